"""The measurement itself: the same pictures and words through the plain path and through the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vla_ros.bench.models import Subject
from vla_ros.engine.executor import Answer, Engine
from vla_ros.types import CameraFrame, IntArray, UInt8Array
from vla_ros.vision.decode import decode_image, image_stamp

IN_AND_OUT = ("upload", "preprocess", "download", "post")
"""Stages that are neither the message's way nor the network."""
STAGES = ("receive", "upload", "preprocess", "vision", "prefill", "decode", "download", "post")


@dataclass
class Times:
    """Milliseconds of many steps.

    Attributes:
        total: One per step.
        stages: Stage to one per step.
    """

    total: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)

    def add(self, total: float, stages: dict[str, float]) -> None:
        """One step."""
        self.total.append(total)
        for name, value in stages.items():
            self.stages.setdefault(name, []).append(value)

    def percentile(self, share: float) -> float:
        """Of the totals, in milliseconds."""
        return float(np.percentile(self.total, share))

    def together(self, *names: str) -> float:
        """Median of the sum of some stages, in milliseconds; those that were not there count nothing."""
        sums = np.sum([self.stages.get(name, [0.0] * len(self.total)) for name in names], axis=0)
        return float(np.median(sums))

    def medians(self) -> dict[str, float]:
        """Median of each stage, in order."""
        return {name: float(np.median(self.stages[name])) for name in STAGES if name in self.stages}


class Trip:
    """A camera message's way to an action, as the node takes it: from the frame on, all is done on the device."""

    def __init__(self, subject: Subject, engine: Engine) -> None:
        self._subject, self._engine = subject, engine

    def step(self, message: bytes, prompt: IntArray, draft: IntArray | None) -> tuple[Answer, dict[str, float]]:
        """One ``sensor_msgs/Image`` to one action; the answer, and milliseconds by stage with ``total``."""
        began = time.perf_counter()
        image_stamp(message)
        frame = CameraFrame(decode_image(message).image)
        received = time.perf_counter()
        answer = self._engine.answer([frame], [prompt], [draft])[0]
        answered = time.perf_counter()
        normalized = self._subject.bins.decode(answer.tokens)
        self._subject.statistics.unnormalize(normalized)
        ended = time.perf_counter()
        stages = {
            "receive": 1e3 * (received - began),
            **answer.stages_ms,
            "post": 1e3 * (ended - answered),
        }
        return answer, {"total": 1e3 * (ended - began), **stages}


def run_engine(
    trip: Trip, messages: Sequence[bytes], prompt: IntArray, drafts: Sequence[IntArray | None], warmup: int
) -> tuple[Times, list[Answer]]:
    """Every message once, after ``warmup`` steps that do not count."""
    times, answers = Times(), []
    for index in range(-warmup, len(messages)):
        answer, stages = trip.step(messages[index % len(messages)], prompt, drafts[index % len(drafts)])
        if index >= 0:
            total = stages.pop("total")
            times.add(total, stages)
            answers.append(answer)
    return times, answers


@torch.inference_mode()
def run_baseline(
    subject: Subject, plain: Any, images: Sequence[UInt8Array], prompt: IntArray, count: int, warmup: int
) -> tuple[list[float], list[IntArray]]:
    """``generate`` of transformers, eager, over the same weights: milliseconds and tokens of each picture.

    Args:
        subject: For the vision towers, run eagerly.
        plain: From :func:`~vla_ros.bench.models.eager_baseline`.
        images: Uint8 [H, W, 3] of the model's size.
        prompt: Int64 [L].
        count: Tokens to decode.
        warmup: Steps that do not count.
    """
    model, times, tokens = subject.model, [], []
    ids = torch.from_numpy(prompt)[None].to(model.device)
    for index in range(-warmup, len(images)):
        began = time.perf_counter()
        image = torch.from_numpy(images[index % len(images)])[None].to(model.device)
        sequence = model.embed_sequence(model.embed_image(model.normalize(image)), ids)
        mask = torch.ones(sequence.shape[:2], dtype=torch.int64, device=model.device)
        made = plain.generate(
            inputs_embeds=sequence, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        answer = made[0, -count:].cpu().numpy()
        if index >= 0:
            times.append(1e3 * (time.perf_counter() - began))
            tokens.append(answer)
    return times, tokens


def compare(ours: Sequence[Answer], theirs: Sequence[IntArray]) -> dict[str, Any]:
    """How far two paths agree: whole answers, tokens, and how near a tie each first difference was.

    Greedy decoding that differs once goes on from another token, so only the first difference of an answer is a
    difference between the paths; ``token_match`` counts tokens up to it.
    """
    same = matched = counted = 0
    near: list[float] = []
    for answer, tokens in zip(ours, theirs, strict=True):
        differing: NDArray[np.intp] = np.flatnonzero(answer.tokens != tokens)
        if differing.size == 0:
            same, matched, counted = same + 1, matched + len(tokens), counted + len(tokens)
        else:
            first = int(differing[0])
            matched, counted = matched + first, counted + first + 1
            near.append(round(float(answer.margins[first]), 5))
    return {
        "tokens_equal": same == len(theirs),
        "answers_equal": same / len(theirs),
        "token_match": matched / counted,
        "mismatch_margins": near,
    }
