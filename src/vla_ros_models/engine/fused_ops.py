"""The operations of decoders for which :class:`~.triton_ops.TritonOps` has no kernels, on a GPU.

Layer norms, biases, norms of queries and keys, attention to another model's keys: the library computes products and
attention, and one kernel stands between two of them.
"""

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros_models.engine.device_errors import EngineMismatchError
from vla_ros_models.engine.many_rows import multiply_silu, normalize, room, rotate
from vla_ros_models.engine.ops import Ops, multiply_fp8, project
from vla_ros_models.engine.stream import KVCache, Positions, QuantizedRows, Rows, ScaledProduct, Stream
from vla_ros_models.engine.tile_configs import MeasuredTile, unmeasured
from vla_ros_models.engine.triton_ops import TritonOps, add_layer_norm
from vla_ros_models.engine.weights import DecoderWeights, Matrix


class FusedOps(Ops):
    """:class:`~.ops.Ops` for passes over whole sequences; a stream always has its next norm."""

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
        if not shape.rotary:
            keys, values = cache.keys[index], cache.values[index]
            query, key, value = torch.split(product, [shape.heads, shape.kv_heads, shape.kv_heads], dim=2)
            keys[:, :, :rows], values[:, :, :rows] = key.transpose(1, 2), value.transpose(1, 2)
            return query
        query = product.new_empty(batch, rows, shape.heads, shape.head_dim)
        rotate(
            ScaledProduct(product, None, None), layer.qkv, positions, cache, index, query,
            layer.qk_norms or (None, None), shape.rms_norm_eps, by_row=len(positions.cosine) > 1,
        )  # fmt: skip
        return query

    def gate_up(self, weights: DecoderWeights, index: int, stream: Stream, positions: Positions) -> Rows:
        matrix, following = weights.layers[index].gate_up, weights.layers[index].down_proj
        assert matrix is not None
        assert following is not None
        if weights.shape.gated:
            both = ScaledProduct(_product(stream, matrix), None, None)
            return multiply_silu(both, matrix, stream.hidden, following)
        assert isinstance(stream.normed, Tensor)
        flat = stream.normed.flatten(0, 1)
        if matrix.bias is None or not flat.is_cuda:  # the fused activation is another one on a CPU
            return functional.gelu(project(stream.normed, matrix), approximate="tanh")
        made: Tensor = torch._addmm_activation(matrix.bias, flat, matrix.data.t(), use_gelu=True)
        return made.view(*stream.normed.shape[:2], -1)

    def add(
        self, weights: DecoderWeights, stream: Stream, rows: Rows, matrix: Matrix, positions: Positions
    ) -> Stream:
        """See :class:`~vla_ros_models.engine.ops.Ops`; changes ``stream.hidden``."""
        hidden, norm = stream.hidden, stream.norm + 1
        branch = _product(stream, matrix, rows).view_as(hidden)
        if norm >= len(weights.norms):
            return Stream(hidden.add_(branch), norm)
        return self._add_norm(weights, hidden, branch, norm, positions)

    def _add_norm(
        self, weights: DecoderWeights, hidden: Tensor, branch: Tensor | None, norm: int, positions: Positions
    ) -> Stream:
        """Add ``branch`` to ``hidden`` in place, and compute a norm in the form that the next product takes."""
        if weights.shape.norm == "rms":
            layer = weights.layers[min(norm // 2, len(weights.layers) - 1)]
            following = layer.gate_up if norm % 2 else layer.qkv
            assert following is not None
            rows, out = room(hidden, following)
            added = None if branch is None else ScaledProduct(branch, None, None)
            normalize(weights, Stream(hidden, norm, added), out)
            return Stream(hidden, norm, normed=rows)
        table = weights.norms[norm]
        gain, shift = table[min(positions.step, len(table) - 1)]
        return Stream(hidden, norm, normed=add_layer_norm(hidden, branch, gain, shift, weights.shape.rms_norm_eps))


def _product(stream: Stream, matrix: Matrix, rows: Rows | None = None) -> Tensor:
    """Multiply ``rows``, or the stream's normed rows, in the stream's type: quantised rows do not tell theirs."""
    chosen = stream.normed if rows is None else rows
    assert chosen is not None
    if isinstance(chosen, QuantizedRows):
        return multiply_fp8(chosen, matrix, stream.hidden.dtype)
    return project(chosen, matrix)
