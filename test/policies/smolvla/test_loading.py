import numpy as np
import pytest

from test.policies.golden import edit_json
from test.policies.smolvla.conftest import CASES, SHIPPED, infer, load_folder, request
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros_models.smolvla import SmolVlaOptions
from vla_ros_models.smolvla.architecture import SMOLVLM2
from vla_ros_models.smolvla.loading import read_checkpoint
from vla_ros_models.smolvla.policy import load_model

REFUSED = {
    "type": "pi0",
    "use_peft": True,
    "use_cache": False,
    "use_delta_joint_actions_aloha": True,
    "resize_imgs_with_padding": None,
    "attention_mode": "banded",
    "num_expert_layers": 3,
    "self_attn_every_n_layers": 0.5,
    "expert_width_multiplier": 0.02,
    "empty_cameras": -1,
    "adapt_to_pi_aloha": True,
    "n_action_steps": 51,
    "chunk_size": 0,
    "min_period": 0,
    "num_vlm_layers": "all",
    "max_state_dim": 5,
    "max_action_dim": 5,
    "vlm_model_name": "somebody/AnotherVLM",
    "add_image_special_tokens": "yes",
    "rtc_training_max_delay": 4,
    "memory_frames": 8,
}
"""Values of ``config.json`` that are refused with the key's name."""

NAMED = {
    "use_peft": "use_peft", "max_state_dim": "observation.state", "max_action_dim": "action",
    "num_expert_layers": "num_expert_layers", "vlm_model_name": "somebody/AnotherVLM|tokenizer_name",
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), REFUSED.items(), ids=list(REFUSED))
def test_what_is_not_supported_is_refused_by_name(checkpoint, key, value):
    edit_json(checkpoint / "config.json", lambda config: config.update({key: value}))
    with pytest.raises(CheckpointError, match=NAMED.get(key, key)):
        load_folder(checkpoint)


@pytest.mark.parametrize(
    ("resize", "message"), [([128, 96], "two equal"), ([120, 120], "multiples of 32"), ([128], "two equal")]
)
def test_images_must_be_square_multiples_of_the_shuffle(checkpoint, resize, message):
    edit_json(checkpoint / "config.json", lambda config: config.update(resize_imgs_with_padding=resize))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(checkpoint, SmolVlaOptions())


def test_other_values_of_harmless_keys_change_nothing(checkpoint):
    """The folder's own config.json has every field of LeRobot 0.6.1."""
    values = {"prefix_length": 200, "pad_language_to": "max_length", "compile_model": True}
    values |= {"load_vlm_weights": True, "n_obs_steps": 2}
    edit_json(checkpoint / "config.json", lambda config: config.update(values))
    case = CASES["default"][0]
    model = load_folder(checkpoint)
    np.testing.assert_allclose(infer(model, request(model, case))[0], case["actions_normalized"], atol=1e-4)


def test_the_base_model_is_never_downloaded(checkpoint):
    name_published_base(checkpoint)
    (checkpoint / "vlm").rename(checkpoint / "elsewhere")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*policy\.vlm"):
        load_model(read_checkpoint(checkpoint, SmolVlaOptions()))
    with pytest.raises(ConfigError, match=r"policy\.vlm"):
        read_checkpoint(checkpoint, SmolVlaOptions(vlm=str(checkpoint / "vlm")))
    assert read_checkpoint(checkpoint, SmolVlaOptions(vlm=str(checkpoint / "elsewhere"))).vlm.name == "elsewhere"


def name_published_base(folder):
    edit_json(folder / "config.json", lambda config: config.update(vlm_model_name=SMOLVLM2))
    text = (folder / "policy_preprocessor.json").read_text()
    (folder / "policy_preprocessor.json").write_text(text.replace('"vlm"', f'"{SMOLVLM2}"'))


def test_a_tokenizer_that_the_checkpoint_has_is_used(checkpoint):
    """LeRobot newer than 0.6.1 saves it there, under a name of its own."""

    def rename(content):
        for step in content["steps"]:
            if "tokenizer_name" in step["config"]:
                step["config"]["tokenizer_name"] = "tokenizer"
                step["artifacts"] = {"tokenizer_name": "tokenizer"}

    before = infer(load_folder(checkpoint), request(load_folder(checkpoint), CASES["default"][0]))
    edit_json(checkpoint / "policy_preprocessor.json", rename)
    with pytest.raises(CheckpointError, match="tokenizer_name is 'tokenizer', but vlm_model_name 'vlm'"):
        load_folder(checkpoint)
    (checkpoint / "tokenizer").mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / "vlm" / file).rename(checkpoint / "tokenizer" / file)
    model = load_folder(checkpoint)
    np.testing.assert_array_equal(infer(model, request(model, CASES["default"][0])), before)


def test_published_sizes_need_no_configuration_of_the_base_model(checkpoint):
    edit_json(checkpoint / "config.json", lambda config: config.update(vlm_model_name=SMOLVLM2, num_vlm_layers=16))
    (checkpoint / "vlm" / "config.json").unlink()
    edit_json(checkpoint / "config.json", lambda config: config.update(resize_imgs_with_padding=[512, 512]))
    sizes = read_checkpoint(checkpoint, SmolVlaOptions(vlm=str(checkpoint / "vlm"))).architecture
    assert (sizes.prefix.hidden_size, sizes.prefix.layers, sizes.expert.hidden_size) == (960, 16, 720)
    assert (sizes.expert.intermediate_size, sizes.expert.layers, sizes.image_tokens) == (2048, 16, 64)
    assert sizes.crossing == tuple(range(1, 16, 2))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("add_bos_token", True),
        ("do_lower_case", True),
        ("truncation_side", "middle"),
        ("global_image_token", "<none>"),
    ],
)
def test_a_tokenizer_that_adds_tokens_is_refused(checkpoint, key, value):
    edit_json(checkpoint / "vlm" / "tokenizer_config.json", lambda config: config.update({key: value}))
    with pytest.raises(CheckpointError, match=key if key != "global_image_token" else "<none>"):
        load_folder(checkpoint)


def test_a_long_prompt_loses_the_side_that_the_tokenizer_states(checkpoint):
    prompt = "put the red cube into the left drawer " * 5
    right = load_folder(checkpoint)
    edit_json(checkpoint / "vlm" / "tokenizer_config.json", lambda config: config.update(truncation_side="left"))
    left = load_folder(checkpoint)
    whole = right.tokenizer.encode(prompt + "\n")
    state = np.zeros(6)
    assert list(right.processing.tokens(right.tokenizer.encode, prompt, state)) == whole[:48]
    assert list(left.processing.tokens(left.tokenizer.encode, prompt, state)) == whole[-48:]
    with pytest.raises(ConfigError, match="<global-img>"):
        right.processing.tokens(right.tokenizer.encode, "see <global-img>", state)


@pytest.mark.parametrize("missing", ["policy_preprocessor.json", "policy_postprocessor.json", "model.safetensors"])
def test_a_missing_file_is_named(checkpoint, missing):
    (checkpoint / missing).unlink()
    with pytest.raises(CheckpointError, match=missing.split("_step")[0]):
        load_folder(checkpoint)


def test_weights_of_other_sizes_are_refused(checkpoint):
    edit_json(checkpoint / "config.json", lambda config: config.update(expert_width_multiplier=0.5))
    with pytest.raises(CheckpointError, match="of the wrong shape: action_in_proj"):
        load_folder(checkpoint)


def test_the_shipped_data_is_small():
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 2.5e6
