"""The Llama decoder of OpenVLA, its parameters named as in the published checkpoints.

Written here and not taken from transformers because the meaning of a prompt with an empty cache has changed there
between versions, which silently blinded the published code; and because a small model on a CPU spends most of a
decoding step outside the arithmetic. Numerically it is transformers' Llama: norms and rotary tables in float32,
everything else in the model's type.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.policies.openvla.architecture import LlmShape


class KeyValueCache:
    """Keys and values of one batch, allocated once for prompt and answer.

    Attributes:
        keys: [layers, B, kv_heads, capacity, head_dim].
        values: The same.
        length: Positions filled so far.
    """

    def __init__(
        self, shape: LlmShape, batch: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        sizes = (shape.layers, batch, shape.kv_heads, capacity, shape.head_dim)
        self.keys = torch.empty(sizes, device=device, dtype=dtype)
        self.values = torch.empty(sizes, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, kv_heads, N, head_dim] behind what is there; returns everything up to and with it.

        ``length`` itself moves once per pass, after the last layer.
        """
        end = self.length + key.shape[2]
        self.keys[layer, :, :, self.length : end] = key
        self.values[layer, :, :, self.length : end] = value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class RmsNorm(nn.Module):
    """Root mean square norm, computed in float32 and rounded before the weight is applied."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to the same."""
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden.dtype)


class SelfAttention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, shape: LlmShape, layer: int, implementation: str) -> None:
        super().__init__()
        self.shape = shape
        self.layer = layer
        self.implementation = implementation
        self.q_proj = nn.Linear(shape.hidden_size, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], cache: KeyValueCache | None) -> Tensor:
        """[B, N, hidden_size] to the same; ``cache`` holds earlier positions and takes these."""
        batch, count, _ = hidden.shape
        query = (
            self.q_proj(hidden).view(batch, count, self.shape.heads, -1).transpose(1, 2)
        )  # [B, heads, N, head_dim]
        key = self.k_proj(hidden).view(batch, count, self.shape.kv_heads, -1).transpose(1, 2)
        value = self.v_proj(hidden).view(batch, count, self.shape.kv_heads, -1).transpose(1, 2)
        query, key = rotate(query, rotary), rotate(key, rotary)
        if cache is not None:
            key, value = cache.append(self.layer, key, value)
        mixed = attend(query, key, value, self.implementation)  # [B, N, heads, head_dim]
        output: Tensor = self.o_proj(mixed.reshape(batch, count, -1))
        return output


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlmShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] to the same."""
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, shape: LlmShape, layer: int, implementation: str) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape, layer, implementation)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMlp(shape)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], cache: KeyValueCache | None) -> Tensor:
        """[B, N, hidden_size] to the same."""
        attended: Tensor = hidden + self.self_attn(self.input_layernorm(hidden), rotary, cache)
        output: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return output


class DecoderStack(nn.Module):
    """Embedding, layers and the last norm."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: LlmShape, implementation: str) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape, layer, implementation) for layer in range(shape.layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        cosine, sine = rotary_tables(shape)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, hidden: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Run embeddings [B, N, hidden_size] at the positions that follow ``cache``; the same shape out."""
        start = 0 if cache is None else cache.length
        end = start + hidden.shape[1]
        rotary = (self.cosine[start:end].to(hidden.dtype), self.sine[start:end].to(hidden.dtype))
        for layer in self.layers:
            hidden = layer(hidden, rotary, cache)
        if cache is not None:
            cache.length = end
        output: Tensor = self.norm(hidden)
        return output


class LlamaDecoder(nn.Module):
    """Decoder and head.

    Args:
        shape: Sizes.
        implementation: Attention: ``eager``, ``sdpa`` or ``flash_attention_2``.
    """

    def __init__(self, shape: LlmShape, implementation: str = "sdpa") -> None:
        super().__init__()
        self.model = DecoderStack(shape, implementation)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)


def rotary_tables(shape: LlmShape) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [max_positions, head_dim], on the CPU even while parameters are on ``meta``."""
    steps = torch.arange(0, shape.head_dim, 2, device="cpu", dtype=torch.float32)
    frequencies = 1.0 / (shape.rope_theta ** (steps / shape.head_dim))
    angles = torch.outer(torch.arange(shape.max_positions, device="cpu", dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [B, heads, N, head_dim]; the halves of each head are the pairs, as in transformers."""
    cosine, sine = rotary
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def attend(query: Tensor, key: Tensor, value: Tensor, implementation: str) -> Tensor:
    """Causal attention of the last N positions to all M.

    Args:
        query: [B, heads, N, head_dim].
        key: [B, kv_heads, M, head_dim], M >= N.
        value: The same.
        implementation: ``eager``, ``sdpa`` or ``flash_attention_2``.

    Returns:
        [B, N, heads, head_dim].
    """
    if implementation == "flash_attention_2":
        from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

        mixed: Tensor = flash_attn_func(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=True
        )
        return mixed
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    new, total = query.shape[2], key.shape[2]
    mask = None
    if new > 1 and (new < total or implementation == "eager"):
        mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
    if implementation == "eager":
        scores = (query @ key.transpose(2, 3)) * query.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        mixed = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value
    else:
        causal = new > 1 and mask is None
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    return mixed.transpose(1, 2)
