"""The loss of GR00T N1.7, and its forward pass with gradients for the action head.

The flow runs from noise at 0 to actions at 1: the network sees ``(1 - t) * noise + t * actions`` and predicts
``actions - noise``. The published recipe trains projectors, diffusion transformer and what connects it; language
model and vision tower stay frozen, so they run as at inference. Source: LeRobot 0.6.1 (its GR00T policy).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.contract.spec import PolicySpec
from vla_ros.types import FloatArray, Observation
from vla_ros_models.distilled import TARGET_LAYERS
from vla_ros_models.engine.decoder import run_layer
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.stream import KVCache, Positions, Stream
from vla_ros_models.engine.training import recompute, train_layer
from vla_ros_models.engine.weights import DecoderWeights
from vla_ros_models.groot.architecture import HEAD, VISION, GrootArchitecture
from vla_ros_models.groot.building import (
    StoredTensors,
    build_model,
    condition_on,
    ending,
    make_layer,
    modulation,
    sines,
)
from vla_ros_models.groot.loading import GrootCheckpoint, load_tensors
from vla_ros_models.groot.network import LAST_EPS, Grid, GrootModel, RunLayer, everywhere
from vla_ros_models.groot.processing import Processing
from vla_ros_models.groot.prompt import PromptEncoder, read_prompt_encoder
from vla_ros_models.training import (
    ADAPTER,
    Augment,
    Batch,
    BatchLoss,
    Prepared,
    Trainable,
    as_it_is,
    flow_time,
    pad_numbers,
    stack_arrays,
)


@dataclass(frozen=True, eq=False)
class GrootBatch(Batch):
    """Observations and chunks as the network takes them."""

    images: Tensor  # uint8 [B, cameras, H, W, 3]
    tokens: Tensor  # int64 [B, L], those of images included, padding at the end
    valid: Tensor  # bool [B, L], False for padding
    positions: Tensor  # int64 [B, 3, L]
    state: Tensor  # float32 [B, S], normalised and padded
    actions: Tensor  # float32 [B, H, A], normalised and padded
    counts: Tensor  # bool [B, H, A], the numbers that count
    noise: Tensor  # float32 [B, H, A]
    time: Tensor  # float32 [B], 0 for noise, 1 for actions


@dataclass(frozen=True, eq=False)
class HeadContext(Batch):
    """What the action head attends to."""

    tokens: Tensor  # [B, L, width]


class ParameterTree(nn.Module):
    """Parameters by dotted names; matrices with a bias are linear layers, which take adapters."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.graft(tensors)

    def graft(self, tensors: Mapping[str, Tensor]) -> None:
        """Add parameters."""
        for name, tensor in tensors.items():
            owner, (*path, leaf) = self, name.split(".")
            stem = ".".join(path)
            for depth, part in enumerate(path, 1):
                if part not in dict(owner.named_children()):
                    linear = depth == len(path) and tensor.ndim == 2 and f"{stem}.bias" in tensors
                    with torch.device("meta"):
                        node = nn.Linear(*tensor.shape[::-1]) if linear else ParameterTree({})
                    owner.add_module(part, node)
                owner = owner.get_submodule(part)  # type: ignore[assignment]
            owner.register_parameter(leaf, nn.Parameter(tensor.float(), requires_grad=False))


class GrootTrainee(nn.Module):
    """The action head with gradients, on a frozen backbone; its parameters have NVIDIA's names.

    With ``connect_padding``, the connector sees the padding of a batch, as in LeRobot's training; inference has
    none.
    """

    def __init__(
        self,
        sizes: GrootArchitecture,
        tensors: Mapping[str, Tensor],
        recompute_layers: bool = False,
        connect_padding: bool = False,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        whole = build_model(sizes, tensors, 1)
        self.backbone: GrootModel = replace(whole, head=whole.head.first(0), crossing=(), connector=None)
        self.network = ParameterTree({name: tensor for name, tensor in tensors.items() if name.startswith(HEAD)})
        self._tower = {name: tensor for name, tensor in tensors.items() if name.startswith(VISION)}
        self._sees = False  # whether the tower may train
        self._grids: dict[tuple[int, int], Grid] = {}
        self.recompute_layers, self.connect_padding = recompute_layers, connect_padding

    def forward(self, batch: GrootBatch) -> BatchLoss:
        """Return the loss of a batch."""
        time = batch.time[:, None, None]
        noisy = (1 - time) * batch.noise + time * batch.actions
        velocity = self._velocity(batch, self.read(batch), noisy, self._bucket(batch.time))
        element = (velocity - (batch.actions - batch.noise)).square() * batch.counts
        return BatchLoss(element.sum() / (batch.counts.sum() + 1e-6), element)

    def open_vision(self) -> Mapping[str, str]:
        """Let vision tower and merger train; return the stored name of each of their parameters."""
        self._sees = True
        self.network.graft(self._tower)
        return {f"network.{name}": name for name in self._tower}

    def _opened(self) -> GrootModel:
        """Return the backbone with the parameters of vision tower and merger."""

        def get(name: str, *shape: int) -> Tensor:
            owner, _, leaf = name.rpartition(".")
            return getattr(self.network.get_submodule(owner), leaf) if name in self._tower else torch.empty(0)

        stored = StoredTensors(self.sizes, get)
        vision = replace(self.backbone.vision, layers=tuple(map(make_layer, stored.tower)))
        return replace(self.backbone, vision=vision, mergers=tuple(stored.mergers))

    def counted(self, batch: GrootBatch) -> Tensor:
        """Return what counts in the loss, bool [B, H, A]."""
        return batch.counts

    def predict(
        self,
        batch: GrootBatch,
        context: HeadContext,
        noisy: Tensor,
        left: Tensor,
        target: Tensor | None = None,
        given: Tensor | None = None,
    ) -> Tensor:
        """Return the velocity from actions to noise; see :class:`~vla_ros_models.distillation.Distillable`."""
        ends = None if target is None else self._bucket(1 - target)
        return -self._velocity(batch, context, noisy, self._bucket(1 - left), ends)

    def add_targets(self) -> Mapping[str, nn.Parameter]:
        """See :class:`~vla_ros_models.distillation.Distillable`."""
        width = self.sizes.head.hidden_size
        self.sizes = replace(self.sizes, targets=True)
        device = next(self.network.parameters()).device
        for name in TARGET_LAYERS:
            layer = nn.Linear(width, width, device=device)
            self.network.graft({f"{HEAD}{name}.{key}": one.data for key, one in layer.named_parameters()})
        return {name: one for name, one in self.network.named_parameters() if "target_time_mlp" in name}

    def _bucket(self, time: Tensor) -> Tensor:
        return (time * self.sizes.time_buckets).long().float()

    def _encode(self, batch: GrootBatch) -> Tensor:
        """Return the language model's hidden states [B, L, width]."""
        if not self._sees:
            with torch.no_grad():
                return self._read(batch, self.backbone, run_layer)
        run = recompute(self.recompute_layers and self.training)

        def layer(
            weights: DecoderWeights, ops: Ops, cache: KVCache, index: int, stream: Stream, positions: Positions
        ) -> Stream:
            hidden, *_ = run(train_layer, weights, index, stream.hidden, positions)
            return Stream(hidden, stream.norm + 2)

        return self._read(batch, self._opened(), layer)

    def _read(self, batch: GrootBatch, model: GrootModel, layer: RunLayer) -> Tensor:
        ops, patch = Ops(), self.sizes.vision.patch_size
        grid = batch.images.shape[2] // patch, batch.images.shape[3] // patch
        if grid not in self._grids:
            self._grids[grid] = model.grid(*grid)
        first, *levels = model.encode(ops, batch.images.flatten(0, 1), self._grids[grid], layer)
        places = (batch.tokens == self.sizes.image_token).flatten().nonzero()[:, 0]
        flat = [level.flatten(0, 1) for level in levels]
        return model.read(ops, batch.tokens, places, first.flatten(0, 1), flat, batch.positions, layer)

    def _stored(self, like: Tensor) -> StoredTensors:
        modules: Mapping[str, Any] = dict(self.network.named_modules())

        def get(name: str, *shape: int) -> Tensor:
            owner, _, leaf = name.rpartition(".")
            layer = modules.get(owner)
            found: Tensor = getattr(layer, leaf, like)
            change = getattr(layer, "get_delta_weight", None)  # of peft's layers, which are not called here
            return found if change is None or leaf == "bias" else found + change(ADAPTER)

        return StoredTensors(self.sizes, get)

    def read(self, batch: GrootBatch) -> HeadContext:
        """Run the backbone, which is frozen, and the connector."""
        sizes, run = self.sizes, recompute(self.recompute_layers and self.training)
        stored, context = self._stored(batch.noise), self._encode(batch).float()
        if stored.normed is not None:
            context = functional.layer_norm(context, context.shape[-1:], *stored.normed, eps=1e-5)
        if sizes.connector is not None:
            norms = [torch.stack(norm)[None] for one in stored.connector for norm in one["norms"]]
            layers = [make_layer(one) for one in stored.connector]
            none = context.new_empty(0, sizes.connector.head_dim // 2)
            weights = DecoderWeights(sizes.connector, tuple(layers), tuple(norms), none, none)
            seen = None if self.connect_padding else batch.valid[:, None, None]
            at = replace(everywhere(context), mask=seen)
            for index in range(len(weights.layers)):
                context, *_ = run(train_layer, weights, index, context, at)
        return HeadContext(context)

    def _velocity(
        self, batch: GrootBatch, context: HeadContext, noisy: Tensor, times: Tensor, ends: Tensor | None = None
    ) -> Tensor:
        """Return the velocity from noise to actions, float32 [B, H, A]; ``times`` and ``ends`` are in buckets."""
        sizes, run = self.sizes, recompute(self.recompute_layers and self.training)
        stored, inner, count = self._stored(noisy), sizes.head.hidden_size, len(noisy)
        condition = condition_on(times, *stored.time)
        if ends is not None:
            condition = condition + ending(ends, *stored.target)
        hidden = self._suffix(stored, batch.state, noisy, times)
        head: list[Tensor] = []
        for one in stored.head:
            scale, shift = modulation(condition, one["norms"][0])  # type: ignore[arg-type]
            plain = torch.stack([torch.ones_like(shift[:1]), torch.zeros_like(shift[:1])], dim=1)
            head += [torch.stack([1 + scale, shift], dim=1), plain]
        layers = [make_layer(one, crosses=index in sizes.crossing) for index, one in enumerate(stored.head)]
        none = hidden.new_empty(0, sizes.head.head_dim // 2)
        weights = DecoderWeights(sizes.head, tuple(layers), tuple(head), none, none)
        own = replace(everywhere(hidden), time=torch.arange(count, device=hidden.device)[:, None])
        image = batch.tokens == sizes.image_token
        past = (context.tokens[:, None], context.tokens[:, None])
        for index in range(len(layers)):
            seen = batch.valid
            if sizes.alternate:
                seen = seen & (~image if sizes.sees_text(index) else image)
            crosses = index in sizes.crossing
            crossed = replace(own, mask=seen[:, None, None])
            hidden, *_ = run(train_layer, weights, index, hidden, own, past if crosses else None, crossed)
        shift, scale = modulation(condition, stored.last)
        ended = functional.layer_norm(hidden[:, 1:].float(), (inner,), eps=LAST_EPS)
        rows = functional.linear(ended * (1 + scale[:, None]) + shift[:, None], *stored.out)
        first, second = stored.velocity
        return _each(_each(rows, first).relu(), second).float()

    def _suffix(self, stored: StoredTensors, state: Tensor, noisy: Tensor, times: Tensor) -> Tensor:
        """Embed the state and the noisy actions, [B, 1 + H, width]."""
        inner = self.sizes.head.hidden_size
        token = _each(_each(state, stored.state[0]).relu(), stored.state[1])[:, None]
        first, second, third = stored.action
        moment = sines(times, inner, inner // 2)[:, None].expand(-1, noisy.shape[1], -1)
        rows = _each(functional.silu(_each(torch.cat([_each(noisy, first), moment], dim=-1), second)), third)
        if stored.places is not None:
            rows = rows + stored.places[: noisy.shape[1]]
        return torch.cat([token, rows], dim=1)


def _each(rows: Tensor, layer: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the embodiment's layer, [1, inputs, outputs] and [1, outputs]."""
    return rows @ layer[0][0] + layer[1][0]


@dataclass(frozen=True, eq=False)
class GrootInputs:
    """Prepares samples of one embodiment as inference prepares a request."""

    sizes: GrootArchitecture
    processing: Processing
    prompt: PromptEncoder
    state_dropout: float = 0.0  # share of samples whose state is zero

    def prepare(
        self,
        observation: Observation,
        actions: FloatArray,
        is_pad: NDArray[np.bool_],
        random: np.random.Generator,
        augment: Augment = as_it_is,
    ) -> Prepared:
        """See :class:`~vla_ros_models.training.SampleInputs`."""
        sizes, processing, unit = self.sizes, self.processing, self.sizes.vision.unit
        state = np.concatenate([np.zeros(0), *(observation.state[key] for key, _ in processing.state)])
        images = [_bytes(augment(key, observation.images[key], random)) for key in processing.images]
        grids = [(image.shape[0] // unit, image.shape[1] // unit) for image in images]
        tokens = self.prompt.encode(observation.instruction, grids)
        normalized = processing.normalized_state(state, sizes.state_dim)
        if random.random() < self.state_dropout:
            normalized = np.zeros_like(normalized)
        wanted = pad_numbers(training_actions(processing, actions, state, is_pad), sizes.action_dim)
        wanted = np.pad(wanted, ((0, sizes.horizon - len(wanted)), (0, 0)))
        counts = np.zeros(wanted.shape, np.bool_)
        counts[: len(is_pad), : processing.model_size] = ~is_pad[:, None]
        return {
            "images": np.stack(images),
            "tokens": tokens.tokens,
            "valid": np.ones(len(tokens.tokens), np.bool_),
            "positions": tokens.positions,
            "state": normalized,
            "actions": wanted,
            "counts": counts,
            "noise": random.standard_normal(wanted.shape, np.float32),
            "time": np.asarray(np.float32(1) - flow_time(random)),
        }

    def collate(self, samples: Sequence[Prepared]) -> GrootBatch:
        """See :class:`~vla_ros_models.training.SampleInputs`."""
        return GrootBatch(**{one.name: stack_arrays(samples, one.name) for one in fields(GrootBatch)})


def _bytes(image: NDArray[Any]) -> NDArray[np.uint8]:
    """Return an image as uint8; augmented ones are float32 in [0, 1]."""
    return image if image.dtype == np.uint8 else (image * 255).round().astype(np.uint8)


def training_actions(
    processing: Processing, actions: FloatArray, state: FloatArray, is_pad: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return the model's actions [H, N], relative to the state where the checkpoint's are; 0 after the end."""
    values = processing.converted_actions(actions, state)
    found, start = [], 0
    for part in processing.parts:
        found.append(part.bounds.normalize(values[:, start : start + part.bounds.size], clip=True))
        start += part.bounds.size
    return np.where(is_pad[:, None], np.float32(0), np.concatenate(found, axis=1))


def make_trainable(
    checkpoint: GrootCheckpoint,
    spec: PolicySpec,
    device: str,
    dtype: str,
    recompute_layers: bool,
    state_dropout: float = 0.2,
) -> Trainable:
    """Load a checkpoint for training; the frozen backbone has the type ``dtype``."""
    sizes = checkpoint.architecture
    prompt = read_prompt_encoder(checkpoint.backbone, sizes.image_token, sizes.text.vocab_size, checkpoint.formal)
    trainee = GrootTrainee(
        sizes, load_tensors(checkpoint, torch.device(device), getattr(torch, dtype)), recompute_layers
    )
    return Trainable(
        trainee,
        {f"network.{name}": name for name, _ in trainee.network.named_parameters()},
        checkpoint.stored,
        GrootInputs(sizes, checkpoint.processing, prompt, state_dropout),
        spec,
        sizes.text,
        "groot",
        row=checkpoint.embodiment,
    )
