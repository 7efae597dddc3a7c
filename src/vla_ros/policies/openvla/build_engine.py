"""Builds the engine (:mod:`vla_ros.engine`) from the reference model's weights, and checks it at start."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from vla_ros.engine.device_errors import EngineMismatchError
from vla_ros.engine.executor import Engine, EngineOptions, EngineRequest
from vla_ros.engine.ops import Ops
from vla_ros.engine.resizer import resizes
from vla_ros.engine.step_graphs import Encode
from vla_ros.engine.tolerances import GUARD_SLACK, TOLERANCES
from vla_ros.engine.weights import DecoderWeights, assemble, fuse, fuse_layer
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.checkpoint_files import Produce
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.reference import answer
from vla_ros.policies.openvla.vision_encoder import VisionEncoder
from vla_ros.policies.weights import place
from vla_ros.types import IntArray, RawImage, UInt8Array
from vla_ros.vision.preprocess import process

logger = logging.getLogger(__name__)


def check_engine(
    model: OpenVLAModel, engine: Engine, images: Sequence[UInt8Array], prompt: IntArray, count: int
) -> None:
    """Compare the engine's tokens with the reference path's, for unquantised weights.

    Raises EngineMismatchError if a token differs where the reference path has a clear margin.
    """
    near = TOLERANCES[engine.weights.dtype].near_tie
    for image in images:
        expected, margins, _ = answer(model, image, prompt, count)
        found = engine.answer([EngineRequest(image, prompt)])[0].tokens
        differing = np.flatnonzero(found != expected)
        # Only the first difference counts, because later tokens follow another prefix.
        if differing.size and margins[differing[0]] > near:
            raise EngineMismatchError(
                f"the engine decodes {found.tolist()}, the reference path {expected.tolist()}: token "
                f"{differing[0]} differs, although its logit leads by {margins[differing[0]]:.2g}"
            )


def fit_guard(engine: Engine, images: Sequence[UInt8Array], prompt: IntArray) -> None:
    """Raise the engine's guard if these weights make drafted logits differ more than usual.

    The default guards in :mod:`vla_ros.engine.tolerances` were measured with other weights. The tokens decoded for
    each image serve as drafts for all images.
    """
    if engine.options.drafts != "prefill":
        return
    answers = [engine.answer([EngineRequest(image, prompt)])[0].tokens for image in images]
    largest = max(engine.draft_error(image, prompt, tokens) for image in images for tokens in answers)
    if not GUARD_SLACK * largest <= engine.guard:
        logger.info(
            "policy.drafts: drafted tokens need a logit margin of %.2g instead of %.2g, because prefill and "
            "decoding differ by up to %.2g with these weights",
            GUARD_SLACK * largest,
            engine.guard,
            largest,
        )
        engine.guard = GUARD_SLACK * largest


def check_resizing(engine: Engine, frame: RawImage) -> None:
    """Check that the engine processes a camera image as the host does; warms up both.

    With graphs, compares twice: without a graph, as for the first image of each size, and with a graph. Skips
    processors without exact resampling steps, because the host resizes their images. Raises EngineMismatchError if
    a value differs.
    """
    if not resizes(engine.weights.device, frame):
        return
    expected = process(frame)
    for _ in range(2 if engine.runner.graphs else 1):
        found = engine.resized(frame)
        if not np.array_equal(found, expected):
            height, width, _ = frame.pixels.shape
            raise EngineMismatchError(
                f"{engine.weights.device} resizes an image of {width}x{height} differently from the host: "
                f"{np.mean(found != expected):.2%} of the values differ"
            )
        engine.wait()


_LAYERS = "language_model.model.layers."


def make_engine(
    model: OpenVLAModel,
    answer: int,
    quantization: str = "none",
    drafts: str = "prefill",
    *,
    keep: bool = True,
    weights: DecoderWeights | None = None,
    ops: Ops | None = None,
    encode: Encode | None = None,
) -> Engine:
    """Return an engine that runs the weights of ``model``.

    ``model`` must be loaded, unquantised and on its device. ``answer`` is the number of tokens to decode;
    ``drafts`` is ``policy.drafts``. With ``keep``, ``model`` stays usable: dense weights are shared, and quantised
    weights are copies. Without ``keep``, the decoder's dense weights are freed layer by layer. ``weights`` are from
    :func:`fill_quantized`. ``ops`` and ``encode`` default to those of the device.
    """
    size = model.architecture.image_size
    if weights is None:
        weights = fuse(model.language_model, quantization, keep=keep)
    return Engine(
        VisionEncoder(model) if encode is None else encode,
        weights,
        model.architecture.patches,
        EngineOptions(answer=answer, image_size=(size, size), drafts=drafts),
        ops,
    )


def fill_quantized(
    model: OpenVLAModel,
    produce: Produce,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    progress: Progress = no_progress,
) -> DecoderWeights:
    """Load the weights to ``device``; quantise one decoder layer at a time to save memory.

    ``model`` is from :func:`~vla_ros.policies.openvla.loading.build_empty`; afterwards everything except its
    decoder layers is usable. ``produce`` yields the tensors; unquantised parameters have the data type ``dtype``.
    """
    names = [name for name, _ in model.named_parameters()]
    for name, tensor in produce([name for name in names if not name.startswith(_LAYERS)]):
        place(model, name, tensor, device, dtype)
    fused = []
    for index, layer in enumerate(model.language_model.layers):
        for name, tensor in produce([name for name in names if name.startswith(f"{_LAYERS}{index}.")]):
            place(model, name, tensor, device, dtype)
        fused.append(fuse_layer(layer, quantization, keep=False))
        progress((index + 1) / model.architecture.llm.layers, f"quantising layer {index + 1}")
    model.to(device)
    return assemble(model.language_model, tuple(fused))
