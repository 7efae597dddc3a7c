"""Vision transformers, with the parameter names of the published checkpoints.

They are DINOv2 ViT-L/14 with registers and SigLIP SO400M/14 as timm builds them, up to the intermediate block whose
patches the families use, without final norm and pooling. GELU is exact (erf), and LayerNorm's epsilon is 1e-6.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros_models.engine.shapes import TowerShape
from vla_ros_models.engine.tower_ops import TowerOps

LAYER_NORM_EPS = 1e-6


class PatchEmbedding(nn.Module):
    """Embeds patches with one matrix product instead of an equivalent convolution."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.patch_size = shape.patch_size
        self.proj = nn.Conv2d(3, shape.width, shape.patch_size, shape.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed pixels [B, 3, H, W] as [B, patches, width], in row-major order."""
        return self.embed(self.unfold(pixels))

    def unfold(self, pixels: Tensor) -> Tensor:
        """Return the pixels [B, 3, H, W] of each patch, channels first: [B, patches, 588]."""
        batch, channels, height, width = pixels.shape
        size = self.patch_size
        grid = pixels.reshape(batch, channels, height // size, size, width // size, size)
        return grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * size * size)

    def embed(self, patches: Tensor) -> Tensor:
        """Embed flattened patches [B, patches, 588], channels first, as [B, patches, width]."""
        embedded: Tensor = functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias)
        return embedded


class Attention(nn.Module):
    """Multi-head self-attention over all tokens."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [B, N, width] to [B, N, width]."""
        batch, count, width = tokens.shape
        qkv = self.qkv(tokens).view(batch, count, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, N, head_dim]
        mixed = functional.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, count, width))
        return output


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        output: Tensor = self.fc2(functional.gelu(self.fc1(tokens)))
        return output


class LayerScale(nn.Module):
    """A learned factor per feature. The published files call it ``scale_factor`` (timm: ``gamma``)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))


class Block(nn.Module):
    """Weights of a pre-norm transformer block; :meth:`VisionTower.run` runs it."""

    def __init__(self, shape: TowerShape, film: int = 0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=LAYER_NORM_EPS)
        self.attn = Attention(shape)
        self.ls1 = LayerScale(shape.width) if shape.layer_scale else None
        self.norm2 = nn.LayerNorm(shape.width, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(shape.width, shape.mlp_width, shape.width)
        self.ls2 = LayerScale(shape.width) if shape.layer_scale else None
        if film:
            self.scale, self.shift = nn.Linear(film, shape.width), nn.Linear(film, shape.width)

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Layer-scale factors [width] of the attention and the MLP branch, or None."""
        first, second = (None if scale is None else scale.scale_factor for scale in (self.ls1, self.ls2))
        return first, second


class VisionTower(nn.Module):
    """One vision transformer, with only its first ``shape.used_blocks`` blocks.

    ``film`` is the width of the text embedding that modulates every block (FiLM), or 0.
    """

    def __init__(self, shape: TowerShape, film: int = 0) -> None:
        super().__init__()
        self.shape = shape
        if shape.class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
        if shape.register_tokens:
            self.reg_token = nn.Parameter(torch.zeros(1, shape.register_tokens, shape.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, shape.patches, shape.width))
        self.patch_embed = PatchEmbedding(shape)
        self.blocks = nn.ModuleList(Block(shape, film) for _ in range(shape.used_blocks))

    def prefix(self) -> Tensor:
        """Return the class and register tokens [tokens, width] before the patches; empty for SigLIP."""
        tokens: list[Tensor] = [self.cls_token] if self.shape.class_token else []
        tokens += [self.reg_token] if self.shape.register_tokens else []
        return torch.cat([*tokens, self.pos_embed[:, :0]], dim=1)[0]

    def modulations(self, language: Tensor) -> Tensor:
        """Return each block's factor and shift [blocks, 2, width] for a mean text embedding [1, film]."""
        blocks: list[Block] = list(self.blocks)  # type: ignore[arg-type]
        return torch.stack([torch.cat([1 + block.scale(language), block.shift(language)]) for block in blocks])

    def run(self, ops: TowerOps, embedded: Tensor, prefix: Tensor, out: Tensor, film: Tensor | None = None) -> None:
        """Compute features from embedded patches [B, patches, width] without positions.

        ``out`` [B, patches, width] receives the features and may be part of a wider tensor. ``prefix`` comes from
        :meth:`prefix`, ``film`` from :meth:`modulations`.
        """
        blocks: list[Block] = list(self.blocks)  # type: ignore[arg-type]
        tokens, normed = ops.embed(embedded, self.pos_embed[0], prefix, blocks[0].norm1)
        modulations = [None] * len(blocks) if film is None else film
        for block, following, pair in zip(blocks, [*blocks[1:], None], modulations, strict=True):
            attention_scale, mlp_scale = block.scales
            tokens, normed = ops.add_norm(tokens, block.attn(normed), attention_scale, block.norm2, pair)
            branch = block.mlp(normed)
            if following is None:
                ops.add(tokens, branch, mlp_scale, out)
            else:  # fused with the next block's first norm
                tokens, normed = ops.add_norm(tokens, branch, mlp_scale, following.norm1)


class VisionBackbone(nn.Module):
    """One vision tower, or two on the same image with concatenated features."""

    mean: Tensor
    std: Tensor

    def __init__(self, towers: tuple[TowerShape, ...], film: int = 0) -> None:
        super().__init__()
        # None where another GPU has the tower.
        self.featurizer: VisionTower | None = VisionTower(towers[0], film)
        self.fused_featurizer = VisionTower(towers[1], film) if len(towers) > 1 else None
        # These constants have values even while the parameters are on "meta".
        mean = [value for tower in towers for value in tower.mean]
        std = [value for tower in towers for value in tower.std]
        self.register_buffer("mean", torch.tensor(mean, device="cpu").view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, device="cpu").view(1, -1, 1, 1), persistent=False)

    @property
    def placed(self) -> dict[int, VisionTower]:
        """The towers here by their number."""
        both = self.featurizer, self.fused_featurizer
        return {index: tower for index, tower in enumerate(both) if tower is not None}

    @property
    def towers(self) -> list[VisionTower]:
        return list(self.placed.values())

    def keep(self, wanted: Callable[[int], bool]) -> None:
        """Remove all towers but those whose number is ``wanted``."""
        self.featurizer = self.featurizer if wanted(0) else None
        self.fused_featurizer = self.fused_featurizer if wanted(1) else None

    def normalize(self, images: Tensor) -> Tensor:
        """Normalise RGB images, uint8 [B, H, W, 3], to float32 [B, 3 * towers, H, W].

        Each tower has its own constants; the first tower's channels come first.
        """
        # Permuting bytes and computing in place is five times faster on a CPU than one expression.
        pixels = images.permute(0, 3, 1, 2).contiguous().to(torch.float32).div_(255.0)
        return pixels.repeat(1, self.mean.shape[1] // 3, 1, 1).sub_(self.mean).div_(self.std)

    def forward(self, pixels: Tensor, film: Sequence[Tensor] = ()) -> Tensor:
        """Encode normalised pixels [B, 3 * towers, H, W] as features [B, patches, sum of widths].

        ``film`` holds each tower's :meth:`VisionTower.modulations`, or is empty.
        """
        features = []
        for index, tower in self.placed.items():
            patches = tower.patch_embed(pixels[:, 3 * index : 3 * index + 3])
            features.append(torch.empty_like(patches))
            tower.run(TowerOps(), patches, tower.prefix(), features[-1], film[index] if film else None)
        return features[0] if len(features) == 1 else torch.cat(features, dim=-1)
