"""The whole policy on a CPU: answers, sessions, self-test, options and errors."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.checkpoints.tiny import STATISTICS, tiny_architecture, write_tiny
from vla_ros.config import CameraConfig, Config, build
from vla_ros.errors import CheckpointError, ConfigError, ImageError, VlaRosError
from vla_ros.policies import Policy, create
from vla_ros.types import Observation
from vla_ros.vision.processors import ResizeNaive
from vla_ros_models.network_policy import choose_device
from vla_ros_models.openvla import OpenVLAOptions
from vla_ros_models.openvla.policy import OpenVLAPolicy


@pytest.fixture(scope="module")
def loaded(shared_tiny):
    policy = OpenVLAPolicy(Config(policy=OpenVLAOptions(checkpoint=str(shared_tiny), device="cpu")))
    policy.load()
    return policy


def ask(policy, observation):
    return policy.infer(policy.start_session(), observation)


def prompt_ids(policy):
    """Int64 [1, L] of one instruction."""
    return torch.from_numpy(policy.loaded.prompt.encode("pick up the red cube"))[None]


def rewrite(folder, prefix, change):
    """Apply ``change`` to every weight whose key begins with ``prefix``."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({key: change(value) if key.startswith(prefix) else value for key, value in tensors.items()}, file)


def test_a_chunk_has_stages_tokens_and_margins(loaded, observe):
    chunk = ask(loaded, observe(stamp=123))
    assert chunk.stamp == 123
    assert chunk.actions.shape == chunk.normalized.shape == (1, 7)
    assert (chunk.actions.dtype, chunk.tokens.dtype) == (np.float64, np.int64)
    assert chunk.tokens.shape == (7,)
    assert list(chunk.stages_ms) == ["preprocess", "vision", "prefill", "decode", "post"]
    assert all(value >= 0 for value in chunk.stages_ms.values())
    assert len(chunk.info["logit_margins"]) == 7
    assert min(chunk.info["logit_margins"]) > 0
    low, high = (np.array(STATISTICS["tiny"]["action"][key]) for key in ("q01", "q99"))
    assert (chunk.actions[0, :6] >= low[:6]).all()
    assert (chunk.actions[0, :6] <= high[:6]).all()
    assert chunk.actions[0, 6] == chunk.normalized[0, 6]


@pytest.mark.parametrize(("preset", "ends"), [("libero", (1.0, -1.0)), ("bridge", (0.0, 1.0))])
def test_the_gripper_follows_the_preset(loaded, observe, shared_tiny, preset, ends):
    values = {"preset": preset, "policy.checkpoint": str(shared_tiny), "policy.device": "cpu"}
    policy = OpenVLAPolicy(build({**values, "camera.keys": ["image"], "camera.topics": ["/image"]}, complete=False))
    policy.load()
    native = ask(loaded, observe()).actions[0, 6]
    assert policy.spec.action[-1].range == ends
    np.testing.assert_allclose(ask(policy, observe()).actions[0, 6], ends[0] + native * (ends[1] - ends[0]))


def test_the_registry_creates_the_policy_with_the_checkpoints_spec(loaded, shared_tiny):
    config = Config(policy=OpenVLAOptions(checkpoint=str(shared_tiny)), camera=CameraConfig(keys=("front",)))
    policy = create(config)
    assert isinstance(policy, OpenVLAPolicy)
    assert isinstance(policy, Policy)
    assert policy.spec.image_keys == ("front",)
    assert loaded.spec.dimension == 7
    assert loaded.spec.horizon == 1
    assert loaded.spec.gripper == 6
    assert loaded.spec.processors == {"image": ResizeNaive((224, 224))}


def test_image_and_instruction_change_the_action(loaded, observe):
    black, white = np.zeros((224, 224, 3), np.uint8), np.full((224, 224, 3), 255, np.uint8)
    words = ("pick up the red cube", "push the ball left", "open the drawer")
    answers = {tuple(ask(loaded, observe(image, text)).tokens) for image in (black, white, 0) for text in words}
    assert len(answers) >= 7


def test_the_same_observation_gives_the_same_tokens(loaded, observe):
    first = ask(loaded, observe())
    session = loaded.start_session()
    loaded.infer(session, observe(3, "push the ball left"))
    np.testing.assert_array_equal(loaded.infer(session, observe()).tokens, first.tokens)


def test_views_with_negative_strides_are_supported(loaded, observe):
    image = np.random.default_rng(5).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    view = image[::-1, ::-1]
    view.flags.writeable = False
    copy = ask(loaded, observe(np.ascontiguousarray(view)))
    np.testing.assert_array_equal(ask(loaded, observe(view)).tokens, copy.tokens)


def test_the_closing_token_changes_the_logits(loaded, observe):
    model, ids = loaded.loaded.model, prompt_ids(loaded)
    with torch.inference_mode():
        patches = model.embed_image(model.normalize(torch.zeros(1, 224, 224, 3, dtype=torch.uint8)))
        with_it, without = (model.prefill(patches, part)[0] for part in (ids, ids[:, :-1]))
    assert (with_it - without).abs().max() > 0.1


def test_forward_predicts_the_decoded_tokens(loaded, observe):
    model, tokens = loaded.loaded.model, ask(loaded, observe(2)).tokens
    ids = torch.cat([prompt_ids(loaded), torch.from_numpy(tokens[None, :-1])], dim=1)
    image = torch.from_numpy(observe(2).images["image"])[None]
    with torch.inference_mode():
        logits, hidden, patches = model(model.normalize(image), ids)
    assert hidden.shape[1] == logits.shape[1] == patches.shape[1] + ids.shape[1]
    np.testing.assert_array_equal(logits[0, -7:].argmax(-1).numpy(), tokens)


@pytest.mark.parametrize("prefix", ["projector.fc3.weight", "projector.fc1.weight", "vision_backbone"])
def test_a_model_that_ignores_its_image_is_refused(tiny, load_policy, make_policy, observe, prefix):
    rewrite(tiny, prefix, torch.zeros_like)
    policy = make_policy(tiny)
    with pytest.raises(CheckpointError, match=r"does not see.*self_test:=false"):
        policy.load()
    with pytest.raises(VlaRosError, match="not loaded"):
        ask(policy, observe())
    willing = load_policy(tiny, self_test=False)
    np.testing.assert_array_equal(ask(willing, observe(0)).tokens, ask(willing, observe(1)).tokens)


def test_weights_with_nan_are_refused(tiny, make_policy):
    rewrite(tiny, "projector.fc2.bias", lambda value: torch.full_like(value, torch.nan))
    with pytest.raises(VlaRosError, match=r"NaN or Inf.*weights are damaged"):
        make_policy(tiny).load()


def test_an_invalid_image_does_not_affect_the_next(loaded, observe):
    for image, words in (
        (np.zeros((0, 0, 3), np.uint8), r"\[0, 0, 3\], expected uint8 \[224, 224, 3\]"),
        (np.zeros((224, 224, 4), np.uint8), "expected"),
        (np.zeros((224, 224, 3), np.float32), "float32"),
    ):
        with pytest.raises(ImageError, match=words):
            ask(loaded, observe(image))
    with pytest.raises(ImageError, match=r"no image \['image'\]; found \['wrist'\]"):
        ask(loaded, Observation({"wrist": np.zeros((224, 224, 3), np.uint8)}, "lift it", 0))
    with pytest.raises(ConfigError, match="shorten"):
        ask(loaded, observe(instruction="x" * 10_000))
    assert ask(loaded, observe()).actions.shape == (1, 7)


def test_a_closed_policy_can_be_loaded_again(shared_tiny, make_policy, observe):
    policy = make_policy(shared_tiny)
    seen = []
    policy.load(lambda share, words: seen.append((share, words)))
    assert "GB are free" in seen[0][1]
    assert seen[-1][0] == 1.0
    tokens = ask(policy, observe()).tokens
    policy.close()
    policy.close()
    with pytest.raises(VlaRosError, match="not loaded"):
        ask(policy, observe())
    policy.load()
    np.testing.assert_array_equal(ask(policy, observe()).tokens, tokens)


def test_several_datasets_need_a_key(tmp_path, small, load_policy, make_policy, observe):
    wide = {"action": {**STATISTICS["tiny"]["action"], "q99": [1.0] * 7}}
    write_tiny(tmp_path, architecture=small, statistics={**STATISTICS, "libero_goal_no_noops": wide})
    with pytest.raises(ConfigError, match="unnorm_key: not set"):
        make_policy(tmp_path).load()
    chunks = []
    for key in ("tiny", "libero_goal"):
        policy = load_policy(tmp_path, unnorm_key=key)
        chunks.append(ask(policy, observe()))
    np.testing.assert_array_equal(chunks[0].tokens, chunks[1].tokens)
    assert not np.allclose(chunks[0].actions, chunks[1].actions)


def test_actions_may_have_four_numbers(tmp_path, small, load_policy, observe):
    statistics = {"arm": {"action": {"q01": [-1.0] * 4, "q99": [1.0] * 4}}}
    write_tiny(tmp_path, architecture=small, statistics=statistics)
    policy = load_policy(tmp_path)
    assert policy.spec.dimension == 4
    assert policy.spec.gripper is None
    assert ask(policy, observe()).tokens.shape == (4,)


def test_the_prompt_version_follows_checkpoint_and_option(tmp_path, load_policy, observe):
    write_tiny(tmp_path, architecture=tiny_architecture(vocabulary=768, empty_token=500, prompt_version="v0.1"))
    lengths = {}
    for prompt in ("auto", "v0.1", "v0.2"):
        policy = load_policy(tmp_path, prompt=prompt)
        lengths[prompt] = ask(policy, observe()).info["prompt_tokens"]
    assert lengths["auto"] == lengths["v0.1"] > lengths["v0.2"]


def test_bfloat16_and_threads_are_those_of_the_options(shared_tiny, load_policy, loaded, observe):
    torch.set_num_threads(2)
    policy = load_policy(shared_tiny, dtype="bfloat16", threads=1)
    assert torch.get_num_threads() == 1
    assert policy.loaded.model.dtype == torch.bfloat16
    assert ask(policy, observe()).tokens[0] == ask(loaded, observe()).tokens[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "tpu9"}, "expected auto, cpu, cuda"),
        ({"device": "meta"}, "is not available"),
        ({"device": "cuda:77"}, "CUDA devices"),
        ({"quantization": "int4", "dtype": "float32"}, "does not work with"),
        ({"quantization": "int4", "engine": "reference"}, "int4 with policy.engine reference"),
        ({"unnorm_key": "bridge"}, "no dataset 'bridge'"),
    ],
)
def test_options_that_do_not_fit_are_refused(shared_tiny, make_policy, options, words):
    with pytest.raises(ConfigError, match=words):
        make_policy(shared_tiny, **options).load()


def test_auto_selects_cuda_if_available():
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("folder", "words"), [("", "not set"), ("/no/where", "neither a folder nor one of demo, demo-pi")]
)
def test_a_missing_checkpoint_is_refused(make_policy, folder, words):
    with pytest.raises(CheckpointError, match=words):
        make_policy(folder).load()


def test_options_are_imported_without_torch():
    code = (
        "import sys, vla_ros_models.openvla.prompt, vla_ros_models.openvla.processing; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
