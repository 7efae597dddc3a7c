"""Trains the small pi0.5 on chunks of joint positions.

Flow matching follows openpi (times from Beta(1.5, 1)). In half of the rows, the first actions are given, as in
real-time chunking. Counterfactual prompts and auxiliary losses are the same as for the small OpenVLA.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tools.train import data, shards
from tools.train.batches import TableFrames, moved, table_frames
from tools.train.flow_network import ACTION_SIZE, FlowTrainee, architecture_of, initialize
from tools.train.flow_words import VOCABULARY, FlowPrompts, write_tokenizer
from tools.train.labels import KINDS
from tools.train.loop import STATISTICS, Training
from tools.train.objective import kind_loss, place_loss
from tools.train.recipe import DataRecipe, FitOptions, FitRecipe, FlowNetworkRecipe, as_json, from_json
from vla_ros.errors import ConfigError
from vla_ros.types import FloatArray
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.tasks import SLOTS, make_task
from vla_ros_models.normalization import LEROBOT_EPS, make_normalization
from vla_ros_models.pi.processing import state_bins
from vla_ros_models.training import Batch

TOKENIZER = "tokenizer.json"
_EULER_STEPS = 10
_RETURN = 5  # steps within which a chunk returns to the expert's actions after given actions with an error


@dataclass(frozen=True)
class FlowFrames(TableFrames):
    """Demonstrations whose labels are chunks."""

    chunks: Tensor  # float16 [N, tasks * SLOTS, H, 8], normalised, joints relative to the state
    bins: Tensor  # int64 [N, 8], the state as bins for the prompt
    scale: Tensor  # float32 [8], radians per normalised unit of a joint
    prompts: FlowPrompts  # prompts of every task and object


class Run(Training[FlowFrames, FlowTrainee]):
    """A training run in ``folder`` on the demonstrations in ``dataset``; resumes from a saved state.

    Raises:
        ConfigError: The folder belongs to a run with another recipe, or the demonstrations have no chunks.
    """

    def __init__(
        self, folder: Path, dataset: Path, network: FlowNetworkRecipe, fit: FitRecipe, options: FitOptions
    ) -> None:
        self._dataset, self._network = dataset, network
        self._data = from_json(DataRecipe, json.loads((dataset / data.MANIFEST).read_text(encoding="utf-8")))
        if self._data.horizon < 2:
            raise ConfigError(f"{dataset}: found single actions, expected chunks; record them with --horizon 16")
        if network.geometry and not self._data.points:
            raise ConfigError(f"{dataset}: has no points, which --geometry needs; record them with --points")
        trainee = FlowTrainee(architecture_of(network, len(VOCABULARY), self._data.horizon, self._data.side))
        initialize(trainee, fit.seed)
        recipes = {"data": as_json(self._data), "network": as_json(network), "fit": as_json(fit)}
        super().__init__(folder, recipes, trainee, flow_losses, fit, options)

    def load(self, progress: Callable[[int, int], None] = lambda done, total: None) -> FlowFrames:
        """Load the demonstrations onto the device; write their statistics and the tokenizer."""
        paths = data.shard_paths(self._dataset)
        labels = shards.read_labels(paths)
        states, chunks = states_of(labels), relative(labels)
        rows = np.arange(len(labels))
        statistics = {
            "observation.state": quantiles(states),
            "action": quantiles(chunks[rows, labels.asked[:, 0], labels.asked[:, 1]].reshape(-1, ACTION_SIZE)),
        }
        (self.folder / STATISTICS).write_text(json.dumps(statistics, indent=1) + "\n", encoding="utf-8")
        write_tokenizer(self.folder / TOKENIZER)
        normal = {key: make_normalization("quantile", value, key, LEROBOT_EPS) for key, value in statistics.items()}
        low, high = (np.array(statistics["action"][name]) for name in ("q01", "q99"))
        targets = normal["action"].normalize(chunks.astype(np.float32)).reshape(len(labels), -1, *chunks.shape[3:])
        instructions = [make_task(task, kind).instruction for task in self._data.tasks for kind in KINDS]
        bins = state_bins(normal["observation.state"].normalize(states.astype(np.float32)))
        return FlowFrames(
            **table_frames(paths, labels, self.device, lambda done: progress(done, len(labels))),
            chunks=moved(targets, self.device, torch.float16),
            bins=moved(bins, self.device),
            scale=moved((high - low) / 2, self.device, torch.float32),
            prompts=FlowPrompts(self.folder / TOKENIZER, instructions, self.device),
        )

    def draw(self, frames: FlowFrames, step: int, *, held_out: bool = False) -> FlowBatch:
        recipe = self.recipe
        tasks, batch = frames.chunks.shape[1] // SLOTS, recipe.batch
        found = frames.choose(
            step, recipe.seed, batch, recipe.prompts, tasks, held_out=held_out, shift=recipe.shift
        )
        bins = frames.bins[found.rows].repeat_interleave(recipe.prompts, dim=0)
        prompts, lengths = frames.prompts.fill(found.named, bins)
        chunks = frames.chunks[found.rows[:, None], found.chosen].flatten(0, 1).float()
        chunks = chunks.repeat_interleave(recipe.samples, dim=0)
        device, random, count = chunks.device, found.random, len(chunks)
        noise = torch.randn(chunks.shape, generator=random, device=device)
        times, past, delay = draw_times(count, chunks.shape[1], self._network.max_delay, random)
        if recipe.seam_noise:
            missed = recipe.seam_noise * torch.randn(count, 1, ACTION_SIZE, generator=random, device=device)
            missed[..., -1] = 0.0  # gripper
            fade = (1 - (past + 1).clamp(min=0) / _RETURN).clamp(min=0) * (delay > 0)
            chunks = chunks + missed * fade[..., None]
        return FlowBatch(
            found.images if held_out else found.images / 255.0,
            prompts,
            lengths if frames.prompts.padded else None,
            chunks,
            noise,
            times,
            found.places,
            found.kinds,
            found.positions if self._network.geometry else None,
        )

    def measure(self, frames: FlowFrames, batch: FlowBatch) -> Mapping[str, float]:
        """Return the losses, and the errors of chunks that were sampled without given actions.

        ``first``, ``middle`` and ``last`` are the mean joint errors, in milliradians, of these steps of a chunk.
        """
        every = self.recipe.samples
        losses = flow_losses(self.trainee, batch, self.recipe)
        wanted = batch.chunks[::every]
        prefix = self.trainee.encode(batch.images, batch.prompts, batch.lengths, batch.positions)
        missed = self.trainee.sample(prefix, batch.noise[::every], _EULER_STEPS) - wanted
        joints = (missed[..., :7].abs() * frames.scale[:7]).mean((0, 2)) * 1e3  # [H]
        return {
            **{name: float(value) for name, value in losses._asdict().items()},
            "first": float(joints[0]),
            "middle": float(joints[len(joints) // 2]),
            "last": float(joints[-1]),
            "gripper_wrong": float((missed[..., 7].abs() > 1.0).float().mean()),
        }


@dataclass(frozen=True, eq=False)
class FlowBatch(Batch):
    """F frames with P instructions each (R = F * P), and K samples per instruction."""

    images: Tensor  # [F, H, W, 3], float32 in [0, 1] where augmented, else uint8
    prompts: Tensor  # int64 [R, L], padded
    lengths: Tensor | None  # int64 [R]; None if no prompt is padded
    chunks: Tensor  # float32 [R * K, H, 8], normalised
    noise: Tensor  # float32 [R * K, H, 8]
    times: Tensor  # float32 [R * K, H]; 0 where real-time chunking gives the action
    places: Tensor  # int64 [R], patch of the named object; :data:`NOT_ASKED` if it is not visible
    kinds: Tensor  # int64 [F, patches], the object in each patch; ``len(KINDS)`` for no object
    positions: Tensor | None  # float32 [F, patches, 3], metres; None without geometric tokens


class FlowLosses(NamedTuple):
    """The loss of a batch, the parts of the loss, and the share of objects found."""

    total: Tensor
    flow: Tensor
    places: Tensor
    kinds: Tensor
    place_accuracy: Tensor


def draw_times(count: int, horizon: int, max_delay: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the times of chunks, of which half begin with up to ``max_delay`` given actions.

    Returns the times [count, H], 0 where the action is given; the steps since the last given one [count, H],
    negative where the action is given; and the numbers of given actions [count, 1].
    """
    device = random.device
    when = torch.rand(count, 1, generator=random, device=device) ** (1 / 1.5) * 0.999 + 0.001
    delay = torch.randint(max_delay + 1, (count, 1), generator=random, device=device)
    delay *= torch.rand(count, 1, generator=random, device=device) < 0.5
    past = torch.arange(horizon, device=device) - delay
    return torch.where(past < 0, 0.0, when), past, delay


def noisy_chunks(chunks: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    times = times[..., None]
    return times * noise + (1 - times) * chunks


def velocity_loss(velocity: Tensor, chunks: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Return the mean square error of velocities [R * K, H, A] of the actions that are not given."""
    missed, free = (velocity - (noise - chunks)).square().mean(-1), times > 0
    return (missed * free).sum() / free.sum()


def flow_losses(trainee: FlowTrainee, batch: FlowBatch, recipe: FitRecipe) -> FlowLosses:
    noisy = noisy_chunks(batch.chunks, batch.noise, batch.times)
    found = trainee(batch.images, batch.prompts, batch.lengths, noisy, batch.times, batch.positions)
    flow = velocity_loss(found.velocity, batch.chunks, batch.noise, batch.times)
    place, right = place_loss(found.places, batch.places)
    kind = kind_loss(found.kinds, batch.kinds, recipe)
    total = flow + recipe.location_weight * place + recipe.kind_weight * kind
    return FlowLosses(total, flow, place, kind, right)


def states_of(labels: shards.Labels) -> FloatArray:
    """Return the states [N, 8]: joint positions in radians and the gripper's opening, 0 to 1."""
    states = labels.states.astype(np.float64)
    states[:, 7] /= arm.FINGER_TRAVEL
    return states


def relative(labels: shards.Labels) -> FloatArray:
    """Return the chunks [N, tasks, SLOTS, H, 8] with joints relative to the state; the gripper stays absolute."""
    chunks = labels.actions.astype(np.float64)
    chunks[..., :7] -= labels.states[:, None, None, None, :7]
    return chunks


def quantiles(values: FloatArray) -> dict[str, Any]:
    """Return the statistics of ``values`` [N, 8] under LeRobot's names; the gripper's range is 0 to 1."""
    low, high = np.percentile(values, [1, 99], axis=0)
    low[7], high[7] = 0.0, 1.0
    return {"q01": low.tolist(), "q99": high.tolist()}
