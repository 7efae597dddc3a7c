"""Weights of the decoder in the layout that its kernels read: fused, dense or quantised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vla_ros.engine import int4, int8, lowbit
from vla_ros.engine.shapes import DecoderShape
from vla_ros.errors import ConfigError

_ROWS_AT_ONCE = 4096

KINDS = ("none", "int8", "int4")


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, inputs] of one kind.

    ``dense``: ``data`` [N, K] in the model's type. ``int8``: words and scales of :mod:`vla_ros.engine.int8`.
    ``int4``: words and grid of :mod:`vla_ros.engine.int4`.

    Attributes:
        data: The numbers.
        kind: ``dense``, ``int8`` or ``int4``.
        inputs: K.
        scale: None for dense; with the zero points for int4.
    """

    data: Tensor
    kind: str
    inputs: int
    scale: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether ``data`` is in the order of :mod:`vla_ros.engine.lowbit`."""
        return self.kind in lowbit.BITS

    @property
    def outputs(self) -> int:
        """N."""
        return int(self.data.shape[0]) * (lowbit.UNIT if self.packed else 1)

    @property
    def nbytes(self) -> int:
        """Bytes that one pass reads."""
        parts = [part for part in (self.data, self.scale) if part is not None]
        return sum(part.numel() * part.element_size() for part in parts)


def dense(weight: Tensor) -> Matrix:
    """A weight [N, K] as it is."""
    return Matrix(weight, "dense", int(weight.shape[1]))


def quantize_int8(weight: Tensor) -> Matrix:
    """Symmetric, one scale per output, see :func:`vla_ros.engine.int8.quantize`.

    Raises:
        ConfigError: The number of outputs does not suit.
    """
    return _quantize("int8", int8.quantize, weight)


def quantize_int4(weight: Tensor) -> Matrix:
    """Asymmetric in groups, see :func:`vla_ros.engine.int4.quantize`.

    Raises:
        ConfigError: The number of outputs does not suit.
    """
    return _quantize("int4", int4.quantize, weight)


def _parts(tensor: Tensor, size: int) -> list[Tensor]:
    return [tensor[start : start + size] for start in range(0, tensor.shape[0], size)]


def _quantize(kind: str, quantize: Callable[[Tensor], tuple[Tensor, Tensor]], weight: Tensor) -> Matrix:
    # Some rows at a time: the float32 copies of a whole matrix would be the largest thing in memory.
    words, scale = (torch.cat(part) for part in zip(*map(quantize, _parts(weight, _ROWS_AT_ONCE)), strict=True))
    return Matrix(words, kind, int(weight.shape[1]), scale)


QUANTIZE: dict[str, Callable[[Tensor], Matrix]] = {
    "none": dense,
    "int8": quantize_int8,
    "int4": quantize_int4,
}


def dequantize(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """[N, K] in ``dtype``; a dense matrix of that type is returned itself."""
    if matrix.kind == "dense":
        return matrix.data.to(dtype)
    assert matrix.scale is not None
    # Some rows at a time, as they were quantised: float32 copies would be several times what comes out.
    some = _ROWS_AT_ONCE // lowbit.UNIT
    parts = zip(_parts(matrix.data, some), _parts(matrix.scale, some), strict=True)
    widen = {"int8": int8.dequantize, "int4": int4.dequantize}[matrix.kind]
    return torch.cat([widen(words, scale, matrix.inputs).to(dtype) for words, scale in parts])


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        attention_norm: [hidden].
        qkv: Queries, keys and values [(heads + 2 kv_heads) * head_dim, hidden].
        output: [hidden, heads * head_dim].
        mlp_norm: [hidden].
        gate_up: Gate, then up [2 * intermediate, hidden].
        down: [hidden, intermediate].
    """

    attention_norm: Tensor
    qkv: Matrix
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class DecoderWeights:
    """Everything that a pass reads.

    Attributes:
        shape: Sizes.
        embedding: [vocab, hidden].
        layers: One per layer.
        norm: [hidden].
        head: [vocab, hidden], always dense.
        cosine: [positions, head_dim / 2] in the model's type.
        sine: The same.
    """

    shape: DecoderShape
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Matrix
    cosine: Tensor
    sine: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.embedding.device

    @property
    def nbytes(self) -> int:
        """Bytes that one decoding pass reads: layers, norms and head."""
        matrices = [m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return sum(matrix.nbytes for matrix in (*matrices, self.head))


def fuse_layer(layer: Any, kind: str = "none", *, keep: bool = True) -> Layer:
    """Fuse one decoder layer of a reference module (parameters named as in transformers' Llama).

    Args:
        layer: Has ``self_attn.{q,k,v,o}_proj``, ``mlp.{gate,up,down}_proj`` and the two norms.
        kind: ``none``, ``int8`` or ``int4``.
        keep: True leaves the module usable: dense weights become views of the fused ones, quantised ones exist
            beside it. False frees each weight as soon as it is fused, so that at most one exists twice.
    """
    attention, mlp = layer.self_attn, layer.mlp
    quantize = QUANTIZE[kind]
    return Layer(
        attention_norm=layer.input_layernorm.weight.data,
        qkv=quantize(_fuse([attention.q_proj, attention.k_proj, attention.v_proj], kind, keep)),
        output=quantize(_fuse([attention.o_proj], kind, keep)),
        mlp_norm=layer.post_attention_layernorm.weight.data,
        gate_up=quantize(_fuse([mlp.gate_proj, mlp.up_proj], kind, keep)),
        down=quantize(_fuse([mlp.down_proj], kind, keep)),
    )


def collect(decoder: Any, shape: DecoderShape, kind: str = "none", *, keep: bool = True) -> DecoderWeights:
    """The weights of a reference decoder (``model.{embed_tokens,layers,norm}`` and ``lm_head``), fused.

    Args:
        decoder: With its weights, on its device.
        shape: Its sizes.
        kind: ``none``, ``int8`` or ``int4`` for the layers.
        keep: As for :func:`fuse_layer`.

    Raises:
        ConfigError: Unknown kind, or a width that it does not suit.
    """
    if kind not in KINDS:
        raise ConfigError(f"policy.quantization: found {kind!r}, the engine knows {', '.join(KINDS)}")
    layers = tuple(fuse_layer(layer, kind, keep=keep) for layer in decoder.model.layers)
    return assemble(decoder, shape, layers)


def assemble(decoder: Any, shape: DecoderShape, layers: tuple[Layer, ...]) -> DecoderWeights:
    """What is around layers that were fused one by one while a checkpoint was read.

    Raises:
        ConfigError: The heads do not suit a kind of weight: both halves of one must be whole units.
    """
    qkv = layers[0].qkv
    if qkv.packed and shape.head_dim % (2 * lowbit.UNIT):
        raise ConfigError(
            f"policy.quantization: {lowbit.BITS[qkv.kind]} bits need heads in multiples of {2 * lowbit.UNIT}, "
            f"found {shape.head_dim}"
        )
    embedding = decoder.model.embed_tokens.weight.data
    cosine, sine = rotary_tables(shape)
    return DecoderWeights(
        shape=shape,
        embedding=embedding,
        layers=layers,
        norm=decoder.model.norm.weight.data,
        head=dense(decoder.lm_head.weight.data),
        # Rounded to the model's type, as the reference rounds them.
        cosine=cosine.to(embedding.device, embedding.dtype),
        sine=sine.to(embedding.device, embedding.dtype),
    )


def rotary_tables(shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, float32 [positions, head_dim / 2]."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (shape.rope_theta ** (steps / shape.head_dim))
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _fuse(linears: list[Any], kind: str, keep: bool) -> Tensor:
    weights = [linear.weight.data for linear in linears]
    fused = weights[0] if len(weights) == 1 else torch.cat(weights)  # [sum of outputs, inputs]
    if keep and kind != "none":
        return fused
    start = 0
    for linear, weight in zip(linears, weights, strict=True):
        part = fused[start : start + weight.shape[0]] if keep else fused.new_empty(0)
        linear.weight = nn.Parameter(part, requires_grad=False)
        start += weight.shape[0]
    return fused
