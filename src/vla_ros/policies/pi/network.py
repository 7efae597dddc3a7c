"""The network of pi0 and pi0.5: the prefix once, then a velocity for each flow step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.policies.pi.architecture import PiArchitecture
from vla_ros.policies.pi.gemma import GemmaStack, KeyValues, Modulation, Rotary, rotary_at
from vla_ros.policies.pi.vision_tower import SiglipTower

MIN_PERIOD, MAX_PERIOD = 0.004, 4.0


class PrefixInput(NamedTuple):
    """What one chunk is computed from; a batch has the same cameras and the same padded prompt length.

    Attributes:
        pixels: Float32 [B, cameras, 3, S, S] in [-1, 1], the cameras that are there, in the model's order.
        tokens: Int64 [B, L].
        lengths: Int64 [B], valid tokens of each prompt, the rest is padding; None where all are valid.
        state: Float32 [B, action_dim], normalised and padded; pi0 only.
    """

    pixels: Tensor
    tokens: Tensor
    lengths: Tensor | None = None
    state: Tensor | None = None


class Prefix(NamedTuple):
    """What the flow steps read.

    Attributes:
        memory: Keys and values of images, prompt and, in pi0, the state token, with room for the actions.
        start: Places taken; the actions come behind.
        rotary: Of the actions' positions.
        mask: Bool [B, 1, 1, capacity], False at the prompt's padding; None without padding.
    """

    memory: KeyValues
    start: int
    rotary: Rotary
    mask: Tensor | None


class StepConstants(NamedTuple):
    """All through which the time enters one flow step; computed once for a number of steps.

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
        """Data type of the towers and of both Gemmas' matrices; norms and the action's ends are float32."""
        return self.projector.weight.dtype

    def embed_images(self, pixels: Tensor) -> Tensor:
        """[B, cameras, 3, S, S] to tokens [B, cameras * patches, width], all images as one batch; not scaled."""
        features = self.projector(self.vision(pixels.flatten(0, 1)))
        tokens: Tensor = features.unflatten(0, pixels.shape[:2]).flatten(1, 2)
        return tokens

    def embed_prompt(self, tokens: Tensor) -> Tensor:
        """Int64 [B, L] to [B, L, width], scaled by the root of the width."""
        embedded: Tensor = self.embed_tokens(tokens) * math.sqrt(self.architecture.prefix.width)
        return embedded

    def prefill(self, inputs: PrefixInput) -> Prefix:
        """Keys and values of images, prompt and state token.

        Tokens are at the positions 0, 1, ...: what is masked in training is either left out here or, as padding,
        comes last, where it takes no position. The state token sees prefix and itself, never the actions, so that
        its keys and values do not change from step to step and belong here.
        """
        hidden = torch.cat([self.embed_images(inputs.pixels), self.embed_prompt(inputs.tokens)], dim=1)
        batch, count, _ = hidden.shape
        shape, device = self.architecture.prefix, hidden.device
        start = count + int(self.architecture.has_state_token)
        capacity = start + self.architecture.horizon
        sizes = (shape.depth, batch, shape.kv_heads, capacity, shape.head_dim)
        memory = KeyValues(*(torch.zeros(sizes, device=device, dtype=hidden.dtype) for _ in range(2)))

        positions = torch.arange(capacity, device=device)[None]
        mask = None
        if inputs.lengths is not None:
            padding = (inputs.tokens.shape[1] - inputs.lengths)[:, None]  # [B, 1]
            mask = ((positions < count - padding) | (positions >= count))[:, None, None]
            positions = torch.where(positions < count, positions, positions - padding)
        cosine, sine = rotary_at(positions, shape.head_dim, hidden.dtype)

        def rotary(first: int, end: int) -> Rotary:
            return cosine[:, :, first:end], sine[:, :, first:end]

        self.prefix.remember(hidden, rotary(0, count), memory, 0, mask)
        if self.architecture.has_state_token:
            assert inputs.state is not None, "pi0 needs the state"
            token = self.state_proj(inputs.state)[:, None].to(hidden.dtype)
            self.expert.remember(token, rotary(count, start), memory, count, mask)
        return Prefix(memory, start, rotary(start, capacity), mask)

    def constants(self, time: float) -> StepConstants:
        """What depends on the time alone."""
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
        """Noisy actions, float32 [B, H, action_dim], to the expert's tokens, float32 [B, H, E]."""
        tokens: Tensor = self.action_in_proj(actions)
        if constants.time_bias is not None:
            weight = self.action_time_mlp_in.weight[:, : tokens.shape[-1]]
            hidden = functional.silu(functional.linear(tokens, weight) + constants.time_bias)
            tokens = self.action_time_mlp_out(hidden)
        return tokens

    def velocity(self, actions: Tensor, constants: StepConstants, prefix: Prefix) -> Tensor:
        """Float32 [B, H, action_dim] at one time, from noisy actions of the same shape."""
        hidden = self.embed_actions(actions, constants).to(self.dtype)
        hidden = self.expert(hidden, constants.layers, prefix.rotary, prefix.memory, prefix.start, prefix.mask)
        output: Tensor = self.action_out_proj(constants.final.norm(hidden).float())
        return output


def time_embedding(time: float, width: int) -> Tensor:
    """Float32 [width]: sines, then cosines, of ``width / 2`` periods; computed in float64 as the references do."""
    exponent = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device="cpu")
    periods = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** exponent
    angles = 2.0 * math.pi * time / periods
    return torch.cat([angles.sin(), angles.cos()]).float()
