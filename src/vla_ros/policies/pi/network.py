"""The network of pi0 and pi0.5: the prefix once, then a velocity for each flow step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.policies.pi.architecture import PiArchitecture
from vla_ros.policies.pi.gemma import GemmaStack, KeyValueCache, Modulation, Rotary, rotary_at
from vla_ros.policies.pi.vision_tower import SiglipTower

MIN_PERIOD, MAX_PERIOD = 0.004, 4.0


class PrefixInput(NamedTuple):
    """Inputs of one chunk; a batch shares its cameras and its padded prompt length.

    Attributes:
        pixels: Float32 [B, cameras, 3, S, S] in [-1, 1]: the present cameras, in the model's order.
        tokens: Int64 [B, L].
        lengths: Int64 [B], valid tokens of each prompt, the rest is padding; None where all are valid.
        state: Float32 [B, action_dim], normalised and padded; pi0 only.
    """

    pixels: Tensor
    tokens: Tensor
    lengths: Tensor | None = None
    state: Tensor | None = None


class Prefix(NamedTuple):
    """The prefix as the flow steps read it.

    Attributes:
        cache: Keys and values of images, prompt and, in pi0, the state token, with capacity for the actions.
        start: Cached positions; those of the actions follow.
        rotary: Of the actions' positions.
        mask: Bool [B, 1, 1, capacity], False at the prompt's padding; None without padding.
    """

    cache: KeyValueCache
    start: int
    rotary: Rotary
    mask: Tensor | None


class StepConstants(NamedTuple):
    """Everything in one flow step that depends on the time; computed once per model.

    Attributes:
        time: t, 1 for noise and 0 for actions.
        time_bias: pi0: [E], the time's share of ``action_time_mlp_in`` with its bias.
        layers: Modulations of every expert layer.
        final: Of the final norm; its gate is not used.
    """

    time: float
    time_bias: Tensor | None
    layers: tuple[tuple[Modulation, Modulation], ...]
    final: Modulation


class PiNetwork(nn.Module):
    """Vision tower, projector, Gemma prefix and action expert.

    Args:
        architecture: Sizes.
    """

    def __init__(self, architecture: PiArchitecture) -> None:
        super().__init__()
        prefix, expert = architecture.prefix, architecture.expert
        width = expert.width
        self.architecture = architecture
        self.vision = SiglipTower(architecture.vision)
        self.projector = nn.Linear(architecture.vision.width, prefix.width)
        self.embed_tokens = nn.Embedding(architecture.vocabulary, prefix.width)
        self.prefix = GemmaStack(prefix, keys_only=True)
        self.expert = GemmaStack(expert, adaptive=not architecture.has_state_token)
        self.action_in_proj = nn.Linear(architecture.action_dim, width)
        self.action_out_proj = nn.Linear(width, architecture.action_dim)
        if architecture.has_state_token:
            self.state_proj = nn.Linear(architecture.action_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)
        else:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.projector.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the matrices; norms and the projections of state and actions are float32."""
        return self.projector.weight.dtype

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Embed [B, cameras, 3, S, S], all images as one batch, as tokens [B, cameras * patches, width]."""
        features = self.projector(self.vision(pixels.flatten(0, 1)))
        tokens: Tensor = features.unflatten(0, pixels.shape[:2]).flatten(1, 2)
        return tokens

    def embed_prompt(self, tokens: Tensor) -> Tensor:
        """Embed int64 [B, L] as [B, L, width], scaled by the root of the width (image tokens are not)."""
        embedded: Tensor = self.embed_tokens(tokens) * math.sqrt(self.architecture.prefix.width)
        return embedded

    def prefill(self, inputs: PrefixInput) -> Prefix:
        """Compute keys and values of images, prompt and state token.

        Valid tokens have the positions 0, 1, ...: a missing camera is not in the input, and padding comes last and
        takes no position. The state token attends to the prefix and itself, never to the actions, so its keys and
        values are the same in every flow step and are computed here.
        """
        hidden = torch.cat([self.embed_images(inputs.pixels), self.embed_prompt(inputs.tokens)], dim=1)
        batch, count, _ = hidden.shape
        shape, device = self.architecture.prefix, hidden.device
        start = count + int(self.architecture.has_state_token)
        capacity = start + self.architecture.horizon
        sizes = (shape.depth, batch, shape.kv_heads, capacity, shape.head_dim)
        cache = KeyValueCache(*(torch.zeros(sizes, device=device, dtype=hidden.dtype) for _ in range(2)))

        positions = torch.arange(capacity, device=device)[None]
        mask = None
        if inputs.lengths is not None:
            padding = (inputs.tokens.shape[1] - inputs.lengths)[:, None]  # [B, 1]
            mask = ((positions < count - padding) | (positions >= count))[:, None, None]
            positions = torch.where(positions < count, positions, positions - padding)
        cosine, sine = rotary_at(positions, shape.head_dim, hidden.dtype)

        def rotary(first: int, end: int) -> Rotary:
            return cosine[:, :, first:end], sine[:, :, first:end]

        self.prefix.fill_cache(hidden, rotary(0, count), cache, 0, mask)
        if self.architecture.has_state_token:
            assert inputs.state is not None, "pi0 needs the state"
            token = self.state_proj(inputs.state)[:, None].to(hidden.dtype)
            self.expert.fill_cache(token, rotary(count, start), cache, count, mask)
        return Prefix(cache, start, rotary(start, capacity), mask)

    def constants(self, time: float) -> StepConstants:
        """Compute what one flow step derives from its time."""
        width = self.architecture.expert.width
        embedded = time_embedding(time, width).to(self.action_in_proj.weight.device)
        condition, bias = None, None
        if self.architecture.has_state_token:
            weight, offset = self.action_time_mlp_in.weight, self.action_time_mlp_in.bias
            bias = functional.linear(embedded, weight[:, width:], offset)
        else:
            condition = functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(embedded))))
        layers = tuple(layer.modulations(condition) for layer in self.expert.each())
        return StepConstants(time, bias, layers, self.expert.norm.modulation(condition))

    def embed_actions(self, actions: Tensor, constants: StepConstants) -> Tensor:
        """Embed noisy actions, float32 [B, H, action_dim], as the expert's tokens, float32 [B, H, E]."""
        tokens: Tensor = self.action_in_proj(actions)
        if constants.time_bias is not None:
            weight = self.action_time_mlp_in.weight[:, : tokens.shape[-1]]
            hidden = functional.silu(functional.linear(tokens, weight) + constants.time_bias)
            tokens = self.action_time_mlp_out(hidden)
        return tokens

    def velocity(self, actions: Tensor, constants: StepConstants, prefix: Prefix) -> Tensor:
        """Predict the velocity of noisy actions at one time; both float32 [B, H, action_dim]."""
        hidden = self.embed_actions(actions, constants).to(self.dtype)
        hidden = self.expert(hidden, constants.layers, prefix.rotary, prefix.cache, prefix.start, prefix.mask)
        output: Tensor = self.action_out_proj(constants.final.norm(hidden).float())
        return output


def time_embedding(time: float, width: int) -> Tensor:
    """Embed the time: float32 [width], sines then cosines of ``width / 2`` periods.

    Computed in float64, as openpi and LeRobot do on a CPU or CUDA device.
    """
    exponent = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device="cpu")
    periods = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** exponent
    angles = 2.0 * math.pi * time / periods
    return torch.cat([angles.sin(), angles.cos()]).float()
