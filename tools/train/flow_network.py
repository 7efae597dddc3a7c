"""A small pi0.5 for training: a differentiable forward pass of the policy's parameters, and two auxiliary heads."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train.labels import KINDS
from tools.train.network import sincos_positions
from tools.train.recipe import FlowNetworkRecipe
from vla_ros_models.engine.ops import rotate
from vla_ros_models.engine.shapes import DecoderShape, TowerShape
from vla_ros_models.engine.tower_ops import TowerOps
from vla_ros_models.pi.architecture import PI05, PiArchitecture, gemma
from vla_ros_models.pi.network import RMS_EPS, GemmaParameters, PiNetwork, rotary_tables_like

STATE_SIZE = ACTION_SIZE = 8
"""Seven joints and the gripper."""


def architecture_of(
    recipe: FlowNetworkRecipe, vocabulary: int, horizon: int, image_size: int = 224, patch_size: int = 14
) -> PiArchitecture:
    """Return a pi0.5 with the recipe's sizes and :data:`ACTION_SIZE` action dimensions."""
    blocks, width = recipe.vision_blocks, recipe.vision_width
    heads = {"heads": recipe.heads, "head_dim": recipe.head_dim, "layers": recipe.depth}
    return PiArchitecture(
        PI05,
        TowerShape(width, blocks, recipe.vision_heads, 4 * width, blocks, patch_size, image_size),
        gemma(recipe.prefix_width, mlp_width=recipe.prefix_hidden, **heads),
        gemma(recipe.expert_width, mlp_width=recipe.expert_hidden, **heads),
        vocabulary,
        ACTION_SIZE,
        horizon,
    )


class FlowPredictions(NamedTuple):
    """Outputs of a forward pass; R = frames times prompts."""

    velocity: Tensor  # float32 [R * K, H, A], pointing from actions to noise
    places: Tensor  # logits of the patch that holds the named object [R, patches]
    kinds: Tensor  # logits of the object in each patch [F, patches, len(KINDS) + 1]; the last class is no object


class Prefix(NamedTuple):
    """Encoded images and prompts, which all samples of a chunk share."""

    patches: Tensor  # [F, P, width]
    past: list[tuple[Tensor, Tensor]]  # keys and values of every layer [R, P + L, 1, head_dim]
    last: Tensor  # [R, width], the last token of each prompt before the last layer
    ends: Tensor  # int64 [R], length of each row
    seen: Tensor | None  # bool [R, P + L], False for padding; None if no prompt is padded
    rotary: tuple[Tensor, Tensor]  # cosines and sines of all positions


class FlowTrainee(nn.Module):
    """The network with its two auxiliary heads."""

    def __init__(self, architecture: PiArchitecture) -> None:
        super().__init__()
        self.network = PiNetwork(architecture)
        self.architecture = architecture
        width = architecture.prefix.hidden_size
        self.place_head = nn.Linear(width, architecture.vision.patches)
        self.kind_head = nn.Linear(width, len(KINDS) + 1)

    def forward(
        self, images: Tensor, prompts: Tensor, lengths: Tensor | None, noisy: Tensor, times: Tensor
    ) -> FlowPredictions:
        """Predict the velocity of noisy actions.

        Args:
            images: [F, S, S, 3] RGB, uint8, or float in [0, 1]; [F, cameras, S, S, 3] of several cameras.
            prompts: Int64 [R, L], padded; R / F consecutive rows belong to one frame.
            lengths: Int64 [R], number of tokens of each prompt; None if no prompt is padded.
            noisy: Float32 [R * K, H, A], normalised actions at ``times``; K consecutive samples share a prompt.
            times: Float32 [R * K, H], 1 for noise, 0 for actions, including actions given by real-time chunking.
        """
        prefix = self.encode(images, prompts, lengths, noisy.shape[1])
        velocity = self.velocity(prefix, noisy, times)
        return FlowPredictions(
            velocity, self.place_head(prefix.last).float(), self.kind_head(prefix.patches).float()
        )

    def encode(self, images: Tensor, prompts: Tensor, lengths: Tensor | None, horizon: int) -> Prefix:
        """Encode images and prompts, once for all samples of a chunk."""
        network = self.network
        shape = self.architecture.prefix
        pixels = images.flatten(0, -4)
        patches = network.encode(pixels, TowerOps()).view(len(images), -1, shape.hidden_size)  # [F, P, width]
        repeated = patches.repeat_interleave(len(prompts) // len(images), dim=0)
        words = network.embed_tokens(prompts) * shape.hidden_size**0.5
        hidden = torch.cat([repeated, words.to(repeated.dtype)], dim=1)  # [R, P + L, width]
        count = hidden.shape[1]
        ends = torch.full((len(prompts),), count, device=prompts.device)
        seen = None
        if lengths is not None:
            ends = patches.shape[1] + lengths
            seen = torch.arange(count, device=ends.device) < ends[:, None]  # [R, P + L]
        rotary = rotary_tables_like(count + horizon, shape.head_dim, words.float())
        at = torch.arange(count, device=ends.device).expand(len(prompts), -1)
        past, hidden = _prefix(network.prefix, hidden, at, rotary, seen)
        last = hidden.gather(1, (ends - 1)[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]
        return Prefix(patches, past, last, ends, seen, rotary)

    def velocity(self, prefix: Prefix, noisy: Tensor, times: Tensor) -> Tensor:
        """Return the velocities, float32 [R * K, H, A], given a prefix of R rows."""
        samples = len(noisy) // len(prefix.ends)
        ends = prefix.ends.repeat_interleave(samples, dim=0)
        seen = None if prefix.seen is None else prefix.seen.repeat_interleave(samples, dim=0)
        past = [(k.repeat_interleave(samples, dim=0), v.repeat_interleave(samples, dim=0)) for k, v in prefix.past]
        at = ends[:, None] + torch.arange(noisy.shape[1], device=ends.device)
        hidden = self.network.action_in_proj(noisy)
        return self._expert(hidden, at, prefix.rotary, seen, past, self._condition(times)).float()

    @torch.no_grad()
    def sample(self, prefix: Prefix, noise: Tensor, steps: int) -> Tensor:
        """Return the actions [R, H, A] from ``noise`` by Euler's method."""
        actions = noise
        for step in range(steps):
            times = torch.full(noise.shape[:2], 1 - step / steps, device=noise.device)
            actions = actions - self.velocity(prefix, actions, times) / steps
        return actions

    def _condition(self, times: Tensor) -> Tensor:
        width = self.architecture.expert.hidden_size
        exponent = torch.linspace(0.0, 1.0, width // 2, device=times.device)
        shortest, longest = self.architecture.periods
        angles = 2 * math.pi * times[..., None] / (shortest * (longest / shortest) ** exponent)
        embedded = torch.cat([angles.sin(), angles.cos()], dim=-1)
        network = self.network
        embedded = functional.silu(network.time_mlp_in(embedded))
        return functional.silu(network.time_mlp_out(embedded))

    def _expert(
        self,
        hidden: Tensor,
        at: Tensor,
        rotary: tuple[Tensor, Tensor],
        seen: Tensor | None,
        past: list[tuple[Tensor, Tensor]],
        condition: Tensor,
    ) -> Tensor:
        """Return velocities [R, H, A] of action tokens ``hidden`` [R, H, E], given the prefix's keys and values."""
        if seen is not None:
            seen = torch.cat([seen, seen.new_ones(at.shape)], dim=1)
        expert = self.network.expert
        layers: list[Any] = list(expert.layers)
        for layer, (keys, values) in zip(layers, past, strict=True):
            normed, gate = _normed(hidden, layer.input_norm, condition)
            query, key, value = _heads(layer, expert.shape, normed, at, rotary)
            mixed = _attend(query, torch.cat([keys, key], dim=1), torch.cat([values, value], dim=1), seen)
            hidden = hidden + gate * layer.o(mixed)
            normed, gate = _normed(hidden, layer.post_norm, condition)
            hidden = hidden + gate * _mlp(layer, normed)
        normed, _ = _normed(hidden, expert.norm, condition)
        velocity: Tensor = self.network.action_out_proj(normed)
        return velocity


def _prefix(
    prefix: GemmaParameters, hidden: Tensor, at: Tensor, rotary: tuple[Tensor, Tensor], seen: Tensor | None
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return the keys and values of every layer, and the hidden states before the last layer."""
    past: list[tuple[Tensor, Tensor]] = []
    layers: list[Any] = list(prefix.layers)
    for layer in layers:
        query, key, value = _heads(layer, prefix.shape, _normed(hidden, layer.input_norm)[0], at, rotary)
        past.append((key, value))
        if not hasattr(layer, "o"):
            break
        hidden = hidden + layer.o(_attend(query, key, value, seen))
        hidden = hidden + _mlp(layer, _normed(hidden, layer.post_norm)[0])
    return past, hidden


def _normed(hidden: Tensor, norm: Any, condition: Tensor | None = None) -> tuple[Tensor, Tensor | float]:
    """Return the RMS norm of ``hidden`` [R, N, width], and the gate of the block that follows."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_EPS)
    if condition is None:
        return wide * (1.0 + norm.weight), 1.0
    scale, shift, gate = norm.dense(condition).chunk(3, dim=-1)
    return wide * (1.0 + scale) + shift, gate


def _heads(
    layer: Any, shape: DecoderShape, normed: Tensor, at: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated queries and keys, and the values, [R, N, heads, head_dim] each."""
    heads = layer.qkv(normed).unflatten(-1, (-1, shape.head_dim))
    size = shape.kv_heads
    query, key, value = torch.split(heads, [heads.shape[2] - 2 * size, size, size], dim=2)
    cosine, sine = (table[at][:, :, None] for table in rotary)
    return rotate(query, cosine, sine), rotate(key, cosine, sine), value


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
    query, key, value = (each.transpose(1, 2).to(value.dtype) for each in (query, key, value))
    mask = None if seen is None else seen[:, None, None]
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def _mlp(layer: Any, normed: Tensor) -> Tensor:
    gate, up = layer.gate_up(normed).chunk(2, dim=-1)
    output: Tensor = layer.down(functional.gelu(gate, approximate="tanh") * up)
    return output


@torch.no_grad()
def initialize(trainee: FlowTrainee, seed: int) -> None:
    """Initialise like :func:`tools.train.network.initialize`; the expert's layers start as identities."""
    generator = torch.Generator().manual_seed(seed)
    shape = trainee.architecture
    for name, parameter in trainee.named_parameters():
        if name.endswith(("bias", "_norm.weight")) or ".dense." in name:
            parameter.zero_()
        elif "vision" in name and "norm" in name:
            parameter.fill_(1.0)
        elif name.endswith("pos_embed"):
            parameter.copy_(0.5 * sincos_positions(parameter.shape[-2], parameter.shape[-1]).view_as(parameter))
        else:
            deviation = parameter[0].numel() ** -0.5  # preserves the scale of the input
            if name.endswith(("attn.proj.weight", "fc2.weight", ".o.weight", ".down.weight")):
                deviation /= math.sqrt(2 * (shape.vision.blocks if "vision" in name else shape.prefix.layers))
            elif name.endswith("embed_tokens.weight"):
                deviation = shape.prefix.hidden_size**-0.5  # the network multiplies by the root of the width
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
