"""The engine: pictures and prompts in, greedy tokens out, through programs that fit the prompt's length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vla_ros.engine import drafts as drafting
from vla_ros.engine.frames import FrameResizer
from vla_ros.engine.health import explain_device_errors, require_finite
from vla_ros.engine.ops import Ops, TorchOps
from vla_ros.engine.program import Program, See
from vla_ros.engine.programs import Programs
from vla_ros.engine.runner import Runner, make_runner
from vla_ros.engine.shapes import Buckets
from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import ConfigError, DeviceLostError
from vla_ros.types import CameraFrame, IntArray, UInt8Array

DRAFTS = ("none", "verify", "prefill")

_STAGES_PLAIN = ("vision", "prefill", "decode", "download")
_STAGES_DRAFTED = ("vision", "prefill", "download", "decode")  # its passes come and go with downloads between them


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs.

    Attributes:
        answer: Tokens to decode.
        image_size: (height, width) of its pictures.
        drafts: ``none``; ``verify`` checks drafts with the decoding kernels alone, so that tokens equal plain
            decoding to the bit; ``prefill`` checks them inside the prompt's pass, which saves one more pass and
            trusts a drafted row by its logit margin.
        guard: Least margin for ``prefill``; None takes :data:`~vla_ros.engine.drafts.GUARDS` by data type.
        background: True captures graphs of further prompt lengths while others answer.
        bucket_step: Tokens by which padded lengths grow.
    """

    answer: int
    image_size: tuple[int, int]
    drafts: str = "prefill"
    guard: float | None = None
    background: bool = True
    bucket_step: int = 32


@dataclass(frozen=True)
class Answer:
    """What the engine answers to one observation.

    Attributes:
        tokens: Int64 [D].
        margins: Float64 [D], best minus second-best logit.
        accepted: Tokens that a draft saved; None where none was tried.
        passes: Decoder passes after the prefill.
        stages_ms: ``upload`` (of pictures), ``preprocess`` (of frames), ``vision``, ``prefill`` (which begins with
            the words' upload), ``decode``, ``download``; with a draft ``decode`` comes last, and is what further
            passes take, with their ways to the device and back. The same for all observations of a batch.
    """

    tokens: IntArray
    margins: NDArray[np.float64]
    accepted: int | None
    passes: int
    stages_ms: dict[str, float] = field(default_factory=dict)


class Engine:
    """Answers B observations at a time. One thread uses it.

    Args:
        see: From uint8 pictures [B, H, W, 3] to patch embeddings; capturable, without waits.
        weights: The decoder.
        patches: Patch tokens of one picture.
        options: How it runs.
        ops: How it computes; None takes Triton on CUDA and torch elsewhere.
        runner: Where it runs; None takes that of the weights' device.

    Attributes:
        guard: Least margin, in logits, at which a drafted row of the prefill is believed; infinity where drafts are
            not checked there.
    """

    def __init__(
        self,
        see: See,
        weights: DecoderWeights,
        patches: int,
        options: EngineOptions,
        ops: Ops | None = None,
        runner: Runner | None = None,
    ) -> None:
        if options.drafts not in DRAFTS:
            raise ConfigError(f"policy.drafts: found {options.drafts!r}, expected one of {', '.join(DRAFTS)}")
        self.options = options
        self.weights = weights
        self.buckets = Buckets.up_to(patches, options.answer, weights.shape.max_positions, options.bucket_step)
        self.runner = make_runner(weights.device) if runner is None else runner
        self._see = see
        self._ops = make_ops(weights.device) if ops is None else ops
        self._patches = patches
        name = str(weights.dtype).removeprefix("torch.")
        self.guard = drafting.GUARDS[name] if options.guard is None else options.guard
        if options.drafts != "prefill":
            self.guard = inf
        self._resizer = FrameResizer(options.image_size, weights.device, self.runner, options.background)
        self._programs: dict[int, Programs[Program]] = {}
        self._policies: dict[int, drafting.DraftPolicy] = {}
        self._lost: DeviceLostError | None = None

    def warm_up(self, prompts: Sequence[int], batch: int = 1) -> None:
        """Make programs ready for prompts of these lengths in tokens, before the first answer.

        Raises:
            ConfigError: One is too long.
            OutOfMemoryError: There is no room.
        """
        programs = self._of(batch)
        with explain_device_errors(self.weights.device), self.runner.stream():
            for length in sorted({self.buckets.require(prompt) for prompt in prompts}, reverse=True):
                programs.ensure(length)

    @torch.inference_mode()
    def answer(
        self,
        images: UInt8Array | Sequence[CameraFrame],
        prompts: Sequence[IntArray],
        drafts: Sequence[IntArray | None] | None = None,
    ) -> list[Answer]:
        """Answer B observations.

        Args:
            images: Uint8 [B, H, W, 3] RGB of ``options.image_size``; or B camera frames of any size, which are
                turned, cropped and resized on the device.
            prompts: Int64 [L] each: BOS, prompt, closing token.
            drafts: The previous answer of each, int64 [D], or None.

        Raises:
            ConfigError: A prompt is too long, the numbers of pictures and prompts differ, or the device cannot
                prepare a frame as it asks.
            ImageError: A frame is no picture.
            NotFiniteError: The network answers with NaN or Inf.
            OutOfMemoryError: The device has no room left; asking again is allowed.
            DeviceLostError: The device stopped answering, now or before.
        """
        if self._lost is not None:
            raise self._lost
        if len(prompts) != len(images):
            raise ConfigError(f"engine: {len(images)} pictures and {len(prompts)} prompts, expected as many")
        try:
            with explain_device_errors(self.weights.device), self.runner.stream():
                answers = self._answer(images, prompts, drafts or [None] * len(prompts))
        except DeviceLostError as error:
            self._lost = error
            raise
        for answer in answers:
            require_finite(answer.margins.tolist())
        return answers

    @torch.inference_mode()
    def resized(self, frame: CameraFrame) -> UInt8Array:
        """What the network sees of a frame, uint8 of ``options.image_size`` on the host; to look at and to check.

        Raises:
            ConfigError: As :meth:`answer`.
            ImageError: As :meth:`answer`.
        """
        with explain_device_errors(self.weights.device), self.runner.stream():
            picture = torch.empty((1, *self.options.image_size, 3), dtype=torch.uint8, device=self.weights.device)
            self._resizer.resize(self._resizer.upload([frame]), picture)
            seen: UInt8Array = picture[0].cpu().numpy()
        return seen

    @torch.inference_mode()
    def draft_error(self, image: UInt8Array, prompt: IntArray, draft: IntArray) -> float:
        """By how much a prefill's logits of drafted rows differ from the decoding kernels', which are right.

        What :attr:`guard` must exceed. Of each row the five largest logits of either side are compared, as a margin
        is made of these.

        Args:
            image: Uint8 [H, W, 3].
            prompt: Int64 [L].
            draft: Int64 [D].

        Returns:
            The largest difference, in logits; 0 where an answer has one token only.
        """
        count = self.options.answer - 1
        if count == 0:
            return 0.0
        with explain_device_errors(self.weights.device), self.runner.stream():
            program = self._of(1).take(len(prompt))
            _, last = self._tell(program, [prompt], [draft])
            guesses, (fed, start) = program.guesses.on_host()
            fed[0], start[0] = draft[:count], last[0] + 1
            self.runner.upload(program.guesses.buffer, guesses)
            self.runner.upload(program.images, image[None])
            inside, after = program.drafted_logits()
            at = torch.cat([inside.topk(5).indices, after.topk(5).indices], dim=-1)
            return float((inside - after).gather(-1, at).abs().max().item())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is captured behind the scenes; False where that took longer than ``timeout`` seconds.

        Nothing needs it to answer: a later frame is only faster than the first of its size.
        """
        ready = [programs.wait(timeout) for programs in self._programs.values()]
        return self._resizer.wait(timeout) and all(ready)

    def failures(self) -> dict[int, Exception]:
        """Sequence lengths of single observations whose graphs could not be captured, and why."""
        return self._of(1).failures

    def close(self) -> None:
        """Free buffers, caches and graphs; the weights belong to the caller."""
        for programs in self._programs.values():
            programs.close()
        self._programs.clear()
        self._resizer.clear()
        self.runner.close()

    def _answer(
        self,
        images: UInt8Array | Sequence[CameraFrame],
        prompts: Sequence[IntArray],
        drafts: Sequence[IntArray | None],
    ) -> list[Answer]:
        batch, runner, rows = len(prompts), self.runner, self.options.answer
        program = self._of(batch).take(max(len(prompt) for prompt in prompts))
        policy = self._policies.setdefault(batch, drafting.DraftPolicy())
        offered = self.options.drafts != "none" and rows > 1 and any(draft is not None for draft in drafts)
        drafted = offered and policy.wanted()

        marks, names = [runner.mark()], ["upload"]
        if isinstance(images, np.ndarray):
            runner.upload(program.images, images)
        else:
            there = self._resizer.upload(images)
            marks.append(runner.mark())
            self._resizer.resize(there, program.images)
            names.append("preprocess")
        marks.append(runner.mark())
        program.run("vision")
        marks.append(runner.mark())
        text, last = self._tell(program, prompts, drafts)  # while the device looks at the picture
        for stage in ("prefill",) if drafted else ("prefill", "decode"):
            program.run(stage)
            marks.append(runner.mark())
        tokens, margins = program.answers.split(runner.download(program.answers.buffer))
        marks.append(runner.mark())
        names += _STAGES_DRAFTED if drafted else _STAGES_PLAIN
        if not drafted:
            settled = [
                drafting.Settled(tuple(tokens[row].tolist()), tuple(margins[row].tolist()), 0, rows - 1)
                for row in range(batch)
            ]
        else:
            settled = self._settle(program, text, last, tokens, margins)
            marks.append(runner.mark())
            policy.record(sum(result.accepted for result in settled))
        stages = {name: runner.milliseconds(*span) for name, span in zip(names, pairwise(marks), strict=True)}
        return [
            Answer(
                tokens=np.array(one.tokens, np.int64),
                margins=np.array(one.margins, np.float64),
                accepted=one.accepted if drafted else None,
                passes=one.passes,
                stages_ms=stages,
            )
            for one in settled
        ]

    def _tell(
        self, program: Program, prompts: Sequence[IntArray], drafts: Sequence[IntArray | None]
    ) -> tuple[IntArray, NDArray[np.int32]]:
        """Upload rows of text with their drafts, and where each prompt ends in the sequence."""
        raw, (text, last) = program.words.on_host()
        for row, (prompt, draft) in enumerate(zip(prompts, drafts, strict=True)):
            text[row, : len(prompt)] = prompt
            if draft is not None:
                text[row, len(prompt) : len(prompt) + self.options.answer - 1] = draft[: self.options.answer - 1]
            last[row] = self._patches + len(prompt) - 1
        self.runner.upload(program.words.buffer, raw)
        return text, last

    def _settle(
        self, program: Program, text: IntArray, last: NDArray[np.int32], tokens: Any, margins: Any
    ) -> list[drafting.Settled]:
        """From the drafted prefill's predictions [B, D] to the answers, with as many passes as it takes."""
        rows = self.options.answer
        waiting = []
        for row in range(len(last)):
            begin = int(last[row]) - self._patches + 1
            draft = text[row, begin : begin + rows - 1].tolist()
            first = (tokens[row].tolist(), margins[row].tolist())
            if self.options.drafts == "verify":
                # Only the first token is taken from the prefill; for the others the draft itself is the guess.
                first = ([first[0][0], *draft[1:], draft[-1]], first[1])
            waiting.append(drafting.settling(draft, first, self.guard))

        def verify(wants: Sequence[drafting.Fed | None]) -> list[drafting.Predictions]:
            raw, (fed, start) = program.guesses.on_host()
            start[:] = last + 1
            for row, want in enumerate(wants):
                if want is not None:
                    fed[row, : len(want[0])] = want[0]
                    start[row] = last[row] + 1 + want[1]
            self.runner.upload(program.guesses.buffer, raw)
            program.run("verify")
            checked, sure = program.checks.split(self.runner.download(program.checks.buffer))
            return [(checked[row].tolist(), sure[row].tolist()) for row in range(len(wants))]

        return drafting.settle_all(waiting, verify)

    def _of(self, batch: int) -> Programs[Program]:
        if batch not in self._programs:

            def build(length: int) -> Program:
                return Program(
                    self._see, self.weights, self._ops, self.buckets, length, batch, self.options.image_size
                )

            # Without graphs there is nothing to gain from a second thread.
            background = self.options.background and self.runner.graphs
            self._programs[batch] = Programs(
                self.buckets, build, lambda program: program.capture(self.runner), background
            )
        return self._programs[batch]


def make_ops(device: torch.device) -> Ops:
    """Triton's operations on a GPU where Triton is installed, torch's elsewhere."""
    if device.type == "cuda":
        try:
            from vla_ros.engine.triton_ops import TritonOps
        except ImportError:
            return TorchOps()
        return TritonOps()
    return TorchOps()
