"""Builds OpenVLA-OFT's engine and reference path from a loaded model, and compares their chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vla_ros.engine.device_errors import EngineMismatchError
from vla_ros.engine.device_ops import make_ops
from vla_ros.engine.llama import as_loaded
from vla_ros.engine.ops import Ops
from vla_ros.engine.runner import make_runner
from vla_ros.engine.tolerances import TOLERANCES, relative_error
from vla_ros.engine.weights import DecoderWeights, fuse
from vla_ros.policies.oft.inference import Chunk, ChunkInference
from vla_ros.policies.oft.network import OFTModel
from vla_ros.policies.openvla.vision_encoder import VisionEncoder


def plain_inference(model: OFTModel, steps: int = 50) -> ChunkInference:
    """Return the reference path: plain torch, sequences without padding."""

    def encode(images: torch.Tensor, film: Sequence[torch.Tensor]) -> torch.Tensor:
        return model.embed_image(model.normalize(images), film)

    runner = make_runner(model.device, graphs=False)
    weights = as_loaded(model.language_model)
    return ChunkInference(model, weights, model.ops, encode, runner, steps, bucket_step=1)


def make_chunk_engine(
    model: OFTModel,
    weights: DecoderWeights | None = None,
    ops: Ops | None = None,
    encode: VisionEncoder | None = None,
    steps: int = 50,
    quantization: str = "none",
    *,
    background: bool = True,
) -> ChunkInference:
    """Return the engine over the weights of ``model``: fused kernels, one graph per padded length.

    ``weights`` is the decoder if it was quantised while loading; None fuses the decoder of ``model`` with
    ``quantization``. ``ops`` and ``encode`` default to the device's.
    """
    if weights is None:
        weights = fuse(model.language_model, quantization)
    return ChunkInference(
        model,
        weights,
        ops or make_ops(weights.device),
        encode or VisionEncoder(model),
        make_runner(weights.device),
        steps,
        background=background,
    )


def check_chunks(ours: Sequence[Chunk], theirs: Sequence[Chunk], dtype: torch.dtype) -> None:
    """Compare the engine's chunks with the reference path's; EngineMismatchError means more than rounding."""
    bounds = TOLERANCES[dtype]
    for one, other in zip(ours, theirs, strict=True):
        if one.tokens is not None and other.tokens is not None:
            error = float(other.margins[one.tokens != other.tokens].max(initial=0.0))
            good = error <= bounds.near_tie
        else:
            error = relative_error(torch.from_numpy(one.normalized), torch.from_numpy(other.normalized))
            good = error <= bounds.vision
        if not good:
            raise EngineMismatchError(f"the engine's chunk differs from the reference path's by {error:.2g}")
