"""The stages of an inference step over static buffers, for B images and one padded prompt length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vla_ros.engine.decoder import decode, prefill, verify
from vla_ros.engine.graph_cache import Buckets
from vla_ros.engine.ops import Ops
from vla_ros.engine.runner import Runner, Stage
from vla_ros.engine.stream import KVCache
from vla_ros.engine.transfer_buffer import TransferBuffer
from vla_ros.engine.weights import DecoderWeights

Encode = Callable[[Tensor], Tensor]
"""Encodes RGB images, uint8 [B, H, W, 3], as patch embeddings [B, patches, hidden]; can be captured."""


class StepGraphs:
    """Static buffers, a KV cache, and the four stages over them: as functions, or captured as graphs.

    Attributes:
        images: Uint8 [B, H, W, 3].
        text: Int64 [B, T]: BOS, prompt, draft, padding.
        last: Int32 [B], position of the prompt's last token in the sequence.
        tokens: Int64 [B, D], the answer's tokens: after ``prefill`` its predictions, after ``decode`` the result.
        margins: Float32 [B, D], logit margins of ``tokens``.
        fed: Int64 [B, D - 1], tokens for ``verify``.
        start: Int32 [B], position of the first token in ``fed``.
        checked: Int64 [B, D - 1], the predictions of ``verify``.
        checked_margins: Float32 [B, D - 1], logit margins of ``checked``.
        prompt_buffer: ``text`` and ``last``, uploaded together.
        fed_buffer: ``fed`` and ``start``, uploaded together.
        answer_buffer: ``tokens`` and ``margins``, downloaded together.
        checked_buffer: ``checked`` and ``checked_margins``, downloaded together.
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
        self.stages: dict[str, Stage] = {
            "vision": self._vision,
            "prefill": self._prefill,
            "decode": self._decode,
            "verify": self._verify,
        }

    def capture(self, runner: Runner) -> None:
        with torch.inference_mode():
            self.stages = {name: runner.capture(stage) for name, stage in self.stages.items()}

    def run(self, stage: str) -> None:
        self.stages[stage]()

    def drafted_logits(self) -> tuple[Tensor, Tensor]:
        """Return the drafted rows' logits from prefill and from verification, float32 [B, D - 1, vocab] each.

        Runs without graphs on the uploaded images, a prompt with its draft in ``prompt_buffer`` and the draft's
        tokens in ``fed_buffer``.
        """
        self._vision()
        inside = prefill(
            self._weights, self._ops, self.cache, self._patches, self.text, self.last, self.tokens.shape[1]
        )
        return inside[:, 1:], verify(self._weights, self._ops, self.cache, self.fed, self.start)

    def _vision(self) -> None:
        self._patches.copy_(self._encode(self.images))

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
