"""The OpenVLA network: vision towers, projector, Llama decoder. Parameter names are the checkpoint's keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.policies.openvla.architecture import Architecture
from vla_ros.policies.openvla.decoder import KeyValueCache, LlamaDecoder
from vla_ros.policies.openvla.vision_tower import VisionBackbone


class Projector(nn.Module):
    """Maps patch features to the language model's embedding space.

    Three layers after two towers, two layers after one, as the Prismatic models have it.
    """

    def __init__(self, vision_width: int, llm_width: int, fused: bool) -> None:
        super().__init__()
        hidden = 4 * vision_width if fused else llm_width
        self.fc1 = nn.Linear(vision_width, hidden)
        self.fc2 = nn.Linear(hidden, llm_width)
        self.fc3 = nn.Linear(llm_width, llm_width) if fused else None

    def forward(self, features: Tensor) -> Tensor:
        """[B, patches, vision_width] to [B, patches, llm_width]."""
        hidden: Tensor = self.fc2(functional.gelu(self.fc1(features)))
        return hidden if self.fc3 is None else self.fc3(functional.gelu(hidden))


class Answer(NamedTuple):
    """Greedy tokens and how sure each was.

    Attributes:
        tokens: Int64 [B, D].
        margins: Float32 [B, D], best minus second-best logit at each step.
    """

    tokens: Tensor
    margins: Tensor


class OpenVLAModel(nn.Module):
    """The network, step by step: ``normalize``, ``embed_image``, ``prefill``, ``decode_one``.

    Args:
        architecture: Sizes, from ``config.json``.
        attention: ``eager``, ``sdpa`` or ``flash_attention_2`` for the decoder. The towers know eager and SDPA,
            which takes its own flash kernel where there is one.
    """

    def __init__(self, architecture: Architecture, attention: str = "sdpa") -> None:
        super().__init__()
        llm = architecture.llm
        self.architecture = architecture
        self.vision_backbone = VisionBackbone(architecture.towers, eager=attention == "eager")
        self.projector = Projector(architecture.vision_width, llm.hidden_size, fused=len(architecture.towers) > 1)
        self.language_model = LlamaDecoder(llm, attention)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.vision_backbone.featurizer.pos_embed.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of everything that is not quantised."""
        return self.vision_backbone.featurizer.pos_embed.dtype

    def normalize(self, images: Tensor) -> Tensor:
        """Uint8 [B, H, W, 3] RGB to normalised pixels [B, 3 * towers, H, W] in the model's data type."""
        return self.vision_backbone.normalize(images).to(self.dtype)

    def embed_image(self, pixels: Tensor) -> Tensor:
        """Normalised pixels to patch embeddings [B, patches, llm_width]."""
        patches: Tensor = self.projector(self.vision_backbone(pixels))
        return patches

    def embed_sequence(self, patches: Tensor, input_ids: Tensor) -> Tensor:
        """BOS, patches, rest of the prompt: [B, L + patches, llm_width].

        Args:
            patches: [B, patches, llm_width].
            input_ids: Int64 [B, L], beginning with BOS.
        """
        words = self.language_model.model.embed_tokens(input_ids)
        return torch.cat([words[:, :1], patches, words[:, 1:]], dim=1)

    def prefill(self, patches: Tensor, input_ids: Tensor, room: int = 16) -> tuple[Tensor, KeyValueCache]:
        """Run the prompt.

        Args:
            patches: [B, patches, llm_width].
            input_ids: Int64 [B, L]; every row of the batch has the same length.
            room: Positions to keep free in the cache for :meth:`decode_one`.

        Returns:
            Logits of the first action token [B, vocab_size], and the cache that :meth:`decode_one` continues
            (and changes in place).
        """
        sequence = self.embed_sequence(patches, input_ids)
        batch, count, _ = sequence.shape
        cache = KeyValueCache(self.architecture.llm, batch, count + room, sequence.device, sequence.dtype)
        hidden = self.language_model.model(sequence, cache)
        return self._head(hidden[:, -1]), cache

    def decode_one(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Logits [B, vocab_size] after ``tokens``, int64 [B], at the next position of ``cache``."""
        hidden = self.language_model.model(self.language_model.model.embed_tokens(tokens[:, None]), cache)
        return self._head(hidden[:, -1])

    def greedy(self, logits: Tensor, cache: KeyValueCache, count: int) -> Answer:
        """Decode ``count`` tokens greedily over the whole vocabulary, starting from :meth:`prefill`'s answer.

        Nothing is brought to the host in between, so that a GPU never waits for Python.
        """
        tokens: list[Tensor] = []
        margins: list[Tensor] = []
        for step in range(count):
            if step:
                logits = self.decode_one(tokens[-1], cache)
            best = logits.topk(2, dim=-1).values
            tokens.append(logits.argmax(dim=-1))  # not topk's index: argmax decides ties as ``generate`` does
            margins.append(best[:, 0] - best[:, 1])
        return Answer(torch.stack(tokens, dim=1), torch.stack(margins, dim=1))

    def forward(self, pixels: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All positions at once, without a cache and with gradients: for training and for checks.

        Args:
            pixels: Normalised, [B, 3 * towers, H, W].
            input_ids: Int64 [B, L]: BOS, prompt, then any action tokens.

        Returns:
            Logits [B, L + patches, vocab_size], last hidden states [B, L + patches, llm_width] and patch
            embeddings [B, patches, llm_width]. Position ``patches + i`` predicts ``input_ids[:, i + 1]``.
        """
        patches = self.embed_image(pixels)
        hidden = self.language_model.model(self.embed_sequence(patches, input_ids))
        return self._head(hidden), hidden, patches

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.language_model.lm_head(hidden)
        return logits.float()
