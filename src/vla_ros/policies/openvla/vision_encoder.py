"""The engine's vision encoder: the model's towers and projector with fused kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros.engine.device_errors import EngineMismatchError, explain_device_errors
from vla_ros.engine.device_ops import make_tower_ops
from vla_ros.engine.kernel_check import agrees
from vla_ros.engine.tolerances import TOLERANCES, relative_error
from vla_ros.engine.towers import TowerOps
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.reference import to_device
from vla_ros.policies.vision_tower import VisionTower
from vla_ros.types import UInt8Array


class VisionEncoder:
    """Encodes uint8 images [B, H, W, 3] as patch embeddings, with the two towers in parallel on a GPU.

    Equivalent to ``model.embed_image(model.normalize(images))``. One tower does not fill a large GPU, so the second
    runs on a separate stream, also within a captured graph.
    """

    @torch.no_grad()
    def __init__(self, model: OpenVLAModel, ops: TowerOps | None = None) -> None:
        self.model = model
        self.ops = make_tower_ops(model.device) if ops is None else ops
        towers = model.vision_backbone.towers
        # The model's normalisation of each byte value, as a bit-identical look-up table.
        every = torch.arange(256, dtype=torch.uint8, device=model.device).view(1, 256, 1, 1).expand(-1, -1, -1, 3)
        self._table = model.normalize(every).view(len(towers), 3, 256).contiguous()
        self._prefixes = [tower.prefix() for tower in towers]
        patch = towers[0].shape.patch_size
        zeros = self.ops.patch_width(patch) - 3 * patch**2
        self._kernels = [functional.pad(tower.patch_embed.proj.weight.flatten(1), (0, zeros)) for tower in towers]
        # One per calling stream: the inference thread must not use a stream that is being captured.
        self._side_streams: dict[int, torch.cuda.Stream] = {}

    def __call__(self, images: Tensor, film: Sequence[Tensor] = ()) -> Tensor:
        """Return [B, patches, llm_width]; ``film`` holds each tower's modulations, or is empty."""
        towers = self.model.vision_backbone.towers
        patches = self.ops.patchify(images, self._table, towers[0].shape.patch_size)  # [towers, B, patches, 588]
        widths = [tower.shape.width for tower in towers]
        features = patches.new_empty(len(images), towers[0].shape.patches, sum(widths))
        parts = torch.split(features, widths, dim=-1)
        pairs: Sequence[Tensor | None] = film or [None] * len(towers)
        work = list(zip(towers, self._kernels, patches, self._prefixes, parts, pairs, strict=True))

        def run(tower: VisionTower, kernel: Tensor, pixels: Tensor, *rest: Any) -> None:
            tower.run(self.ops, functional.linear(pixels, kernel, tower.patch_embed.proj.bias), *rest)

        with self._side_stream(images.device) as side:
            with side:
                for one in work[1:]:
                    run(*one)
            run(*work[0])
        embeddings: Tensor = self.model.projector(features)
        return embeddings

    @contextmanager
    def _side_stream(self, device: torch.device) -> Iterator[AbstractContextManager[Any]]:
        """Open a side stream that starts after the current stream's work, and join it at the end.

        It is joined even after an error, because the allocator reuses both streams' memory on the current stream.
        """
        if device.type != "cuda" or len(self._prefixes) == 1:
            yield nullcontext()
            return
        main = torch.cuda.current_stream(device)
        side = self._side_streams.get(main.cuda_stream)
        if side is None:
            side = torch.cuda.Stream(device, priority=main.priority)  # type: ignore[no-untyped-call]
            self._side_streams[main.cuda_stream] = side
        side.wait_stream(main)
        try:
            yield torch.cuda.stream(side)
        finally:
            main.wait_stream(side)


@torch.inference_mode()
def check_vision(encoder: VisionEncoder, images: Sequence[UInt8Array]) -> None:
    """Raise EngineMismatchError if features differ from torch's by more than rounding."""
    model = encoder.model
    bound = TOLERANCES[model.dtype].vision
    for image in images:
        batch = to_device(image, model.device)
        error = relative_error(encoder(batch), model.embed_image(model.normalize(batch)))
        if not error <= bound:  # also true for NaN
            raise EngineMismatchError(
                f"the engine's kernels for the vision towers differ from torch by {error:.2g}, at most {bound:.0e} "
                "expected"
            )


def checked_encoder(model: OpenVLAModel, images: Sequence[UInt8Array], *, strict: bool) -> VisionEncoder:
    """Return the vision encoder with fused kernels if they pass :func:`check_vision`, else with plain torch.

    A failure is logged, or raised as EngineMismatchError with ``strict``.
    """
    encoder = VisionEncoder(model)

    def check() -> None:
        with explain_device_errors(model.device):
            check_vision(encoder, images)

    instead = "torch runs the vision towers instead of the engine's kernels"
    return encoder if agrees(check, instead, strict=strict) else VisionEncoder(model, TowerOps())
