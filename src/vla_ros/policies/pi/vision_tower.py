"""The SigLIP tower of pi0 and pi0.5, with all blocks, a final norm and GELU's tanh form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vla_ros.engine.shapes import TowerShape
from vla_ros.engine.towers import TowerOps
from vla_ros.policies.vision_tower import LAYER_NORM_EPS, Block, VisionTower


class SiglipTower(VisionTower):
    """Returns the last block's patches after the final norm.

    Patches and positions are embedded in float32 even if the blocks are bfloat16.
    """

    def __init__(self, shape: TowerShape) -> None:
        super().__init__(shape)
        self.norm = nn.LayerNorm(shape.width, eps=LAYER_NORM_EPS)

    def forward(self, images: Tensor, ops: TowerOps) -> Tensor:
        """Encode images [N, S, S, 3], uint8 or float32 in [0, 1], as features [N, patches, width]."""
        tokens = self.embed(images)
        blocks: list[Block] = list(self.blocks)  # type: ignore[arg-type]
        normed: Tensor = blocks[0].norm1(tokens)
        for block, following in zip(blocks, [*(each.norm1 for each in blocks[1:]), self.norm], strict=True):
            tokens, normed = ops.add_norm(tokens, block.attn(normed), None, block.norm2)
            branch = block.mlp.fc2(ops.linear_gelu(normed, block.mlp.fc1))
            tokens, normed = ops.add_norm(tokens, branch, None, following)
        return normed

    def embed(self, images: Tensor) -> Tensor:
        """Embed patches and add their positions: [N, patches, width]."""
        size, side = self.shape.patch_size, self.shape.image_size // self.shape.patch_size
        pixels = (images.float() / 255.0 if images.dtype == torch.uint8 else images) * 2.0 - 1.0
        grid = pixels.view(-1, side, size, side, size, 3).permute(0, 1, 3, 5, 2, 4)
        patches = grid.reshape(len(images), side * side, -1).to(self.pos_embed.dtype)
        return (self.patch_embed.embed(patches) + self.pos_embed).to(self.norm.weight.dtype)
