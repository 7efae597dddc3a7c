"""The loss of pi0, pi0.5 and SmolVLA, which extends them, and the forward pass with gradients.

The loss is flow matching's: the network sees ``t * noise + (1 - t) * actions`` and predicts ``noise - actions``.
Sources: openpi 15a9616 (its PyTorch model), LeRobot 0.6.1 (its policies).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.types import FloatArray, Observation
from vla_ros.vision.points import camera_positions
from vla_ros_models.distilled import TARGET_LAYERS
from vla_ros_models.engine.stream import Positions, Stream
from vla_ros_models.engine.training import Call, TrainingOps, placed, recompute, train_layer
from vla_ros_models.pi.architecture import EMBEDDINGS, PI05, PiArchitecture
from vla_ros_models.pi.checkpoint import PiCheckpoint
from vla_ros_models.pi.inference import load_network
from vla_ros_models.pi.network import LOADED, AdaptiveNorm, PiNetwork, rotary_tables_like
from vla_ros_models.pi.processing import Processing, find_tokenizer, load_tokenizer
from vla_ros_models.training import (
    Augment,
    Batch,
    BatchLoss,
    Prepared,
    Trainable,
    as_it_is,
    draw_weights,
    flow_time,
    masked_mean,
    pad_numbers,
    run_blocks,
    separate,
    sincos_positions,
    stack_arrays,
)


@dataclass(frozen=True, eq=False)
class FlowBatch(Batch):
    """Observations and chunks as the network takes them."""

    images: Tensor  # [B, cameras, S, S, 3], uint8 or float32 in [0, 1]
    seen: Tensor  # bool [B, cameras], False for a missing image
    tokens: Tensor  # int64 [B, L], prompt and padding; SmolVLA's ends with a placeholder for the state
    valid: Tensor  # bool [B, L], False for padding
    state: Tensor  # float32 [B, S], normalised and padded; pi0.5 does not read it
    actions: Tensor  # float32 [B, H, A], normalised and padded with zeros
    is_pad: Tensor  # bool [B, H], True after the episode's end
    noise: Tensor  # float32 [B, H, A]
    time: Tensor  # float32 [B], 1 for noise, 0 for actions
    # Float32 [B, cameras, patches, 3], metres, NaN where unknown; None without geometric tokens.
    positions: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PrefixCache(Batch):
    """What the expert attends to."""

    valid: Tensor  # bool [B, N], False for padding
    past: tuple[tuple[Tensor, Tensor], ...]  # each layer's keys and values [B, kv_heads, N, head_dim]


@dataclass(frozen=True)
class FlowLossForm:
    """What counts in the loss."""

    numbers: int  # the first numbers of an action that count; openpi counts the padding, too
    mask_padding: bool = False  # whether actions after the episode's end are left out


class FlowTrainee(nn.Module):
    """A network whose layers are those of the checkpoint (:func:`~vla_ros_models.training.separate`)."""

    state_in_prefix = False
    causal = False

    def __init__(self, network: PiNetwork, form: FlowLossForm, recompute_layers: bool = False) -> None:
        super().__init__()
        self.network = network
        self.form = form
        self.recompute_layers = recompute_layers

    def forward(self, batch: FlowBatch) -> BatchLoss:
        """Return the loss of a batch."""
        time = batch.time[:, None, None]
        noisy = time * batch.noise + (1 - time) * batch.actions
        velocity = self.predict(batch, self.read(batch), noisy, batch.time)
        element = (velocity - (batch.noise - batch.actions)).square()
        return BatchLoss(masked_mean(element, self.counted(batch)), element)

    def counted(self, batch: FlowBatch) -> Tensor:
        """Return what counts in the loss, bool [B, H, A]."""
        numbers = torch.arange(batch.actions.shape[2], device=batch.actions.device) < self.form.numbers
        steps = ~batch.is_pad if self.form.mask_padding else torch.ones_like(batch.is_pad)
        return steps[..., None] & numbers

    def add_targets(self) -> Mapping[str, nn.Parameter]:
        """See :class:`~vla_ros_models.distillation.Distillable`."""
        self.network.add_targets()
        self.network.architecture = replace(self.network.architecture, targets=True)
        return {name: one for name, one in self.network.named_parameters() if name.startswith(TARGET_LAYERS)}

    def read(self, batch: FlowBatch) -> PrefixCache:
        """Run the prefix."""
        return self.run_prefix(batch)[0]

    def run_prefix(self, batch: FlowBatch) -> tuple[PrefixCache, Tensor]:
        """Run the prefix; return its rows [B, N, width] after the last layer with an MLP, too."""
        network, run = self.network, recompute(self.recompute_layers and self.training)
        hidden, valid = self._prefix(batch, run)
        tables = rotary_tables_like(hidden.shape[1], network.architecture.prefix.head_dim, batch.noise)
        prefix = network.prefix.weights(batch.time[:1], tables, LOADED)
        at = (valid.cumsum(1) - 1).clamp(min=0)
        positions = placed(at, *tables, mask=self._prefix_mask(valid))
        past: list[tuple[Tensor, Tensor]] = []
        for index in range(len(prefix.layers)):
            hidden, *written = run(train_layer, prefix, index, hidden, positions)
            past.append((written[0], written[1]))
        return PrefixCache(valid, tuple(past)), hidden

    def predict(
        self,
        batch: FlowBatch,
        prefix: PrefixCache,
        noisy: Tensor,
        left: Tensor,
        target: Tensor | None = None,
        given: Tensor | None = None,
    ) -> Tensor:
        """See :class:`~vla_ros_models.distillation.Distillable`; only pi0.5 takes ``given``."""
        run = recompute(self.recompute_layers and self.training)
        ends = None if target is None else target.double()[:, None]
        time = left.double()[:, None]
        if given is not None:
            time = functional.pad(time, (0, 0, 0, 1))
            ends = None if ends is None else functional.pad(ends, (0, 0, 0, 1))
        condition = self.network.condition(time, ends)
        hidden = self._suffix(batch, noisy, condition)
        return self._expert(batch, hidden, condition, prefix, given, run)

    @property
    def _state_row(self) -> bool:
        return self.network.architecture.has_state_token and not self.state_in_prefix

    def _prefix(self, batch: FlowBatch, run: Call) -> tuple[Tensor, Tensor]:
        """Return the embedded prefix [B, N, width], and which of its tokens are no padding, bool [B, N]."""
        cameras = batch.images.shape[1]
        patches = self._patches(batch.images.flatten(0, 1), run)
        patches = patches.reshape(len(batch.tokens), -1, patches.shape[-1])  # [B, cameras * patches, width]
        if self.network.geometry is not None:
            assert batch.positions is not None
            patches = self.network.geometry.added(patches, batch.positions.flatten(1, 2))
        words = self._words(batch.tokens)
        seen = batch.seen.repeat_interleave(patches.shape[1] // cameras, dim=1)
        if self.state_in_prefix:
            last = _last(batch.valid)
            words = torch.where(last[..., None], self.network.state_proj(batch.state)[:, None].to(words), words)
        return torch.cat([patches, words.to(patches.dtype)], dim=1), torch.cat([seen, batch.valid], dim=1)

    def _words(self, tokens: Tensor) -> Tensor:
        words: Tensor = self.network.embed_tokens(tokens)
        scale: float = self.network.architecture.prefix.hidden_size**0.5
        return words * scale

    def _patches(self, images: Tensor, run: Call) -> Tensor:
        """Embed images [N, S, S, 3] as tokens [N, patches, width]."""
        vision = self.network.vision
        activate = partial(functional.gelu, approximate="tanh")
        tokens: Tensor = vision.norm(run_blocks(list(vision.blocks), vision.embed(images), activate, run))
        return self._project(tokens)

    def _project(self, patches: Tensor) -> Tensor:
        projected: Tensor = self.network.projector(patches)
        return projected

    def _prefix_mask(self, valid: Tensor) -> Tensor:
        """Return what each row of the prefix sees: bool [B, 1, N or 1, N]."""
        mask = valid[:, None, None]
        if not self.state_in_prefix:
            return mask
        state = _last(valid)
        return mask & ~(state[:, None, None] & ~state[:, None, :, None])

    def _suffix(self, batch: FlowBatch, noisy: Tensor, condition: Tensor) -> Tensor:
        """Embed the noisy actions, after the state if it is a token of the suffix: [B, R, width]."""
        network = self.network
        rows: Tensor = network.action_in_proj(noisy)
        if not network.architecture.has_state_token:
            return rows
        timed = torch.cat([rows, condition[:, None].expand_as(rows).to(rows.dtype)], dim=-1)
        rows = network.action_time_mlp_out(functional.silu(network.action_time_mlp_in(timed)))
        return torch.cat([network.state_proj(batch.state)[:, None], rows], dim=1) if self._state_row else rows

    def _expert(
        self,
        batch: FlowBatch,
        hidden: Tensor,
        condition: Tensor,
        prefix: PrefixCache,
        given: Tensor | None,
        run: Call,
    ) -> Tensor:
        network, valid, past, (size, rows, _) = self.network, prefix.valid, prefix.past, hidden.shape
        norms = condition if isinstance(network.expert.norm, AdaptiveNorm) else condition[:1]
        tables = rotary_tables_like(valid.shape[1] + rows, network.architecture.prefix.head_dim, batch.noise)
        weights = network.expert.weights(norms, tables, LOADED)
        steps = torch.arange(rows, device=hidden.device)
        positions = self._suffix_positions(valid, steps, tables, size)
        if given is not None:  # the last condition is that of time 0
            own = torch.arange(size, device=hidden.device)[:, None]
            positions = replace(positions, time=torch.where(given, size, own).int())
        crossed = placed(steps.expand(size, -1), *tables, mask=valid[:, None, None])
        reads = getattr(network.architecture, "reads", ()) or range(len(weights.layers))
        for index, layer in enumerate(reads):
            hidden, *_ = run(train_layer, weights, index, hidden, positions, past[layer], crossed)
        ended = TrainingOps().norm(weights, Stream(hidden, len(weights.norms) - 1), positions)
        velocity: Tensor = network.action_out_proj(ended[:, -batch.noise.shape[1] :])
        return velocity.float()

    def _suffix_positions(
        self, valid: Tensor, steps: Tensor, tables: tuple[Tensor, Tensor], size: int
    ) -> Positions:
        rows = len(steps)
        own = steps[None, :] <= steps[:, None] if self.causal else steps.new_ones(rows, rows, dtype=torch.bool)
        if self._state_row:
            own = own & ((steps[None, :] == 0) | (steps[:, None] > 0))
        seen = torch.cat(
            [valid[:, None, None].expand(-1, -1, rows, -1), own.expand(size, 1, -1, -1)], dim=-1
        )  # [B, 1, R, N + R]
        at = valid.sum(1)[:, None] + steps
        times = torch.arange(size, dtype=torch.int32, device=valid.device)[:, None]
        return placed(at, *tables, mask=seen, time=times)


def _last(valid: Tensor) -> Tensor:
    """Return which token is the last valid one: bool [B, L]."""
    return valid & (valid.flip(1).cumsum(1).flip(1) == 1)


@dataclass(frozen=True, eq=False)
class FlowInputs:
    """Prepares samples of pi0, pi0.5 and SmolVLA with what prepares an inference's request."""

    processing: Processing
    encode: Callable[[str], list[int]]  # text to ids
    keys: tuple[str, ...]  # the spec's names of the images, in the model's order
    states: tuple[str, ...]  # names of the state vectors, in the spec's order
    side: int  # of the network's images
    state_dim: int  # numbers to which the state is padded
    action_dim: int  # numbers to which actions are padded
    around: tuple[int, ...] = ()  # SmolVLA: control tokens around a missing image
    cameras: int = 0  # SmolVLA: images of the configuration
    empty: int = 0  # SmolVLA: the most missing images that ``around`` stands for
    state_token: bool = False  # SmolVLA: whether a place for the state ends the prompt
    points: tuple[tuple[str, str], ...] = ()  # the spec's images with points
    patches: int = 0  # of an image; needed with ``points``

    def prepare(
        self,
        observation: Observation,
        actions: FloatArray,
        is_pad: NDArray[np.bool_],
        random: np.random.Generator,
        augment: Augment = as_it_is,
    ) -> Prepared:
        """See :class:`~vla_ros_models.training.SampleInputs`."""
        processing = self.processing
        state = np.concatenate([np.zeros(0), *(observation.state[key] for key in self.states)])
        normalized = processing.normalized_state(state)
        images = {
            name: observation.images[key]
            for key, name in zip(self.keys, processing.images, strict=True)
            if key in observation.images
        }
        shown = dict(zip(images, processing.prepared_images(images, self.side), strict=True))
        shown = {name: augment(name, image, random) for name, image in shown.items()}
        empty = np.zeros_like(next(iter(shown.values())))
        tokens = processing.tokens(self.encode, observation.instruction, normalized)
        missing = self.around * min(self.cameras - len(images), self.empty)
        tokens = np.array([*missing, *tokens, *((0,) if self.state_token else ())], np.int64)
        shape = (len(actions), self.action_dim)
        surfaces: dict[str, NDArray[Any]] = {}
        if self.points:
            where = (observation.points, self.points, self.keys, self.side, self.patches)
            surfaces = {"positions": camera_positions(*where)}
        return surfaces | {
            "images": np.stack([shown.get(name, empty) for name in processing.images]),
            "seen": np.array([name in images for name in processing.images]),
            "tokens": tokens,
            "valid": np.ones(len(tokens), np.bool_),
            "state": pad_numbers(normalized, self.state_dim),
            "actions": pad_numbers(processing.model_actions(actions, state), self.action_dim),
            "is_pad": is_pad,
            "noise": random.standard_normal(shape, np.float32),
            "time": np.asarray(flow_time(random)),
        }

    def collate(self, samples: Sequence[Prepared]) -> FlowBatch:
        """See :class:`~vla_ros_models.training.SampleInputs`."""
        names = [one.name for one in fields(FlowBatch) if one.name in samples[0]]
        return FlowBatch(**{name: stack_arrays(samples, name) for name in names})


def deviation_of(architecture: PiArchitecture, name: str, parameter: Tensor) -> float | Tensor:
    """Return how a parameter of pi0.5 starts: its input's scale is kept, the expert's layers are identities."""
    if name.endswith(("bias", "_norm.weight", "geometry.fc2.weight", "geometry.unknown")) or ".dense." in name:
        return torch.tensor(0.0)
    if "vision" in name and "norm" in name:
        return torch.tensor(1.0)
    if name.endswith("pos_embed"):
        return 0.5 * sincos_positions(*parameter.shape[-2:])
    if name.endswith("embed_tokens.weight"):
        return float(architecture.prefix.hidden_size**-0.5)  # the network multiplies by the root of the width
    deviation = float(parameter[0].numel() ** -0.5)
    if name.endswith(("attn.proj.weight", "fc2.weight", ".o.weight", ".down.weight")):
        depth = architecture.vision.blocks if "vision" in name else architecture.prefix.layers
        return deviation / math.sqrt(2 * depth)
    return deviation


def make_trainable(
    checkpoint: PiCheckpoint,
    device: str,
    dtype: str,
    recompute_layers: bool,
    tokenizer: str = "",
    mask_padding: bool = False,
) -> Trainable:
    """Load a checkpoint of pi0 or pi0.5 for training; matrices have the type ``dtype``."""
    sizes, processing = checkpoint.architecture, checkpoint.processing
    words = load_tokenizer(find_tokenizer(checkpoint.folder, tokenizer, checkpoint.tokenizer), sizes.vocabulary)
    network = load_network(checkpoint, device, dtype)
    layout = "openpi" if processing.antialias else "lerobot"
    numbers = sizes.action_dim if layout == "openpi" else processing.action_size
    trainee = FlowTrainee(network, FlowLossForm(numbers, mask_padding), recompute_layers)
    return Trainable(
        trainee,
        {f"network.{name}": stored for name, stored in separate(network, checkpoint.parts).items()},
        checkpoint.stored,
        FlowInputs(
            processing,
            words.encode,
            checkpoint.image_keys,
            tuple(key for key, _ in checkpoint.state_keys),
            sizes.vision.image_size,
            sizes.action_dim,
            sizes.action_dim,
            points=checkpoint.points,
            patches=sizes.image_tokens,
        ),
        checkpoint.spec,
        sizes.prefix,
        sizes.model,
        layout,
        tower=sizes.vision,
        tied=EMBEDDINGS,
        delay=checkpoint.trained_delay,
        initialize=partial(draw_weights, trainee, partial(deviation_of, sizes)) if sizes.model == PI05 else None,
    )
