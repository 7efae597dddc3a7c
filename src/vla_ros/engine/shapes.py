"""Network sizes, which policies read from a checkpoint's ``config.json``. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class LlmShape:
    """Sizes of the Llama decoder."""

    vocab_size: int  # rows of embedding and head, with padding (32064)
    hidden_size: int  # features per token
    intermediate_size: int  # hidden features of the gated MLP
    layers: int  # decoder layers
    heads: int  # query heads
    kv_heads: int  # key and value heads
    head_dim: int  # features per head
    # Epsilon of every RMSNorm, from the checkpoint. If it is not stored: 1e-6, transformers' default for Llama;
    # Llama-2's own 1e-5 would be wrong for the published files.
    rms_norm_eps: float
    rope_theta: float  # base of the rotary embedding
    max_positions: int  # longest sequence in tokens
    bos_token: int  # first token of every sequence


@dataclass(frozen=True)
class GemmaShape:
    """Sizes of one Gemma: the prefix (images and prompt) or the action expert."""

    width: int  # features per token
    depth: int  # layers
    mlp_width: int  # hidden features of the gated MLP
    heads: int = 8  # query heads
    kv_heads: int = 1  # key and value heads
    head_dim: int = 256  # features per head; not ``width / heads`` in the expert


@dataclass(frozen=True)
class TowerShape:
    """Sizes of one vision transformer."""

    width: int  # features per token
    blocks: int  # transformer blocks that the checkpoint stores
    heads: int  # attention heads
    mlp_width: int  # hidden features of each block's MLP
    # Blocks that run; features are the output of the last one that runs, without a final norm. OpenVLA takes the
    # output of the second-to-last block, so ``blocks - 1`` run.
    used_blocks: int
    patch_size: int = 14  # side of a patch in pixels
    image_size: int = 224  # side of the square input in pixels
    class_token: bool = False  # True if a class token precedes the patches
    register_tokens: int = 0  # number of register tokens between class token and patches
    layer_scale: bool = False  # True if each residual branch is multiplied by a learned vector
    # Subtracted from each RGB channel in [0, 1]; the checkpoint's ``preprocessor_config.json`` may override it.
    mean: tuple[float, float, float] = HALF
    std: tuple[float, float, float] = HALF  # each channel is then divided by it

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the patches; they are dropped from the features."""
        return int(self.class_token) + self.register_tokens

    @property
    def patches(self) -> int:
        """Number of output tokens."""
        return (self.image_size // self.patch_size) ** 2


TIMM_TOWERS: Mapping[str, TowerShape] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerShape(
        width=1024,
        blocks=24,
        heads=16,
        mlp_width=4096,
        used_blocks=23,
        class_token=True,
        register_tokens=4,
        layer_scale=True,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    "vit_so400m_patch14_siglip_224": TowerShape(width=1152, blocks=27, heads=16, mlp_width=4304, used_blocks=26),
}
"""The towers of the published checkpoints, by their timm identifier."""
