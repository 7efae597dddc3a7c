"""Runs camera messages through the engine, plain and with drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_ros.bench.inputs import OnDemand
from vla_ros.bench.models import Subject
from vla_ros.engine.drafts import DraftState
from vla_ros.engine.executor import Answer, Engine, Request
from vla_ros.types import IntArray, RawImage
from vla_ros.vision.decode import decode_image, image_stamp
from vla_ros.vision.processors import ResizeNaive

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

    def only(self, wanted: Sequence[bool]) -> Times:
        """Return the selected steps, given one flag per step."""

        def pick(values: list[float]) -> list[float]:
            return [value for value, keep in zip(values, wanted, strict=True) if keep]

        return Times(pick(self.total), {name: pick(values) for name, values in self.stages.items()})

    def percentile(self, share: float) -> float:
        """Of the totals, in milliseconds."""
        return float(np.percentile(self.total, share))

    def percentiles(self) -> dict[str, float] | None:
        """``p50`` and ``p99`` of the totals in milliseconds; None without steps."""
        return {"p50": self.percentile(50), "p99": self.percentile(99)} if self.total else None

    def between(self) -> float:
        """Median of a step's time outside its stages, the host's work, in milliseconds."""
        return float(np.median(np.array(self.total) - np.sum(list(self.stages.values()), axis=0)))

    def together(self, *names: str) -> float:
        """Median of the sum of some stages, in milliseconds; missing stages count as zero."""
        sums = np.sum([self.stages.get(name, [0.0] * len(self.total)) for name in names], axis=0)
        return float(np.median(sums))

    def medians(self) -> dict[str, float]:
        """Median of each stage, in order."""
        return {name: float(np.median(self.stages[name])) for name in STAGES if name in self.stages}


class InferenceStep:
    """A camera message to an action, as the node does it: everything behind decoding runs on the device."""

    def __init__(self, subject: Subject, engine: Engine) -> None:
        self._subject, self._engine = subject, engine

    def run(self, message: bytes, prompt: IntArray, draft: DraftState) -> tuple[Answer, dict[str, float]]:
        """One ``sensor_msgs/Image`` to one action; the answer, and milliseconds by stage with ``total``."""
        began = time.perf_counter()
        image_stamp(message)
        frame = RawImage(decode_image(message).image, processor=ResizeNaive(self._engine.options.image_size))
        received = time.perf_counter()
        answer = self._engine.answer([Request(frame, prompt, draft)])[0]
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


@dataclass(frozen=True)
class Asked:
    """Inputs that every pass of a measurement shares.

    Attributes:
        step: From a message to an action.
        messages: ``sensor_msgs/Image``.
        prompt: Int64 [L].
    """

    step: InferenceStep
    messages: OnDemand[bytes]
    prompt: IntArray

    def run(
        self, drafts: Sequence[IntArray | None], warmup: int = 0, which: Sequence[int] | None = None
    ) -> tuple[Times, list[Answer]]:
        """Run and time the steps; messages are made between them, untimed.

        Args:
            drafts: One per message, or a single one for all.
            warmup: First, unmeasured steps.
            which: Messages to use, in this order; default: all.
        """
        times, answers, state = Times(), [], DraftState()
        order = range(len(self.messages)) if which is None else which
        for number, index in enumerate(chain(islice(cycle(order), warmup), order)):
            draft = drafts[index % len(drafts)]
            state = replace(state, tokens=() if draft is None else tuple(draft))
            answer, stages = self.step.run(self.messages[index], self.prompt, state)
            state = answer.draft
            if number >= warmup:
                times.add(stages.pop("total"), stages)
                answers.append(answer)
        return times, answers


@dataclass(frozen=True)
class RightDrafts:
    """Times with the engine's own plain answers as drafts.

    Attributes:
        accepted: Steps whose draft the prefill accepted in full, without a further pass.
        verified: Steps with further passes, because some margin was below the guard.
        share: Share of drafts that were accepted in full, on unselected images.
        images: Different images among ``accepted``.
        equal: All tokens were those of plain decoding.
    """

    accepted: Times
    verified: Times
    share: float
    images: int
    equal: bool


def run_right_drafts(asked: Asked, answers: Sequence[Answer], guard: float, steps: int, warmup: int) -> RightDrafts:
    """Measure the effect of a correct draft.

    The prefill accepts a draft if all its margins exceed the guard. With random weights that is rare for a whole
    answer, so only a few steps would time an accepted draft. Therefore ``share`` and ``verified`` are measured on
    unselected images, and ``accepted`` on images whose margins exceed the guard at every token and whose draft was
    accepted in a trial, repeated for ``steps`` steps.

    Args:
        asked: Inputs.
        answers: Answers of plain decoding, one per message.
        guard: The engine's guard.
        steps: Number of steps of each kind.
        warmup: Unmeasured steps.
    """
    drafts = [answer.tokens for answer in answers]

    def equal(which: Sequence[int], found: Sequence[Answer]) -> bool:
        return all(np.array_equal(drafts[index], answer.tokens) for index, answer in zip(which, found, strict=True))

    first = range(min(steps, len(answers)))
    times, offered = asked.run(drafts, warmup, first)
    whole = [_accepted(answer) for answer in offered]
    least = [float(answer.margins[1:].min(initial=np.inf)) for answer in answers]
    sure = sorted((index for index in range(len(answers)) if least[index] > guard), key=lambda i: -least[i])[:steps]
    _, tried = asked.run(drafts, which=sure)
    kept = [index for index, answer in zip(sure, tried, strict=True) if _accepted(answer)]
    order = list(islice(cycle(kept), steps))
    again, repeated = asked.run(drafts, warmup, order)
    return RightDrafts(
        accepted=again.only([_accepted(answer) for answer in repeated]),
        verified=times.only([not one for one in whole]),
        share=sum(whole) / len(whole),
        images=len(kept),
        equal=equal(first, offered) and equal(sure, tried) and equal(order, repeated),
    )


def _accepted(answer: Answer) -> bool:
    return answer.accepted is not None and answer.passes == 0


def compare(ours: Sequence[Answer], theirs: Sequence[IntArray]) -> dict[str, Any]:
    """Compare two paths: equal answers, equal tokens, and the margin at each first difference.

    After a first difference greedy decoding continues from another token, so only the first difference of an answer
    counts; ``token_match`` counts tokens up to it.
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
