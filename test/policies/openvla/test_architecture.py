import json
from pathlib import Path

import pytest

from tools.checkpoints.openvla import config_json
from tools.checkpoints.tiny import STATISTICS, tiny_architecture
from vla_ros.config.checkpoints import folder_of
from vla_ros.errors import CheckpointError
from vla_ros_models.openvla.architecture import parse_architecture, read_architecture

PATH = Path("config.json")


@pytest.fixture
def config(data):
    return json.loads((data / "config.json").read_text())


def test_the_published_config_is_read(data):
    architecture = read_architecture(data)
    dino, siglip = architecture.towers
    assert (dino.width, dino.used_blocks, dino.prefix_tokens, dino.layer_scale) == (1024, 23, 5, True)
    assert (siglip.width, siglip.used_blocks, siglip.prefix_tokens, siglip.mlp_width) == (1152, 26, 0, 4304)
    assert (architecture.vision_width, architecture.patches, architecture.image_size) == (2176, 256, 224)
    assert (architecture.llm.vocab_size, architecture.action_vocab_size) == (32064, 32000)
    assert (architecture.empty_token, architecture.prompt_version) == (29871, "v0.2")


def test_missing_entries_default_to_llama_2_7b(config):
    config["text_config"] = {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000}
    llm = parse_architecture(config, PATH).llm
    sizes = llm.hidden_size, llm.intermediate_size, llm.layers, llm.heads, llm.head_dim
    assert sizes == (4096, 11008, 32, 32, 128)
    assert (llm.rms_norm_eps, llm.rope_theta) == (1e-6, 1e4)


@pytest.mark.parametrize("entry", ["rope_scaling", "rope_parameters"])
def test_epsilon_and_theta_come_from_the_file(config, entry):
    config["text_config"].update({"rms_norm_eps": 1e-5, entry: {"rope_type": "default", "rope_theta": 5e5}})
    llm = parse_architecture(config, PATH).llm
    assert (llm.rms_norm_eps, llm.rope_theta) == (1e-5, 5e5)


def test_vicuna_checkpoints_have_the_old_prompt_and_one_tower(config):
    config.update(
        llm_backbone_id="vicuna-v15-7b",
        use_fused_vision_backbone=False,
        timm_model_ids=["vit_so400m_patch14_siglip_224"],
        timm_override_act_layers=[None],
        image_sizes=[224],
    )
    architecture = parse_architecture(config, PATH)
    assert architecture.prompt_version == "v0.1"
    assert architecture.vision_width == 1152


def test_the_folder_name_selects_prompt_v01(config):
    path = Path("openvla-v01-7b/config.json")
    assert parse_architecture(config, path).prompt_version == "v0.1"
    assert parse_architecture({**config, "prompt_version": "v0.2"}, path).prompt_version == "v0.2"


def test_a_written_config_is_read_back():
    architecture = tiny_architecture(vocabulary=400, empty_token=380, prompt_version="v0.1")
    written = json.loads(json.dumps(config_json(architecture, STATISTICS, "float32")))
    assert parse_architecture(written, PATH) == architecture


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("image_resize_strategy", "letterbox", "resize-naive"),
        ("timm_model_ids", ["vit_giant", "b"], "vision_towers"),
        ("timm_model_ids", ["vit_so400m_patch14_siglip_224"], "image_sizes has 2 entries for 1"),
        ("timm_override_act_layers", [None, "quick_gelu"], "GELU"),
        ("use_fused_vision_backbone", False, "2 vision towers"),
        ("image_sizes", [225, 225], "divide evenly"),
        ("n_action_bins", 40000, "n_action_bins"),
        ("n_action_bins", "many", "whole number"),
        ("empty_token_id", 32000, "empty_token_id"),
        ("prompt_version", "v3", "prompt_version"),
        ("image_token_stride", 2, "found image_token_stride: 2"),
        ("num_beams", 4, "num_beams: found 4"),
        ("repetition_penalty", 1.2, r"repetition_penalty: found 1\.2"),
        ("llm_backbone_id", "mistral-v0.1-7b-pure", "llm_backbone_id"),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("hidden_act", "gelu", "hidden_act"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling"),
        ("text_config", None, "text_config"),
        ("vision_towers", [{"width": 8}], "expected an object with the keys"),
        ("vision_towers", ["x"], "expected an object"),
        (
            "vision_towers",
            [{"width": 8.5, "blocks": 1, "heads": 1, "mlp_width": 1, "used_blocks": 1}],
            "width: expected an int, at least 0, got 8.5",
        ),
    ],
)
def test_unsupported_networks_are_refused(config, name, value, words):
    in_text = name in config["text_config"] or name.startswith("rope")
    (config["text_config"] if in_text else config)[name] = value
    with pytest.raises(CheckpointError, match=words):
        parse_architecture(config, PATH)


@pytest.mark.parametrize("key", ["sliding_window", "attention_bias", "mlp_bias", "tie_word_embeddings"])
def test_unsupported_options_of_the_language_model_are_refused(config, key):
    config["text_config"][key] = None
    parse_architecture(config, PATH)
    config["text_config"][key] = 64
    with pytest.raises(CheckpointError, match=f"text_config: found {key}: 64"):
        parse_architecture(config, PATH)


def test_what_transformers_writes_is_read(config, tmp_path):
    from transformers import GenerationConfig, LlamaConfig

    config["text_config"] = {**LlamaConfig().to_dict(), **config["text_config"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoding = tmp_path / "generation_config.json"
    decoding.write_text(json.dumps({**GenerationConfig().to_dict(), "bos_token_id": 1, "eos_token_id": 2}))
    assert read_architecture(tmp_path).llm.hidden_size == config["text_config"]["hidden_size"]
    decoding.write_text('{"repetition_penalty": 1.3}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: repetition_penalty: found 1\.3"):
        read_architecture(tmp_path)


def test_a_checkpoint_of_another_family_is_refused():
    with pytest.raises(CheckpointError, match=r"expected 'openvla'"):
        read_architecture(folder_of("demo-pi"))


def test_a_missing_or_damaged_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no such file.*Hugging Face layout"):
        read_architecture(tmp_path)
    for content, words in (("{ half", "not readable as JSON"), ("[]", "expected a JSON object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=words):
            read_architecture(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"std": [float("inf")] * 3},
        {"std": [-1.0, 0.2, 0.2]},
        {"std": [0.0, 1.0, 1.0]},
        {"mean": [float("nan")] * 3},
    ],
)
def test_a_tower_needs_finite_constants(change):
    config = json.loads((folder_of("demo") / "config.json").read_text())
    assert parse_architecture(config, PATH).towers
    config["vision_towers"][0].update(change)
    with pytest.raises(CheckpointError, match="expected finite numbers, and std above 0"):
        parse_architecture(config, PATH)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", 1_000_000, "of 1 to 1000"),
        ("hidden_size", 1 << 40, "of 1 to 16777216"),
        ("vocab_size", 10**400, "of 1 to 16777216"),
    ],
)
def test_a_damaged_size_is_refused_before_anything_is_built(config, key, value, words):
    config["text_config"][key] = value
    with pytest.raises(CheckpointError, match=words) as caught:
        parse_architecture(config, PATH)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [None, 5, "x", {}, [None]])
def test_towers_are_a_list_of_objects(value):
    config = json.loads((folder_of("demo") / "config.json").read_text())
    with pytest.raises(CheckpointError, match="vision"):
        parse_architecture({**config, "vision_towers": value}, PATH)
