"""Few rows on a GPU: one kernel per product, with the norm before it and the operation after it.

Norms need no separate kernel. The kernel that writes the residual stream also writes the stream times the next
norm's scale and sums the stream's squares; the next product divides its results by the root mean square. There are
two families of kernels. In ``kernels.linear``, for norms of kind ``rms``, a row's result does not depend on the
number of rows. In ``kernels.flow``, for norms of kind ``rms_float32``, norms may depend on the flow time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from vla_ros_models.engine.kernels import flow, flow_ends, linear, pointwise, shards
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.stream import KVCache, Positions, Rows, Stream
from vla_ros_models.engine.tile import Tile
from vla_ros_models.engine.tile_configs import (
    PACKED_ROWS,
    SKINNY,
    MeasuredTile,
    Work,
    choose_tile,
    divisor,
    gpu_of,
    interpreted,
    precision,
)
from vla_ros_models.engine.weights import DecoderWeights, Matrix


@dataclass(frozen=True, kw_only=True)
class PrescaledStream(Stream):
    """A residual stream whose norm is half done: scaled, not yet divided, which the next kernel does at its end."""

    scaled: Tensor  # ``hidden`` times the norm's scale
    # Sums of the squares of ``hidden``: float64, one per row; in flow steps float32 [tiles, rows], 0 in unused
    # tiles.
    squares: Tensor
    next_squares: Tensor  # receives those for the next norm; zeros where kernels add to it
    # Int32 zeros of flow steps: count the finished programs of a tile; reset by the last.
    counters: Tensor | None = None


@dataclass(frozen=True)
class DecodingRows:
    """Few rows with norms of kind ``rms``, and weights of any kind, or ``ranks``' shards of them."""

    measured: MeasuredTile
    ranks: Ranks | None = None

    def gather(self, weights: DecoderWeights, table: Tensor, index: Tensor, norm: int) -> PrescaledStream:
        """Begin a stream with rows ``index`` of ``table``; products take inputs of ``weights.rows_dtype``."""
        width = table.shape[1]
        hidden = table.new_empty(*index.shape, width)
        scaled = torch.empty_like(hidden, dtype=weights.rows_dtype)
        sums = table.new_empty(2, SKINNY, dtype=torch.float64)
        pointwise.gather_kernel[(index.numel(),)](
            table, index.contiguous(), hidden, weights.norms[norm], scaled, sums[0], sums[1], N=width,
            BLOCK=triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        return PrescaledStream(hidden, norm, scaled=scaled, squares=sums[0], next_squares=sums[1])

    def qkv(
        self, weights: DecoderWeights, index: int, stream: PrescaledStream, positions: Positions, cache: KVCache,
        query: Tensor,
    ) -> None:  # fmt: skip
        hidden, matrix, shape = stream.hidden, weights.layers[index].qkv, weights.shape
        batch, rows, _ = hidden.shape
        keys, values = cache.keys[index], cache.values[index]
        config = self._tile(matrix, hidden)
        linear.qkv_kernel[_grid(hidden, matrix.outputs // 2 // config.block_n)](
            *_prescaled(weights, stream), *matrix.operands, positions.at, positions.cosine, positions.sine, query,
            keys, values, batch * rows, rows, keys.shape[2], HEADS=shape.heads, KV_HEADS=shape.kv_heads,
            HEAD=shape.head_dim, **_constants(matrix, config, hidden),
        )  # fmt: skip

    def gate_up(self, weights: DecoderWeights, index: int, stream: PrescaledStream, positions: Positions) -> Tensor:
        hidden, matrix, width = stream.hidden, weights.layers[index].gate_up, weights.shape.intermediate_size
        assert matrix is not None
        batch, rows, _ = hidden.shape
        out = hidden.new_empty(batch, rows, width, dtype=weights.rows_dtype)
        config = self._tile(matrix, hidden)
        linear.gate_up_kernel[_grid(hidden, width // config.block_n)](
            *_prescaled(weights, stream), *matrix.operands, out, batch * rows, width,
            **_constants(matrix, config, hidden),
        )  # fmt: skip
        return out

    def add(
        self, weights: DecoderWeights, stream: PrescaledStream, rows: Rows, matrix: Matrix, positions: Positions
    ) -> PrescaledStream:
        """Add a product to the stream; changes the tensors of ``stream``."""
        assert isinstance(rows, Tensor)
        norm, config, rows = stream.norm + 1, self._tile(matrix, rows), rows.contiguous()
        if self.ranks is not None:
            return self._add_shards(self.ranks, weights, stream, rows, matrix, config)
        linear.add_kernel[_grid(rows, matrix.outputs // config.block_n)](
            rows, *matrix.operands, stream.hidden, weights.norms[norm], stream.scaled, stream.next_squares,
            stream.squares, rows.shape[0] * rows.shape[1], matrix.outputs, **_constants(matrix, config, rows),
        )  # fmt: skip
        # Swap the sums: the kernel has reset the used ones to zero, for the norm after the next.
        return replace(stream, norm=norm, squares=stream.next_squares, next_squares=stream.squares)

    def _add_shards(
        self, ranks: Ranks, weights: DecoderWeights, stream: PrescaledStream, rows: Tensor, matrix: Matrix,
        config: Tile,
    ) -> PrescaledStream:  # fmt: skip
        """Add the sum of all ranks' products, in float32: rounded once, as a whole product is."""
        norm, count, width = stream.norm + 1, rows.shape[0] * rows.shape[1], matrix.outputs
        product = rows.new_empty(*rows.shape[:2], width, dtype=torch.float32)
        linear.product_kernel[_grid(rows, width // config.block_n)](
            rows, *matrix.operands, product, count, width, **_constants(matrix, config, rows)
        )
        ranks.sum(product)
        shards.add_sum_kernel[(count,)](
            product, stream.hidden, weights.norms[norm], stream.scaled, stream.next_squares, N=width,
            BLOCK=triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        return replace(stream, norm=norm, squares=stream.next_squares, next_squares=stream.squares)

    def lm_head(self, weights: DecoderWeights, stream: PrescaledStream, matrix: Matrix) -> Tensor:
        hidden = stream.hidden
        batch, rows, _ = hidden.shape
        logits = hidden.new_empty(batch, rows, matrix.outputs, dtype=torch.float32)
        config = self._tile(matrix, hidden)
        linear.lm_head_kernel[_grid(hidden, matrix.outputs // config.block_n)](
            *_prescaled(weights, stream), *matrix.operands, logits, batch * rows, matrix.outputs,
            **_constants(matrix, config, hidden),
        )  # fmt: skip
        return logits

    def _tile(self, matrix: Matrix, rows: Tensor) -> Tile:
        return choose_tile(gpu_of(rows.device), matrix_work("decode", matrix, _block_m(rows), rows), self.measured)


@dataclass(frozen=True)
class FlowRows:
    """Few rows with norms of kind ``rms_float32``, and dense weights."""

    measured: MeasuredTile

    def start(
        self, weights: DecoderWeights, hidden: Tensor | None, embed: tuple[Tensor, ...], positions: Positions
    ) -> PrescaledStream:
        """Begin a stream with ``hidden`` or, if it is None, with actions times a weight plus a bias (``embed``)."""
        stream, table = self._empty(weights, positions), weights.norms[0]
        out, (actions, weight, bias) = stream.hidden, embed or (table,) * 3
        flow_ends.start_kernel[(positions.at.numel(),)](
            out if hidden is None else hidden.contiguous(), actions, weight, bias, table, positions.time, out,
            stream.scaled, stream.squares, stream.next_squares, stream.counters, A=actions.shape[-1],
            EMBED=hidden is None, TILES=len(stream.squares), BLOCK_M=padded_rows(positions.at), N=out.shape[-1],
            BLOCK=triton.next_power_of_2(out.shape[-1]), num_warps=8, **norm_constants(table),
        )  # fmt: skip
        return stream

    def start_mlp(
        self, weights: DecoderWeights, actions: Tensor, embed: tuple[Tensor, ...], positions: Positions,
        more: tuple[Tensor, Tensor] | None = None,
    ) -> PrescaledStream:  # fmt: skip
        """Begin a stream with two layers over the actions, whose weights and biases are ``embed``.

        ``more`` are the rows [B, 1, N] before the actions', and what is added to an observation's actions [H, N].
        """
        stream, width = self._empty(weights, positions), weights.shape.hidden_size
        # The sums of squares must be those that the product before the norm after the next overwrites.
        down = weights.layers[0].down_proj
        assert down is not None
        block_n = max(16, self._tile(down, positions.at).block_n)
        inner, (first, places) = weights.cosine.new_empty(*actions.shape[:2], width), more or (None, None)
        self._linear(actions.contiguous(), None, embed[0], embed[1], inner, "silu")
        flow_ends.start_mlp_kernel[(width // block_n,)](
            inner, *embed[2:], weights.norms[0][positions.step], stream.hidden, stream.scaled,
            stream.squares, stream.next_squares, stream.counters, positions.at.numel(), width, K=width,
            TILES=len(stream.squares), BLOCK_M=padded_rows(positions.at), BLOCK_N=block_n,
            BLOCK_K=divisor(width, min(128, 4096 // block_n)), PRECISION=precision(stream.hidden),
            first=first, places=places, ROWS=positions.at.shape[1], num_stages=3,
            num_warps=4 if gpu_of(positions.at.device).capability[0] == 9 else 8,  # four would spill
        )  # fmt: skip
        return stream

    def finish(
        self, weights: DecoderWeights, stream: PrescaledStream, layers: Sequence[tuple[Tensor, Tensor]], eps: float,
        actions: Tensor, factor: Tensor,
    ) -> None:  # fmt: skip
        """Add the result of two layers with a ReLU between, times ``factor`` [B, H], to ``actions`` [B, H, A].

        The layers take the last H rows of the stream after a norm; the stream has its scale, the bias its shift.
        """
        (first, bias), (second, last) = layers
        inner = weights.cosine.new_empty(*actions.shape[:2], len(first))
        self._linear(stream.scaled, stream, first, bias, inner, "relu", eps)
        self._linear(inner, None, second, last, actions, "", factor=factor)

    def _linear(
        self, x: Tensor, stream: PrescaledStream | None, weight: Tensor, bias: Tensor, out: Tensor, activation: str,
        eps: float = 0.0, factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the float32 layer of the last rows of each observation in ``x`` to ``out`` [B, H, N]."""
        (outputs, inputs), rows = weight.shape, out[..., 0].numel()
        squares = x if stream is None else stream.squares
        flow_ends.flow_linear_kernel[(triton.cdiv(outputs, 16),)](
            x, squares, eps, weight, bias, out, factor, rows, x.shape[1], out.shape[1], inputs, N=outputs, K=inputs,
            ACTIVATION=activation, SCALED=stream is not None, TILES=1 if stream is None else len(squares),
            BLOCK_M=max(16, triton.next_power_of_2(x[..., 0].numel())), BLOCK_N=16,
            BLOCK_K=max(32, divisor(inputs, 64)), num_warps=4, num_stages=4,
            PRECISION="ieee" if x.dtype == out.dtype == torch.float32 else "tf32",
        )  # fmt: skip

    def _empty(self, weights: DecoderWeights, positions: Positions) -> PrescaledStream:
        width, layer, at = weights.shape.hidden_size, weights.layers[0], positions.at
        assert layer.o_proj is not None
        assert layer.down_proj is not None
        smallest = min(self._tile(one, at).block_n for one in (layer.o_proj, layer.down_proj))
        count = triton.next_power_of_2(width // smallest)
        out, scaled = weights.cosine.new_empty(2, *at.shape, width)
        squares, spare = weights.norms[0].new_empty(2, count, padded_rows(at))
        counters = at.new_empty(count)
        return PrescaledStream(out, 0, scaled=scaled, squares=squares, next_squares=spare, counters=counters)

    def qkv(
        self, weights: DecoderWeights, index: int, stream: PrescaledStream, positions: Positions, cache: KVCache,
        query: Tensor,
    ) -> None:  # fmt: skip
        matrix, (batch, rows, heads, head) = weights.layers[index].qkv, query.shape
        keys, values, tile = cache.keys[index], cache.values[index], self._tile(matrix, positions.at)
        flow.flow_qkv_kernel[(matrix.outputs // 2 // tile.block_n,)](
            *_shifted(weights, index, 0, stream, positions), positions.at, positions.cosine, positions.sine, query,
            keys, values, batch * rows, rows, keys.shape[2], matrix.inputs, TILES=len(stream.squares),
            HEADS=heads, KV_HEADS=(matrix.outputs // head - heads) // 2, HEAD=head,
            **self._constants(weights, matrix, tile, positions.at),
        )  # fmt: skip

    def gate_up(self, weights: DecoderWeights, index: int, stream: PrescaledStream, positions: Positions) -> Tensor:
        matrix, width = weights.layers[index].gate_up, weights.shape.intermediate_size
        assert matrix is not None
        out, tile = weights.cosine.new_empty(*positions.at.shape, width), self._tile(matrix, positions.at)
        flow.flow_gate_up_kernel[(matrix.outputs // 2 // tile.block_n,)](
            *_shifted(weights, index, 1, stream, positions), out, positions.at.numel(), matrix.inputs, N=width,
            TILES=len(stream.squares), GELU=weights.shape.activation == "gelu", GATED=weights.shape.gated,
            **self._constants(weights, matrix, tile, positions.at),
        )  # fmt: skip
        return out

    def add(
        self, weights: DecoderWeights, stream: PrescaledStream, rows: Rows, matrix: Matrix, positions: Positions
    ) -> PrescaledStream:
        """Add a product, times its gate, to the stream; changes the tensors of ``stream``."""
        assert isinstance(rows, Tensor)
        norm, tile, count = stream.norm + 1, self._tile(matrix, positions.at), positions.at.numel()
        partial = rows.new_empty(tile.splits * count * matrix.outputs, dtype=torch.float32)
        flow.flow_add_kernel[(matrix.outputs // tile.block_n, tile.splits)](
            rows, matrix.data, stream.hidden, *_at_times(weights.norms[norm], positions), stream.scaled,
            stream.next_squares, partial, stream.counters, count, matrix.inputs // tile.splits, N=matrix.outputs,
            SPLITS=tile.splits, bias=matrix.bias, **self._constants(weights, matrix, tile, positions.at),
        )  # fmt: skip
        return replace(stream, norm=norm, squares=stream.next_squares, next_squares=stream.squares)

    def _tile(self, matrix: Matrix, at: Tensor) -> Tile:
        work = matrix_work("flow", matrix, padded_rows(at), matrix.data)
        return choose_tile(gpu_of(at.device), work, self.measured)

    def _constants(self, weights: DecoderWeights, matrix: Matrix, tile: Tile, at: Tensor) -> dict[str, object]:
        return {
            "K": matrix.inputs,
            "ADAPTIVE": norm_constants(weights.norms[0])["ADAPTIVE"],
            "BLOCK_M": padded_rows(at),
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "PRECISION": precision(matrix.data),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }


def matrix_work(kernel: str, matrix: Matrix, count: int, rows: Tensor) -> Work:
    """Describe a product of ``count`` rows, which have the type of ``rows``."""
    each = matrix.nbytes / (matrix.outputs * matrix.inputs)
    size, item = (matrix.inputs, matrix.outputs), rows.element_size()
    return Work(kernel, *size, matrix.role, matrix.kind, count, each, item)


def norm_constants(table: Tensor) -> dict[str, object]:
    """Return the stride between times in a norm's table, and whether it has shift and gate."""
    return {"TIME": table.stride(0), "ADAPTIVE": table.shape[1] == 3}


def _shifted(
    weights: DecoderWeights, index: int, which: int, stream: PrescaledStream, positions: Positions
) -> tuple[object, ...]:
    """Return what kernels take instead of normed rows, then a weight and its norm's shifts.

    The weight is ``qkv`` or ``gate_up`` of layer ``index``: ``which`` is 0 or 1.
    """
    layer = weights.layers[index]
    matrix, shifts = (layer.qkv, layer.gate_up)[which], weights.norms[0]
    assert matrix is not None
    if layer.shifts is not None:
        shifts = layer.shifts[which]
    return stream.scaled, stream.squares, weights.shape.rms_norm_eps, matrix.data, *_at_times(shifts, positions)


def _at_times(table: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Return a table's entries for the step's time and for 0, the rows' time indices, and the index of 0."""
    return table[positions.step], table[-1], positions.time, len(table) - 1


def padded_rows(at: Tensor) -> int:
    """Return the number of rows, padded to a power of two of at least 16."""
    return max(16, int(triton.next_power_of_2(at.numel())))


def _prescaled(weights: DecoderWeights, stream: PrescaledStream) -> tuple[Tensor, Tensor, float]:
    """Return the inputs that kernels take instead of normed rows."""
    return stream.scaled, stream.squares, weights.shape.rms_norm_eps


def _block_m(rows: Tensor) -> int:
    """Return the rows of a program: 1, or a power of two from 8 (the instruction's narrow side) to PACKED_ROWS."""
    count = int(triton.next_power_of_2(rows.shape[0] * rows.shape[1]))
    return 1 if count == 1 else min(PACKED_ROWS, max(8, count))


def _grid(rows: Tensor, programs: int) -> tuple[int, int]:
    # Programs that share a weight tile but not their rows run together: the tile is read from memory once.
    return triton.cdiv(rows.shape[0] * rows.shape[1], _block_m(rows)), programs


def _constants(matrix: Matrix, config: Tile, rows: Tensor) -> dict[str, object]:
    return {
        "K": matrix.inputs,
        "KIND": matrix.kind,
        "MORE": rows.shape[0] * rows.shape[1] > _block_m(rows),
        "ASM": not interpreted(rows) and rows.dtype != torch.float32,
        "GROUPS": min(config.warps, config.block_k // 16),
        "BLOCK_M": _block_m(rows),
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PRECISION": precision(rows),
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": False,
    }
