"""The stages of an answer over buffers of one size: B pictures, one padded prompt length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vla_ros.engine.decoder import Cache, decode, prefill, verify
from vla_ros.engine.ops import Ops
from vla_ros.engine.packed import Packed
from vla_ros.engine.runner import Runner, Stage
from vla_ros.engine.shapes import Buckets
from vla_ros.engine.weights import DecoderWeights

See = Callable[[Tensor], Tensor]
"""Uint8 [B, H, W, 3] RGB to patch embeddings [B, patches, hidden]."""

STAGES = ("vision", "prefill", "decode", "verify")


class Program:
    """Buffers, a cache, and the four stages that work on them: as functions, or captured.

    Attributes:
        images: Uint8 [B, H, W, 3].
        text: Int64 [B, T]: BOS, prompt, draft, padding.
        last: Int32 [B], position of the prompt's last token in the sequence.
        tokens: Int64 [B, D]; after ``prefill`` one prediction per drafted row, after ``decode`` the answer.
        margins: Float32 [B, D].
        fed: Int64 [B, D - 1], tokens for ``verify``.
        start: Int32 [B], position of the first of them.
        checked: Int64 [B, D - 1], what ``verify`` answers.
        checked_margins: Float32 [B, D - 1].
        words: ``text`` and ``last``, as they are uploaded.
        guesses: ``fed`` and ``start``, as they are uploaded.
        answers: ``tokens`` and ``margins``, as they are downloaded.
        checks: ``checked`` and ``checked_margins``, as they are downloaded.
    """

    def __init__(
        self,
        see: See,
        weights: DecoderWeights,
        ops: Ops,
        buckets: Buckets,
        length: int,
        batch: int,
        image_size: tuple[int, int],
    ) -> None:
        self.length = length
        self.batch = batch
        self._see, self._weights, self._ops = see, weights, ops
        answer, device = buckets.answer, weights.device

        fed = (batch, max(1, answer - 1))
        self.images = torch.zeros(batch, *image_size, 3, dtype=torch.uint8, device=device)
        self.words = Packed(device, ((batch, buckets.text(length)), torch.int64), ((batch,), torch.int32))
        self.text, self.last = self.words.tensors
        self.guesses = Packed(device, (fed, torch.int64), ((batch,), torch.int32))
        self.fed, self.start = self.guesses.tensors
        self.answers = Packed(device, ((batch, answer), torch.int64), ((batch, answer), torch.float32))
        self.tokens, self.margins = self.answers.tensors
        self.checks = Packed(device, (fed, torch.int64), (fed, torch.float32))
        self.checked, self.checked_margins = self.checks.tensors
        self.last.fill_(buckets.patches)
        self.start.fill_(buckets.patches)
        self._patches = torch.zeros(
            batch, buckets.patches, weights.shape.hidden_size, dtype=weights.dtype, device=device
        )
        # A verifying pass always has D - 1 rows; those behind the answer need room, too.
        self.cache = Cache.allocate(weights, batch, length + answer)
        self.stages: dict[str, Stage] = {
            "vision": self._vision,
            "prefill": self._prefill,
            "decode": self._decode,
            "verify": self._verify,
        }
        self.captured = False

    def capture(self, runner: Runner) -> None:
        """Replace every stage by its graph."""
        with torch.inference_mode():
            self.stages = {name: runner.capture(self.stages[name]) for name in STAGES}
        self.captured = runner.graphs

    def run(self, stage: str) -> None:
        """Start one stage of :data:`STAGES`."""
        self.stages[stage]()

    def drafted_logits(self) -> tuple[Tensor, Tensor]:
        """What prefill and verification say of the same drafted tokens, float32 logits [B, D - 1, vocab] each.

        For what was uploaded: pictures, ``words`` with a draft, the draft's tokens in ``guesses``. Not captured.
        """
        self._vision()
        inside = prefill(
            self._weights, self._ops, self.cache, self._patches, self.text, self.last, self.tokens.shape[1]
        )
        return inside[:, 1:], verify(self._weights, self._ops, self.cache, self.fed, self.start)

    def _vision(self) -> None:
        self._patches.copy_(self._see(self.images))

    def _prefill(self) -> None:
        rows = self.tokens.shape[1]
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
        logits = verify(self._weights, self._ops, self.cache, self.fed, self.start)
        self._store(self.checked, self.checked_margins, logits)

    def _store(self, tokens: Tensor, margins: Tensor, logits: Tensor) -> None:
        chosen, margin = self._ops.choose(logits)
        tokens.copy_(chosen)
        margins.copy_(margin)
