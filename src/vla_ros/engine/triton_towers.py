"""The operations between the products of the vision towers, in Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor, nn

from vla_ros.engine.kernels import towers
from vla_ros.engine.towers import TowerOps


class TritonTowerOps(TowerOps):
    """:class:`~vla_ros.engine.towers.TowerOps` in Triton, over contiguous tensors."""

    def patch_width(self, patch: int) -> int:
        """Return a multiple of 8: for rows of 588, cuBLAS's kernel takes five times as long (98 us on an H200)."""
        return -(-3 * patch * patch // 8) * 8

    def patchify(self, images: Tensor, table: Tensor, patch: int) -> Tensor:
        batch, height, width, _ = images.shape
        down, across, length = height // patch, width // patch, self.patch_width(patch)
        out = table.new_empty(table.shape[0], batch, down * across, length)
        towers.patchify_kernel[(batch * down * across,)](
            images, table, out, SIDE=across, PATCH=patch, TOWERS=table.shape[0], WIDTH=length,
            BLOCK=triton.next_power_of_2(length), num_warps=4,
        )  # fmt: skip
        return out

    def embed(
        self, patches: Tensor, positions: Tensor, prefix: Tensor, norm: nn.LayerNorm
    ) -> tuple[Tensor, Tensor]:
        batch, count, width = patches.shape
        rows = prefix.shape[0] + count
        tokens = patches.new_empty(batch, rows, width)
        out = torch.empty_like(tokens)
        towers.embed_kernel[(batch * rows,)](
            patches, positions, prefix, norm.weight, norm.bias, tokens, out, norm.eps, ROWS=rows,
            PREFIX=prefix.shape[0], **_sizes(width),
        )  # fmt: skip
        return tokens, out

    def add_norm(
        self,
        tokens: Tensor,
        branch: Tensor,
        scale: Tensor | None,
        norm: nn.LayerNorm,
        film: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`~vla_ros.engine.towers.TowerOps`; works in place."""
        batch, rows, width = tokens.shape
        out = torch.empty_like(tokens)
        towers.tower_add_norm_kernel[(batch * rows,)](
            tokens, branch, scale, norm.weight, norm.bias, *((None, None) if film is None else film), out, norm.eps,
            SCALED=scale is not None, FILM=film is not None, **_sizes(width),
        )  # fmt: skip
        return tokens, out

    def linear_gelu(self, tokens: Tensor, linear: nn.Linear) -> Tensor:
        """See :class:`~vla_ros.engine.towers.TowerOps`; the library's product includes the activation."""
        rows, weight = tokens.flatten(0, 1), linear.weight.t()
        out: Tensor = torch._addmm_activation(linear.bias, rows, weight, use_gelu=True)
        return out.view(*tokens.shape[:2], -1)

    def add(self, tokens: Tensor, branch: Tensor, scale: Tensor | None, out: Tensor) -> None:
        batch, rows, width = tokens.shape
        count = out.shape[1]
        towers.tower_add_kernel[(batch * count,)](
            tokens, branch, scale, out, out.stride(1), ROWS=rows, PREFIX=rows - count, SCALED=scale is not None,
            **_sizes(width),
        )  # fmt: skip


def _sizes(width: int) -> dict[str, object]:
    """Return launch options for rows of ``width``: 16 bytes of bfloat16 per lane, each step rounded separately."""
    block = triton.next_power_of_2(width)
    return {"N": width, "BLOCK": block, "num_warps": max(1, min(8, block // 256)), "enable_fp_fusion": False}
