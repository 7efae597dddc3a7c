"""Sizes of decoders. No torch here: a policy reads them from a checkpoint's ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LlmShape:
    """The Llama decoder.

    Attributes:
        vocab_size: Rows of embedding and head, with padding (32064).
        hidden_size: Features per token.
        intermediate_size: Hidden features of the gated MLP.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Features per head.
        rms_norm_eps: Epsilon of every RMSNorm; it comes from the checkpoint (1e-6 when not stored, which is
            transformers' default for Llama; Llama-2's own 1e-5 would be wrong for the published files).
        rope_theta: Base of the rotary embedding.
        max_positions: Longest sequence in tokens.
        bos_token: First token of every sequence.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    bos_token: int


@dataclass(frozen=True)
class GemmaShape:
    """One Gemma: the prefix (images and prompt) or the action expert.

    Attributes:
        width: Features per token.
        depth: Layers.
        mlp_width: Hidden features of the gated MLP.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Features per head; not ``width / heads`` in the expert.
    """

    width: int
    depth: int
    mlp_width: int
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 256
