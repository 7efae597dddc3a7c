"""Compares the engine's operations with torch's at start."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from vla_ros.errors import DeviceLostError, OutOfMemoryError
from vla_ros_models.engine.decoder import run_layers
from vla_ros_models.engine.device_errors import EngineMismatchError
from vla_ros_models.engine.flow import FlowModel, start_step, suffix_rows
from vla_ros_models.engine.ops import Ops, rounded
from vla_ros_models.engine.stream import Cross, Guide, KVCache, Stream
from vla_ros_models.engine.tile_configs import SKINNY
from vla_ros_models.engine.tolerances import TOLERANCES, Tolerances, relative_error
from vla_ros_models.engine.weights import DecoderWeights

logger = logging.getLogger(__name__)

ROWS = (1, 6, 288)
"""Numbers of rows to check: a decoding pass, a verified draft, and a typical prompt with its image."""


@torch.inference_mode()
def check_products(ops: Ops, weights: DecoderWeights) -> None:
    """Compare the products of the first layer and the head with torch's over the same weights.

    Raises EngineMismatchError if a product differs by more than rounding.
    """
    ops.require(weights)
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
    assert layer.o_proj is not None
    assert layer.down_proj is not None
    noise = random_numbers(rows, weights.device)

    def stream() -> Stream:
        order = torch.arange(rows, device=weights.device)[None]
        return ops.gather(weights, noise(rows, shape.hidden_size).to(weights.dtype), order)

    def copied(one: Stream) -> Stream:
        return replace(one, hidden=one.hidden.clone())  # a norm adds the branch in place

    def inputs(width: int) -> Tensor:
        return noise(1, rows, width).to(weights.dtype).to(weights.rows_dtype if rows <= SKINNY else weights.dtype)

    cache = KVCache.allocate(weights, 1, rows)
    positions = ops.positions(weights, cache, torch.arange(rows, dtype=torch.int32, device=weights.device)[None])
    yield "queries", ops.qkv(weights, 0, stream(), positions, cache)
    yield "keys", cache.keys[0]
    yield "values", cache.values[0]
    yield "gate and up", rounded(ops.gate_up(weights, 0, stream(), positions), layer.down_proj)
    # Products that are added to the residual stream are compared after the next norm.
    added = ops.add(weights, stream(), inputs(layer.o_proj.inputs), layer.o_proj, positions)
    yield "output", ops.norm(weights, copied(added))
    yield "gate and up of a sum", rounded(ops.gate_up(weights, 0, added, positions), layer.down_proj)
    added = ops.add(weights, added, inputs(layer.down_proj.inputs), layer.down_proj, positions)
    yield "down", ops.norm(weights, copied(added))
    yield "head", ops.lm_head(weights, added)


@torch.inference_mode()
def check_flow(ops: Ops, model: FlowModel) -> None:
    """Compare the first layers of prefix and expert, and the end of a flow step, with torch.

    Raises EngineMismatchError if a result differs by more than rounding.
    """
    for name, weights, rows in (
        ("the prefix", model.prefix, 2 * SKINNY),
        ("a flow step", model.expert, min(model.suffix, SKINNY)),
        ("a flow step of several robots", model.expert, 2 * SKINNY),
    ):
        ops.require(weights)
        bounds, kind = TOLERANCES[weights.dtype], weights.layers[0].qkv.kind
        if kind == "fp8_rows":  # a norm that rounds differently may yield the neighbouring FP8 value
            bounds = replace(bounds, product=2 * bounds.product, element=2 * bounds.element)
        # The first layer that attends to its own rows, and the first that attends to the prefix's.
        firsts = {layer.cross is None: index for index, layer in reversed(list(enumerate(weights.layers)))}
        for index in sorted(firsts.values()):
            one = replace(
                weights, layers=(weights.layers[index],), norms=weights.norms[2 * index :],
                shape=replace(weights.shape, layers=1),
            )  # fmt: skip
            ends = weights is model.expert
            expected = _flow_layer(Ops(), model, one, rows, ends)
            for (what, theirs), ours in zip(
                expected.items(), _flow_layer(ops, model, one, rows, ends).values(), strict=True
            ):
                require_close(f"{what} of {name} ({kind} weights, {rows} rows)", ours, theirs, bounds)
    for what, ours, theirs in zip(
        ("the actions' tokens", "their queries"), *(_first_rows(one, model) for one in (ops, Ops())), strict=True
    ):
        require_close(what, ours, theirs, bounds)


def _flow_layer(ops: Ops, model: FlowModel, weights: DecoderWeights, count: int, ends: bool) -> dict[str, Tensor]:
    """Run one layer on noise; return keys, values, hidden states and, if it ends a flow step, advanced actions."""
    noise = random_numbers(count, model.device)
    at = torch.arange(count, dtype=torch.int32, device=model.device)[None]
    cache = KVCache.in_blocks(weights, 1, count)
    rows = ops.prefix_positions(weights, cache, at, torch.full_like(at, count), torch.zeros_like(at))
    stream = ops.start(weights, noise(1, count, weights.shape.hidden_size).to(weights.dtype), rows)
    cross, found = None, {"keys": cache.keys[0], "values": cache.values[0]}
    if weights.layers[0].cross is not None:
        keys, values = (noise(*cache.keys[0].shape).to(weights.dtype) for _ in range(2))
        cross, found = Cross(KVCache((keys,), (values,), cache.split_counters), rows), {}
    stream = run_layers(weights, ops, cache, stream, rows, cross=cross)
    found["hidden states"] = stream.hidden.clone()
    if ends:
        actions = noise(1, count, model.action_dim)
        ops.euler_step(weights, stream, rows, model.action_out, actions, Guide.free(actions), model.times[0], -1.0)
        found["actions"] = actions
    return found


def _first_rows(ops: Ops, model: FlowModel) -> tuple[Tensor, Tensor]:
    """Begin a flow step with noise; return the rows [1, R, hidden] and the first layer's queries."""
    noise, start = random_numbers(0, model.device), torch.zeros(1, dtype=torch.int32, device=model.device)
    actions, state = noise(1, model.horizon, model.action_dim), noise(1, model.state_dim)
    cache = KVCache.in_blocks(model.expert, 1, model.suffix)
    rows = suffix_rows(model, ops, cache, start, torch.zeros_like(actions[..., 0], dtype=torch.int32))[0]
    stream = start_step(model, ops, actions, state, rows, 0)
    return stream.hidden.clone(), ops.qkv(model.expert, 0, stream, rows, cache)


def random_numbers(seed: int, device: torch.device) -> Callable[..., Tensor]:
    """Return a function from a shape to normal numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)


def checked(ops: Ops, model: DecoderWeights | FlowModel, *, strict: bool = False) -> Ops:
    """Return ``ops`` if its results are correct; otherwise log a warning and return torch's operations.

    Torch's operations are slow but yield the same tokens. With ``strict``, raises the error instead.
    """
    if type(ops) is Ops:
        return ops
    instead = "torch computes the layers instead of the engine's kernels, many times more slowly"
    check = partial(check_flow, ops, model) if isinstance(model, FlowModel) else partial(check_products, ops, model)
    try:
        return ops if agrees(check, instead, strict=strict) else Ops()
    finally:
        if model.device.type == "cuda":
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
