import re
import shutil
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from test.policies.golden import edit_json
from vla_ros.errors import CheckpointError, ConfigError, VlaRosError
from vla_ros_models.flow_options import RtcSettings
from vla_ros_models.pi.architecture import EMBEDDINGS, EXPERT, PREFIX, PUBLISHED, SIGLIP, infer_architecture
from vla_ros_models.pi.checkpoint import read_checkpoint
from vla_ros_models.pi.inference import load_model, load_network
from vla_ros_models.pi.loading import parameter_parts, plan_memory
from vla_ros_models.pi.network import build_empty
from vla_ros_models.pi.processing import find_robot

from .conftest import MODELS, infer
from .mutations import AFTER, BEFORE, CONFIG, Mutation, config, mutate, options, step

LIBERO = find_robot("libero")


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def read(folder):
    return read_checkpoint(folder, None if folder.name.endswith("lerobot") else LIBERO)


@pytest.mark.parametrize("kind", MODELS)
def test_both_layouts_hold_the_same_weights(networks, kind):
    one, other = (networks(kind, layout).state_dict() for layout in ("openpi", "lerobot"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", MODELS)
def test_the_published_sizes(kind):
    """Parameters as counted on the published classes: what runs, and what no answer depends on."""
    architecture = PUBLISHED[kind]
    parts = parameter_parts(architecture, EMBEDDINGS[1:])
    needed = sum(prod(part.shape) for group in parts.values() for part in group)
    prefix, expert = architecture.prefix, architecture.expert
    last_layer = prefix.hidden_size * (2 * 2048 + 3 * prefix.intermediate_size + 2)
    unused = last_layer + architecture.vocabulary * expert.hidden_size
    assert needed + unused == {"pi0": 3_501_372_176, "pi05": 3_616_757_520}[kind]
    stored = {part.name for group in parts.values() for part in group}
    # Two more norms, the last layer's q, o and MLP, and the expert's head.
    assert len(stored) + 2 + 5 + 1 == {"pi0": 777, "pi05": 812}[kind]
    network = build_empty(architecture)
    sizes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    assert sizes.keys() == parts.keys()
    assert sum(prod(size) for size in sizes.values()) == needed


@pytest.mark.parametrize("kind", MODELS)
def test_the_memory_of_the_published_sizes(kind):
    parts = parameter_parts(PUBLISHED[kind], EMBEDDINGS[1:])
    small = plan_memory(parts, PUBLISHED[kind], "bfloat16", "none", "cuda")
    assert 6.2e9 < small.weights < 6.9e9
    assert small.total < 8e9


def test_the_memory_of_a_loaded_model(networks, folders):
    network = networks("pi05", "openpi")
    checkpoint = read(folders["pi05", "openpi"])
    parts = parameter_parts(checkpoint.architecture, checkpoint.stored)
    plan = plan_memory(parts, checkpoint.architecture, "float32", "none", "cpu", flow_steps=0)
    held = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    assert held <= plan.weights <= 1.1 * held


def test_the_data_types_of_bfloat16(networks):
    network = networks("pi05", "openpi", dtype="bfloat16")
    wide = {name for name, value in network.named_parameters() if value.dtype == torch.float32}
    assert wide >= {"vision.pos_embed", "vision.patch_embed.proj.weight", "expert.norm.dense.weight"}
    assert wide >= {"prefix.layers.0.input_norm.weight", "action_in_proj.weight", "time_mlp_out.bias"}
    assert not wide & {"expert.layers.0.qkv.weight", "vision.norm.weight", "embed_tokens.weight", "projector.bias"}


@pytest.mark.parametrize("layout", ["openpi", "lerobot"])
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_the_embedding_has_either_name(checkpoint, networks, layout, embedding):
    folder = checkpoint("pi0", layout)
    prefix = "model." if layout == "lerobot" else ""

    def keep_one(weights):
        value = next(weights[prefix + name] for name in EMBEDDINGS if prefix + name in weights).clone()
        for name in EMBEDDINGS:
            weights.pop(prefix + name, None)
        weights[prefix + embedding] = value

    edit_weights(folder, keep_one)
    expected = networks("pi0", layout).embed_tokens.weight
    assert torch.equal(load_network(read(folder)).embed_tokens.weight, expected)


@pytest.mark.parametrize("layout", ["openpi", "lerobot"])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{EXPERT}layers.1.mlp.up_proj.weight", None, "1 missing: NAME"),
        ("action_out_proj.bias", lambda value: value[:5], r"1 of the wrong shape: NAME .*: \[5\], expected \[32\]"),
        ("action_in_proj.bias", lambda value: value.long(), "1 not of a type in .*: NAME in .*: I64"),
        (f"{PREFIX}layers.0.self_attn.q_proj.lora_A.weight", lambda _: torch.zeros(2), "1 unexpected: NAME"),
        (f"{PREFIX}layers.1.mlp.visual_memory.weight", lambda _: torch.zeros(2), "1 unexpected: NAME"),
    ],
)
def test_wrong_tensors_are_refused(checkpoint, layout, name, change, message):
    folder = checkpoint("pi05", layout)
    key = f"model.{name}" if layout == "lerobot" else name

    def edit(weights):
        value = weights.pop(key, None)
        if change is not None:
            weights[key] = change(value).contiguous()

    edit_weights(folder, edit)
    with pytest.raises(CheckpointError, match=message.replace("NAME", re.escape(name))):
        load_model(read(folder))


@pytest.mark.parametrize("kind", MODELS)
def test_unused_tensors_may_be_missing(checkpoint, networks, kind):
    folder = checkpoint(kind)

    def edit(weights):
        del weights["paligemma_with_expert.gemma_expert.lm_head.weight"]
        for name in list(weights):
            if re.match(rf"{re.escape(PREFIX)}(norm|layers\.2\.(mlp|self_attn\.[qo]_proj|post_))", name):
                del weights[name]

    edit_weights(folder, edit)
    state = load_network(read(folder)).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in networks(kind, "openpi").state_dict().items())


def test_a_folder_of_neither_layout_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        read_checkpoint(tmp_path, LIBERO)
    (tmp_path / CONFIG).write_text('{"model_type": "openvla"}')
    with pytest.raises(CheckpointError, match=r"not a layout of pi0 or pi0.5.*'model_type'"):
        read_checkpoint(tmp_path, LIBERO)
    (tmp_path / CONFIG).write_text('{"action_horizon": 10}')
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"\['model.pt'\] are pickles"):
        read_checkpoint(tmp_path, LIBERO)


def test_weights_of_neither_model_are_refused(checkpoint):
    folder = checkpoint("pi0")
    edit_weights(folder, lambda weights: weights.pop("state_proj.weight"))
    with pytest.raises(CheckpointError, match="neither of state_proj"):
        read(folder)
    edit_weights(folder, lambda weights: weights.pop("action_in_proj.weight"))
    edit_weights(folder, lambda weights: weights.update({"state_proj.weight": torch.zeros(32, 32)}))
    with pytest.raises(CheckpointError, match=r"action_in_proj.weight is missing"):
        read(folder)


def test_architecture_json_states_the_heads_of_the_vision_tower(checkpoint, tmp_path):
    folder = checkpoint("pi0")
    text = (folder / "architecture.json").read_text()
    (folder / "architecture.json").unlink()
    with pytest.raises(CheckpointError, match=r"64 wide.*architecture.json"):
        read(folder)
    (tmp_path / "architecture.json").write_text(text)
    assert read(folder).architecture.vision.heads == 4
    (tmp_path / "architecture.json").write_text('{"vision": {"heads": 5}}')
    with pytest.raises(CheckpointError, match=r"vision\.heads is 5"):
        read(folder)


def test_contradicting_sizes_are_refused(checkpoint):
    folder = checkpoint("pi0")

    def drop_layer(weights):
        for name in [name for name in weights if name.startswith(f"{EXPERT}layers.2.")]:
            del weights[name]

    edit_weights(folder, drop_layer)
    with pytest.raises(CheckpointError, match="differ in layers, heads or head size"):
        read(folder)


def test_the_heads_of_the_published_vision_tower_are_known(folders, tmp_path):
    stored = read(folders["pi0", "openpi"]).stored
    shapes = {name: entry.shape for name, entry in stored.items()}
    shapes[f"{SIGLIP}embeddings.patch_embedding.weight"] = (1152, 3, 14, 14)
    assert infer_architecture(shapes, 10, tmp_path).vision.heads == 16


def test_a_robot_with_more_numbers_than_the_model_is_refused(folders):
    with pytest.raises(ConfigError, match=r"libero has 33 numbers in its state .* pads to 32"):
        read_checkpoint(folders["pi0", "openpi"], replace(LIBERO, state=33))


def test_openpis_layout_needs_a_robot_and_its_statistics(checkpoint):
    folder = checkpoint("pi05")
    with pytest.raises(ConfigError, match=r"set policy\.robot to one of .*libero"):
        read_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"assets/mine/norm_stats.json: no such file; .*'trossen'"):
        read_checkpoint(folder, LIBERO, asset="mine")
    shutil.copytree(folder / "assets" / "trossen", folder / "assets" / "mine")
    mine = folder / "assets" / "mine" / "norm_stats.json"
    edit_json(mine, lambda content: content["norm_stats"]["state"].update(q01=[-9.0] * 14 + [0.0] * 18))
    own = read_checkpoint(folder, find_robot("aloha"), asset="mine").processing.state
    assert own.offset[0] == -9, "the statistics of the asset that was named"
    path = folder / "assets" / "droid" / "norm_stats.json"
    edit_json(path, lambda content: content["norm_stats"].pop("actions"))
    with pytest.raises(CheckpointError, match="lacks state or actions"):
        read_checkpoint(folder, find_robot("droid"))
    path.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        read_checkpoint(folder, find_robot("droid"))


def test_a_lerobot_checkpoint_is_read_without_a_robot(folders):
    with pytest.raises(ConfigError, match=r"set no policy\.robot or policy\.asset"):
        read_checkpoint(folders["pi05", "lerobot"], LIBERO)
    checkpoint = read(folders["pi05", "lerobot"])
    assert checkpoint.processing.images == ("observation.images.image", "observation.images.image2")
    assert (checkpoint.architecture.horizon, checkpoint.flow_steps, checkpoint.trained_delay) == (10, 10, 0)
    assert (checkpoint.execute_steps, checkpoint.rtc) == (10, RtcSettings())


def test_the_checkpoints_rtc_config_is_read(checkpoint):
    folder = checkpoint("pi05", "lerobot")
    values = {"enabled": True, "mode": "guided", "execution_horizon": 6, "max_guidance_weight": 3.0}
    values |= {"prefix_attention_schedule": "EXP", "debug": True, "debug_maxlen": 100}
    edit_json(folder / CONFIG, lambda c: c.update(rtc_config=values))
    assert read(folder).rtc == RtcSettings("guided", 6, "EXP", 3.0)
    edit_json(folder / CONFIG, lambda c: c["rtc_config"].update(enabled=False))
    assert read(folder).rtc == RtcSettings()
    edit_json(folder / CONFIG, lambda c: c["rtc_config"].update(soft_start=2))
    with pytest.raises(CheckpointError, match="rtc_config: found soft_start: 2"):
        read(folder)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (CONFIG, {"paligemma_variant": "gemma_2b_lora"}, "paligemma_variant: found 'gemma_2b_lora'"),
        (CONFIG, {"action_dim": 24}, "action_dim: found 24, expected 32"),
        (CONFIG, {"time_scale": 2.0}, "found time_scale: 2.0"),
        ("assets/droid/norm_stats.json", {"version": 2}, "found version: 2"),
        (
            "assets/droid/norm_stats.json",
            {"norm_stats": {"state": {}, "actions": {}, "base_0_rgb": {"mean": 0}}},
            "base_0_rgb",
        ),
    ],
)
def test_openpis_files_are_obeyed_or_refused(checkpoint, file, change, words):
    folder = checkpoint("pi05", "openpi")
    edit_json(folder / file, lambda c: c.update(change))
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(folder, find_robot("droid"))


NO_IMAGES = [f"observation.images.{name}" for name in ("image", "image2")]


@pytest.mark.parametrize(
    "mutation",
    [
        Mutation(CONFIG, config(type="pi0"), "type is pi0, but the weights are those of pi05"),
        Mutation(CONFIG, lambda c: c["output_features"]["action"].update(shape=[40]), r"the shape \[40\]"),
        Mutation(CONFIG, lambda c: list(map(c["input_features"].pop, NO_IMAGES)), "input_features has no image"),
        Mutation(CONFIG, config(chunk_size=0), "chunk_size is 0"),
        Mutation(CONFIG, config(num_inference_steps="ten"), "num_inference_steps is 'ten'"),
        Mutation(BEFORE, options("tokenizer_processor", max_length=True), "max_length is True"),
        Mutation(BEFORE, lambda c: c.pop("steps"), "expected a list"),
        Mutation(
            BEFORE, options("rename", rename_map={"a": "c", "b": "c"}), "maps two observations to the same name"
        ),
        Mutation(AFTER, lambda c: step(c, "unnorm").update(state_file="gone.safetensors"), "'gone.*is missing"),
        Mutation(AFTER, lambda c: step(c, "unnorm").update(state_file="../x.safetensors"), "which is missing"),
    ],
)
def test_invalid_lerobot_files_are_refused(checkpoint, mutation):
    folder = checkpoint("pi05", "lerobot")
    mutate(folder, mutation)
    with pytest.raises(CheckpointError, match=mutation.refused):
        read(folder)


def test_missing_statistics_are_refused(checkpoint):
    folder = checkpoint("pi05", "lerobot")
    path = next(folder.glob("policy_postprocessor_step_0*.safetensors"))
    statistics = load_file(path)
    del statistics["action.q99"]
    save_file(statistics, path)
    with pytest.raises(CheckpointError, match=r"action: no \['q99'\]"):
        read(folder)
    path.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="damaged"):
        read(folder)


def test_renamed_cameras_keep_the_robots_names(checkpoint):
    folder = checkpoint("pi05", "lerobot")
    renames = {"observation.images.front": "observation.images.image2", "observation.joints": "observation.state"}
    mutate(folder, Mutation(BEFORE, options("rename", rename_map=renames)))
    assert read(folder).processing.images == ("observation.images.image", "observation.images.front")


def relative(folder, **values):
    mutate(folder, Mutation(CONFIG, config(use_relative_actions=True)))
    mutate(folder, Mutation(BEFORE, options("relative", enabled=True, **values)))
    mutate(folder, Mutation(AFTER, options("absolute", enabled=True)))


@pytest.mark.parametrize(
    ("names", "mask"),
    [
        (["x.pos", "y.pos", "z.pos", "a.pos", "b.pos", "c.pos", "Gripper.pos"], [1, 1, 1, 1, 1, 1, 0]),
        (["x", "gripper"], [1, 0, 1, 1, 1, 1, 1]),
        (None, [1] * 7),
    ],
)
def test_relative_actions(checkpoint, names, mask):
    folder = checkpoint("pi05", "lerobot")
    relative(folder, action_names=names, exclude_joints=["Gripper", None])
    processing = read(folder).processing
    assert processing.delta == tuple(map(bool, mask))
    state, chunk = np.arange(8, dtype=np.float32), np.zeros((10, 32), np.float32)
    expected = processing.actions.unnormalize(chunk)[:, :7] + state[:7] * mask
    np.testing.assert_allclose(processing.robot_actions(chunk, state), expected, atol=1e-6)


def test_relative_actions_need_as_many_states(checkpoint):
    folder = checkpoint("pi05", "lerobot")
    relative(folder)
    edit_json(folder / CONFIG, lambda c: c["output_features"]["action"].update(shape=[9]))
    with pytest.raises(CheckpointError, match="9 action dimensions are relative, but the state has 8 dimensions"):
        read(folder)


def test_a_chunk_with_nan_is_refused(loaded):
    model = loaded("pi0", "openpi")
    images = {key: np.zeros((8, 8, 3), np.uint8) for key in model.processing.images}
    noise = np.full((10, 32), np.inf)
    with pytest.raises(VlaRosError, match="NaN or Inf; the frame is dropped"):
        infer(model, images, np.zeros(8), "go", noise)


def test_noise_of_another_shape_is_refused(loaded):
    with pytest.raises(ConfigError, match=r"noise has shape \[9, 32\], expected \[10, 32\]"):
        infer(loaded("pi0", "openpi"), {}, np.zeros(8), "go", np.zeros((9, 32)))
