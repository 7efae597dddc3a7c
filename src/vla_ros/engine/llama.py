"""The parameters of a Llama decoder, named as in transformers and in the published checkpoints.

Nothing is computed here: :mod:`vla_ros.engine.decoder` runs these weights as loaded (:func:`as_loaded`), or fused
and packed (:func:`~vla_ros.engine.weights.fuse`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vla_ros.engine.shapes import DecoderShape
from vla_ros.engine.weights import DecoderWeights, Layer, Matrix, linears_by_role, rotary_tables


class LlamaDecoder(nn.Module):
    """Embedding, layers, last norm and head."""

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
    """Return the weights without copying them, so later changes to ``decoder`` take effect.

    Linear layers of other libraries (bitsandbytes) are kept.
    """
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
