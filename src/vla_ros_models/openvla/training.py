"""The losses of OpenVLA and OpenVLA-OFT, and their forward pass with gradients.

OpenVLA and OFT's discrete form predict the tokens of actions and the stop token after them, by cross entropy; OFT's
L1 form predicts actions from the hidden states of placeholders. Sources: openvla c8f03f4 (its finetune script),
openvla-oft 213c5ff (its finetune script).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.contract.spec import PolicySpec
from vla_ros.types import FloatArray, Observation
from vla_ros.vision.points import camera_positions
from vla_ros_models.checkpoint_files import StoredTensor
from vla_ros_models.engine.ops import prompt_positions
from vla_ros_models.engine.stream import Positions, Stream
from vla_ros_models.engine.training import Call, TrainingOps, recompute, train_layer
from vla_ros_models.engine.weights import as_loaded
from vla_ros_models.oft.network import OFTModel
from vla_ros_models.openvla.architecture import Architecture
from vla_ros_models.openvla.network import OpenVLAModel
from vla_ros_models.openvla.processing import ActionBins, ActionStatistics
from vla_ros_models.openvla.prompt import PromptEncoder
from vla_ros_models.training import (
    Augment,
    Batch,
    BatchLoss,
    Prepared,
    Trainable,
    as_it_is,
    draw_weights,
    run_blocks,
    sincos_positions,
    stack_arrays,
)
from vla_ros_models.vision_tower import Block, VisionTower

NO_LABEL = -100
"""Label of a token that does not count."""

STOP = 2
"""The token after the action's."""


@dataclass(frozen=True, eq=False)
class TokenBatch(Batch):
    """Observations and actions as the network takes them."""

    images: Tensor  # [B, images, S, S, 3], uint8 or float32 in [0, 1]
    tokens: Tensor  # int64 [B, L]: BOS, prompt, action tokens, stop token, padding
    labels: Tensor  # int64 [B, L], :data:`NO_LABEL` for all but the action tokens and the stop token
    slots: Tensor  # bool [B, L], True for action tokens, which OFT replaces by placeholders
    valid: Tensor  # bool [B, L], False for padding
    actions: Tensor  # float32 [B, K, D], normalised
    state: Tensor | None = None  # float32 [B, P], normalised
    # Float32 [B, images, patches, 3], metres, NaN where unknown; None without geometric tokens.
    positions: Tensor | None = None


class TokenTrainee(nn.Module):
    """OpenVLA, or with an :class:`~vla_ros_models.oft.network.OFTModel` OpenVLA-OFT, without a diffusion head."""

    def __init__(self, network: OpenVLAModel, recompute_layers: bool = False) -> None:
        super().__init__()
        self.network = network
        self.recompute_layers = recompute_layers
        self.by_action = False

    def open_vision(self) -> Mapping[str, str]:
        """Let only actions count: a frozen decoder ends them as before, and prefers one of two equal tokens.

        The two highest tokens decode to one number. Checkpoints differ in which of them they were trained on.
        """
        self.by_action = True
        return {}

    def forward(self, batch: TokenBatch) -> BatchLoss:
        """Return the loss of a batch."""
        hidden = self._hidden(batch)  # [B, L - 1, width]: row i predicts token i + 1
        head = self._oft.action_head if self._oft is not None else None
        # As many rows of each sample: with a mask, the host would wait for the GPU to count them.
        first, count = batch.slots[:, 1:].int().argmax(1, keepdim=True), batch.actions[0].numel()
        rows = first + torch.arange(count if self.by_action or head is not None else count + 1, device=first.device)
        hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        if head is not None:
            element = (head(hidden).view_as(batch.actions).float() - batch.actions).abs()
            return BatchLoss(element.mean(), element)
        logits = self.network.language_model.lm_head(hidden.flatten(0, 1)).float()
        labels = batch.labels[:, 1:].gather(1, rows).flatten()
        if self.by_action:
            sizes = self.network.architecture
            top = sizes.action_vocab_size - sizes.action_bins
            both = logits[:, top : top + 2].logsumexp(1, keepdim=True)
            logits = torch.cat([logits[:, :top], both, logits[:, top + 2 :]], dim=1)
            labels = labels - (labels > top).long()
        element = functional.cross_entropy(logits, labels, reduction="none")
        return BatchLoss(element.mean(), element)

    @property
    def _oft(self) -> OFTModel | None:
        return self.network if isinstance(self.network, OFTModel) else None

    def _hidden(self, batch: TokenBatch) -> Tensor:
        run, oft = recompute(self.recompute_layers and self.training), self._oft
        weights = as_loaded(self.network.language_model)
        model: Any = self.network.language_model.model
        words: Tensor = model.embed_tokens(
            batch.tokens if oft is None else batch.tokens.masked_fill(batch.slots, 0)
        )
        if oft is not None:
            words = words.masked_fill(batch.slots[..., None], 0.0)
        parts = [self._patches(batch, words, run)]
        if oft is not None and oft.proprio_projector is not None:
            assert batch.state is not None, "the checkpoint takes a state, but the batch has none"
            parts.append(oft.proprio_projector(batch.state)[:, None].to(words.dtype))
        fixed = sum(part.shape[1] for part in parts)
        hidden = torch.cat([words[:, :1], *(part.to(words.dtype) for part in parts), words[:, 1:]], dim=1)
        mask = None
        if oft is not None:
            mask = functional.pad(batch.valid, (fixed, 0), value=True)[:, None, None]
        at, count = prompt_positions(hidden), hidden.shape[1]
        cosine, sine = (table[None, :count, None] for table in (weights.cosine, weights.sine))
        positions = Positions(at, cosine, sine, prompt=True, causal=oft is None, mask=mask)
        for index in range(len(weights.layers)):
            hidden, *_ = run(train_layer, weights, index, hidden, positions)
        ended = TrainingOps().norm(weights, Stream(hidden[:, fixed:-1], 2 * len(weights.layers)))
        return ended

    def _patches(self, batch: TokenBatch, words: Tensor, run: Call) -> Tensor:
        """Embed the images as patches [B, images * patches, llm_width]."""
        backbone, (size, count) = self.network.vision_backbone, batch.images.shape[:2]
        pixels = batch.images.flatten(0, 1).permute(0, 3, 1, 2)
        pixels = pixels.float() / 255.0 if pixels.dtype == torch.uint8 else pixels
        language = None
        if self._oft is not None and self._oft.layout.film:
            chosen = (batch.valid & ~batch.slots)[..., None]  # as in inference; OFT's own training has padding, too
            language = (words * chosen).sum(1) / chosen.sum(1)  # [B, llm_width]
            language = language.repeat_interleave(count, dim=0)
        features = [
            _features(tower, (pixels - mean) / std, language, run)
            for tower, mean, std in zip(
                backbone.towers, torch.split(backbone.mean, 3, 1), torch.split(backbone.std, 3, 1), strict=True
            )
        ]
        patches: Tensor = self.network.projector(torch.cat(features, dim=-1))
        patches = patches.reshape(size, count * patches.shape[1], -1)
        if self._oft is None or self._oft.geometry is None:
            return patches
        assert batch.positions is not None, "the checkpoint takes positions, but the batch has none"
        return self._oft.geometry.added(patches, batch.positions.flatten(1, 2))


def _features(tower: VisionTower, pixels: Tensor, language: Tensor | None, run: Call) -> Tensor:
    """Return the patches [N, P, width] of normalised pixels [N, 3, S, S]."""
    patches: Tensor = tower.patch_embed.proj(pixels.to(tower.pos_embed.dtype)).flatten(2).transpose(1, 2)
    prefix = tower.prefix().expand(len(patches), -1, -1)
    tokens = torch.cat([prefix.to(patches.dtype), patches + tower.pos_embed], dim=1)
    film: list[Tensor | None] = []
    if language is not None:
        blocks: list[Block] = list(tower.blocks)  # type: ignore[arg-type]
        film = [torch.stack([1 + one.scale(language), one.shift(language)])[:, :, None] for one in blocks]
    tokens = run_blocks(list(tower.blocks), tokens, functional.gelu, run, film)
    return tokens[:, tokens.shape[1] - patches.shape[1] :]


def deviation_of(architecture: Architecture, name: str, parameter: Tensor) -> float | Tensor:
    """Return how a parameter starts, as in GPT-2 and Llama: 0.02, smaller where a block adds to the stream."""
    depth = {"vision_backbone": architecture.towers[0].used_blocks, "language_model": architecture.llm.layers}
    if name.endswith("bias"):
        return torch.tensor(0.0)
    if "norm" in name or name.endswith("scale_factor"):
        return torch.tensor(1.0)
    if name.endswith("pos_embed"):
        return 0.5 * sincos_positions(*parameter.shape[1:])
    if "patch_embed" in name or "projector" in name:
        return float(parameter[0].numel() ** -0.5)  # input projections preserve the scale of their input
    if name.endswith(("attn.proj.weight", "mlp.fc2.weight", "o_proj.weight", "down_proj.weight")):
        return 0.02 / math.sqrt(2 * next(count for part, count in depth.items() if part in name))
    return 0.02


@dataclass(frozen=True, eq=False)
class TokenInputs:
    """Prepares samples of OpenVLA and OpenVLA-OFT as inference prepares a request."""

    prompt: PromptEncoder
    bins: ActionBins
    statistics: ActionStatistics  # of the actions
    keys: tuple[str, ...]  # of the images, in the model's order
    state_key: str = ""  # of the state; empty without one
    state: ActionStatistics | None = None
    gripper: tuple[int, tuple[float, float]] | None = None  # its column, and the numbers of closed and open
    points: tuple[tuple[str, str], ...] = ()  # the spec's images with points
    sizes: tuple[int, int, float] = (0, 0, 0.0)  # of an image: side, patches, and its crop; needed with ``points``

    def prepare(
        self,
        observation: Observation,
        actions: FloatArray,
        is_pad: NDArray[np.bool_],
        random: np.random.Generator,
        augment: Augment = as_it_is,
    ) -> Prepared:
        """See :class:`~vla_ros_models.training.SampleInputs`."""
        values = np.array(actions, np.float64)
        if self.gripper is not None:
            column, (closed, opened) = self.gripper
            values[:, column] = (values[:, column] - closed) / (opened - closed)
        normalized = self.statistics.normalize(values)
        prompt = self.prompt.encode(observation.instruction)
        answer = np.array([*self.bins.encode(normalized).flatten(), STOP], np.int64)
        tokens = np.concatenate([prompt, answer])
        own = np.arange(len(tokens)) >= len(prompt)
        found = {
            "images": np.stack([augment(key, observation.images[key], random) for key in self.keys]),
            "tokens": tokens,
            "labels": np.where(own, tokens, NO_LABEL),
            "slots": own & (np.arange(len(tokens)) < len(tokens) - 1),
            "valid": np.ones(len(tokens), np.bool_),
            "actions": normalized.astype(np.float32),
        }
        if self.points:
            found["positions"] = camera_positions(observation.points, self.points, self.keys, *self.sizes)
        if self.state is not None:
            found["state"] = self.state.normalize(observation.state[self.state_key]).astype(np.float32)
        return found

    def collate(self, samples: Sequence[Prepared]) -> TokenBatch:
        """See :class:`~vla_ros_models.training.SampleInputs`."""
        pads = {"labels": NO_LABEL}
        names = [one.name for one in fields(TokenBatch) if one.name in samples[0]]
        return TokenBatch(**{name: stack_arrays(samples, name, pads.get(name, 0)) for name in names})


def make_trainable(
    loaded: Any,
    spec: PolicySpec,
    keys: tuple[str, ...],
    stored: Mapping[str, StoredTensor],
    family: str,
    recompute_layers: bool,
    state: ActionStatistics | None = None,
    area: float = 1.0,
) -> Trainable:
    """Return a network whose weights are loaded, in a policy's ``LoadedNetwork``, as the trainer takes it.

    ``area`` is the share of images that their crop keeps.
    """
    ends = spec.action[-1].range if spec.gripper is not None else None
    gripper = None if spec.gripper is None or ends is None else (spec.gripper, ends)
    state_key = spec.state[0].key if state is not None else ""
    sizes = loaded.model.architecture
    where = spec.points, (sizes.image_size, sizes.patches, area)
    inputs = TokenInputs(loaded.prompt, loaded.bins, loaded.statistics, keys, state_key, state, gripper, *where)
    names = {f"network.{name}": name for name, _ in loaded.model.named_parameters()}
    trainee = TokenTrainee(loaded.model, recompute_layers)
    draw = partial(draw_weights, trainee, partial(deviation_of, sizes)) if family == "openvla" else None
    return Trainable(trainee, names, stored, inputs, spec, sizes.llm, family, initialize=draw)
