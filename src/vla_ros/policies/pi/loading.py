"""Loads weights in both layouts and estimates their memory; LeRobot's names are openpi's after ``model.``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from vla_ros.policies import weights
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.checkpoint_files import Produce, StoredTensor, from_files, read_manifest
from vla_ros.policies.memory import MemoryPlan, cache_numbers, estimate, prefill_numbers, tower_numbers
from vla_ros.policies.pi.architecture import PROMPT_TOKENS, PiArchitecture
from vla_ros.policies.pi.names import Parts, never_run, parameter_parts
from vla_ros.policies.pi.network import PiNetwork

LEROBOT = "model."

FLOAT32 = re.compile(r"vision\.(patch|pos)_embed|\w+_(proj|mlp_in|mlp_out)\.|(prefix|expert)\..*norm\.")
"""Parameters that stay float32 in a bfloat16 model, as in openpi."""

_ALL = (("float32", "none"), ("bfloat16", "none"))
CHOICES = {"cuda": _ALL, "cpu": _ALL}
"""Options to suggest if memory does not suffice."""

Manifest = Mapping[str, StoredTensor]
"""Stored tensors by openpi's names."""


def read_stored(folder: Path) -> dict[str, StoredTensor]:
    """List every tensor of a checkpoint by openpi's name; reads only the files' headers."""
    manifest = read_manifest(folder)
    lerobot = any(name.startswith(f"{LEROBOT}paligemma_with_expert.") for name in manifest)
    return {name.removeprefix(LEROBOT) if lerobot else name: stored for name, stored in manifest.items()}


def check_weights(architecture: PiArchitecture, stored: Manifest, folder: Path) -> Parts:
    """Compare the parameters with the stored tensors, and return the parts of each parameter.

    Raises CheckpointError if tensors are missing or unexpected, or have the wrong shape or type.
    """
    parts = parameter_parts(architecture, stored)
    weights.check_weights(
        {part.name: part.shape for group in parts.values() for part in group},
        stored,
        never_run(architecture).match,
        f"{folder}: the weights are not those of {architecture.model} (LoRA adapters must be merged first; files "
        "that LeRobot wrote before October 2025 must be converted by a newer version)",
    )
    return parts


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
    """Load the weights to ``device``, one parameter at a time."""
    weights.fill(network, stacked(parts, stored), device, partial(parameter_dtype, dtype=dtype), progress)


def stacked(parts: Parts, stored: Manifest) -> Produce:
    """Return a function that yields parameters, with their parts stacked along axis 0."""

    def produce(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        owner = {part.name: name for name in names for part in parts[name]}
        arrived: dict[str, Tensor] = {}  # still mapped from their files, so waiting costs no memory
        for part_name, tensor in from_files(stored)(list(owner)):
            name, arrived[part_name] = owner[part_name], tensor
            group = [part.name for part in parts[name]]
            if all(one in arrived for one in group):
                rows = [arrived.pop(one) for one in group]
                yield name, rows[0] if len(rows) == 1 else torch.cat(rows)

    return produce


def plan_memory(
    parts: Parts,
    architecture: PiArchitecture,
    dtype: str,
    quantization: str,
    device: str,
    cameras: int = 3,
    flow_steps: int = 10,
) -> MemoryPlan:
    """Estimate the memory of a model for one robot, before loading.

    ``quantization`` has no effect: the dense weights are loaded first and determine the peak.
    """
    torch_dtype = getattr(torch, dtype)
    item = torch_dtype.itemsize
    sizes = {name: sum(prod(part.shape) for part in group) for name, group in parts.items()}
    weights = sum(size * parameter_dtype(name, torch_dtype).itemsize for name, size in sizes.items())
    vision, prefix, expert = architecture.vision, architecture.prefix, architecture.expert
    weights += (flow_steps + 1) * (2 * expert.layers + 1) * 3 * expert.hidden_size * 4
    tokens = cameras * vision.patches + PROMPT_TOKENS[architecture.model]
    peak = max(tower_numbers(vision, cameras), prefill_numbers(prefix, tokens)) * item
    if not device.startswith("cuda"):  # for a GPU, the host converts stored tensors
        peak = max(peak, 4 * max(prod(part.shape) for group in parts.values() for part in group))
    return estimate(weights, cache_numbers(prefix, tokens + 1 + architecture.horizon) * item, peak, device)
