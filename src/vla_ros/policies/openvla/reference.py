"""One inference on the reference path, in plain torch."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from vla_ros.engine.device_errors import require_finite
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.types import FloatArray, IntArray, UInt8Array


@torch.inference_mode()
def answer(
    model: OpenVLAModel, image: UInt8Array, prompt: IntArray, count: int
) -> tuple[IntArray, FloatArray, dict[str, float]]:
    """Decode ``count`` tokens greedily from an RGB image, uint8 [H, W, 3], and a prompt.

    ``prompt`` is int64 [L]. Returns the tokens, int64 [count], their logit margins (best minus second-best) and the
    duration of each stage in milliseconds. Raises NotFiniteError if a margin is NaN or Inf.
    """
    stages: dict[str, float] = {}
    began = time.perf_counter()

    def end(stage: str) -> None:
        if model.device.type == "cuda":
            torch.cuda.current_stream(model.device).synchronize()  # a device-wide wait would break a capture
        stages[stage] = 1e3 * (time.perf_counter() - began) - sum(stages.values())

    pixels = model.normalize(to_device(image, model.device))
    end("preprocess")
    patches = model.embed_image(pixels)
    end("vision")
    logits, prefix = model.prefill(patches, torch.from_numpy(prompt)[None].to(model.device), room=count)
    end("prefill")
    found = model.greedy(logits, prefix, count)
    end("decode")
    margins: FloatArray = found.margins[0].double().cpu().numpy()
    require_finite(margins.tolist())
    return found.tokens[0].cpu().numpy(), margins, stages


def to_device(image: UInt8Array, device: torch.device) -> Tensor:
    """Copy an image to the device as uint8 [1, H, W, 3]."""
    # A copy takes microseconds; torch accepts neither negative strides nor read-only arrays.
    return torch.from_numpy(image.copy())[None].to(device)
