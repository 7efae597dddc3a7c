"""Weights of a decoder: as loaded, or fused (dense or quantised).

The parameters of :class:`LlamaDecoder` are named as in transformers and in the published checkpoints.
:mod:`vla_ros_models.engine.decoder` runs them as loaded (:func:`as_loaded`), or fused and packed (:func:`fuse`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vla_ros.errors import ConfigError
from vla_ros_models.engine import fp8, lowbit
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.shapes import DecoderShape

_ROWS_AT_ONCE = 4096

QUANTIZATIONS = ("none", "int8", "int4", "fp8")
"""How layers may be quantised: not at all, 8 bits, asymmetric 4 bits in groups, or 8-bit floating point."""

ROLES = ("qkv", "o_proj", "gate_up", "down_proj", "lm_head")
"""Roles of a matrix. Kernels are tuned by role."""

SPLIT_INPUTS = ("o_proj", "down_proj")
"""Roles of which a rank has a shard of the inputs instead of the outputs."""


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, inputs] of one kind.

    ``dense``: ``data`` [N, K] in the model's type. ``int8``: words and scales of
    :mod:`vla_ros_models.engine.lowbit`. ``int4``: words and grid of :mod:`vla_ros_models.engine.lowbit`. ``fp8``:
    ``data`` [N, K] and scales [N] of :mod:`vla_ros_models.engine.fp8`; if there are many input rows, these are
    quantised too. ``fp8_rows``: the same, but input rows are always quantised, and the library applies both scales.
    ``loaded``: the checkpoint's linear layers, whose outputs are concatenated.
    """

    data: Tensor  # the numbers; for ``loaded``, the weight of the first linear layer
    kind: str  # ``dense``, ``int8``, ``int4``, ``fp8``, ``fp8_rows`` or ``loaded``
    inputs: int  # K
    role: str  # one of :data:`ROLES`
    scale: Tensor | None = None  # scales of quantised weights; for ``int4`` with zero points
    linears: tuple[nn.Module, ...] = ()  # the layers of ``loaded``
    bias: Tensor | None = None  # [N], only in torch's operations

    @classmethod
    def of_linears(cls, role: str, *linears: Any) -> "Matrix":
        """Return a ``loaded`` matrix of linear layers that have the same inputs."""
        return cls(linears[0].weight, "loaded", linears[0].in_features, role, linears=linears)

    @property
    def packed(self) -> bool:
        """True if ``data`` is packed in the order of :mod:`vla_ros_models.engine.lowbit`."""
        return self.kind in lowbit.BITS

    @property
    def outputs(self) -> int:
        return int(self.data.shape[0]) * (lowbit.FRAGMENT_N if self.packed else 1)

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """``data`` and ``scale`` for a kernel; any tensor stands for scales that do not exist."""
        return self.data, self.data if self.scale is None else self.scale

    @property
    def nbytes(self) -> int:
        parts = [part for part in (self.data, self.scale) if part is not None]
        return sum(part.numel() * part.element_size() for part in parts)


def quantize(weight: Tensor, kind: str, role: str, largest: lowbit.Reduce = lowbit.unchanged) -> Matrix:
    """Return a weight [N, K] as a matrix of one of :data:`QUANTIZATIONS`; ``none`` keeps it dense.

    ``largest`` is as in :func:`vla_ros_models.engine.lowbit.quantize_int8`.
    """
    if kind == "none":
        return Matrix(weight, "dense", int(weight.shape[1]), role)
    rounded = {"int8": lowbit.quantize_int8, "int4": lowbit.quantize_int4, "fp8": _round_fp8}[kind]
    # Some rows at a time: a float32 copy of the whole matrix would set the peak memory use.
    parts = [rounded(part, largest) for part in torch.split(weight, _ROWS_AT_ONCE)]
    words, scale = (torch.cat(part) for part in zip(*parts, strict=True))
    return Matrix(words, kind, int(weight.shape[1]), role, scale)


def dequantize(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Return [N, K] in ``dtype``; a dense matrix of that type is returned unchanged."""
    if matrix.kind == "dense":
        return matrix.data.to(dtype)
    assert matrix.scale is not None
    # The same rows at a time: a float32 copy of the whole matrix would be several times as large as the result.
    some = _ROWS_AT_ONCE // (lowbit.FRAGMENT_N if matrix.packed else 1)
    widen = {"int8": lowbit.dequantize_int8, "int4": lowbit.dequantize_int4, "fp8": _widen_fp8}[matrix.kind]
    parts = zip(torch.split(matrix.data, some), torch.split(matrix.scale, some), strict=True)
    return torch.cat([widen(words, scale, matrix.inputs).to(dtype) for words, scale in parts])


def _round_fp8(weight: Tensor, largest: lowbit.Reduce) -> tuple[Tensor, Tensor]:
    rounded, scale = fp8.quantize(weight, largest)
    return rounded, scale[:, 0]


def _widen_fp8(data: Tensor, scale: Tensor, inputs: int) -> Tensor:
    return data.float() * scale[:, None]


@dataclass(frozen=True)
class Layer:
    """One decoder layer; a last layer of which only keys and values are needed has only ``qkv``."""

    qkv: Matrix  # queries (if the layer has them), keys and values [(heads + 2 kv_heads) * head_dim, hidden]
    o_proj: Matrix | None = None  # [hidden, heads * head_dim]
    gate_up: Matrix | None = None  # gate, then up [2 * intermediate, hidden]; without a gate only up
    down_proj: Matrix | None = None  # [hidden, intermediate]
    qk_norms: tuple[Tensor, Tensor] | None = None  # weights [head_dim] of RMS norms of each query and key
    # Projections of another model's keys and values, to which the layer attends; ``qkv`` then has only queries.
    cross: tuple[Matrix, Matrix] | None = None
    # The products of ``qkv`` and ``gate_up`` with their norms' shifts at each time, float32 [times, outputs], for
    # kernels that finish the norm after the product; None if norms have no shift.
    shifts: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, matrices: Mapping[str, Matrix]) -> "Layer":
        """Return a layer; the keys are names of this class's fields, of which all but ``qkv`` may be missing."""
        o_proj, gate_up, down_proj = (matrices.get(role) for role in ("o_proj", "gate_up", "down_proj"))
        return cls(matrices["qkv"], o_proj, gate_up, down_proj)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(one for one in (self.qkv, self.o_proj, self.gate_up, self.down_proj) if one is not None)


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder."""

    shape: DecoderShape
    layers: tuple[Layer, ...]
    # Norm 2 i precedes the attention of layer i, norm 2 i + 1 its MLP, and the last norm the output, if there is
    # one. Each has a weight [hidden] in the model's type or, unless ``shape.norm`` is ``rms``, float32 [times,
    # parts, hidden] with up to three parts for each time: scale, shift, and the gate of the branch that follows.
    norms: tuple[Tensor, ...]
    cosine: Tensor  # [positions, head_dim / 2] in the model's type
    sine: Tensor  # the same
    embedding: Tensor | None = None  # [vocab, hidden]
    lm_head: Matrix | None = None  # [vocab, hidden], never quantised

    @property
    def dtype(self) -> torch.dtype:
        return (self.cosine if self.embedding is None else self.embedding).dtype

    @property
    def rows_dtype(self) -> torch.dtype:
        """Type of the inputs of few-row products: float16 for quantised weights, which convert to it fastest."""
        half = self.layers[0].qkv.scale is not None and self.dtype == torch.bfloat16
        return torch.float16 if half else self.dtype

    @property
    def device(self) -> torch.device:
        return (self.cosine if self.embedding is None else self.embedding).device

    @property
    def nbytes(self) -> int:
        head = 0 if self.lm_head is None else self.lm_head.nbytes
        return head + sum(matrix.nbytes for layer in self.layers for matrix in layer.matrices)

    def first(self, layers: int) -> "DecoderWeights":
        """Return a decoder of the first layers."""
        return replace(self, layers=self.layers[:layers], shape=replace(self.shape, layers=layers))

    def table(self) -> Tensor:
        """Return the embedding. Raises ConfigError if the decoder has none."""
        if self.embedding is None:
            raise ConfigError("the decoder has no embedding, so it cannot run tokens")
        return self.embedding


def fuse_layer(layer: Any, kind: str = "none", *, keep: bool = True, ranks: Ranks | None = None) -> Layer:
    """Fuse one layer of a :class:`LlamaDecoder`.

    With ``keep`` the module stays usable: dense weights become views of the fused weights; quantised weights are
    copies. Otherwise each weight is freed as soon as it is fused, so that at most one matrix exists twice.
    If ``layer`` is the shard of one of several ``ranks``, all of them must fuse it together.
    """
    whole = lowbit.unchanged if ranks is None else ranks.largest
    return Layer.of(
        {
            role: quantize(
                _fuse(linears, kind, keep), kind, role, whole if role in SPLIT_INPUTS else lowbit.unchanged
            )
            for role, linears in linears_by_role(layer).items()
        }
    )


def linears_by_role(layer: Any) -> dict[str, list[Any]]:
    """Return the linear layers that make up each matrix of a layer."""
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "qkv": [attention.q_proj, attention.k_proj, attention.v_proj],
        "o_proj": [attention.o_proj],
        "gate_up": [mlp.gate_proj, mlp.up_proj],
        "down_proj": [mlp.down_proj],
    }


def fuse(decoder: Any, kind: str = "none", *, keep: bool = True) -> DecoderWeights:
    """Fuse the weights of a :class:`LlamaDecoder` that is on its device.

    ``kind``, one of :data:`QUANTIZATIONS`, is that of the layers; ``keep`` as for :func:`fuse_layer`.
    """
    if kind not in QUANTIZATIONS:
        raise ConfigError(f"policy.quantization: found {kind!r}, the engine supports {', '.join(QUANTIZATIONS)}")
    return assemble(decoder, tuple(fuse_layer(layer, kind, keep=keep) for layer in decoder.model.layers))


def assemble(decoder: Any, layers: tuple[Layer, ...]) -> DecoderWeights:
    """Assemble a decoder from layers that were fused one by one while a checkpoint was read.

    Raises ConfigError if the head size is not supported: both halves of a head must be whole fragments.
    """
    qkv, shape = layers[0].qkv, decoder.shape
    if qkv.packed and shape.head_dim % (2 * lowbit.FRAGMENT_N):
        raise ConfigError(
            f"policy.quantization: {lowbit.BITS[qkv.kind]}-bit weights need a head size that is a "
            f"multiple of {2 * lowbit.FRAGMENT_N}; found {shape.head_dim}"
        )
    embedding = decoder.model.embed_tokens.weight.data
    return DecoderWeights(
        shape=shape,
        embedding=embedding,
        layers=layers,
        norms=tuple(norm.weight.data for norm in decoder.norms),
        lm_head=quantize(decoder.lm_head.weight.data, "none", "lm_head"),
        # Rounded to the model's type, as in transformers.
        cosine=decoder.cosine.to(embedding.device, embedding.dtype),
        sine=decoder.sine.to(embedding.device, embedding.dtype),
    )


def rotary_tables(shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of all positions, float32 [positions, head_dim / 2] each, on the CPU."""
    steps = torch.arange(0, shape.head_dim, 2, device="cpu", dtype=torch.float32)
    frequencies = 1.0 / (shape.rope_theta ** (steps / shape.head_dim))
    angles = torch.outer(torch.arange(shape.max_positions, device="cpu", dtype=torch.float32), frequencies)
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


class LlamaDecoder(nn.Module):
    """The parameters of a Llama model, named as in transformers: embedding, layers, final norm and head."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _group(
            embed_tokens=nn.Embedding(shape.vocab_size, shape.hidden_size),
            layers=nn.ModuleList(_layer(shape) for _ in range(shape.layers)),
            norm=nn.RMSNorm(shape.hidden_size),
        )
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        # Constants, not weights: they hold values even while parameters are on ``meta``.
        cosine, sine = rotary_tables(shape)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    @property
    def layers(self) -> nn.ModuleList:
        layers = self.model.layers
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def norms(self) -> list[Any]:
        """The norms before attention and MLP of each layer, then the last norm."""
        layers: list[Any] = list(self.layers)
        pairs = [(layer.input_layernorm, layer.post_attention_layernorm) for layer in layers]
        return [*(norm for pair in pairs for norm in pair), self.model.norm]


def as_loaded(decoder: LlamaDecoder) -> DecoderWeights:
    """Return the weights without copying them, so later changes to ``decoder`` take effect."""
    model: Any = decoder.model
    dtype = model.embed_tokens.weight.dtype

    def of(layer: Any) -> Layer:
        return Layer.of({role: Matrix.of_linears(role, *own) for role, own in linears_by_role(layer).items()})

    return DecoderWeights(
        shape=decoder.shape,
        embedding=model.embed_tokens.weight,
        layers=tuple(of(layer) for layer in model.layers),
        norms=tuple(norm.weight for norm in decoder.norms),
        lm_head=Matrix.of_linears("lm_head", decoder.lm_head),
        cosine=decoder.cosine.to(dtype),
        sine=decoder.sine.to(dtype),
    )


def _layer(shape: DecoderShape) -> nn.Module:
    hidden, kv = shape.hidden_size, shape.kv_heads * shape.head_dim
    return _group(
        input_layernorm=nn.RMSNorm(hidden),
        self_attn=_group(
            q_proj=nn.Linear(hidden, shape.heads * shape.head_dim, bias=False),
            k_proj=nn.Linear(hidden, kv, bias=False),
            v_proj=nn.Linear(hidden, kv, bias=False),
            o_proj=nn.Linear(shape.heads * shape.head_dim, hidden, bias=False),
        ),
        post_attention_layernorm=nn.RMSNorm(hidden),
        mlp=_group(
            gate_proj=nn.Linear(hidden, shape.intermediate_size, bias=False),
            up_proj=nn.Linear(hidden, shape.intermediate_size, bias=False),
            down_proj=nn.Linear(shape.intermediate_size, hidden, bias=False),
        ),
    )


def _group(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module
