"""The OpenVLA-OFT network: OpenVLA with an action head, projectors for state and noisy actions, and FiLM.

Parameter names are those of the published files, without the prefix ``module.`` that training adds.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.types import IntArray
from vla_ros_models.engine.shapes import GeometryShape
from vla_ros_models.geometry import GEOMETRY, GeometryTokens
from vla_ros_models.openvla.architecture import Architecture
from vla_ros_models.openvla.network import OpenVLAModel
from vla_ros_models.vision_tower import Mlp

TRAINING_STEPS = 50
"""Steps of the noise schedule that diffusion heads are trained with."""


@dataclass(frozen=True)
class Layout:
    """Parts of a checkpoint's sequence besides the prompt."""

    images: int  # number of images
    chunk: int  # K, actions per chunk
    action: int  # D, numbers per action
    state: int  # P, numbers of the proprioceptive state; 0 without a state
    head: str  # ``l1``, ``diffusion``, or ``none`` where actions are tokens
    film: bool  # whether the text modulates the vision towers
    geometry: GeometryShape | None = None  # of the tokens for where the patches' surfaces are; None without them

    @property
    def slots(self) -> int:
        """Placeholder positions: one per number of the chunk."""
        return self.chunk * self.action

    @property
    def extras(self) -> int:
        """Positions between the patches and the prompt: state, diffusion timestep."""
        return int(self.state > 0) + int(self.head == "diffusion")


class ResidualBlock(nn.Module):
    """``x + ReLU(Linear(LayerNorm(x)))``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to [..., width]."""
        total: Tensor = x + self.ffn(x)
        return total


class ActionHead(nn.Module):
    """Maps the hidden states of K * D placeholders to K actions of D numbers, or to the noise in them."""

    def __init__(self, width: int, action: int, blocks: int = 2) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(width * action)
        self.fc1 = nn.Linear(width * action, width)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(blocks))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, action)

    def forward(self, states: Tensor) -> Tensor:
        """Map hidden states of the action tokens [B, K * D, width] to normalised actions or noise [B * K, D]."""
        x = functional.relu(self.fc1(self.layer_norm1(states.view(-1, self.fc1.in_features))))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        count = self.fc2.out_features
        room = -count % 8  # padded, because cuBLAS takes 100 us for seven outputs (H200)
        weight, bias = functional.pad(self.fc2.weight, (0, 0, 0, room)), functional.pad(self.fc2.bias, (0, room))
        return functional.linear(self.layer_norm2(x), weight, bias)[:, :count]


class OFTModel(OpenVLAModel):
    """OpenVLA's network with an action head, projectors and geometric tokens; absent parts are None."""

    float32: ClassVar[str] = f"{GEOMETRY}."  # positions need it

    def __init__(self, architecture: Architecture, layout: Layout) -> None:
        super().__init__(architecture, layout.film)
        width = architecture.llm.hidden_size
        self.layout = layout
        self.action_head = None if layout.head == "none" else ActionHead(width, layout.action)
        self.proprio_projector = Mlp(layout.state, width, width) if layout.state else None
        self.noisy_action_projector = Mlp(1, width, width) if layout.head == "diffusion" else None
        self.geometry = GeometryTokens(layout.geometry, width) if layout.geometry else None


class SequencePlan(NamedTuple):
    """Layout of a sequence, as indices into the rows of :func:`sources`."""

    order: IntArray  # int64 [S], the source row of each position; padding takes row 0, which is zero
    wanted: IntArray  # int64 [K * D], positions whose states become actions: one before each placeholder
    length: int  # positions without padding


def plan_sequence(layout: Layout, patches: int, text: int, prompt: int, size: int) -> SequencePlan:
    """Lay out ``BOS, patches, [state], [timestep], prompt, placeholders, </s>``, padded to ``size``.

    ``patches`` is the number of patch tokens of all images, ``text`` is the number of source rows for text, and
    ``prompt`` is the prompt's length with BOS. ``</s>`` is text token number ``prompt``.
    """
    fixed = patches + layout.extras
    words = np.arange(1, prompt + 2)  # row 0 is zero
    inputs = np.arange(text + 1, text + 1 + fixed)
    slots = np.zeros(layout.slots, np.int64)
    if layout.head == "diffusion":
        slots = np.arange(text + 1 + fixed, text + 1 + fixed + layout.slots)
    order = np.concatenate([words[:1], inputs, words[1:-1], slots, words[-1:]])
    wanted = fixed + prompt - 1 + np.arange(layout.slots)
    return SequencePlan(np.pad(order, (0, size - len(order))), wanted, len(order))


def sources(words: Tensor, patches: Tensor, extras: list[Tensor], noisy: Tensor | None) -> Tensor:
    """Return the source rows [B, rows, width]: a zero row, text, patches, extras, noisy actions."""
    zero = torch.zeros_like(words[:, :1])
    return torch.cat([zero, words, patches, *extras, *([] if noisy is None else [noisy])], dim=1)


class Denoising(NamedTuple):
    """Constants of each denoising step, from the first to the last."""

    times: Tensor  # timestep tokens [n, width] float32
    alphas: Tensor  # cumulative products at each step and at the next, float32 [n, 2]

    @classmethod
    def of(cls, steps: int, width: int) -> "Denoising":
        """Compute DDIM's squared-cosine schedule with ``leading`` spacing, in float32 as in training.

        ``steps`` are those of an inference, at most ``TRAINING_STEPS``; ``width`` is that of a step's embedding.
        """

        def bar(share: float) -> float:
            return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

        n = TRAINING_STEPS
        betas = torch.tensor([min(1 - bar((i + 1) / n) / bar(i / n), 0.999) for i in range(n)], dtype=torch.float32)
        products = torch.cumprod(1.0 - betas, 0)
        stride = n // steps
        at = torch.arange(steps - 1, -1, -1) * stride
        before = at - stride
        previous = torch.where(before >= 0, products[before.clamp_min(0)], torch.ones(()))
        half = width // 2
        frequencies = torch.exp(torch.arange(half) * (-math.log(10000.0) / (half - 1)))
        angles = at[:, None].float() * frequencies
        return cls(torch.cat([angles.sin(), angles.cos()], dim=1), torch.stack([products[at], previous], dim=1))


def denoise(sample: Tensor, noise: Tensor, alphas: Tensor) -> Tensor:
    """Run one DDIM step (eta 0) with the estimated ``noise``; ``alphas`` [2] belong to this step and the next.

    The estimate of the clean sample is clipped to [-1, 1].
    """
    now, following = alphas.unbind()
    clean = ((sample - (1 - now).sqrt() * noise) / now.sqrt()).clamp(-1.0, 1.0)
    return following.sqrt() * clean + (1 - following).sqrt() * noise


COMPONENTS = ("action_head", "proprio_projector", "noisy_action_projector", GEOMETRY)
"""Parts that published checkpoints store in separate files, as they do ``vision_backbone`` with FiLM."""
