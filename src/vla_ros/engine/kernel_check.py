"""Compares the engine's matrix products with torch's at start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from vla_ros.engine.device_errors import EngineMismatchError
from vla_ros.engine.ops import KVCache, Ops, Residual, rounded
from vla_ros.engine.tile_configs import SKINNY
from vla_ros.engine.tolerances import TOLERANCES, Tolerances, relative_error
from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import DeviceLostError, OutOfMemoryError

logger = logging.getLogger(__name__)

ROWS = (1, 6, 288)
"""Numbers of rows to check: a decoding pass, a verified draft, and a typical prompt with its image."""


@torch.inference_mode()
def check_products(ops: Ops, weights: DecoderWeights) -> None:
    """Compare the products of the first layer and the head with torch's over the same weights.

    Raises EngineMismatchError if a product differs by more than rounding.
    """
    kind = weights.layers[0].qkv.kind
    for rows in sorted({min(rows, weights.shape.max_positions) for rows in ROWS}):
        bounds = _bounds(weights, rows)
        pairs = zip(_products(ops, weights, rows), _products(Ops(), weights, rows), strict=True)
        for (name, ours), (_, theirs) in pairs:
            require_close(f"{name} ({kind} weights, {rows} rows)", ours, theirs, bounds)


def _bounds(weights: DecoderWeights, rows: int) -> Tolerances:
    bounds = TOLERANCES[weights.dtype]
    if weights.layers[0].qkv.kind not in ("fp8", "int4"):
        return bounds
    # Many rows are rounded to FP8. If a norm rounds differently, the FP8 value may be the neighbouring one, up to
    # 1/8 away. After two products, the relative error was 0.04, and one of three million values was off by 0.32.
    slack = 4 if rows > SKINNY else 2
    return replace(bounds, product=slack * bounds.product, element=slack * bounds.element)


def require_close(name: str, ours: Tensor, theirs: Tensor, bounds: Tolerances) -> None:
    """Raise an EngineMismatchError about ``name`` if a result differs from torch's by more than rounding."""
    expected, ours = theirs.float(), ours.view_as(theirs)
    off, error = (ours.float() - expected).abs(), relative_error(ours, theirs)
    share = (off / (expected.abs() + expected.square().mean().sqrt())).max().item()
    if not (error <= bounds.product and share <= bounds.element):  # also fails for NaN
        raise EngineMismatchError(
            f"the engine's kernel for {name} differs from torch: relative error {error:.2g} (limit "
            f"{bounds.product:.0e}), largest error of one value {share:.2g} (limit {bounds.element:.0e})"
        )


def _products(ops: Ops, weights: DecoderWeights, rows: int) -> Iterator[tuple[str, Tensor]]:
    shape, layer = weights.shape, weights.layers[0]
    generator = torch.Generator().manual_seed(rows)

    def noise(width: int) -> Tensor:
        return torch.randn(1, rows, width, generator=generator).to(weights.device, weights.dtype)

    def stream() -> Residual:
        order = torch.arange(rows, device=weights.device)[None]
        return ops.gather(noise(shape.hidden_size)[0], order, layer.attention_norm, weights.rows_dtype)

    def copied(one: Residual) -> Residual:
        return replace(one, hidden=one.hidden.clone())  # a norm adds the branch in place

    def inputs(width: int) -> Tensor:
        return noise(width).to(weights.rows_dtype if rows <= SKINNY else weights.dtype)

    cache = KVCache.allocate(weights, 1, rows)
    positions = ops.locate(weights, cache, torch.arange(rows, dtype=torch.int32, device=weights.device)[None])
    yield "queries", ops.qkv(weights, 0, stream(), positions, cache)
    yield "keys", cache.keys[0]
    yield "values", cache.values[0]
    yield "gate and up", rounded(ops.gate_up(weights, 0, stream()), layer.down_proj)
    # Products that are added to the residual stream are compared after the next norm.
    added = ops.add_linear(stream(), inputs(layer.o_proj.inputs), layer.o_proj, layer.mlp_norm)
    yield "output", ops.norm(weights, copied(added))
    yield "gate and up of a sum", rounded(ops.gate_up(weights, 0, added), layer.down_proj)
    added = ops.add_linear(added, inputs(layer.down_proj.inputs), layer.down_proj, weights.norm)
    yield "down", ops.norm(weights, copied(added))
    yield "head", ops.lm_head(weights, added)


def checked(ops: Ops, weights: DecoderWeights, *, strict: bool) -> Ops:
    """Return ``ops`` if its products are correct; otherwise log a warning and return torch's operations.

    Torch's operations are slow but yield the same tokens. With ``strict``, raises the error instead.
    """
    instead = "torch computes the products instead of the engine's kernels, many times more slowly"
    try:
        return ops if agrees(lambda: check_products(ops, weights), instead, strict=strict) else Ops()
    finally:
        if weights.device.type == "cuda":
            torch.cuda.empty_cache()  # frees dense copies of a layer, which are not needed again


def agrees(check: Callable[[], None], instead: str, *, strict: bool) -> bool:
    """Return True if ``check`` succeeds; otherwise log ``instead`` with the error, and return False.

    With ``strict``, every error is raised again. DeviceLostError and OutOfMemoryError are always raised again,
    because torch's kernels would fail as well.
    """
    try:
        check()
    except (DeviceLostError, OutOfMemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any error, such as a compiler's, that keeps the kernels from running
        if strict:
            raise
        logger.warning("policy.engine: %s: %s", instead, error)
        return False
    return True
