"""The SigLIP tower of pi0 and pi0.5: OpenVLA's with all blocks, a final norm and the tanh form of GELU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.policies.openvla.architecture import TowerShape
from vla_ros.policies.openvla.vision_tower import LAYER_NORM_EPS, Block, Mlp, VisionTower


class TanhMlp(Mlp):
    """Two linear layers with the tanh form of GELU between."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[..., width] to the same."""
        output: Tensor = self.fc2(functional.gelu(self.fc1(tokens), approximate="tanh"))
        return output


class SiglipTower(VisionTower):
    """Outputs the patches of the last block after the final norm.

    Patches and positions are embedded in their own data type (float32 also where the blocks are bfloat16).
    """

    def __init__(self, shape: TowerShape) -> None:
        super().__init__(shape)
        for block in self.blocks:
            block.mlp = TanhMlp(shape.width, shape.mlp_width)
        self.norm = nn.LayerNorm(shape.width, eps=LAYER_NORM_EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        """Float32 [B, 3, image_size, image_size] in [-1, 1] to features [B, patches, width]."""
        embedded = self.patch_embed(pixels.to(self.pos_embed.dtype)) + self.pos_embed
        tokens: Tensor = embedded.to(self.norm.weight.dtype)
        for block in self.blocks:
            assert isinstance(block, Block)
            tokens = tokens + block.attn(block.norm1(tokens))
            tokens = tokens + block.mlp(block.norm2(tokens))
        output: Tensor = self.norm(tokens)
        return output


def as_pixels(images: Tensor) -> Tensor:
    """Images [..., S, S, 3], uint8 or float32 in [0, 1], as float32 [..., 3, S, S] in [-1, 1]."""
    levels = images.float() / 255.0 if images.dtype == torch.uint8 else images
    return (levels * 2.0 - 1.0).movedim(-1, -3).contiguous()
