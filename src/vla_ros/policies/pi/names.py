"""Maps the parameters of the network to the tensors of a checkpoint, by openpi's names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from vla_ros.engine.shapes import GemmaShape, TowerShape
from vla_ros.policies.pi.architecture import (
    EMBEDDINGS,
    EXPERT,
    PREFIX,
    PROJECTOR,
    SIGLIP,
    PiArchitecture,
)


@dataclass(frozen=True)
class Part:
    """One stored tensor of a parameter; several are stacked along the first axis."""

    name: str  # openpi's name
    shape: tuple[int, ...]  # as stored


Parts = dict[str, tuple[Part, ...]]
"""Parameter of :class:`~vla_ros.policies.pi.network.PiNetwork` to what it is made of."""


def parameter_parts(architecture: PiArchitecture, stored: Collection[str]) -> Parts:
    """List the parts of every parameter; ``stored`` shows which name the embedding has."""
    vision, prefix, expert = architecture.vision, architecture.prefix, architecture.expert
    width, numbers = expert.width, architecture.action_dim
    embedding = next((name for name in EMBEDDINGS if name in stored), EMBEDDINGS[0])
    adaptive = not architecture.has_state_token
    ends = {"action_in_proj": (width, numbers), "action_out_proj": (numbers, width)}
    if adaptive:
        ends |= {"time_mlp_in": (width, width), "time_mlp_out": (width, width)}
    else:
        ends |= {"state_proj": (width, numbers), "action_time_mlp_in": (width, 2 * width)}
        ends |= {"action_time_mlp_out": (width, width)}
    return dict(
        [
            *_vision(vision),
            *_linear("projector", PROJECTOR, prefix.width, vision.width),
            _one("embed_tokens.weight", embedding, architecture.vocabulary, prefix.width),
            *_gemma("prefix", PREFIX, prefix, keys_only=True),
            *_gemma("expert", EXPERT, expert, adaptive),
            *_norm("expert.norm", f"{EXPERT}norm", width, adaptive),
            *(entry for name, shape in ends.items() for entry in _linear(name, name, *shape)),
        ]
    )


def never_run(architecture: PiArchitecture) -> re.Pattern[str]:
    """Match stored names that no action depends on.

    These are the expert's head, the other name of the embedding, the prefix's final norm, and everything in its
    last layer except keys and values.
    """
    last = architecture.prefix.depth - 1
    tail = r"self_attn\.[qo]_proj\.weight|mlp\.\w+\.weight|post_attention_layernorm\.weight"
    escaped = re.escape(PREFIX)
    return re.compile(
        rf"paligemma_with_expert\.gemma_expert\.lm_head\.weight$|{'|'.join(map(re.escape, EMBEDDINGS))}$"
        rf"|{escaped}norm\.weight$|{escaped}layers\.{last}\.({tail})$"
    )


Entry = tuple[str, tuple[Part, ...]]


def _one(name: str, source: str, *shape: int) -> Entry:
    return name, (Part(source, shape),)


def _linear(name: str, source: str, rows: int, columns: int) -> list[Entry]:
    weight = _one(f"{name}.weight", f"{source}.weight", rows, columns)
    return [weight, _one(f"{name}.bias", f"{source}.bias", rows)]


def _norm(name: str, source: str, width: int, adaptive: bool) -> list[Entry]:
    if adaptive:
        return _linear(f"{name}.dense", f"{source}.dense", 3 * width, width)
    return [_one(f"{name}.weight", f"{source}.weight", width)]


def _vision(shape: TowerShape) -> Iterator[Entry]:
    width, size = shape.width, shape.patch_size
    embeddings = f"{SIGLIP}embeddings."
    yield _one("vision.patch_embed.proj.weight", f"{embeddings}patch_embedding.weight", width, 3, size, size)
    yield _one("vision.patch_embed.proj.bias", f"{embeddings}patch_embedding.bias", width)
    yield _one("vision.pos_embed", f"{embeddings}position_embedding.weight", shape.patches, width)
    for index in range(shape.blocks):
        block, source = f"vision.blocks.{index}.", f"{SIGLIP}encoder.layers.{index}."
        for kind, sizes in (("weight", (width, width)), ("bias", (width,))):
            heads = tuple(Part(f"{source}self_attn.{which}_proj.{kind}", sizes) for which in "qkv")
            yield f"{block}attn.qkv.{kind}", heads
            for norm in "12":
                yield _one(f"{block}norm{norm}.{kind}", f"{source}layer_norm{norm}.{kind}", width)
        yield from _linear(f"{block}attn.proj", f"{source}self_attn.out_proj", width, width)
        yield from _linear(f"{block}mlp.fc1", f"{source}mlp.fc1", shape.mlp_width, width)
        yield from _linear(f"{block}mlp.fc2", f"{source}mlp.fc2", width, shape.mlp_width)
    for kind in ("weight", "bias"):
        yield _one(f"vision.norm.{kind}", f"{SIGLIP}post_layernorm.{kind}", width)


def _gemma(
    stack: str, stem: str, shape: GemmaShape, adaptive: bool = False, keys_only: bool = False
) -> Iterator[Entry]:
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for index in range(shape.depth):
        layer, source = f"{stack}.layers.{index}.", f"{stem}layers.{index}."
        whole = not keys_only or index < shape.depth - 1
        rows = {"q": query} if whole else {}
        rows |= {"k": key, "v": key}
        yield from _norm(f"{layer}input_norm", f"{source}input_layernorm", shape.width, adaptive)
        attention = f"{source}self_attn."
        yield (
            f"{layer}qkv.weight",
            tuple(Part(f"{attention}{which}_proj.weight", (count, shape.width)) for which, count in rows.items()),
        )
        if whole:
            hidden = (shape.mlp_width, shape.width)
            gates = tuple(Part(f"{source}mlp.{which}_proj.weight", hidden) for which in ("gate", "up"))
            yield from _norm(f"{layer}post_norm", f"{source}post_attention_layernorm", shape.width, adaptive)
            yield _one(f"{layer}o.weight", f"{attention}o_proj.weight", shape.width, query)
            yield f"{layer}gate_up.weight", gates
            yield _one(f"{layer}down.weight", f"{source}mlp.down_proj.weight", shape.width, shape.mlp_width)
