"""The operations of vision towers, in torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class TowerOps:
    """The operations of vision towers, in plain torch."""

    def patch_width(self, patch: int) -> int:
        """Return the number of values per patch from :meth:`patchify`: pixels, then zeros."""
        return 3 * patch * patch

    def patchify(self, images: Tensor, table: Tensor, patch: int) -> Tensor:
        """Split uint8 images [B, H, W, 3] into patches, [towers, B, patches, patch_width], channels first.

        ``table`` [towers, 3, 256] maps a byte to its normalised value and gives the type; H and W are multiples of
        ``patch``.
        """
        batch, height, width, _ = images.shape
        grid = images.view(batch, height // patch, patch, width // patch, patch, 3)
        rows = grid.permute(0, 1, 3, 5, 2, 4).reshape(batch, -1, 3, patch * patch).int()
        rows += 256 * torch.arange(3, dtype=torch.int32, device=images.device)[:, None]
        return table.flatten(1)[:, rows.flatten(2)]

    def embed(
        self, patches: Tensor, positions: Tensor, prefix: Tensor, norm: nn.LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and their norm (the first norm of the first block), [B, prefix + patches, width] each.

        ``positions`` [patches, width] are added only to the patches; ``prefix`` [prefix, width] comes before them.
        """
        tokens = torch.cat([prefix.expand(patches.shape[0], -1, -1), patches + positions], dim=1)
        return tokens, norm(tokens)

    def add_norm(
        self,
        tokens: Tensor,
        branch: Tensor,
        scale: Tensor | None,
        norm: nn.LayerNorm,
        film: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return ``tokens + [scale *] branch`` [B, N, width] and its norm; may overwrite ``tokens``.

        With ``film`` [2, width], a factor and a shift, the sum is modulated before it is normalised and returned.
        """
        tokens = tokens + (branch if scale is None else branch * scale)
        tokens = tokens if film is None else tokens * film[0] + film[1]
        return tokens, norm(tokens)

    def linear_gelu(self, tokens: Tensor, linear: nn.Linear) -> Tensor:
        """Apply ``linear``, then the tanh form of GELU; return [B, N, outputs]."""
        return functional.gelu(linear(tokens), approximate="tanh")

    def add(self, tokens: Tensor, branch: Tensor, scale: Tensor | None, out: Tensor) -> None:
        """Write the last rows (patches) of ``tokens + [scale *] branch`` to ``out`` [B, patches, width].

        ``out`` may be a slice of columns of a wider, contiguous tensor.
        """
        total = tokens + (branch if scale is None else branch * scale)
        out.copy_(total[:, total.shape[1] - out.shape[1] :])
