"""Loads the weights of both layouts; checks every name, shape and type before it reads a byte.

LeRobot's names are openpi's with ``model.`` in front. Safetensors only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import nn

from vla_ros.errors import CheckpointError
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.checkpoint_files import FLOATS, StoredTensor, list_some, read_manifest, read_tensors
from vla_ros.policies.pi.architecture import PiArchitecture
from vla_ros.policies.pi.names import Parts, never_run, parameter_parts
from vla_ros.policies.pi.network import PiNetwork

LEROBOT = "model."

FLOAT32 = re.compile(r"vision\.(patch|pos)_embed|\w+_(proj|mlp_in|mlp_out)\.|(prefix|expert)\..*norm\.")
"""Parameters that stay float32 in a bfloat16 model, as in openpi."""


@dataclass(frozen=True)
class Stored:
    """A stored tensor and its name in the file."""

    tensor: StoredTensor  # file, shape and type
    name: str  # its name in the file


Manifest = Mapping[str, Stored]
"""Stored tensors by openpi's name."""


def read_stored(folder: Path) -> dict[str, Stored]:
    """List every tensor of a checkpoint by openpi's name; reads only the files' headers."""
    manifest = read_manifest(folder)
    lerobot = any(name.startswith(f"{LEROBOT}paligemma_with_expert.") for name in manifest)
    return {
        name.removeprefix(LEROBOT) if lerobot else name: Stored(tensor, name) for name, tensor in manifest.items()
    }


def check_weights(architecture: PiArchitecture, stored: Manifest, folder: Path) -> Parts:
    """Compare the parameters with the stored tensors, and return what each parameter is made of.

    CheckpointError names missing or unexpected tensors, wrong shapes and types.
    """
    parts = parameter_parts(architecture, stored)
    needed = {part.name: part.shape for group in parts.values() for part in group}
    unused = never_run(architecture)
    found = {name: entry.tensor for name, entry in stored.items()}
    problems = {
        "missing": sorted(needed.keys() - found.keys()),
        "unexpected": sorted(name for name in found.keys() - needed.keys() if not unused.match(name)),
        "of the wrong shape": [
            f"{name}: {list(found[name].shape)}, expected {list(shape)}"
            for name, shape in sorted(needed.items())
            if name in found and found[name].shape != shape
        ],
        f"not of a type in {list(FLOATS)}": [
            f"{name}: {found[name].dtype}"
            for name in sorted(needed.keys() & found.keys())
            if found[name].dtype not in FLOATS
        ],
    }
    text = "; ".join(list_some(what, names) for what, names in problems.items() if names)
    if text:
        raise CheckpointError(
            f"{folder}: the weights are not those of {architecture.model}: {text}. LoRA adapters must be merged "
            "first; files that LeRobot wrote before October 2025 must be converted by a newer one"
        )
    return parts


def build_empty(architecture: PiArchitecture) -> PiNetwork:
    """Build the network on ``meta``, ready for :func:`fill`."""
    with torch.device("meta"):
        network = PiNetwork(architecture)
    return network.eval().requires_grad_(False)


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the data type of a parameter in a model of ``dtype``."""
    return torch.float32 if FLOAT32.match(name) else dtype


def fill(
    network: PiNetwork,
    parts: Parts,
    stored: Manifest,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress = no_progress,
) -> None:
    """Copy the weights to ``device``, one stored tensor at a time."""
    slots: dict[str, tuple[str, int]] = {}  # stored name to parameter and first row
    values: dict[str, torch.Tensor] = {}
    for name, group in parts.items():
        start = 0
        for part in group:
            slots[part.name] = name, start
            start += part.shape[0]
    total = sum(prod(stored[name].tensor.shape) for name in slots)
    done = 0
    for file in sorted({stored[name].tensor.file for name in slots}):
        there = {stored[name].name: name for name in slots if stored[name].tensor.file == file}
        for stored_name, tensor in read_tensors(file, there):
            name, start = slots[there[stored_name]]
            if name not in values:
                shape = network.get_parameter(name).shape
                values[name] = torch.empty(shape, device=device, dtype=parameter_dtype(name, dtype))
            rows = values[name].view(-1, *tensor.shape[1:])  # the tower's positions have a leading 1
            rows[start : start + tensor.shape[0]].copy_(tensor)
            done += tensor.numel()
            progress(done / total, f"reading {file.name}")
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
