"""Random models of many configurations, answered by LeRobot 0.6.1 itself where it is installed (see ``.ci``)."""

import json
import os
import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest

pytest.importorskip("lerobot", reason="needs an environment with LeRobot")

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.groot.configuration_groot import GrootConfig
from lerobot.policies.groot.modeling_groot import GrootPolicy
from safetensors.torch import save_file

from test.policies.golden import edit_json
from test.policies.groot.conftest import BACKBONE, DATA, infer
from test.policies.smolvla.test_lerobot import PROMPTS, SIZES, ranges
from vla_ros_models.checkpoint_files import read_fields
from vla_ros_models.groot import GrootOptions
from vla_ros_models.groot.architecture import read_architecture
from vla_ros_models.groot.building import tensor_shapes
from vla_ros_models.groot.inference import load_model
from vla_ros_models.groot.loading import read_checkpoint

CHUNK = 1e-4
EMBODIMENTS = {
    "two": "libero_sim",
    "oxe": "oxe_droid_relative_eef_relative_joint",
    "plain": "libero_sim",
    "joints": "new_embodiment",
}


@dataclass(frozen=True)
class Variant:
    """What differs from one of the shipped checkpoints."""

    base: str  # key of EMBODIMENTS
    config: dict = field(default_factory=dict)
    backbone: dict = field(default_factory=dict)
    processor: dict = field(default_factory=dict)  # of processor_kwargs
    cameras: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # cameras that the second observation lacks
    state: dict = field(default_factory=dict)  # sizes of the state's parts
    action: dict = field(
        default_factory=dict
    )  # sizes of the action's parts; those of the state's names are relative
    transform: str = "none"


HEADS, NARROW = (
    {"num_attention_heads": 2, "attention_head_dim": 32},
    {"num_attention_heads": 2, "attention_head_dim": 8},
)
ONE_KEY_HEAD = {"num_key_value_heads": 1, "intermediate_size": 72, "rms_norm_eps": 1e-4}
DEEPER = {"depth": 5, "num_heads": 4, "deepstack_visual_indexes": [1, 3]}
VARIANTS = {
    "plain": Variant("two"),
    "relative pose": Variant("oxe"),
    "relative joints": Variant("joints"),
    "cv2": Variant("plain", transform="libero"),
    "one text layer": Variant("two", {"select_layer": 1}),
    "all text layers": Variant("oxe", {"select_layer": 6}),
    "no connector": Variant("two", {"vl_self_attention_cfg": {"num_layers": 0}}),
    "no layer norm": Variant("oxe", {"use_vlln": False}),
    "wide connector": Variant("joints", {"vl_self_attention_cfg": {"num_layers": 1} | HEADS}),
    "shallow head": Variant("two", {"diffusion_model_cfg": {"num_layers": 2}}, transform="libero"),
    "deep head": Variant("oxe", {"diffusion_model_cfg": {"num_layers": 8}}),
    "narrow head": Variant("joints", {"diffusion_model_cfg": NARROW, "input_embedding_dim": 16}),
    "every crossing block sees text": Variant("two", {"attend_text_every_n_blocks": 1}),
    "every third": Variant("oxe", {"attend_text_every_n_blocks": 3}),
    "all tokens": Variant("oxe", {"use_alternate_vl_dit": False}),
    "one step": Variant("two", {"num_inference_timesteps": 1}),
    "nine steps": Variant("oxe", {"num_inference_timesteps": 9, "num_timestep_buckets": 500}),
    "long chunk": Variant("joints", {"action_horizon": 60}),
    "no positions": Variant("two", {"add_pos_embed": False}),
    "hidden": Variant("joints", {"hidden_size": 24, "diffusion_model_cfg": {"output_dim": 24}}),
    "more numbers": Variant(
        "two", {"max_action_dim": 140, "max_state_dim": 150}, state={"arm": 141, "hand": 9}, action={"arms": 140}
    ),
    "one number": Variant("joints", {"max_num_embodiments": 12}, state={"slide": 1}, action={"slide": 1}),
    "one key head": Variant("two", {}, {"text_config": ONE_KEY_HEAD}),
    "deeper tower": Variant("oxe", {}, {"vision_config": DEEPER}),
    "no deepstack": Variant("joints", {}, {"vision_config": {"deepstack_visual_indexes": []}}),
    "other positions": Variant("two", {}, {"vision_config": {"num_position_embeddings": 36}}),
    "three cameras, one missing": Variant("oxe", cameras=("top", "a.b", "wrist_image"), missing=("a.b",)),
    "four cameras, three missing": Variant(
        "two", cameras=("d", "b", "wrist_image", "c"), missing=("d", "b", "wrist_image")
    ),
    "four cameras of many shapes": Variant(
        "plain", processor={"letter_box_transform": True, "crop_fraction": None}, cameras=("a", "b", "c", "d")
    ),
    "two arms, half of them relative": Variant(
        "joints", processor={"clip_outliers": True, "use_percentiles": False},
        cameras=("left", "right"), missing=("left",), state={"left": 7, "right": 7, "base": 3},
        action={"right": 7, "hand": 2, "base": 3},
    ),
    "larger images": Variant(
        "two",
        processor={"image_target_size": [160, 128], "image_crop_size": [150, 150], "shortest_image_edge": 140},
    ),
    "published geometry": Variant("oxe", processor={"image_target_size": None, "use_relative_action": False}),
}  # fmt: skip


def merge(content, changes):
    for key, value in changes.items():
        if isinstance(value, dict):
            merge(content[key], value)
        else:
            content[key] = value


def describe(modality, statistics, variant, draw):
    """Give an embodiment other cameras, states and actions."""
    if variant.cameras:
        modality["video"]["modality_keys"] = list(variant.cameras)
    if variant.state:
        rows = len(modality["action"]["delta_indices"])
        modality["state"]["modality_keys"], action = list(variant.state), list(variant.action)
        rep = ["RELATIVE" if name in variant.state else "ABSOLUTE" for name in action]
        modality["action"] |= {
            "modality_keys": action,
            "action_configs": [{"rep": one, "type": "NON_EEF", "format": "DEFAULT"} for one in rep],
        }

        def some(sizes, *axes):
            found = {name: ranges(draw, (*axes, size)) for name, size in sizes.items()}
            return {name: {key: value.tolist() for key, value in one.items()} for name, one in found.items()}

        relative = {name: size for name, size in variant.action.items() if name in variant.state}
        statistics |= {
            "state": some(variant.state),
            "action": some(variant.action),
            "relative_action": some(relative, rows),
        }


def make(folder, variant, draw):
    """Copy a checkpoint with changed sizes and random weights."""
    tag = EMBODIMENTS[variant.base]
    shutil.copytree(DATA / ("two" if variant.base == "oxe" else variant.base), folder, dirs_exist_ok=True)
    shutil.copytree(BACKBONE, folder / "backbone")
    edit_json(folder / "config.json", lambda content: merge(content, variant.config))
    edit_json(folder / "backbone" / "config.json", lambda content: merge(content, variant.backbone))
    statistics = json.loads((folder / "statistics.json").read_text())

    def change(content):
        content["processor_kwargs"] |= variant.processor
        describe(content["processor_kwargs"]["modality_configs"][tag], statistics[tag], variant, draw)

    edit_json(folder / "processor_config.json", change)
    (folder / "statistics.json").write_text(json.dumps(statistics))
    sizes = read_architecture(read_fields(folder / "config.json"), read_fields(folder / "backbone" / "config.json"))
    generator, tensors = torch.Generator().manual_seed(int(draw.integers(1 << 30))), {}
    for name, shape in tensor_shapes(sizes).items():
        fan = shape[1] if name.endswith("W") else int(np.prod(shape[1:]))
        value = torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else fan**-0.5)
        value = value + 1.0 if len(shape) == 1 and name.endswith("weight") else value
        tensors[name] = value.to(torch.bfloat16)  # as which LeRobot reads them
    for path in folder.glob("*.safetensors"):
        path.unlink()
    file = "model-00001-of-00001.safetensors"
    save_file(tensors, str(folder / file), metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load_lerobots(variant, processing, sizes):
    """LeRobot's policy and processors of the checkpoint in the working directory."""
    inputs = {
        f"observation.images.{key}": PolicyFeature(FeatureType.VISUAL, (3, 96, 96)) for key in processing.images
    }
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (processing.state_size,))
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (processing.action_size,))}
    config = GrootConfig(
        base_model_path=".", embodiment_tag=EMBODIMENTS[variant.base], use_bf16=False, device="cpu",
        input_features=inputs, output_features=outputs, action_decode_transform=variant.transform,
        max_state_dim=sizes.state_dim, max_action_dim=sizes.action_dim,
    )  # fmt: skip
    policy = GrootPolicy.from_pretrained(".", config=config).float().eval()
    overrides = {"groot_n1_7_vlm_encode_v1": {"model_name": "backbone"}}
    return policy, *make_pre_post_processors(config, ".", preprocessor_overrides=overrides)


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_equal_lerobots(tmp_path, monkeypatch, name):
    """The first chunk comes from NVIDIA's layout, the second from the one that LeRobot saves."""
    monkeypatch.chdir(tmp_path)  # the backbone's name is relative
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    variant, number = VARIANTS[name], list(VARIANTS).index(name)
    draw = np.random.default_rng(number)
    make(tmp_path, variant, draw)
    options = {"backbone": str(tmp_path / "backbone"), "action_transform": variant.transform}
    model = load_model(read_checkpoint(tmp_path, GrootOptions(embodiment=EMBODIMENTS[variant.base], **options)))
    policy, before, after = load_lerobots(variant, model.processing, model.architecture)
    for turn in range(2):
        if turn:
            model.engine.close()
            for one in (policy, before, after):
                one.save_pretrained(tmp_path / "saved")
            options["base_model"] = str(tmp_path)
            model = load_model(read_checkpoint(tmp_path / "saved", GrootOptions(**options)))
        sizes, processing = model.architecture, model.processing
        side = SIZES[(number + 2 * turn) % len(SIZES)]
        images = {
            key: draw.integers(0, 256, (*side, 3), dtype=np.uint8)
            for key in processing.images
            if not turn or key not in variant.missing
        }
        state = draw.uniform(-0.5, 0.5, processing.state_size).astype(np.float32)
        prompt = PROMPTS[(number + turn) % len(PROMPTS)]
        batch = {
            f"observation.images.{key}": torch.from_numpy(one).permute(2, 0, 1)[None] / 255
            for key, one in images.items()
        }
        batch |= {"observation.state": torch.from_numpy(state)[None], "task": [prompt]}
        prepared = before(batch)
        torch.manual_seed(turn)
        noise = torch.randn(1, sizes.horizon, sizes.action_dim)[0].numpy()
        torch.manual_seed(turn)
        with torch.no_grad():
            chunk = policy.predict_action_chunk(prepared)
            actions = after(chunk.clone())[0].numpy()
        resized = {key: processing.resize(one) for key, one in images.items()}
        asked = model.request(resized, state, prompt, noise)
        assert asked.tokens.tolist() == prepared["input_ids"][0].tolist()
        [ours] = infer(model, asked)
        width, rows = processing.model_size, min(len(ours), chunk.shape[1])
        assert rows == processing.rows
        np.testing.assert_allclose(ours[:rows, :width], chunk[0, :rows, :width].numpy(), rtol=0, atol=CHUNK)
        robot = processing.robot_actions(ours, state)
        assert robot.shape[1] == actions.shape[1]
        np.testing.assert_allclose(robot[:rows], actions[:rows], rtol=0, atol=3 * CHUNK)
    model.engine.close()
