"""Runs camera messages through the engine, plain and with drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import numpy as np

from vla_ros.bench.models import Subject
from vla_ros.bench.times import Stopwatch, Times, collect
from vla_ros.engine.drafts import DraftState
from vla_ros.engine.executor import Answer, Engine, Request
from vla_ros.types import IntArray, RawImage
from vla_ros.vision.decode import decode_image
from vla_ros.vision.messages import image_stamp
from vla_ros.vision.processors import ResizeNaive


@dataclass(frozen=True)
class Measurement:
    """Runs camera messages to actions as the node does, with everything after decoding on the device."""

    subject: Subject  # the model
    engine: Engine  # what executes it
    message: Callable[[int], bytes]  # index to ``sensor_msgs/Image``
    count: int  # how many messages there are
    prompt: IntArray  # int64 [L]

    def image(self, message: bytes) -> RawImage:
        """Return the decoded message with the engine's resize."""
        return RawImage(decode_image(message).image, processor=ResizeNaive(self.engine.options.image_size))

    def step(self, message: bytes, draft: DraftState) -> tuple[Answer, dict[str, float]]:
        """Run one message; return the engine's answer and milliseconds by stage with ``total``."""
        watch = Stopwatch()
        image_stamp(message)
        frame = self.image(message)
        watch.lap("receive")
        answer = self.engine.answer([Request(frame, self.prompt, draft)])[0]
        watch.lap("infer", answer.stages_ms)
        self.subject.statistics.unnormalize(self.subject.bins.decode(answer.tokens))
        watch.lap("post")
        return answer, watch.milliseconds

    def run(
        self, drafts: Sequence[IntArray | None] = (None,), warmup: int = 0, which: Sequence[int] | None = None
    ) -> tuple[Times, list[Answer]]:
        """Run and time the steps; messages are made between them, untimed.

        ``drafts`` has one draft per message, or one for all; ``warmup`` steps come first; ``which`` selects and
        orders the messages.
        """
        times, answers, state = [], [], DraftState()
        order = range(self.count) if which is None else which
        for number, index in enumerate(chain(islice(cycle(order), warmup), order)):
            draft = drafts[index % len(drafts)]
            state = replace(state, tokens=() if draft is None else tuple(draft))
            answer, took = self.step(self.message(index), state)
            state = answer.draft
            if number >= warmup:
                times.append(took)
                answers.append(answer)
        return collect(times), answers


class RightDrafts(NamedTuple):
    """Times with the engine's own plain answers as drafts."""

    accepted: Times  # steps whose draft the prefill accepted in full, without a further pass
    verified: Times  # steps with further passes, because some margin was below the guard
    share: float  # share of drafts that were accepted in full, on unselected images
    images: int  # different images among ``accepted``
    equal: bool  # all tokens were those of plain decoding


def run_right_drafts(measurement: Measurement, answers: Sequence[Answer], steps: int, warmup: int) -> RightDrafts:
    """Measure the effect of a correct draft over ``steps`` steps of each kind.

    The prefill accepts a draft if all its margins exceed the guard. With random weights that is rare for a whole
    action, so only a few steps would measure an accepted draft. Therefore ``share`` and ``verified`` are measured
    on
    unselected images, and ``accepted`` on images whose margins exceed the guard at every token and whose draft was
    accepted in a trial, repeated in turn. ``answers`` are those of plain decoding, one per message.
    """
    drafts = [answer.tokens for answer in answers]
    equal = True

    def run(which: Sequence[int], warmup: int = 0) -> tuple[Times, list[bool]]:
        nonlocal equal
        times, found = measurement.run(drafts, warmup, which)
        equal &= all(np.array_equal(drafts[i], answer.tokens) for i, answer in zip(which, found, strict=True))
        return times, [answer.accepted is not None and answer.passes == 0 for answer in found]

    def select(times: Times, wanted: Sequence[bool]) -> Times:
        return {name: each[np.array(wanted, bool)] for name, each in times.items()}

    times, whole = run(range(min(steps, len(answers))), warmup)
    least = [float(answer.margins[1:].min(initial=np.inf)) for answer in answers]
    sure = sorted(
        (i for i, margin in enumerate(least) if margin > measurement.engine.guard), key=lambda i: -least[i]
    )
    sure = sure[:steps]
    _, tried = run(sure)
    kept = [index for index, accepted in zip(sure, tried, strict=True) if accepted]
    again, repeated = run(list(islice(cycle(kept), steps)), warmup)
    unaccepted = select(times, [not accepted for accepted in whole])
    return RightDrafts(select(again, repeated), unaccepted, sum(whole) / len(whole), len(kept), equal)


def compare(ours: Sequence[Answer], theirs: Sequence[IntArray]) -> dict[str, Any]:
    """Compare two paths: equal answers, equal tokens, and the margin at each first difference.

    After a first difference greedy decoding continues from another token, so only the first difference of an answer
    counts; ``token_match`` counts tokens up to it.
    """
    same = matched = counted = 0
    near: list[float] = []
    for answer, tokens in zip(ours, theirs, strict=True):
        differing = np.flatnonzero(answer.tokens != tokens)
        first = int(differing[0]) if differing.size else len(tokens)
        same, matched, counted = (
            same + (not differing.size),
            matched + first,
            counted + first + bool(differing.size),
        )
        if differing.size:
            near.append(round(float(answer.margins[first]), 5))
    return {
        "tokens_equal": same == len(theirs),
        "answers_equal": same / len(theirs),
        "token_match": matched / counted,
        "mismatch_margins": near,
    }
