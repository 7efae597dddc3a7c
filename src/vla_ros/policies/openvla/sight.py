"""How the engine sees: the towers and the projector of the reference model, fused between their products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vla_ros.engine.agreement import agrees
from vla_ros.engine.health import EngineMismatchError, explain_device_errors
from vla_ros.engine.towers import TorchTowerOps, TowerOps, make_tower_ops
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.reference import BOUNDS, to_device
from vla_ros.policies.openvla.vision_tower import Block, LayerScale, VisionTower
from vla_ros.types import UInt8Array


class Sight:
    """Uint8 pictures [B, H, W, 3] to patch embeddings, the two towers side by side on a GPU.

    The same as ``model.embed_image(model.normalize(images))``. One tower fills a part of a large GPU only. The
    second runs on a stream of its own; a graph keeps that.

    Args:
        model: On its device, its weights in place.
        ops: What runs between the products; None takes what suits the device.
    """

    @torch.no_grad()
    def __init__(self, model: OpenVLAModel, ops: TowerOps | None = None) -> None:
        self.model = model
        self.ops = make_tower_ops(model.device) if ops is None else ops
        towers = model.vision_backbone.towers
        # The model's own normalisation of every byte: a look-up, equal to the bit.
        every = torch.arange(256, dtype=torch.uint8, device=model.device).view(1, 256, 1, 1).expand(-1, -1, -1, 3)
        self._table = model.normalize(every).view(len(towers), 3, 256).contiguous()
        self._prefixes = [torch.cat([*tower.prefix(), tower.pos_embed[:, :0]], dim=1)[0] for tower in towers]
        # By the stream that calls: one that is captured must not be touched by the thread that answers.
        self._sides: dict[int, torch.cuda.Stream] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """[B, patches, llm_width]."""
        towers = self.model.vision_backbone.towers
        shapes = [tower.shape for tower in towers]
        patches = self.ops.cut(images, self._table, shapes[0].patch_size)  # [towers, B, patches, 588]
        features = patches.new_empty(len(images), shapes[0].patches, sum(shape.width for shape in shapes))
        parts = torch.split(features, [shape.width for shape in shapes], dim=-1)
        work = list(zip(towers, patches, self._prefixes, parts, strict=True))
        with self._beside(images.device) as side:
            with side:
                for one in work[1:]:
                    self._run(*one)
            self._run(*work[0])
        embeddings: Tensor = self.model.projector(features)
        return embeddings

    def _run(self, tower: VisionTower, patches: Tensor, prefix: Tensor, out: Tensor) -> None:
        """One tower: ``patches`` [B, patches, 588] to ``out`` [B, patches, width]."""
        blocks: list[Block] = list(tower.blocks)  # type: ignore[arg-type]
        embedded = tower.patch_embed.embed(patches)
        tokens, normed = self.ops.begin(embedded, tower.pos_embed[0], prefix, blocks[0].norm1)
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            normed = self.ops.add_norm(tokens, block.attn(normed), _factors(block.ls1), block.norm2)
            branch, scale = block.mlp(normed), _factors(block.ls2)
            if following is None:
                self.ops.add(tokens, branch, scale, out)
            else:  # what ends a block begins the next
                normed = self.ops.add_norm(tokens, branch, scale, following.norm1)

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[AbstractContextManager[Any]]:
        """A second stream, for what runs after all that the current one was given so far; waited for at the end.

        Waited for in any case: the allocator gives the current stream again what was made on it, and both use that.
        """
        if device.type != "cuda" or len(self._prefixes) == 1:
            yield nullcontext()
            return
        main = torch.cuda.current_stream(device)
        side = self._sides.get(main.cuda_stream)
        if side is None:
            side = torch.cuda.Stream(device, priority=main.priority)  # type: ignore[no-untyped-call]
            self._sides[main.cuda_stream] = side
        side.wait_stream(main)
        try:
            yield torch.cuda.stream(side)
        finally:
            main.wait_stream(side)


def _factors(scale: nn.Module) -> Tensor | None:
    return scale.scale_factor if isinstance(scale, LayerScale) else None


@torch.inference_mode()
def check_towers(sight: Sight, pictures: Sequence[UInt8Array]) -> None:
    """Compare with the reference path.

    Args:
        sight: In question.
        pictures: Uint8 [H, W, 3] each.

    Raises:
        EngineMismatchError: The patch embeddings differ by more than rounding.
    """
    model = sight.model
    bound = BOUNDS.get(model.dtype, BOUNDS[torch.bfloat16])
    for picture in pictures:
        images = to_device(picture, model.device)
        expected = model.embed_image(model.normalize(images)).float()
        error = ((sight(images).float() - expected).norm() / expected.norm()).item()
        if not error <= bound:  # NaN is wrong, too
            raise EngineMismatchError(
                f"the engine's kernels for the vision towers differ from torch by {error:.2g}, at most {bound:.0e} "
                "expected"
            )


def checked_sight(model: OpenVLAModel, pictures: Sequence[UInt8Array], *, strict: bool) -> Sight:
    """How the engine sees, fused where that is right, else in torch alone with a warning: slower, but the same.

    Args:
        model: On its device.
        pictures: To compare with, uint8 [H, W, 3] each.
        strict: True refuses instead.

    Raises:
        EngineMismatchError: With ``strict``, the patch embeddings differ.
    """
    sight = Sight(model)

    def check() -> None:
        with explain_device_errors(model.device):
            check_towers(sight, pictures)

    instead = "torch runs the vision towers instead of the engine's kernels"
    return sight if agrees(check, instead, strict=strict) else Sight(model, TorchTowerOps())
