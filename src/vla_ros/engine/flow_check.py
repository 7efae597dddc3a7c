"""Compares the engine's kernels for Gemma with torch at start."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vla_ros.engine.flow import FlowModel
from vla_ros.engine.gemma import Gemma, GemmaOps, Guide, Rows, allocate_cache, run_layers
from vla_ros.engine.kernel_check import agrees, require_close
from vla_ros.engine.tile_configs import SKINNY
from vla_ros.engine.tolerances import TOLERANCES


def checked(ops: GemmaOps, model: FlowModel) -> GemmaOps:
    """Return ``ops`` if its first layers are correct; otherwise log a warning and return torch's operations."""
    if type(ops) is GemmaOps:
        return ops
    instead = "torch computes the layers instead of the engine's kernels, many times more slowly"
    return ops if agrees(lambda: check_layers(ops, model), instead, strict=False) else GemmaOps()


@torch.inference_mode()
def check_layers(ops: GemmaOps, model: FlowModel) -> None:
    """Compare the first layers of prefix and expert, and the end of a flow step, with torch.

    Raises EngineMismatchError if a result differs by more than rounding.
    """
    for name, gemma, rows in (
        ("the prefix", model.prefix, 2 * SKINNY),
        ("a flow step", model.expert, min(model.suffix, SKINNY)),
        ("a flow step of several robots", model.expert, 2 * SKINNY),
    ):
        first = replace(gemma, layers=gemma.layers[:1])
        bounds = TOLERANCES[gemma.cosine.dtype]
        if first.layers[0].qkv.kind == "fp8":  # a norm that rounds differently may yield the neighbouring FP8 value
            bounds = replace(bounds, product=2 * bounds.product, element=2 * bounds.element)
        expected = _layer(GemmaOps(), model, first, rows)
        for (what, theirs), ours in zip(expected.items(), _layer(ops, model, first, rows).values(), strict=True):
            require_close(
                f"{what} of {name} ({first.layers[0].qkv.kind} weights, {rows} rows)", ours, theirs, bounds
            )


def _layer(ops: GemmaOps, model: FlowModel, gemma: Gemma, count: int) -> dict[str, Tensor]:
    """Run one layer on noise; return keys, values, hidden states and, for the expert, advanced actions."""
    generator = torch.Generator().manual_seed(count)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(model.device)

    at = torch.arange(count, dtype=torch.int32, device=model.device)[None]
    rows = Rows(at, torch.full_like(at, count), torch.zeros_like(at))
    cache = allocate_cache(gemma, 1, count)
    stream = ops.start(gemma, rows, noise(1, count, gemma.shape.width).to(gemma.cosine.dtype))
    stream = run_layers(ops, gemma, rows, stream, cache)
    found = {"keys": cache.keys[0], "values": cache.values[0], "hidden states": stream.hidden.clone()}
    if gemma.norms is model.expert.norms:
        actions = noise(1, count, model.action_dim)
        free = torch.zeros(1, count, device=model.device)
        guide = Guide(torch.zeros_like(actions), free, free[:, 0], free.int())
        ops.advance(gemma, rows, stream, model.action_out, actions, guide, model.times[0], -1.0)
        found["actions"] = actions
    return found
