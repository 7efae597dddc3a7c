"""Start-up checks: the output depends on the image, and the engine agrees with the reference path."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vla_ros.engine.device_errors import EngineMismatchError
from vla_ros.engine.executor import Engine, Request
from vla_ros.engine.resizer import resizes
from vla_ros.engine.tolerances import GUARD_SLACK, SEES, TOLERANCES
from vla_ros.errors import CheckpointError
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.reference import answer, to_device
from vla_ros.types import IntArray, RawImage, UInt8Array
from vla_ros.vision.preprocess import process

logger = logging.getLogger(__name__)


def two_images(height: int, width: int) -> tuple[UInt8Array, UInt8Array]:
    """Return two different images, noise and a half-red one: uint8 [height, width, 3] each."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    plain = np.full((height, width, 3), 32, dtype=np.uint8)
    plain[:, : width // 2, 0] = 224
    return noise, plain


def _blind(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: the model does not see: two different images {what}. The vision towers or the projector are "
        "damaged or untrained; policy.self_test:=false starts it anyway"
    )


@torch.inference_mode()
def check_vision(model: OpenVLAModel, images: Sequence[UInt8Array], prompt: IntArray, folder: Path) -> None:
    """Refuse a model whose output does not depend on the image.

    A model that never runs its vision towers still returns an action, always the same. This happens when the
    published code runs with a transformers version that skips the image, or with incomplete weights. Raises
    CheckpointError if logits are not finite, or equal for the two images, uint8 [H, W, 3].
    """
    ids = torch.from_numpy(prompt)[None].to(model.device)
    first, second = (
        model.prefill(model.embed_image(model.normalize(to_device(image, model.device))), ids)[0]
        for image in images
    )
    if not bool(torch.isfinite(first).all() and torch.isfinite(second).all()):
        raise CheckpointError(f"{folder}: the first answer is NaN or Inf; the weights are damaged")
    change = (first - second).abs().max().item()
    spread = first.std().item()
    if change <= SEES * spread:
        raise _blind(folder, f"change its logits by {change:.2g} (their spread is {spread:.2g})")


def check_engine_vision(engine: Engine, images: Sequence[UInt8Array], prompt: IntArray, folder: Path) -> None:
    """Like :func:`check_vision`, but through the engine, for weights that exist only there."""
    one, other = (engine.answer([Request(image, prompt)])[0] for image in images)
    if np.array_equal(one.tokens, other.tokens) and np.allclose(one.margins, other.margins, 1e-4):
        raise _blind(folder, "leave tokens and logit margins as they are")


def check_engine(
    model: OpenVLAModel, engine: Engine, images: Sequence[UInt8Array], prompt: IntArray, count: int
) -> None:
    """Compare the engine's answers with those of the reference path over the same weights, unquantised.

    Raises EngineMismatchError if a token differs where the reference path has a clear margin.
    """
    ids = torch.from_numpy(prompt)[None].to(model.device)
    near = TOLERANCES[engine.weights.dtype].near_tie
    for image in images:
        expected, margins, _ = answer(model, image, ids, count)
        found = engine.answer([Request(image, prompt)])[0].tokens
        differing = np.flatnonzero(found != expected)
        # After a near-tie that went the other way, all further tokens follow another prefix.
        if differing.size and margins[differing[0]] > near:
            raise EngineMismatchError(
                f"the engine decodes {found.tolist()}, the reference path {expected.tolist()}: token "
                f"{differing[0]} differs though its logit is ahead by {margins[differing[0]]:.2g}"
            )


def fit_guard(engine: Engine, images: Sequence[UInt8Array], prompt: IntArray) -> None:
    """Raise the warm engine's guard if these weights need it.

    The guards of :mod:`vla_ros.engine.tolerances` were measured on weights whose logits may spread less. The tokens
    of each image are used as drafts for every image.
    """
    if engine.options.drafts != "prefill":
        return
    answers = [engine.answer([Request(image, prompt)])[0].tokens for image in images]
    largest = max(engine.draft_error(image, prompt, tokens) for image in images for tokens in answers)
    if not GUARD_SLACK * largest <= engine.guard:
        logger.info(
            "policy.drafts: a drafted token counts from a logit margin of %.2g on instead of %.2g: with these "
            "weights prefill and decoding differ by up to %.2g",
            GUARD_SLACK * largest,
            engine.guard,
            largest,
        )
        engine.guard = GUARD_SLACK * largest


def check_resizing(engine: Engine, frame: RawImage) -> None:
    """Compare the engine's processing of a camera's frame with the host's; warms up both.

    With graphs, compares twice: without a graph, as for the first frame of a size, and with it. Skips processors
    without exact resampling steps: the host resizes their frames. Raises EngineMismatchError if a value differs.
    """
    if not resizes(engine.weights.device, frame):
        return
    expected = process(frame)
    for _ in range(2 if engine.runner.graphs else 1):
        found = engine.resized(frame)
        if not np.array_equal(found, expected):
            height, width, _ = frame.pixels.shape
            raise EngineMismatchError(
                f"{engine.weights.device} resizes a frame of {width}x{height} differently from the host:  "
                f"{np.mean(found != expected):.2%} of the values differ"
            )
        engine.wait()
