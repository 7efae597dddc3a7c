"""The parameters of pi0 and pi0.5, and the model that :mod:`vla_ros_models.engine.flow` runs with them.

Query, key and value form one matrix, gate and up another; the loader stacks them.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros_models.distilled import TARGET_LAYERS
from vla_ros_models.engine import fp8
from vla_ros_models.engine.flow import FlowModel
from vla_ros_models.engine.shapes import DecoderShape, TowerShape
from vla_ros_models.engine.tower_ops import TowerOps
from vla_ros_models.engine.weights import DecoderWeights, Layer, Matrix
from vla_ros_models.geometry import GeometryTokens
from vla_ros_models.pi.architecture import PROMPT_TOKENS, PiArchitecture
from vla_ros_models.vision_tower import LAYER_NORM_EPS, Block, VisionTower
from vla_ros_models.weights import empty, linears_of


class SiglipTower(VisionTower):
    """Returns the last block's patches after the final norm.

    Patches and positions are embedded in their own type: pi's in float32 even if the blocks are bfloat16.
    """

    def __init__(self, shape: TowerShape) -> None:
        super().__init__(shape)
        self.norm = nn.LayerNorm(shape.width, eps=LAYER_NORM_EPS)

    def forward(self, images: Tensor, ops: TowerOps) -> Tensor:
        """Encode images [N, S, S, 3], uint8 or float32 in [0, 1], as features [N, patches, width]."""
        tokens = self.embed(images)
        blocks: list[Block] = list(self.blocks)  # type: ignore[arg-type]
        normed: Tensor = blocks[0].norm1(tokens)
        for block, following in zip(blocks, [*(each.norm1 for each in blocks[1:]), self.norm], strict=True):
            tokens, normed = ops.add_norm(tokens, block.attn(normed), None, block.norm2)
            branch = block.mlp.fc2(ops.linear_gelu(normed, block.mlp.fc1))
            tokens, normed = ops.add_norm(tokens, branch, None, following)
        return normed

    def resize(self, shape: TowerShape) -> None:
        """Take images of another size: each patch has the position of the stored patch that it begins in."""
        stored, side = (one.image_size // one.patch_size for one in (self.shape, shape))
        bounds = torch.arange(1 / stored, 1.0, 1 / stored)
        starts = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
        at = torch.bucketize(starts, bounds, right=True)
        index = (at[:, None] * stored + at).flatten().to(self.pos_embed.device)
        self.shape, self.pos_embed = shape, nn.Parameter(self.pos_embed[:, index], requires_grad=False)

    def embed(self, images: Tensor) -> Tensor:
        """Embed patches and add their positions: [N, patches, width]."""
        size, side = self.shape.patch_size, self.shape.image_size // self.shape.patch_size
        pixels = torch.rsub(images.float() / 255.0 if images.dtype == torch.uint8 else images, -1.0, alpha=-2.0)
        grid = pixels.view(-1, side, size, side, size, 3).permute(0, 1, 3, 5, 2, 4)
        patches = torch.empty(grid.shape, dtype=self.pos_embed.dtype, device=grid.device).copy_(grid)
        patches = patches.view(len(images), side * side, -1)
        return (self.patch_embed.embed(patches) + self.pos_embed).to(self.norm.weight.dtype)


RMS_EPS = 1e-6
LOADED = "loaded"
"""The kind of matrices that are the network's own modules (:class:`~vla_ros_models.engine.weights.Matrix`)."""

ROPE_THETA = 10000.0
CAMERAS = 8
"""Maximum number of cameras for which the rotary tables have positions."""


class RmsNorm(nn.Module):
    """An RMS norm that multiplies by ``1 + weight``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def parts(self, condition: Tensor) -> Tensor:
        """Return the scale [times, 1, width], which is the same at every time."""
        return (1.0 + self.weight.float()).expand(len(condition), 1, -1)


class LlamaNorm(RmsNorm):
    """An RMS norm that multiplies by ``weight``, as Llama's; Gemma's multiplies by ``1 + weight``."""

    def parts(self, condition: Tensor) -> Tensor:
        return self.weight.float().expand(len(condition), 1, -1)


class AdaptiveNorm(nn.Module):
    """An RMS norm whose scale, shift and gate are a linear function of the time condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def parts(self, condition: Tensor) -> Tensor:
        """Return 1 + scale, shift and gate [times, 3, width] for conditions [times, width]."""
        parts: Tensor = self.dense(condition).float().unflatten(-1, (3, -1))
        parts[:, 0] += 1.0
        return parts


class GemmaParameters(nn.Module):
    """The parameters of one decoder.

    ``norm`` is the class of its norms; those of pi0.5's expert depend on the flow time. With ``keys_only`` (the
    prefix), the last layer has only keys and values, and there is no final norm. ``crossing`` layers project
    another model's keys and values.
    """

    def __init__(
        self,
        shape: DecoderShape,
        norm: type[nn.Module] = RmsNorm,
        keys_only: bool = False,
        crossing: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(
            _layer(shape, norm, keys_only and index == shape.layers - 1, index in crossing)
            for index in range(shape.layers)
        )
        if not keys_only:
            self.norm = norm(shape.hidden_size)

    def weights(
        self, condition: Tensor, rotary: tuple[Tensor, Tensor], quantization: str = "none", keep: bool = True
    ) -> DecoderWeights:
        """Return the weights for the engine, with the norms of each condition.

        The weights are the parameters themselves; with ``fp8``, all but the output projections are quantised
        copies. Without ``keep``, each parameter is freed once it is quantised. With ``loaded``, the layers' own
        modules compute the products, with gradients.
        """
        layers: list[Any] = list(self.layers)
        names = ("input_norm", "post_norm")
        norms = [getattr(layer, name) for layer in layers for name in names if hasattr(layer, name)]
        norms += [self.norm] if hasattr(self, "norm") else []
        # One tensor: a kernel finds the gate of a norm before the scale of the next.
        parts = torch.stack([norm.parts(condition) for norm in norms], dim=1).contiguous()

        plain = LOADED if quantization == LOADED else "none"

        def engine_layer(index: int, layer: Any) -> Layer:
            matrices = {
                role: _matrix(layer, name, role, plain if name == "o" else quantization, keep)
                for name, role in _ROLES
                if hasattr(layer, name)
            }
            found = Layer.of(matrices)
            if hasattr(layer, "k"):
                keys, values = (_matrix(layer, name, "qkv", plain, keep) for name in "kv")
                found = replace(found, cross=(keys, values))
            if parts.shape[2] == 1 or found.gate_up is None or plain == LOADED:
                return found
            first, second = parts[:, 2 * index, 1], parts[:, 2 * index + 1, 1]
            shifts = (
                functional.linear(first, found.qkv.data.float()),
                functional.linear(second, found.gate_up.data.float()),
            )
            return replace(found, shifts=shifts)

        return DecoderWeights(
            shape=self.shape,
            layers=tuple(engine_layer(index, layer) for index, layer in enumerate(layers)),
            norms=parts.unbind(1),
            cosine=rotary[0],
            sine=rotary[1],
        )


_ROLES = (
    ("qkv", "qkv"), ("q", "qkv"), ("o", "o_proj"), ("gate_up", "gate_up"), ("down", "down_proj"),
)  # fmt: skip


def _layer(shape: DecoderShape, norm: type[nn.Module], keys_only: bool, crosses: bool) -> nn.Module:
    linear, layer = partial(nn.Linear, bias=False), nn.Module()
    keys, queries, width = 2 * shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim, shape.hidden_size
    layer.input_norm = norm(width)
    if crosses:
        layer.q, layer.k, layer.v = (
            linear(width, queries),
            linear(keys // 2, keys // 2),
            linear(keys // 2, keys // 2),
        )
    else:
        layer.qkv = linear(width, keys + (0 if keys_only else queries))
    if not keys_only:
        layer.o = linear(queries, width)
        layer.post_norm = norm(width)
        layer.gate_up = linear(width, 2 * shape.intermediate_size)
        layer.down = linear(shape.intermediate_size, width)
    return layer


def _matrix(layer: Any, name: str, role: str, quantization: str, keep: bool) -> Matrix:
    if quantization == LOADED:
        found = getattr(layer, name)  # without queries, the engine splits the product itself
        return Matrix.of_linears(role, *(linears_of(found) if hasattr(layer, "o") else (found,)))
    weight = getattr(layer, name).weight.data
    if quantization == "none":
        return Matrix(weight, "dense", int(weight.shape[1]), role)
    data, scale = fp8.quantize(weight)
    if not keep:
        getattr(layer, name).weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return Matrix(data, "fp8_rows", int(weight.shape[1]), role, scale[:, 0].contiguous())


class PiNetwork(nn.Module):
    """The parameters of vision tower, projector, Gemma prefix and action expert."""

    target_time_mlp_in: nn.Linear  # of a distilled flow
    target_time_mlp_out: nn.Linear

    def __init__(self, architecture: PiArchitecture) -> None:
        super().__init__()
        prefix, expert = architecture.prefix, architecture.expert
        width = expert.hidden_size
        self.architecture = architecture
        self.vision = SiglipTower(architecture.vision)
        self.projector = nn.Linear(architecture.vision.width, prefix.hidden_size)
        self.embed_tokens = nn.Embedding(architecture.vocabulary, prefix.hidden_size)
        self.prefix = GemmaParameters(prefix, keys_only=True)
        self.expert = GemmaParameters(expert, RmsNorm if architecture.has_state_token else AdaptiveNorm)
        self.action_in_proj = nn.Linear(architecture.action_dim, width)
        self.action_out_proj = nn.Linear(width, architecture.action_dim)
        if architecture.has_state_token:
            self.state_proj = nn.Linear(architecture.action_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)
        else:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        if architecture.targets:
            self.add_targets()
        sizes = architecture.geometry
        self.geometry = GeometryTokens(sizes, prefix.hidden_size) if sizes else None

    def add_targets(self) -> None:
        """Add the layers for the time at which a flow step ends; with zeros, a step does not depend on it."""
        width = self.architecture.expert.hidden_size
        for name in TARGET_LAYERS:
            setattr(self, name, nn.Linear(width, width, device=self.device))

    def condition(self, time: Tensor, target: Tensor | None = None) -> Tensor:
        """Embed times [T, 1] of flow steps, which end at ``target`` [T, 1], as float32 [T, E].

        pi0.5's norms depend on it; others join it with the action's tokens.
        """
        sizes, width = self.architecture, self.architecture.expert.hidden_size
        embedded = time_embedding(time, width, sizes.periods).to(self.device)
        if not sizes.has_state_token:
            embedded = functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(embedded))))
        if target is None:
            return embedded
        ends: Tensor = self.target_time_mlp_in(time_embedding(target, width, sizes.periods).to(self.device))
        ends = self.target_time_mlp_out(functional.silu(ends))
        return embedded + ends

    @property
    def device(self) -> torch.device:
        return self.projector.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the matrices; norms and the projections of state and actions are float32."""
        return self.projector.weight.dtype

    def encode(self, images: Tensor, ops: TowerOps | None = None) -> Tensor:
        """Embed images [N, S, S, 3], uint8 or float32 in [0, 1], as tokens [N, patches, width]."""
        tokens: Tensor = self.projector(self.vision(images, TowerOps() if ops is None else ops))
        return tokens


def build_empty(architecture: PiArchitecture) -> PiNetwork:
    """Build the network on ``meta``, without memory for its weights."""
    return empty(lambda: PiNetwork(architecture))


@torch.no_grad()
def make_flow(
    network: PiNetwork,
    steps: int = 10,
    summed: bool = True,
    ops: TowerOps | None = None,
    quantization: str = "none",
    keep: bool = True,
    prompt_tokens: int = 0,
) -> FlowModel:
    """Build the engine's model; precompute everything that depends only on the flow time.

    This includes time embeddings, time MLPs and all modulations. ``summed`` is as for :func:`euler_times`; without
    ``keep``, each parameter is freed once it is quantised. ``prompt_tokens`` is the longest prompt, if it is longer
    than the published models'.
    """
    architecture, times = network.architecture, euler_times(steps, summed)
    prompt = max(PROMPT_TOKENS.get(architecture.model, 0), prompt_tokens)
    positions = CAMERAS * architecture.image_tokens + prompt + architecture.horizon + 64
    rotary = rotary_tables_like(positions, architecture.prefix.head_dim, network.projector.weight)
    at = torch.tensor([*times, 0.0], dtype=torch.float64)[:, None]
    condition = network.condition(at, torch.cat([at[1:], at[-1:]]) if architecture.targets else None)
    action_in, action_bias = network.action_in_proj.weight, network.action_in_proj.bias[None]
    mlp = state = None
    if architecture.has_state_token:
        action_in, action_bias = fuse_time(network, condition[:-1])
        mlp, state = linear_of(network.action_time_mlp_out), linear_of(network.state_proj)
        condition = condition[:1]
    return FlowModel(
        encode=partial(network.encode, ops=ops),
        embedding=network.embed_tokens.weight,
        prefix=network.prefix.weights(condition[:1], rotary, quantization, keep),
        expert=network.expert.weights(condition, rotary),
        action_in=action_in,
        action_bias=action_bias,
        action_mlp=mlp,
        action_out=linear_of(network.action_out_proj),
        state=state,
        times=tuple(times),
        patches=architecture.image_tokens,
        horizon=architecture.horizon,
        geometry=network.geometry,
    )


def fuse_time(network: PiNetwork, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight [E, A] and a bias for each embedded time [times, E] of the actions' first two layers.

    Two consecutive linear layers equal one; the time becomes part of its bias.
    """
    first, actions = network.action_time_mlp_in, network.action_in_proj
    weight, time_weight = torch.split(first.weight.double(), embedded.shape[1], dim=1)
    bias = embedded.double() @ time_weight.T + weight @ actions.bias.double() + first.bias
    return (weight @ actions.weight.double()).float(), bias.float()


def euler_times(steps: int, summed: bool) -> list[float]:
    """Return the flow times of the Euler steps as float32 values: 1.0, 0.9, ... for ten steps.

    With ``summed``, the step size is added up in float32, as in openpi; otherwise it is multiplied by the step's
    number, as in LeRobot. The difference changes actions by up to 1e-4, because the time embedding has high
    frequencies.
    """
    delta = np.float32(-1.0 / steps)
    times = [np.float32(1.0)]
    while len(times) < steps:
        times.append(times[-1] + delta if summed else np.float32(1.0 - len(times) / steps))
    return [float(time) for time in times]


def time_embedding(time: float | Tensor, width: int, limits: tuple[float, float]) -> Tensor:
    """Embed a time as float32 [width], or times [B, 1] as [B, width].

    The embedding has the sines, then the cosines, of ``width / 2`` periods between ``limits``. Computed in float64,
    as openpi and LeRobot do on a CPU or CUDA device.
    """
    device = time.device if isinstance(time, Tensor) else "cpu"
    exponent = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=device)
    periods = limits[0] * (limits[1] / limits[0]) ** exponent
    angles = 2.0 * math.pi * time / periods
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


def linear_of(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias


def rotary_tables_like(positions: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of all positions, [positions, head_dim / 2] each, in the type of ``like``."""
    steps = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32)
    angles = torch.arange(positions, device=like.device).float()[:, None] * ROPE_THETA ** (-steps / head_dim)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
