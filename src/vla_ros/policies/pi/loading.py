"""Maps parameters to stored tensors by openpi's names, loads them, and estimates their memory.

LeRobot's names are openpi's with a leading ``model.``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from vla_ros.policies import weights
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.checkpoint_files import Produce, StoredTensor, from_files, read_manifest
from vla_ros.policies.memory import MemoryPlan, cache_numbers, estimate, prefill_numbers, tower_numbers
from vla_ros.policies.pi.architecture import (
    EMBEDDINGS,
    EXPERT,
    PREFIX,
    PROJECTOR,
    PROMPT_TOKENS,
    SIGLIP,
    PiArchitecture,
)
from vla_ros.policies.pi.network import PiNetwork, build_empty
from vla_ros.policies.weights import parameter_shapes

_RENAMES = (
    (r"^vision\.patch_embed\.proj", f"{SIGLIP}embeddings.patch_embedding"),
    (r"^vision\.pos_embed$", f"{SIGLIP}embeddings.position_embedding.weight"),
    (r"^vision\.norm", f"{SIGLIP}post_layernorm"),
    (r"^vision\.blocks", f"{SIGLIP}encoder.layers"),
    (r"^projector", PROJECTOR),
    (r"^prefix\.", PREFIX),
    (r"^expert\.", EXPERT),
    (r"(\.\d+)(\.attn)?\.qkv", r"\1.self_attn.{q,k,v}_proj"),
    (r"\.attn\.proj", ".self_attn.out_proj"),
    (r"(\.\d+)\.o\.", r"\1.self_attn.o_proj."),
    (r"(\.\d+)\.norm([12])", r"\1.layer_norm\2"),
    (r"\.input_norm", ".input_layernorm"),
    (r"\.post_norm", ".post_attention_layernorm"),
    (r"\.gate_up", ".mlp.{gate,up}_proj"),
    (r"(\.\d+)\.down", r"\1.mlp.down_proj"),
)
"""Substitutions, applied in this order. Tensors whose names are in braces are stacked along the first axis."""


@dataclass(frozen=True)
class Part:
    """A stored tensor; the parts of a parameter are stacked along the first axis."""

    name: str  # openpi's name
    shape: tuple[int, ...]  # as stored


Parts = dict[str, tuple[Part, ...]]
"""Maps each parameter of :class:`~vla_ros.policies.pi.network.PiNetwork` to its parts."""


def parameter_parts(architecture: PiArchitecture, stored: Collection[str]) -> Parts:
    """List the parts of every parameter; ``stored`` determines the name of the embedding."""
    shapes = parameter_shapes(build_empty(architecture))
    embedding = next((name for name in EMBEDDINGS if name in stored), EMBEDDINGS[0])
    parts = {name: _parts(name, shape, architecture) for name, shape in shapes.items()}
    return parts | {"embed_tokens.weight": (Part(embedding, shapes["embed_tokens.weight"]),)}


def _parts(name: str, shape: tuple[int, ...], architecture: PiArchitecture) -> tuple[Part, ...]:
    stored = name
    for pattern, replacement in _RENAMES:
        stored = re.sub(pattern, replacement, stored)
    stem, _, rest = stored.partition("{")
    if not rest:
        return (Part(stored, shape[1:] if name == "vision.pos_embed" else shape),)
    names, _, end = rest.partition("}")
    first, *others = names.split(",")
    gemma = architecture.prefix  # the expert has the same heads
    is_gemma_attention = first == "q" and not name.startswith("vision.")
    rows = gemma.kv_heads * gemma.head_dim if is_gemma_attention else shape[0] // (1 + len(others))
    sizes = {first: shape[0] - rows * len(others), **dict.fromkeys(others, rows)}  # the prefix may lack queries
    return tuple(Part(f"{stem}{one}{end}", (count, *shape[1:])) for one, count in sizes.items() if count)


def never_run_pattern(architecture: PiArchitecture) -> re.Pattern[str]:
    """Return a pattern for stored tensors that no action depends on.

    These are the expert's head, the embedding under its other name, the prefix's final norm, and the prefix's last
    layer except its keys and values.
    """
    last = architecture.prefix.layers - 1
    tail = r"self_attn\.[qo]_proj\.weight|mlp\.\w+\.weight|post_attention_layernorm\.weight"
    escaped = re.escape(PREFIX)
    return re.compile(
        rf"paligemma_with_expert\.gemma_expert\.lm_head\.weight$|{'|'.join(map(re.escape, EMBEDDINGS))}$"
        rf"|{escaped}norm\.weight$|{escaped}layers\.{last}\.({tail})$"
    )


LEROBOT_PREFIX = "model."

FLOAT32 = re.compile(r"vision\.(patch|pos)_embed|\w+_(proj|mlp_in|mlp_out)\.|(prefix|expert)\..*norm\.")
"""Parameters that stay float32 in a bfloat16 model, as in openpi."""

_ALL = (("float32", "none"), ("bfloat16", "none"))
PI_CHOICES = {"cuda": _ALL, "cpu": _ALL}
"""Options to suggest if memory does not suffice."""

Manifest = Mapping[str, StoredTensor]
"""Stored tensors by openpi's names."""


def read_stored(folder: Path) -> dict[str, StoredTensor]:
    """List every tensor of a checkpoint by openpi's name; reads only the files' headers."""
    manifest = read_manifest(folder)
    lerobot = any(name.startswith(f"{LEROBOT_PREFIX}paligemma_with_expert.") for name in manifest)
    return {name.removeprefix(LEROBOT_PREFIX) if lerobot else name: stored for name, stored in manifest.items()}


def check_weights(architecture: PiArchitecture, stored: Manifest, folder: Path) -> Parts:
    """Compare the parameters with the stored tensors, and return the parts of each parameter.

    Raises CheckpointError if tensors are missing or unexpected, or have the wrong shape or type.
    """
    parts = parameter_parts(architecture, stored)
    weights.check_weights(
        {part.name: part.shape for group in parts.values() for part in group},
        stored,
        never_run_pattern(architecture).match,
        f"{folder}: the weights are not those of {architecture.model} (LoRA adapters must be merged first; files "
        "that LeRobot wrote before October 2025 must be converted by a newer version)",
    )
    return parts


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the data type of a parameter in a model of ``dtype``."""
    return torch.float32 if FLOAT32.match(name) else dtype


def fill_network(
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
