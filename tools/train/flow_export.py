"""Exports a run of the small pi0.5 in LeRobot's layout and float16."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from tools.train.card import flow_card
from tools.train.data import POINTS
from tools.train.flow_fit import TOKENIZER
from tools.train.flow_network import ACTION_SIZE, STATE_SIZE, FlowTrainee, architecture_of
from tools.train.flow_words import FORM, VOCABULARY
from tools.train.loop import RECIPE, STATISTICS, curve, restored
from tools.train.recipe import FlowNetworkRecipe, from_json
from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import read_json
from vla_ros_models.engine.shapes import GeometryShape
from vla_ros_models.geometry import GEOMETRY
from vla_ros_models.pi.loading import LEROBOT_PREFIX, parameter_parts
from vla_ros_models.processor_files import ACTION
from vla_ros_models.processor_files import STATE as STATE_KEY

EULER_STEPS = 5
"""Euler steps per inference; ten steps gave the same success rate."""
IMAGE = "observation.images.image"
JOINTS = [f"joint_{number}" for number in range(1, ACTION_SIZE)]


def export(run: Path, folder: Path, note: str = "") -> int:
    """Write the checkpoint of a run and its card to ``folder``; return the size of the weights in bytes.

    ``note`` is added to the card.

    Raises:
        CheckpointError: The run has no state, or a weight is out of range.
    """
    recipe = read_json(run / RECIPE)
    network, made = from_json(FlowNetworkRecipe, recipe["network"]), recipe["data"]
    trainee = FlowTrainee(architecture_of(network, len(VOCABULARY), made["horizon"], made["side"]))
    step, seconds = restored(run, trainee)
    relative = {"enabled": True, "exclude_joints": ["gripper"], "action_names": [*JOINTS, "gripper"]}
    sizes = Sizes(images=(IMAGE,), state=STATE_SIZE, action=ACTION_SIZE, prompt=FORM.length)
    parameters = write_layout(folder, trainee, read_json(run / STATISTICS), sizes, network.max_delay, relative)
    shutil.copyfile(run / TOKENIZER, folder / TOKENIZER)
    done = {"steps_done": step, "seconds": seconds, "parameters": parameters, "note": f"\n{note}\n" if note else ""}
    (folder / "README.md").write_text(flow_card({**recipe, **done}, curve(run)), encoding="utf-8")
    return (folder / "model.safetensors").stat().st_size


@dataclass(frozen=True)
class Sizes:
    """What a checkpoint's files say about its inputs and outputs."""

    images: tuple[str, ...]  # LeRobot's names
    state: int  # numbers in the state
    action: int  # numbers in an action
    prompt: int  # tokens of the longest prompt
    execute_steps: int = 0  # actions to execute of each chunk; 0: all
    points: tuple[str, ...] = (POINTS,)  # of the images, for a network with geometric tokens


def write_layout(
    folder: Path,
    trainee: FlowTrainee,
    statistics: Mapping[str, Any],
    sizes: Sizes,
    max_delay: int,
    relative: Mapping[str, Any] | None = None,
) -> int:
    """Write a network in LeRobot's layout and float16, without tokenizer; return the number of its weights.

    ``relative`` says which actions are relative to the state; None if none are.

    Raises:
        CheckpointError: A weight is out of range.
    """
    architecture = trainee.architecture
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, parts in parameter_parts(architecture, ()).items():
        weight = trainee.network.get_parameter(name).detach().half()
        if not torch.isfinite(weight).all():
            raise CheckpointError(f"{folder}: {name} is not finite in float16")
        rows = torch.split(weight.view(-1, *parts[0].shape[1:]), [part.shape[0] for part in parts])
        tensors |= {f"{LEROBOT_PREFIX}{part.name}": piece.clone() for part, piece in zip(parts, rows, strict=True)}
    save_file(tensors, str(folder / "model.safetensors"))
    size = architecture.vision.image_size
    inputs: dict[str, Any] = {name: {"type": "VISUAL", "shape": [3, size, size]} for name in sizes.images}
    inputs[STATE_KEY] = {"type": "STATE", "shape": [sizes.state]}
    outputs = {ACTION: {"type": "ACTION", "shape": [sizes.action]}}
    _write(folder / "architecture.json", {"vision": {"heads": architecture.vision.heads}})
    _write(
        folder / "config.json",
        {
            "type": "pi05",
            "input_features": inputs,
            "output_features": outputs,
            "image_resolution": [size, size],
            "chunk_size": architecture.horizon,
            **({"n_action_steps": sizes.execute_steps} if sizes.execute_steps else {}),
            "num_inference_steps": EULER_STEPS,
            "rtc_training_max_delay": max_delay,
            "tokenizer_max_length": sizes.prompt,
            "max_state_dim": sizes.state,
            "max_action_dim": architecture.action_dim,
            "use_relative_actions": relative is not None,
            **_geometry(architecture.geometry, sizes),
        },
    )
    norm_map = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    before = [
        _normalizer(folder, "policy_preprocessor", "normalizer_processor", statistics, inputs | outputs, norm_map),
        {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}},
        {"registry_name": "tokenizer_processor", "config": {"max_length": sizes.prompt}},
    ]
    after = [_normalizer(folder, "policy_postprocessor", "unnormalizer_processor", statistics, outputs, norm_map)]
    if relative is not None:
        before.insert(0, {"registry_name": "relative_actions_processor", "config": dict(relative)})
        after.append({"registry_name": "absolute_actions_processor", "config": {"enabled": True}})
    for name, steps in (("policy_preprocessor", before), ("policy_postprocessor", after)):
        _write(folder / f"{name}.json", {"name": name, "steps": steps})
    return sum(tensor.numel() for tensor in tensors.values())


def _geometry(shape: GeometryShape | None, sizes: Sizes) -> dict[str, Any]:
    points = dict(zip(sizes.images, sizes.points, strict=True))
    return {GEOMETRY: {"points": points, **asdict(shape)}} if shape else {}


def _normalizer(
    folder: Path,
    file: str,
    name: str,
    statistics: Mapping[str, Any],
    features: dict[str, Any],
    norm_map: dict[str, str],
) -> dict[str, Any]:
    """Write the statistics of a processor step, and return the step's entry in the processor file."""
    arrays = {
        f"{key}.{which}": np.array(values, np.float32)
        for key, entry in statistics.items()
        for which, values in entry.items()
    }
    state_file = f"{file}_{name}.safetensors"
    save_arrays(arrays, str(folder / state_file))
    config = {"eps": 1e-8, "features": features, "norm_map": norm_map}
    return {"registry_name": name, "config": config, "state_file": state_file}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
