"""The OpenVLA network: vision towers, projector, Llama decoder. Parameter names are the checkpoint's keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.engine import decoder
from vla_ros.engine.llama import LlamaDecoder, as_loaded
from vla_ros.engine.ops import Ops
from vla_ros.engine.stream import KVCache
from vla_ros.engine.weights import DecoderWeights
from vla_ros.policies.openvla.architecture import Architecture
from vla_ros.policies.vision_tower import Mlp, VisionBackbone


class Projector(Mlp):
    """Maps patch features [B, patches, vision_width] to the language model's embedding space.

    As in the Prismatic models, it has three layers after two towers and two layers after one tower.
    """

    def __init__(self, vision_width: int, llm_width: int, fused: bool) -> None:
        super().__init__(vision_width, 4 * vision_width if fused else llm_width, llm_width)
        self.fc3 = nn.Linear(llm_width, llm_width) if fused else None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = super().forward(tokens)
        return hidden if self.fc3 is None else self.fc3(functional.gelu(hidden))


class Answer(NamedTuple):
    """Greedy tokens with their logit margins."""

    tokens: Tensor  # int64 [B, D]
    margins: Tensor  # float32 [B, D], best minus second-best logit at each step


@dataclass
class Prefix:
    """A KV cache with a prompt and the tokens decoded after it."""

    weights: DecoderWeights  # the decoder's weights
    cache: KVCache  # keys and values of this prefix only
    length: int  # positions filled so far

    def end(self, batch: int) -> Tensor:
        """Return the next position, int32 [B]."""
        return torch.full((batch,), self.length, dtype=torch.int32, device=self.weights.device)


class OpenVLAModel(nn.Module):
    """The whole network, in plain torch.

    The decoder is :mod:`vla_ros.engine.decoder` with torch's operations. With ``film``, a mean text embedding
    modulates the towers' blocks.
    """

    def __init__(self, architecture: Architecture, film: bool = False) -> None:
        super().__init__()
        llm = architecture.llm
        self.architecture = architecture
        self.vision_backbone = VisionBackbone(architecture.towers, llm.hidden_size if film else 0)
        self.projector = Projector(architecture.vision_width, llm.hidden_size, fused=len(architecture.towers) > 1)
        self.language_model = LlamaDecoder(llm)
        self.ops = Ops()

    @property
    def device(self) -> torch.device:
        return self.vision_backbone.featurizer.pos_embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.vision_backbone.featurizer.pos_embed.dtype

    def normalize(self, images: Tensor) -> Tensor:
        """Normalise uint8 [B, H, W, 3] RGB to pixels [B, 3 * towers, H, W] in the model's data type."""
        return self.vision_backbone.normalize(images).to(self.dtype)

    def embed_image(self, pixels: Tensor, film: Sequence[Tensor] = ()) -> Tensor:
        """Embed normalised pixels as patches [B, patches, llm_width]; ``film`` as for the vision backbone."""
        patches: Tensor = self.projector(self.vision_backbone(pixels, film))
        return patches

    def embed_sequence(self, patches: Tensor, input_ids: Tensor) -> Tensor:
        """Embed prompts, int64 [B, L], with patches [B, patches, llm_width] after BOS."""
        return decoder.embed_sequence(as_loaded(self.language_model), patches, input_ids)

    def prefill(self, patches: Tensor, input_ids: Tensor, room: int = 16) -> tuple[Tensor, Prefix]:
        """Run patches [B, patches, llm_width] and prompts of equal length, int64 [B, L].

        ``room`` positions stay free in the cache for :meth:`greedy`. Returns the logits [B, vocab_size] of the
        first action token, and the prefix, which :meth:`greedy` extends in place.
        """
        weights, batch = as_loaded(self.language_model), len(input_ids)
        length = patches.shape[1] + input_ids.shape[1]
        prefix = Prefix(weights, KVCache.allocate(weights, batch, length + room), length)
        last = prefix.end(batch) - 1
        return decoder.prefill(weights, self.ops, prefix.cache, patches, input_ids, last, 1)[:, 0], prefix

    def greedy(self, logits: Tensor, prefix: Prefix, count: int) -> Answer:
        """Decode ``count`` tokens greedily over the whole vocabulary, starting from :meth:`prefill`'s logits."""
        token, margin = self.ops.choose(logits[:, None])
        start, prefix.length = prefix.end(len(logits)), prefix.length + count - 1
        tokens, margins = decoder.decode(prefix.weights, self.ops, prefix.cache, token[:, 0], start, count - 1)
        return Answer(torch.cat([token, tokens], dim=1), torch.cat([margin, margins], dim=1))

    def hidden_states(self, sequence: Tensor) -> Tensor:
        """Return the last layer's hidden states of embeddings [B, S, llm_width], with gradients."""
        return decoder.hidden_states(as_loaded(self.language_model), self.ops, sequence)

    def forward(self, pixels: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run all positions at once, with gradients and no cache, for training and tests.

        Takes normalised pixels [B, 3 * towers, H, W] and tokens, int64 [B, L]: BOS, prompt, then any action tokens.
        Returns logits [B, L + patches, vocab_size], last hidden states [B, L + patches, llm_width] and patch
        embeddings [B, patches, llm_width]. Position ``patches + i`` predicts ``input_ids[:, i + 1]``.
        """
        patches = self.embed_image(pixels)
        hidden = self.hidden_states(self.embed_sequence(patches, input_ids))
        return self.language_model.lm_head(hidden).float(), hidden, patches
