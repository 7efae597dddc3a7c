"""The engine: turns images and prompts into greedy tokens, with CUDA graphs for each prompt length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_ros.errors import ConfigError
from vla_ros.types import IntArray, RawImage, UInt8Array
from vla_ros_models.engine.decoder import decode, prefill, verify
from vla_ros_models.engine.device_errors import require_finite
from vla_ros_models.engine.device_ops import make_ops
from vla_ros_models.engine.drafts import Decoded, DraftState, Fed, Predictions, verify_all, verify_draft
from vla_ros_models.engine.graph_engine import Buckets, GraphEngine, StageClock, StageGraphs
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.passes import Passes, decoding_passes
from vla_ros_models.engine.runner import Runner, TransferBuffer
from vla_ros_models.engine.stream import KVCache
from vla_ros_models.engine.tolerances import TOLERANCES
from vla_ros_models.engine.weights import DecoderWeights

Encode = Callable[[Tensor], Tensor]
"""Encodes RGB images, uint8 [B, H, W, 3], as patch embeddings [B, patches, hidden]; can be captured."""


class StepGraphs(StageGraphs):
    """Static buffers, a KV cache, and the four stages over them.

    ``text`` is BOS, prompt, draft, padding; ``last`` the position of the prompt's last token in the sequence.
    ``tokens`` are the predictions after ``prefill`` and the answer after ``decode``. ``verify`` takes the tokens
    ``fed`` from position ``start`` and leaves its predictions in ``checked``.
    """

    def __init__(
        self,
        encode: Encode,
        weights: DecoderWeights,
        ops: Ops,
        buckets: Buckets,
        length: int,
        batch: int,
        image_size: tuple[int, int],
    ) -> None:
        self._encode, self._weights, self._ops = encode, weights, ops
        answer, device = buckets.answer, weights.device

        fed = (batch, max(1, answer - 1))
        self.images = torch.zeros(batch, *image_size, 3, dtype=torch.uint8, device=device)
        self.prompt_buffer = TransferBuffer(
            device, ((batch, buckets.text(length)), torch.int64), ((batch,), torch.int32)
        )
        self.text, self.last = self.prompt_buffer.tensors
        self.fed_buffer = TransferBuffer(device, (fed, torch.int64), ((batch,), torch.int32))
        self.fed, self.start = self.fed_buffer.tensors
        self.answer_buffer = TransferBuffer(
            device, ((batch, answer), torch.int64), ((batch, answer), torch.float32)
        )
        self.tokens, self.margins = self.answer_buffer.tensors
        self.checked_buffer = TransferBuffer(device, (fed, torch.int64), (fed, torch.float32))
        self.checked, self.checked_margins = self.checked_buffer.tensors
        self.last.fill_(buckets.patches)
        self.start.fill_(buckets.patches)
        self._patches = torch.zeros(
            batch, buckets.patches, weights.shape.hidden_size, dtype=weights.dtype, device=device
        )
        # A verifying pass always has D - 1 rows; the cache needs room for rows beyond the answer.
        self.cache = KVCache.allocate(weights, batch, length + answer)
        self.stages = {
            "vision": self._vision,
            "prefill": self._prefill,
            "decode": self._decode,
            "verify": self._verify,
        }
        self.checks = {"drafted": self._drafted}

    def drafted_logits(self) -> tuple[Tensor, Tensor]:
        """Return the drafted rows' logits from prefill and from verification, float32 [B, D - 1, vocab] each.

        Runs without graphs on the uploaded images, a prompt with its draft in ``prompt_buffer`` and the draft's
        tokens in ``fed_buffer``.
        """
        result: tuple[Tensor, Tensor] = self.checks["drafted"]()
        return result

    def _drafted(self) -> tuple[Tensor, Tensor]:
        self._vision()
        self._ops.share(self.prompt_buffer.buffer)
        self._ops.share(self.fed_buffer.buffer)
        inside = prefill(
            self._weights, self._ops, self.cache, self._patches, self.text, self.last, self.tokens.shape[1]
        )
        return inside[:, 1:], verify(self._weights, self._ops, self.cache, self.fed, self.start)

    def _vision(self) -> None:
        self._ops.share(self.images)
        self._patches.copy_(self._encode(self.images))

    def _prefill(self) -> None:
        rows = self.tokens.shape[1]
        self._ops.share(self.prompt_buffer.buffer)
        logits = prefill(self._weights, self._ops, self.cache, self._patches, self.text, self.last, rows)
        self._store(self.tokens, self.margins, logits)

    def _decode(self) -> None:
        count = self.tokens.shape[1] - 1
        tokens, margins = decode(
            self._weights, self._ops, self.cache, self.tokens[:, 0].clone(), self.last + 1, count
        )
        self.tokens[:, 1:] = tokens
        self.margins[:, 1:] = margins

    def _verify(self) -> None:
        self._ops.share(self.fed_buffer.buffer)
        logits = verify(self._weights, self._ops, self.cache, self.fed, self.start)
        self._store(self.checked, self.checked_margins, logits)

    def _store(self, tokens: Tensor, margins: Tensor, logits: Tensor) -> None:
        chosen, margin = self._ops.choose(logits)
        tokens.copy_(chosen)
        margins.copy_(margin)


DRAFTS = ("none", "verify", "prefill")


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine."""

    answer: int  # tokens to decode
    image_size: tuple[int, int]  # (height, width) of the network's images
    # One of ``DRAFTS``. ``verify`` checks drafts only with the decoding kernels, so tokens are bit-identical to
    # plain decoding. ``prefill`` checks them in the prompt's pass, which saves another pass, and accepts a drafted
    # row only if its logit margin is at least ``guard``.
    drafts: str = "prefill"
    # Minimum logit margin for ``prefill``; None uses the data type's guard in
    # :mod:`vla_ros_models.engine.tolerances`.
    guard: float | None = None


_NOTHING = DraftState()


@dataclass(frozen=True, eq=False)
class EngineRequest:
    """The network's inputs for one observation."""

    # Uint8 RGB [H, W, 3] of ``options.image_size``, or a camera image of any size, which the device rotates, crops
    # and resizes.
    image: UInt8Array | RawImage
    prompt: IntArray  # int64 [L]: BOS, prompt, closing token
    draft: DraftState = _NOTHING  # the session's draft after its last answer; by default none


@dataclass(frozen=True)
class EngineResult:
    """The engine's result for one observation."""

    tokens: IntArray  # int64 [D]
    margins: NDArray[np.float64]  # float64 [D], best minus second-best logit
    accepted: int | None  # tokens that a draft saved; None without a draft
    passes: int  # decoder passes after the prefill
    draft: DraftState  # for the session's next request
    # Stage times, the same for all observations of a batch: ``upload`` (of images), ``preprocess`` (of camera
    # images), ``vision``, ``prefill`` (begins with the prompt's upload), ``decode``, ``download``. With a draft,
    # ``decode`` comes last and includes the uploads and downloads of its passes.
    stages_ms: dict[str, float] = field(default_factory=dict)


class TokenEngine(GraphEngine[int, StepGraphs]):
    """Runs B observations at a time. Not thread-safe.

    ``encode`` is the vision encoder, and ``patches`` the number of an image's patch tokens. ``ops`` and ``runner``
    default to those of the weights' device. ``guard`` is the minimum logit margin for accepting a drafted row of
    the prefill, infinity if the prefill does not check drafts.
    """

    def __init__(
        self,
        encode: Encode,
        weights: DecoderWeights,
        patches: int,
        options: EngineOptions,
        ops: Ops | None = None,
        runner: Runner | None = None,
    ) -> None:
        if options.drafts not in DRAFTS:
            raise ConfigError(f"policy.drafts: found {options.drafts!r}, expected one of {', '.join(DRAFTS)}")
        self._ops = make_ops(weights.device) if ops is None else ops
        super().__init__(
            weights.device,
            options.image_size,
            Buckets.up_to(patches, options.answer, weights.shape.max_positions),
            runner,
            self._ops.ranks,
        )
        self.options = options
        self.weights = weights
        self._encode = encode
        self._patches = patches
        self.guard = TOLERANCES[weights.dtype].guard if options.guard is None else options.guard
        if options.drafts != "prefill":
            self.guard = inf

    def passes(self, ops: Ops, layers: int) -> Passes:
        return decoding_passes(self.weights, ops, self.buckets.lengths[0], layers)

    def warm_up(self, prompts: Sequence[int], batch: int = 1) -> None:
        """Capture graphs for prompts of these lengths in tokens, before the first request."""
        self._capture(batch, prompts)

    def answer(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """Decode the tokens of B observations.

        Raises:
            ConfigError: A prompt is too long, images and camera images are mixed, or the device cannot run a camera
                image's processor.
            ImageError: A camera image has no pixels.
            NotFiniteError: The network's output holds NaN or Inf.
            OutOfMemoryError: The device ran out of memory; retrying is allowed.
            DeviceLostError: The device failed, now or earlier.
        """
        answers = self._run(partial(self._answer, requests))
        for answer in answers:
            require_finite(answer.margins.tolist())
        return answers

    def resized(self, frame: RawImage) -> UInt8Array:
        """Return a camera image as the network sees it: uint8 of ``options.image_size`` on the host."""

        def resize() -> UInt8Array:
            resized = torch.empty((1, *self.options.image_size, 3), dtype=torch.uint8, device=self.weights.device)
            self._resizer.resize(self._resizer.upload([frame]), resized)
            seen: UInt8Array = resized[0].cpu().numpy()
            return seen

        return self._run(resize)

    def draft_error(self, image: UInt8Array, prompt: IntArray, draft: IntArray) -> float:
        """Return the largest difference of drafted rows' logits between a prefill and the decoding kernels.

        :attr:`guard` must exceed it. Only the five largest logits of each row on either side are compared, because
        margins derive from the largest logits.
        """
        count = self.options.answer - 1
        if count == 0:
            return 0.0

        def compare() -> float:
            graphs = self._of(1).take(len(prompt))
            _, last = self._upload_prompts(graphs, [prompt], [draft.tolist()])
            fed, start = graphs.fed_buffer.cleared()
            fed[0], start[0] = draft[:count], last[0] + 1
            graphs.fed_buffer.load()
            self.runner.upload(graphs.images, image[None])
            inside, after = graphs.drafted_logits()
            at = torch.cat([inside.topk(5).indices, after.topk(5).indices], dim=-1)
            return float((inside - after).gather(-1, at).abs().max().item())

        return self._run(compare)

    def failures(self) -> dict[int, Exception]:
        return self._of(1).failures

    def _answer(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        batch, runner, rows = len(requests), self.runner, self.options.answer
        graphs = self._of(batch).take(max(len(request.prompt) for request in requests))
        possible = self.options.drafts != "none" and rows > 1
        offers = [request.draft.offer() if possible else None for request in requests]
        drafted = any(offer is not None for offer in offers)

        clock = StageClock(runner)
        self._upload([request.image for request in requests], graphs.images, clock)
        graphs.stages["vision"]()
        clock.end("vision")
        # Uploaded while the device encodes the images.
        text, last = self._upload_prompts(graphs, [request.prompt for request in requests], offers)
        for stage in ("prefill",) if drafted else ("prefill", "decode"):
            graphs.stages[stage]()
            clock.end(stage)
        graphs.answer_buffer.store()
        runner.wait()
        clock.end("download")
        tokens, margins = graphs.answer_buffer.arrays
        if not drafted:
            decoded = [
                Decoded(tuple(tokens[row].tolist()), tuple(margins[row].tolist()), 0, rows - 1)
                for row in range(batch)
            ]
        else:
            decoded = self._verify(graphs, text, last, tokens, margins)
            clock.end("decode")
        stages = clock.milliseconds()
        answers = []
        for request, offer, one in zip(requests, offers, decoded, strict=True):
            accepted = None if offer is None else one.accepted
            answers.append(
                EngineResult(
                    tokens=np.array(one.tokens, np.int64),
                    margins=np.array(one.margins, np.float64),
                    accepted=accepted,
                    passes=one.passes,
                    draft=request.draft.after(one.tokens, accepted),
                    stages_ms=stages,
                )
            )
        return answers

    def _upload_prompts(
        self, graphs: StepGraphs, prompts: Sequence[IntArray], drafts: Sequence[Sequence[int] | None]
    ) -> tuple[IntArray, NDArray[np.int32]]:
        """Upload prompts with their drafts; return the text rows and the positions of the prompts' last tokens."""
        text, last = graphs.prompt_buffer.cleared()
        for row, (prompt, draft) in enumerate(zip(prompts, drafts, strict=True)):
            text[row, : len(prompt)] = prompt
            if draft is not None:
                text[row, len(prompt) : len(prompt) + self.options.answer - 1] = draft[: self.options.answer - 1]
            last[row] = self._patches + len(prompt) - 1
        graphs.prompt_buffer.load()
        return text, last

    def _verify(
        self, graphs: StepGraphs, text: IntArray, last: NDArray[np.int32], tokens: Any, margins: Any
    ) -> list[Decoded]:
        """Complete the tokens from the drafted prefill's predictions [B, D]."""
        rows = self.options.answer
        waiting = []
        for row in range(len(last)):
            begin = int(last[row]) - self._patches + 1
            draft = text[row, begin : begin + rows - 1].tolist()
            waiting.append(verify_draft(draft, (tokens[row].tolist(), margins[row].tolist()), self.guard))

        def verify(wants: Sequence[Fed | None]) -> list[Predictions]:
            fed, start = graphs.fed_buffer.cleared()
            start[:] = last + 1
            for row, want in enumerate(wants):
                if want is not None:
                    fed[row, : len(want[0])] = want[0]
                    start[row] = last[row] + 1 + want[1]
            graphs.fed_buffer.load()
            graphs.stages["verify"]()
            graphs.checked_buffer.store()
            self.runner.wait()
            checked, sure = graphs.checked_buffer.arrays
            return [(checked[row].tolist(), sure[row].tolist()) for row in range(len(wants))]

        return verify_all(waiting, verify)

    def _build(self, kind: int, length: int) -> StepGraphs:
        size = self.options.image_size
        return StepGraphs(self._encode, self.weights, self._ops, self.buckets, length, kind, size)
