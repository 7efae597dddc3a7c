"""What is checked before the first frame: the model sees, and the engine sees and answers as the reference does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vla_ros.engine.executor import Engine
from vla_ros.engine.frames import resized_on_host
from vla_ros.engine.health import EngineMismatchError
from vla_ros.engine.preprocess import is_exact
from vla_ros.errors import CheckpointError
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.reference import answer, to_device
from vla_ros.types import CameraFrame, IntArray, UInt8Array

logger = logging.getLogger(__name__)

THRESHOLD = 1e-4
"""Least change of a logit between two pictures, as a share of the logits' spread. Rounding stays below it."""

NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Logit margin up to which another order of rounding may choose another token. In bfloat16 a drafted
prefill and decoding lay 0.12 apart at most (docs/engine.md); other layers add to that here."""


GUARD_SLACK = 3.0
"""The guard in units of the largest difference that two pictures showed: others may show more."""


def two_pictures(height: int, width: int) -> tuple[UInt8Array, UInt8Array]:
    """Noise, and a half red picture: uint8 [height, width, 3] each."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    plain = np.full((height, width, 3), 32, dtype=np.uint8)
    plain[:, : width // 2, 0] = 224
    return noise, plain


def _blind(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: the model does not see: two different pictures {what}. The vision towers or the projector are "
        "damaged or untrained; policy.self_test:=false starts it all the same"
    )


@torch.inference_mode()
def check_sight(model: OpenVLAModel, pictures: Sequence[UInt8Array], prompt: IntArray, folder: Path) -> None:
    """Refuse a model whose answer does not depend on the picture.

    A model that never runs its vision still answers, always with the same action. It happens to people who load
    the published code with a transformers version that skips the picture, and with half-copied weights.

    Args:
        model: On its device.
        pictures: Two, uint8 [H, W, 3].
        prompt: Int64 [L].
        folder: Of the checkpoint, for the message.

    Raises:
        CheckpointError: Logits are not finite, or equal for both pictures.
    """
    ids = torch.from_numpy(prompt)[None].to(model.device)
    first, second = (
        model.prefill(model.embed_image(model.normalize(to_device(picture, model.device))), ids)[0]
        for picture in pictures
    )
    if not bool(torch.isfinite(first).all() and torch.isfinite(second).all()):
        raise CheckpointError(f"{folder}: the first answer is NaN or Inf; the weights are damaged")
    change = (first - second).abs().max().item()
    spread = first.std().item()
    if change <= THRESHOLD * spread:
        raise _blind(folder, f"change its logits by {change:.2g} (their spread is {spread:.2g})")


def check_engine_sight(engine: Engine, pictures: Sequence[UInt8Array], prompt: IntArray, folder: Path) -> None:
    """As :func:`check_sight` through the engine, for weights that only it holds.

    Raises:
        CheckpointError: Both pictures get the same tokens and logit margins.
    """
    one, other = (engine.answer(picture[None], [prompt])[0] for picture in pictures)
    if np.array_equal(one.tokens, other.tokens) and np.allclose(one.margins, other.margins, 1e-4):
        raise _blind(folder, "leave tokens and logit margins as they are")


def check_engine(
    model: OpenVLAModel, engine: Engine, pictures: Sequence[UInt8Array], prompt: IntArray, count: int
) -> None:
    """Compare the engine's answers with those of the reference path over the same weights.

    Args:
        model: The reference path.
        engine: Over the same weights, not quantised.
        pictures: Uint8 [H, W, 3] each.
        prompt: Int64 [L].
        count: Tokens of an answer.

    Raises:
        EngineMismatchError: A token differs where the reference was sure of it.
    """
    ids = torch.from_numpy(prompt)[None].to(model.device)
    near = NEAR_TIE.get(engine.weights.dtype, NEAR_TIE[torch.bfloat16])
    for picture in pictures:
        expected, margins, _ = answer(model, picture, ids, count)
        found = engine.answer(picture[None], [prompt])[0].tokens
        differing = np.flatnonzero(found != expected)
        # Behind a near-tie that went the other way all further tokens answer another question.
        if differing.size and margins[differing[0]] > near:
            raise EngineMismatchError(
                f"the engine answers {found.tolist()}, the reference path {expected.tolist()}: token "
                f"{differing[0]} differs though its logit is ahead by {margins[differing[0]]:.2g}"
            )


def fit_guard(engine: Engine, pictures: Sequence[UInt8Array], prompt: IntArray) -> None:
    """Raise the engine's guard where these weights need it.

    :data:`~vla_ros.engine.drafts.GUARDS` were measured on weights whose logits may spread less. Every picture's
    answer is drafted for every picture.

    Args:
        engine: Warm.
        pictures: Uint8 [H, W, 3] each.
        prompt: Int64 [L].
    """
    if engine.options.drafts != "prefill":
        return
    answers = [engine.answer(picture[None], [prompt])[0].tokens for picture in pictures]
    largest = max(engine.draft_error(picture, prompt, tokens) for picture in pictures for tokens in answers)
    if not GUARD_SLACK * largest <= engine.guard:
        logger.info(
            "policy.drafts: a drafted token counts from a logit margin of %.2g on instead of %.2g: with these "
            "weights prefill and decoding differ by up to %.2g",
            GUARD_SLACK * largest,
            engine.guard,
            largest,
        )
        engine.guard = GUARD_SLACK * largest


def check_resizing(engine: Engine, frame: CameraFrame) -> None:
    """Compare what the engine makes of a camera's frame with what the host makes of it; both are warm then.

    Where there are graphs, twice: launch by launch, as the first frame of a size is resized, and by the graph.
    Nothing is compared where the two may differ: such frames are resized on the host.

    Raises:
        EngineMismatchError: A value differs.
    """
    if not is_exact(frame.pipeline):
        return
    expected = resized_on_host(frame, engine.options.image_size)
    for _ in range(2 if engine.runner.graphs else 1):
        found = engine.resized(frame)
        if not np.array_equal(found, expected):
            height, width, _ = frame.pixels.shape
            raise EngineMismatchError(
                f"{engine.weights.device} resizes a frame of {width}x{height} otherwise than the host: "
                f"{np.mean(found != expected):.2%} of the values differ"
            )
        engine.wait()
