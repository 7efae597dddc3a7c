"""One answer on the reference path: plain torch, one operation after the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.stages import StageTimer
from vla_ros.types import FloatArray, IntArray, UInt8Array


@torch.inference_mode()
def answer(
    model: OpenVLAModel, image: UInt8Array, input_ids: Tensor, count: int
) -> tuple[IntArray, FloatArray, dict[str, float]]:
    """Decode greedily.

    Args:
        model: On its device.
        image: Uint8 [H, W, 3] RGB of the model's size.
        input_ids: Int64 [1, L] on the model's device.
        count: Tokens to decode, D.

    Returns:
        Tokens int64 [D], best minus second-best logit of each [D], and stages in milliseconds.
    """
    timer = StageTimer(model.device)
    pixels = model.normalize(to_device(image, model.device))
    timer.mark("preprocess")
    patches = model.embed_image(pixels)
    timer.mark("vision")
    logits, cache = model.prefill(patches, input_ids, room=count)
    timer.mark("prefill")
    found = model.greedy(logits, cache, count)
    timer.mark("decode")
    tokens, margins = found.tokens[0].cpu().numpy(), found.margins[0].cpu().numpy()
    return tokens, margins.astype(np.float64), timer.milliseconds()


def to_device(image: UInt8Array, device: torch.device) -> Tensor:
    """Uint8 [1, H, W, 3] there."""
    # Copied (a few microseconds): views with negative strides and read-only arrays do not become tensors.
    return torch.from_numpy(image.copy())[None].to(device)
