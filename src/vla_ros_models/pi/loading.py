"""Finds a network's tensors in a checkpoint, loads them, and estimates the memory of a model.

LeRobot's names of tensors are openpi's with a leading ``model.``.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from vla_ros.policies.base import Progress, no_progress
from vla_ros_models import weights
from vla_ros_models.adapters import read_merged
from vla_ros_models.checkpoint_files import Produce, StoredTensor, from_files
from vla_ros_models.engine.shapes import DecoderShape
from vla_ros_models.memory import MemoryNeeds, cache_numbers, memory_needs, prefill_numbers, tower_numbers
from vla_ros_models.pi.architecture import EMBEDDINGS, EXPERT, PREFIX, PROJECTOR, SIGLIP, PiArchitecture
from vla_ros_models.pi.network import PiNetwork, build_empty
from vla_ros_models.weights import parameter_shapes


@dataclass(frozen=True)
class Part:
    """A stored tensor; the parts of a parameter are stacked along the first axis."""

    name: str  # without LeRobot's leading ``model.``
    shape: tuple[int, ...]  # as stored


Parts = dict[str, tuple[Part, ...]]
"""Maps each parameter of a network to its parts."""


@dataclass(frozen=True)
class StoredNames:
    """How the names of the tensors of a network's parts begin."""

    tower: str
    projector: str
    prefix: str
    expert: str
    embeddings: tuple[str, str]  # two names of one tied tensor

    def parts(self, network: PiNetwork, stored: Collection[str]) -> Parts:
        """List the parts of every parameter; the embedding has the first of its names that is stored."""
        shapes, names = parameter_shapes(network), self._renames()
        embedding = next((name for name in self.embeddings if name in stored), self.embeddings[0])
        parts = {name: _parts(name, shape, network.architecture.prefix, names) for name, shape in shapes.items()}
        return parts | {"embed_tokens.weight": (Part(embedding, shapes["embed_tokens.weight"]),)}

    def _renames(self) -> Sequence[tuple[str, str]]:
        """Return substitutions, applied in this order; tensors whose names are in braces are stacked."""
        return (
            (r"^vision\.patch_embed\.proj", f"{self.tower}embeddings.patch_embedding"),
            (r"^vision\.pos_embed$", f"{self.tower}embeddings.position_embedding.weight"),
            (r"^vision\.norm", f"{self.tower}post_layernorm"),
            (r"^vision\.blocks", f"{self.tower}encoder.layers"),
            (r"^projector", self.projector),
            (r"^prefix\.", self.prefix),
            (r"^expert\.", self.expert),
            (r"(\.\d+)(\.attn)?\.qkv", r"\1.self_attn.{q,k,v}_proj"),
            (r"\.attn\.proj", ".self_attn.out_proj"),
            (r"(\.\d+)\.([oqkv])\.", r"\1.self_attn.\2_proj."),
            (r"(\.\d+)\.norm([12])", r"\1.layer_norm\2"),
            (r"\.input_norm", ".input_layernorm"),
            (r"\.post_norm", ".post_attention_layernorm"),
            (r"\.gate_up", ".mlp.{gate,up}_proj"),
            (r"(\.\d+)\.down", r"\1.mlp.down_proj"),
        )

    def never_runs(self, layers: int) -> Callable[[str], bool]:
        """Return whether no action depends on a stored tensor, for a prefix of ``layers``.

        These are the expert's head, the embedding under its other name, the prefix's final norm, its last layer
        except the keys and values, and the layers behind it.
        """
        prefix, tail = re.escape(self.prefix), r"self_attn\.[qo]_proj|mlp\.\w+|post_attention_layernorm"
        whole = (
            *self.embeddings,
            f"{self.prefix}norm.weight",
            f"{self.expert.removesuffix('model.')}lm_head.weight",
        )
        unused = re.compile(
            rf"({'|'.join(map(re.escape, whole))}|{prefix}layers\.{layers - 1}\.({tail})\.weight)$"
            rf"|{prefix}layers\.(?P<layer>\d+)\."
        )

        def never(name: str) -> bool:
            found = unused.match(name)
            return found is not None and (found["layer"] is None or int(found["layer"]) >= layers)

        return never


PI_TENSORS = StoredNames(SIGLIP, PROJECTOR, PREFIX, EXPERT, EMBEDDINGS)


def parameter_parts(architecture: PiArchitecture, stored: Collection[str]) -> Parts:
    """List the parts of every parameter; ``stored`` determines the name of the embedding."""
    return PI_TENSORS.parts(build_empty(architecture), stored)


def _parts(
    name: str, shape: tuple[int, ...], prefix: DecoderShape, names: Sequence[tuple[str, str]]
) -> tuple[Part, ...]:
    stored = name
    for pattern, replacement in names:
        stored = re.sub(pattern, replacement, stored)
    stem, _, rest = stored.partition("{")
    if not rest:
        return (Part(stored, shape[1:] if name == "vision.pos_embed" else shape),)
    fused, _, end = rest.partition("}")
    first, *others = fused.split(",")
    is_decoder_attention = first == "q" and not name.startswith("vision.")
    rows = prefix.kv_heads * prefix.head_dim if is_decoder_attention else shape[0] // (1 + len(others))
    sizes = {first: shape[0] - rows * len(others), **dict.fromkeys(others, rows)}  # the prefix may lack queries
    return tuple(Part(f"{stem}{one}{end}", (count, *shape[1:])) for one, count in sizes.items() if count)


LEROBOT_PREFIX = "model."

FLOAT32 = re.compile(r"geometry\.|vision\.(patch|pos)_embed|\w+_(proj|mlp_in|mlp_out)\.|(prefix|expert)\..*norm\.")
"""Parameters that stay float32 in a bfloat16 model, as in openpi."""

Manifest = Mapping[str, StoredTensor]
"""Stored tensors by openpi's names."""


def read_stored(folder: Path, base: str | Path = "") -> dict[str, StoredTensor]:
    """List every tensor of a checkpoint, with an adapter merged into ``base``, without LeRobot's prefix."""
    return {name.removeprefix(LEROBOT_PREFIX): stored for name, stored in read_merged(folder, base).items()}


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if FLOAT32.match(name) else dtype


N = TypeVar("N", bound=PiNetwork)


def fill_network(
    network: N,
    names: StoredNames,
    stored: Manifest,
    source: str,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Progress = no_progress,
) -> N:
    """Load the weights into a network on ``meta``, one parameter at a time.

    Raises CheckpointError, which begins with ``source``, if tensors are missing or unexpected, or have the wrong
    shape or type.
    """
    parts = names.parts(network, stored)
    weights.check_weights(
        {part.name: part.shape for group in parts.values() for part in group},
        stored,
        names.never_runs(network.architecture.prefix.layers),
        source,
    )
    dtype_of = partial(parameter_dtype, dtype=getattr(torch, dtype))
    weights.fill(network, stacked(parts, stored), torch.device(device), dtype_of, progress)
    return network


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
    prompt: int = 200,
    flow_steps: int = 10,
) -> MemoryNeeds:
    """Estimate the memory of a model for one robot and a prompt of ``prompt`` tokens, before loading.

    ``quantization`` has no effect: the dense weights are loaded first and determine the peak.
    """
    torch_dtype = getattr(torch, dtype)
    item = torch_dtype.itemsize
    sizes = {name: sum(prod(part.shape) for part in group) for name, group in parts.items()}
    weights = sum(size * parameter_dtype(name, torch_dtype).itemsize for name, size in sizes.items())
    vision, prefix, expert = architecture.vision, architecture.prefix, architecture.expert
    weights += (flow_steps + 1) * (2 * expert.layers + 1) * 3 * expert.hidden_size * 4
    tokens = cameras * architecture.image_tokens + prompt
    peak = max(tower_numbers(vision, cameras), prefill_numbers(prefix, tokens)) * item
    if not device.startswith("cuda"):  # for a GPU, the host converts stored tensors
        peak = max(peak, 4 * max(prod(part.shape) for group in parts.values() for part in group))
    cache = cache_numbers(prefix, tokens + 1 + architecture.horizon)
    cache += cache_numbers(expert, tokens) if architecture.crossing else 0
    return memory_needs(weights, cache * item, peak, device)
