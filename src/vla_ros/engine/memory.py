"""What an engine takes on its device, said before its programs are made."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from vla_ros.engine.decoder import cache_bytes
from vla_ros.engine.shapes import Buckets
from vla_ros.engine.weights import DecoderWeights

GB = 1e9


@dataclass(frozen=True)
class EnginePlan:
    """Bytes by use.

    Attributes:
        decoder: Layers and head as they are stored.
        rest: Embedding, vision towers, projector.
        caches: Keys and values of one program; each captured prompt length has its own.
        activations: The largest moment of a prefill.
    """

    decoder: int
    rest: int
    caches: int
    activations: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.decoder + self.rest + self.caches + self.activations

    def __str__(self) -> str:
        return (
            f"plan: {self.total / GB:.2f} GB (decoder {self.decoder / GB:.2f}, vision and embedding "
            f"{self.rest / GB:.2f}, cache {self.caches / GB:.2f} per prompt length, activations "
            f"{self.activations / GB:.2f})"
        )


def plan(weights: DecoderWeights, buckets: Buckets, model: nn.Module, batch: int = 1) -> EnginePlan:
    """The plan for the shortest prompt length.

    Args:
        weights: The decoder as it is stored.
        buckets: Prompt lengths.
        model: The whole network; what is not in the decoder is counted from it.
        batch: Observations.
    """
    shape, length = weights.shape, buckets.lengths[0]
    item = weights.embedding.element_size()
    rest = sum(
        parameter.numel() * item
        for name, parameter in model.named_parameters()
        if not name.startswith(("language_model.model.layers", "language_model.lm_head"))
    )
    # Of one layer: residual, norm, queries with keys and values, gate and up, their product.
    widest = 4 * shape.hidden_size + 3 * shape.heads * shape.head_dim + 3 * shape.intermediate_size
    logits = 4 * buckets.answer * shape.vocab_size
    return EnginePlan(
        decoder=weights.nbytes,
        rest=rest,
        caches=cache_bytes(weights, batch, length + buckets.answer),
        activations=batch * (length * widest * item + logits),
    )
