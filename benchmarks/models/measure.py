"""Runs camera messages through the engine, plain and with drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.models.subject import Subject
from vla_ros.types import IntArray, RawImage
from vla_ros.vision.decode import decode_image
from vla_ros.vision.messages import CdrBytes
from vla_ros.vision.processors import ResizeNaive
from vla_ros_lab.bench.times import Stopwatch, Times, collect
from vla_ros_models.engine.drafts import DraftState
from vla_ros_models.engine.token_engine import EngineRequest, EngineResult, TokenEngine


@dataclass(frozen=True)
class Measurement:
    """Runs camera messages to actions as the node does, with everything after decoding on the device."""

    subject: Subject  # the model
    engine: TokenEngine  # what executes it
    message: Callable[[int], CdrBytes]  # index to ``sensor_msgs/Image``
    count: int  # how many messages there are
    prompt: IntArray  # int64 [L]

    def image(self, message: CdrBytes) -> RawImage:
        """Decode a message and return its image, resized as the engine does it."""
        return RawImage(decode_image(message).image, processor=ResizeNaive(self.engine.options.image_size))

    def step(self, message: CdrBytes, draft: DraftState) -> tuple[EngineResult, dict[str, float]]:
        """Run one message; return the engine's answer and milliseconds by stage with ``total``."""
        watch = Stopwatch()
        frame = self.image(message)
        watch.lap("receive")
        answer = self.engine.answer([EngineRequest(frame, self.prompt, draft)])[0]
        watch.lap("infer", answer.stages_ms)
        self.subject.statistics.unnormalize(self.subject.bins.decode(answer.tokens))
        watch.lap("post")
        return answer, watch.milliseconds

    def run(
        self, drafts: Sequence[IntArray | None] = (None,), warmup: int = 0, which: Sequence[int] | None = None
    ) -> tuple[Times, list[EngineResult]]:
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

    accepted: Times  # steps whose draft the prefill accepted, whatever its margins
    verified: Times  # steps with further passes, because some margin was below the guard
    share: float  # share of drafts that the prefill accepted
    equal: bool  # all tokens were those of plain decoding


def run_right_drafts(
    measurement: Measurement, answers: Sequence[EngineResult], steps: int, warmup: int
) -> RightDrafts:
    """Measure the effect of a correct draft over ``steps`` steps.

    With random weights the two best logits are close, so the guard rejects nearly every draft. The time of a step
    does not depend on its margins: a second run without guard measures the steps whose draft is accepted.
    ``answers`` are those of plain decoding, one per message.
    """
    drafts, which = [answer.tokens for answer in answers], range(min(steps, len(answers)))
    times, found = measurement.run(drafts, warmup, which)
    equal = all(np.array_equal(draft, answer.tokens) for draft, answer in zip(drafts, found, strict=False))
    whole = np.array([answer.passes == 0 for answer in found])
    guard, measurement.engine.guard = measurement.engine.guard, 0.0
    unguarded, found = measurement.run(drafts, warmup, which)
    measurement.engine.guard = guard
    accepted = np.array([answer.passes == 0 for answer in found])
    return RightDrafts(_select(unguarded, accepted), _select(times, ~whole), float(whole.mean()), equal)


def _select(times: Times, wanted: NDArray[np.bool_]) -> Times:
    return {name: each[wanted] for name, each in times.items()}


def compare(ours: Sequence[EngineResult], theirs: Sequence[IntArray]) -> dict[str, Any]:
    """Compare two paths: equal answers, equal tokens, and the margin at each first difference.

    After a first difference greedy decoding continues from another token, so only the first difference of an answer
    counts; ``token_match`` counts tokens up to it.
    """
    same = matched = counted = 0
    near: list[float] = []
    for answer, tokens in zip(ours, theirs, strict=True):
        differing = np.flatnonzero(answer.tokens != tokens)
        first = int(differing[0]) if differing.size else len(tokens)
        same += not differing.size
        matched += first
        counted += first + bool(differing.size)
        if differing.size:
            near.append(round(float(answer.margins[first]), 5))
    return {
        "tokens_equal": same == len(theirs),
        "answers_equal": same / len(theirs),
        "token_match": matched / counted,
        "mismatch_margins": near,
    }
