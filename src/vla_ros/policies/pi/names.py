"""Maps the network's parameters to a checkpoint's tensors, by openpi's names."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from vla_ros.policies.pi.architecture import EMBEDDINGS, EXPERT, PREFIX, PROJECTOR, SIGLIP, PiArchitecture
from vla_ros.policies.pi.network import build_empty
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


def never_run(architecture: PiArchitecture) -> re.Pattern[str]:
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
