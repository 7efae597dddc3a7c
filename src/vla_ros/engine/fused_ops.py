"""The operations of decoders for which :class:`~vla_ros.engine.triton_ops.TritonOps` has no kernels, on a GPU.

Layer norms, biases, norms of queries and keys, attention to another model's keys: the library computes products and
attention, and one kernel stands between two of them.
"""

import torch
import triton
from torch import Tensor
from torch.nn import functional

from vla_ros.engine import fp8
from vla_ros.engine.device_errors import EngineMismatchError
from vla_ros.engine.kernels import pointwise
from vla_ros.engine.ops import Ops, multiply_fp8, project
from vla_ros.engine.stream import KVCache, Positions, QuantizedRows, Rows, Stream
from vla_ros.engine.tile_configs import MeasuredTile, unmeasured
from vla_ros.engine.triton_ops import TritonOps
from vla_ros.engine.weights import DecoderWeights, Matrix


class FusedOps(Ops):
    """:class:`~vla_ros.engine.ops.Ops` for passes over whole sequences; a stream always has its next norm."""

    def __init__(self, measured: MeasuredTile = unmeasured) -> None:
        self.few = TritonOps(measured)

    def require(self, weights: DecoderWeights) -> None:
        shape = weights.shape
        plain = (shape.norm, shape.activation, shape.gated) in {("rms", "silu", True), ("layer", "gelu", False)}
        if not plain or any(norm.ndim > 1 and norm.shape[1] != 2 for norm in weights.norms):
            raise EngineMismatchError(f"the engine has no kernels for a decoder of {shape}")

    def start(self, weights: DecoderWeights, hidden: Tensor, positions: Positions, norm: int = 0) -> Stream:
        return self._add_norm(weights, hidden.contiguous(), None, norm, positions)

    def norm(self, weights: DecoderWeights, stream: Stream, positions: Positions | None = None) -> Tensor:
        assert isinstance(stream.normed, Tensor)
        return stream.normed

    def qkv(
        self, weights: DecoderWeights, index: int, stream: Stream, positions: Positions, cache: KVCache
    ) -> Tensor:
        shape, layer, (batch, rows, _) = weights.shape, weights.layers[index], stream.hidden.shape
        product = _product(stream, layer.qkv).view(batch, rows, -1, shape.head_dim)
        if layer.cross is not None:
            return product
        keys, values, total = cache.keys[index], cache.values[index], shape.heads + 2 * shape.kv_heads
        if not shape.rotary:
            query, key, value = torch.split(product, [shape.heads, shape.kv_heads, shape.kv_heads], dim=2)
            keys[:, :, :rows], values[:, :, :rows] = key.transpose(1, 2), value.transpose(1, 2)
            return query
        query = product.new_empty(batch, rows, shape.heads, shape.head_dim)
        block_h = min(32, triton.next_power_of_2(total))
        norms = (None, None) if layer.qk_norms is None else layer.qk_norms
        pointwise.rotate_kernel[(batch * rows, triton.cdiv(total, block_h))](
            product, positions.at, positions.cosine.contiguous(), positions.sine.contiguous(), query, keys, values,
            rows, keys.shape[2], HEADS=shape.heads, KV_HEADS=shape.kv_heads, HEAD=shape.head_dim, BLOCK_H=block_h,
            query_norm=norms[0], key_norm=norms[1], eps=shape.rms_norm_eps, BY_ROW=len(positions.cosine) > 1,
            num_warps=max(4, shape.head_dim // 32),
        )  # fmt: skip
        return query

    def gate_up(self, weights: DecoderWeights, index: int, stream: Stream, positions: Positions) -> Rows:
        layer, width, (batch, rows, _) = weights.layers[index], weights.shape.intermediate_size, stream.hidden.shape
        matrix, following = layer.gate_up, layer.down_proj
        assert matrix is not None
        assert following is not None
        if not weights.shape.gated:
            assert isinstance(stream.normed, Tensor)
            flat = stream.normed.flatten(0, 1)
            if matrix.bias is None or not flat.is_cuda:  # the fused activation is another one on a CPU
                return functional.gelu(project(stream.normed, matrix), approximate="tanh")
            made: Tensor = torch._addmm_activation(matrix.bias, flat, matrix.data.t(), use_gelu=True)
            return made.view(batch, rows, width)
        both, quantized = _product(stream, matrix), following.kind == "fp8_rows"
        out = both.new_empty(batch, rows, width, dtype=fp8.FP8 if quantized else both.dtype)
        scale = both.new_empty(batch * rows, 1, dtype=torch.float32)
        block = min(2048, max(128, triton.next_power_of_2(width)))
        pointwise.silu_multiply_kernel[(batch * rows, 1 if quantized else triton.cdiv(width, block))](
            both, both, both, out, scale, None, width, SCALED=False, FP8=quantized, GROUPED=False, BLOCK=block,
            num_warps=8 if quantized else 4,
        )  # fmt: skip
        return QuantizedRows(out.view(batch * rows, width), scale) if quantized else out

    def add(
        self, weights: DecoderWeights, stream: Stream, rows: Rows, matrix: Matrix, positions: Positions
    ) -> Stream:
        """See :class:`~vla_ros.engine.ops.Ops`; changes ``stream.hidden``."""
        hidden, norm = stream.hidden, stream.norm + 1
        branch = _product(stream, matrix, rows).view_as(hidden)
        if norm >= len(weights.norms):
            return Stream(hidden.add_(branch), norm)
        return self._add_norm(weights, hidden, branch, norm, positions)

    def _add_norm(
        self, weights: DecoderWeights, hidden: Tensor, branch: Tensor | None, norm: int, positions: Positions
    ) -> Stream:
        """Add ``branch`` to ``hidden`` in place, and compute a norm in the form that the next product takes."""
        width = hidden.shape[-1]
        table, block, grid = weights.norms[norm], triton.next_power_of_2(width), (hidden.numel() // width,)
        if weights.shape.norm == "rms":
            layer = weights.layers[min(norm // 2, len(weights.layers) - 1)]
            following = layer.gate_up if norm % 2 else layer.qkv
            quantized = following is not None and following.kind == "fp8_rows"
            out = torch.empty_like(hidden, dtype=fp8.FP8 if quantized else hidden.dtype)
            scale = hidden.new_empty(grid[0], 1, dtype=torch.float32)
            pointwise.rms_norm_kernel[grid](
                hidden, branch, None, None, table, out, scale, None, weights.shape.rms_norm_eps,
                PARTS=int(branch is not None),
                FP8=quantized, GROUPED=False, N=width, BLOCK=max(128, block), num_warps=8,
            )  # fmt: skip
            made: Rows = QuantizedRows(out.view(-1, width), scale) if quantized else out
            return Stream(hidden, norm, normed=made)
        gain, shift = table[min(positions.step, len(table) - 1)]
        out = torch.empty_like(hidden)
        pointwise.tower_add_norm_kernel[grid](
            hidden, branch, None, gain, shift, None, None, out, weights.shape.rms_norm_eps, SCALED=False,
            FILM=False, N=width, BLOCK=block, num_warps=max(1, min(8, block // 256)), enable_fp_fusion=False,
        )  # fmt: skip
        return Stream(hidden, norm, normed=out)


def _product(stream: Stream, matrix: Matrix, rows: Rows | None = None) -> Tensor:
    """Multiply ``rows``, or the stream's normed rows, in the stream's type: quantised rows do not tell theirs."""
    chosen = stream.normed if rows is None else rows
    assert chosen is not None
    if isinstance(chosen, QuantizedRows):
        return multiply_fp8(chosen, matrix, stream.hidden.dtype)
    return project(chosen, matrix)
