"""Do the kernels of this device multiply as torch does? Asked at the start, where no reference path can be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vla_ros.engine.health import EngineMismatchError
from vla_ros.engine.ops import Ops, Residual, TorchOps
from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import DeviceLostError, OutOfMemoryError

logger = logging.getLogger(__name__)

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest relative error of products by type: several times what rounding in another order makes of it (1e-2 was
seen behind two products in bfloat16). A single number may be off by five times this share of itself and of the mean
(3.5e-2 was seen): a few wrong ones do not show in the norm."""

ROWS = (1, 6, 288)
"""What decoding, verifying a draft and a usual prompt with its picture multiply with."""


@torch.inference_mode()
def check_products(ops: Ops, weights: DecoderWeights) -> None:
    """Compare every product of the first layer with torch's over the same weights, dequantised.

    Args:
        ops: The kernels in question.
        weights: What they are to run with.

    Raises:
        EngineMismatchError: One differs by more than rounding.
    """
    for rows in sorted({min(rows, weights.shape.max_positions) for rows in ROWS}):
        pairs = zip(_products(ops, weights, rows), _products(TorchOps(), weights, rows), strict=True)
        for (name, ours), (_, theirs) in pairs:
            bound, expected = BOUNDS[weights.dtype], theirs.float()
            off = ours.float() - expected
            error = (off.norm() / expected.norm()).item()
            share = (off.abs() / (expected.abs() + expected.square().mean().sqrt())).max().item()
            if not (error <= bound and share <= 5 * bound):  # NaN is wrong, too
                kind = weights.layers[0].qkv.kind
                raise EngineMismatchError(
                    f"the engine's kernel for {name} ({kind} weights, {rows} rows) differs from torch by "
                    f"{error:.2g}, at most {bound:.0e} expected, a single number by {share:.2g}, at most "
                    f"{5 * bound:.0e}"
                )


def _products(ops: Ops, weights: DecoderWeights, rows: int) -> Iterator[tuple[str, Tensor]]:
    shape, layer = weights.shape, weights.layers[0]
    generator = torch.Generator().manual_seed(rows)

    def noise(width: int) -> Tensor:
        return torch.randn(1, rows, width, generator=generator).to(weights.device, weights.dtype)

    def stream() -> Residual:
        order = torch.arange(rows, device=weights.device)[None]
        return ops.pick(noise(shape.hidden_size)[0], order, layer.attention_norm)

    positions = torch.arange(rows, dtype=torch.int32, device=weights.device)[None]
    keys, values = noise(2 * shape.kv_heads * shape.head_dim).view(2, 1, shape.kv_heads, rows, shape.head_dim)
    yield "queries", ops.qkv(weights, layer, stream(), positions, keys, values)
    yield "keys", keys
    yield "values", values
    yield "gate and up", ops.gate_up(weights, layer, stream())
    # What follows a sum is taken of it with its norm.
    added = ops.add_linear(stream(), noise(layer.output.inputs), layer.output, layer.mlp_norm)
    yield "output", added.hidden.clone()
    yield "gate and up of a sum", ops.gate_up(weights, layer, added)
    added = ops.add_linear(added, noise(layer.down.inputs), layer.down, weights.norm)
    yield "down", added.hidden
    yield "head", ops.head(weights, added)


def checked(ops: Ops, weights: DecoderWeights, *, strict: bool) -> Ops:
    """``ops`` if its products are right, else torch's with a warning: slow, but the same answers.

    Args:
        ops: The kernels in question.
        weights: What they are to run with.
        strict: True refuses instead.

    Raises:
        EngineMismatchError: With ``strict``, a product differs.
    """
    instead = "torch multiplies instead of the engine's kernels, many times slower"
    try:
        return ops if agrees(lambda: check_products(ops, weights), instead, strict=strict) else TorchOps()
    finally:
        if weights.device.type == "cuda":
            torch.cuda.empty_cache()  # dense copies of a layer, not needed again


def agrees(check: Callable[[], None], instead: str, *, strict: bool) -> bool:
    """Whether kernels pass their check; a warning says what runs instead of those that do not.

    Args:
        check: Raises where they differ, or do not run at all.
        instead: For the warning.
        strict: True lets what ``check`` raised through.

    Raises:
        DeviceLostError: In any case, as OutOfMemoryError: other kernels would not do better.
    """
    try:
        check()
    except (DeviceLostError, OutOfMemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of a compiler, say: whatever keeps the kernels from running
        if strict:
            raise
        logger.warning("policy.engine: %s: %s", instead, error)
        return False
    return True
