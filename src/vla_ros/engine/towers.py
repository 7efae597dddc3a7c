"""What stands between the matrix products of a vision transformer, and its plain version in torch.

:class:`~vla_ros.engine.triton_towers.TritonTowerOps` is the version for a GPU. Products, attention and GELU are
torch's in both.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class TowerOps(Protocol):
    """The steps of a pre-norm transformer of B pictures, N tokens each, ``width`` features."""

    def cut(self, images: Tensor, table: Tensor, patch: int) -> Tensor:
        """Pictures to patches, as every tower's embedding takes them.

        Args:
            images: Uint8 [B, H, W, 3].
            table: [towers, 3, 256], what becomes of a byte.
            patch: Side of a patch in pixels; H and W are multiples.

        Returns:
            [towers, B, patches, 3 * patch * patch], channels first, in the type of ``table``.
        """

    def begin(
        self, patches: Tensor, positions: Tensor, prefix: Tensor, norm: nn.LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """Tokens and their norm, [B, prefix + patches, width] each.

        Args:
            patches: [B, patches, width].
            positions: Added to them, [patches, width].
            prefix: Tokens before them, [prefix, width].
            norm: The first block's first.
        """

    def add_norm(self, tokens: Tensor, branch: Tensor, scale: Tensor | None, norm: nn.LayerNorm) -> Tensor:
        """Adds ``[scale *] branch`` to ``tokens`` [B, N, width] in place; returns the sum's norm."""

    def add(self, tokens: Tensor, branch: Tensor, scale: Tensor | None, out: Tensor) -> None:
        """Writes the patches of ``tokens + [scale *] branch``, the last rows, to ``out`` [B, patches, width].

        ``out`` may be some columns of a wider, contiguous tensor. ``tokens`` may change.
        """


class TorchTowerOps:
    """The steps in torch alone."""

    def cut(self, images: Tensor, table: Tensor, patch: int) -> Tensor:
        """See :class:`TowerOps`."""
        batch, height, width, _ = images.shape
        grid = images.view(batch, height // patch, patch, width // patch, patch, 3)
        rows = grid.permute(0, 1, 3, 5, 2, 4).reshape(batch, -1, 3, patch * patch).int()
        rows += 256 * torch.arange(3, dtype=torch.int32, device=images.device)[:, None]
        return table.flatten(1)[:, rows.flatten(2)]

    def begin(
        self, patches: Tensor, positions: Tensor, prefix: Tensor, norm: nn.LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """See :class:`TowerOps`."""
        tokens = torch.cat([prefix.expand(patches.shape[0], -1, -1), patches + positions], dim=1)
        return tokens, norm(tokens)

    def add_norm(self, tokens: Tensor, branch: Tensor, scale: Tensor | None, norm: nn.LayerNorm) -> Tensor:
        """See :class:`TowerOps`."""
        normed: Tensor = norm(tokens.add_(branch if scale is None else branch * scale))
        return normed

    def add(self, tokens: Tensor, branch: Tensor, scale: Tensor | None, out: Tensor) -> None:
        """See :class:`TowerOps`."""
        tokens.add_(branch if scale is None else branch * scale)
        out.copy_(tokens[:, tokens.shape[1] - out.shape[1] :])


def make_tower_ops(device: torch.device) -> TowerOps:
    """Triton's on a GPU where Triton is installed, torch's elsewhere."""
    if device.type == "cuda":
        try:
            from vla_ros.engine.triton_towers import TritonTowerOps
        except ImportError:
            return TorchTowerOps()
        return TritonTowerOps()
    return TorchTowerOps()
