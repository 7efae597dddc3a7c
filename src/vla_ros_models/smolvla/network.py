"""The parameters of SmolVLA, and the model that :mod:`vla_ros_models.engine.flow` runs with them."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros_models.engine.flow import FlowModel
from vla_ros_models.engine.tower_ops import TowerOps
from vla_ros_models.engine.weights import Matrix
from vla_ros_models.pi.network import GemmaParameters, LlamaNorm, PiNetwork, SiglipTower, make_flow
from vla_ros_models.smolvla.architecture import SmolVlaArchitecture
from vla_ros_models.weights import empty

EXPERT_UNIT = 128
"""On a GPU, the expert's features are padded to a multiple of this: kernels read whole blocks of inputs."""


class SmolVlaNetwork(PiNetwork):
    """The parameters of vision tower, connector, SmolLM2 prefix and action expert."""

    architecture: SmolVlaArchitecture

    def __init__(self, architecture: SmolVlaArchitecture) -> None:
        super().__init__(architecture)
        prefix, vision = architecture.prefix, architecture.vision
        self.vision = SiglipTower(replace(vision, image_size=architecture.stored_image))
        inputs, bias = vision.width * architecture.shuffle**2, architecture.projector_bias
        self.projector = nn.Linear(inputs, prefix.hidden_size, bias=bias)
        self.prefix = GemmaParameters(prefix, LlamaNorm, keys_only=True)
        self.expert = GemmaParameters(architecture.expert, LlamaNorm, crossing=architecture.crossing)
        self.state_proj = nn.Linear(architecture.state_dim, prefix.hidden_size)

    def encode(
        self, images: Tensor, ops: TowerOps | None = None, ends: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Embed images [N, S, S, 3], float32 in [0, 1], as tokens [N, T, width].

        ``ends`` are the embeddings of the control tokens before and after an image's tokens.
        """
        sizes = self.architecture
        unit, side = sizes.shuffle, sizes.vision.image_size // sizes.vision.patch_size // sizes.shuffle
        patches = self.vision(images, TowerOps() if ops is None else ops).view(
            len(images), side, unit, side, unit, -1
        )
        shuffled = patches.transpose(2, 3).reshape(len(images), side * side, -1)
        tokens: Tensor = self.projector(shuffled) * sizes.prefix.hidden_size**0.5
        if ends is None:
            return tokens
        before, after = (end.expand(len(images), -1, -1) for end in ends)
        return torch.cat([before, tokens, after], dim=1)


def build_empty(architecture: SmolVlaArchitecture) -> SmolVlaNetwork:
    """Build the network on ``meta``, without memory for its weights."""
    return empty(lambda: SmolVlaNetwork(architecture))


@torch.no_grad()
def build_flow(
    network: SmolVlaNetwork,
    steps: int = 10,
    ops: TowerOps | None = None,
    prompt_tokens: int = 64,
    image_ids: tuple[int, ...] = (),
    unit: int = 0,
) -> FlowModel:
    """Build the engine's model; precompute everything that depends only on the flow time.

    ``prompt_tokens`` is the longest prompt. ``image_ids`` are the control tokens around an image, if the model has
    them; the embedding gets rows for them that are not scaled. ``unit`` is as :data:`EXPERT_UNIT`, 0 for the
    device's.
    """
    sizes, embedding, vision = network.architecture, network.embed_tokens.weight, network.vision
    narrow = vision.norm.weight.dtype  # LeRobot embeds patches in the model's type
    vision.patch_embed.to(narrow)
    vision.pos_embed = nn.Parameter(vision.pos_embed.to(narrow), requires_grad=False)
    ends = None
    if image_ids:
        rows = embedding[list(image_ids)]
        ends = rows[:-1], rows[-1:]
        embedding = torch.cat([embedding, rows / sizes.prefix.hidden_size**0.5])
    model = replace(
        make_flow(network, steps, summed=False, prompt_tokens=prompt_tokens),
        encode=partial(network.encode, ops=ops, ends=ends),
        embedding=embedding,
        state_in_prefix=True,
        causal=True,
        reads=sizes.reads,
    )
    return pad_expert(model, unit or (EXPERT_UNIT if network.device.type == "cuda" else 1))


def pad_expert(model: FlowModel, unit: int) -> FlowModel:
    """Pad the expert's features with zeros to a multiple of ``unit``; actions change by rounding only.

    Norms divide by the larger number of features, which their epsilon and scale make up for.
    """
    expert, width = model.expert, model.expert.shape.hidden_size
    more = -width % unit
    if not more or model.action_mlp is None:
        return model
    share = width / (width + more)

    def inputs(weight: Tensor) -> Tensor:
        return functional.pad(weight, (0, more))

    def outputs(weight: Tensor) -> Tensor:
        return functional.pad(weight, (0, 0, 0, more))

    def matrix(found: Matrix | None, pad: Any) -> Matrix:
        assert found is not None
        data = pad(found.data)
        return replace(found, data=data, inputs=int(data.shape[1]))

    layers = tuple(
        replace(
            layer,
            qkv=matrix(layer.qkv, inputs),
            o_proj=matrix(layer.o_proj, outputs),
            gate_up=matrix(layer.gate_up, inputs),
            down_proj=matrix(layer.down_proj, outputs),
        )
        for layer in expert.layers
    )
    shape = replace(expert.shape, hidden_size=width + more, rms_norm_eps=expert.shape.rms_norm_eps * share)
    norms = torch.stack([inputs(norm * share**0.5) for norm in expert.norms], dim=1).contiguous()
    weight, bias = model.action_mlp
    return replace(
        model,
        expert=replace(expert, shape=shape, layers=layers, norms=norms.unbind(1)),
        action_in=outputs(model.action_in),
        action_bias=inputs(model.action_bias),
        action_mlp=(outputs(inputs(weight)), inputs(bias)),
        action_out=(inputs(model.action_out[0]), model.action_out[1]),
    )
