"""Published configurations (``data/published.json``) go through the loaders at published sizes, without weights."""

import json
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from safetensors.numpy import save_file

from vla_ros.config import load
from vla_ros.errors import CheckpointError
from vla_ros.policies.base import create
from vla_ros_models.checkpoint_files import Fields
from vla_ros_models.pi.architecture import PUBLISHED
from vla_ros_models.pi.loading import PI_TENSORS
from vla_ros_models.pi.network import build_empty as build_pi
from vla_ros_models.smolvla.architecture import SMOLVLM2, SMOLVLM2_CONFIG, read_architecture
from vla_ros_models.smolvla.loading import SMOLVLA_TENSORS
from vla_ros_models.smolvla.network import build_empty as build_smolvla
from vla_ros_models.weights import check_weights

DATA = Path(__file__).parents[1] / "data"
PUBLISHED_FILES = json.loads((DATA / "published.json").read_text())["checkpoints"]
IMAGES, STATE = "observation.images.", "observation.state"
PRE, POST = "policy_preprocessor", "policy_postprocessor"
USUAL = {"smolvla": DATA / "smolvla" / "default", "pi05": DATA / "pi" / "pi05" / "lerobot"}
NATIVE = {"smolvla": "smolvla", "pi05": "pi"}
FAMILIES = ("smolvla", "pi05")


@cache
def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of the published sizes, by LeRobot's names."""
    if kind == "smolvla":
        sizes = read_architecture(Fields({}, "config.json"), Fields(SMOLVLM2_CONFIG, SMOLVLM2))
        parts = SMOLVLA_TENSORS.parts(build_smolvla(sizes), ())
    else:
        parts = PI_TENSORS.parts(build_pi(PUBLISHED[kind]), ())
    return {f"model.{part.name}": part.shape for group in parts.values() for part in group}


def write_header(path: Path, kind: str) -> None:
    """Write a safetensors file with the published tensors; their bytes are a hole in the file."""
    entries, end = {}, 0
    for name, shape in shapes(kind).items():
        begin, end = end, end + 4 * prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)


def write(folder: Path, one: dict[str, Any]) -> None:
    """Write the checkpoint that an entry describes, with LeRobot's usual files around it."""
    if "folder" in one:
        (folder / "config.json").write_text(json.dumps(one["folder"]))
        return
    usual = USUAL.get(one["type"], USUAL["smolvla"])
    names = one.get("names", [IMAGES + name for name in one.get("cameras", ())])
    inputs = {name: {"type": "VISUAL", "shape": one.get("shape", [3, 256, 256])} for name in names}
    inputs |= {STATE: {"type": "STATE", "shape": [one["state"]]}, **one.get("more", {})}
    outputs = {"action": {"type": "ACTION", "shape": [one["action"]]}}
    config = json.loads((usual / "config.json").read_text())
    if one["type"] == "smolvla":
        config |= {"vlm_model_name": SMOLVLM2, "resize_imgs_with_padding": [512, 512], "num_vlm_layers": 16}
        config |= {"chunk_size": 50, "n_action_steps": 50, "expert_width_multiplier": 0.75, "num_expert_layers": -1}
        config |= {"self_attn_every_n_layers": 2, "add_image_special_tokens": False, "attention_mode": "cross_attn"}
    elif one["type"] == "pi05":
        config |= {"image_resolution": [224, 224], "chunk_size": 50, "n_action_steps": 50}
    else:
        config = {}
    config |= {"type": one["type"], "input_features": inputs, "output_features": outputs, **one.get("config", {})}
    (folder / "config.json").write_text(json.dumps(config))
    if one["type"] in FAMILIES:
        write_header(folder / "model.safetensors", one["type"])
    found = one["statistics"]
    sizes = {} if found is None else {STATE: found["state"], "action": one["action"]}
    stored = {
        f"{name}.{key}": np.full(size, level, np.float32) for name, size in sizes.items() for key, level in LEVELS
    }
    seen = [] if found is None else found["cameras"]
    stored |= {f"{IMAGES}{name}.{key}": np.zeros((3, 1, 1), np.float32) for name in seen for key in ("mean", "std")}
    for name in (PRE, POST) if one.get("processors", True) else ():
        content = json.loads((usual / f"{name}.json").read_text())
        for step in content["steps"]:
            options = step.get("config", {})
            if step["registry_name"] == "rename_observations_processor":
                options["rename_map"] = {IMAGES + old: IMAGES + new for old, new in one.get("rename", {}).items()}
            if step["registry_name"] == "tokenizer_processor" and one["type"] == "smolvla":
                options["tokenizer_name"] = SMOLVLM2
            if "features" in options:
                options["features"] = {**inputs, **outputs} if name == PRE else outputs
            if "mode" in one and "norm_map" in options:
                options["norm_map"] = {"VISUAL": "IDENTITY", "STATE": one["mode"], "ACTION": one["mode"]}
            if found is None:
                step.pop("state_file", None)
            elif "state_file" in step:
                save_file(stored, str(folder / step["state_file"]))
        if name == PRE and "step" in one:
            content["steps"].insert(0, one["step"])
        (folder / f"{name}.json").write_text(json.dumps(content))


LEVELS = (("mean", 0.5), ("std", 0.2), ("min", -1.0), ("max", 2.0), ("q01", -0.9), ("q99", 1.9))
EACH = [pytest.param(one, id=one["name"]) for one in PUBLISHED_FILES]


@pytest.mark.parametrize("one", EACH)
def test_a_published_checkpoint_is_read_or_refused_by_name(one: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, one)
    config = load((), [f"policy.checkpoint:={tmp_path}"])
    assert config.policy.name == NATIVE.get(one["type"], "lerobot" if one["type"] else config.policy.name)
    policy: Any = create(config)
    if "refused" in one:
        with pytest.raises(CheckpointError, match=one["refused"]):
            policy.describe(), policy.describe_memory()
        return
    spec = policy.describe()
    assert {"images": list(spec.image_keys), "state": sum(part.size for part in spec.state)} == one["found"]
    assert spec.dimension == one["action"]
    if one["type"] in FAMILIES:  # every tensor of the published sizes has its place in the network on ``meta``
        checkpoint = policy._read()
        parts = checkpoint.parts
        needed = {part.name: part.shape for group in parts.values() for part in group}
        check_weights(needed, checkpoint.stored, lambda name: False, str(tmp_path))
        assert len(needed) == len(checkpoint.stored) == len(shapes(one["type"]))


READ = [pytest.param(one, id=one["name"]) for one in PUBLISHED_FILES if one["type"] in FAMILIES and "found" in one]


@pytest.mark.parametrize("one", READ)
def test_lerobots_own_family_reads_the_same(one: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, one)
    spec = create(load((), [f"policy.checkpoint:={tmp_path}", "policy.name:=lerobot"])).describe()
    assert {"images": list(spec.image_keys), "state": sum(part.size for part in spec.state)} == one["found"]


KNOWN_STEMS, ENDS = ("use", "clip", "action", "state", "image"), (
    "visual_history", "proprio_memory", "gripper_sign", "delta_mode", "crop", "rotation", "offset", "scale",
    "delay", "sum",
)  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_invented_keys_are_refused_with_key_value_reason_and_advice(kind: str, tmp_path: Path) -> None:
    usual = next(one for one in PUBLISHED_FILES if one["type"] == kind and "found" in one)
    write(tmp_path, usual)
    path = tmp_path / "config.json"
    config, policy = json.loads(path.read_text()), create(load((), [f"policy.checkpoint:={tmp_path}"]))
    policy.describe()
    for key in (f"{stem}_{end}" for stem in KNOWN_STEMS for end in ENDS):
        path.write_text(json.dumps({**config, key: 0.5}))
        words = rf"config\.json: found {key}: 0\.5, expected no such key .*may change the actions; policy\.name:="
        with pytest.raises(CheckpointError, match=words):
            policy.describe()
