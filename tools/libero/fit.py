"""Trains the small pi0.5 on LIBERO's demonstrations; resumes, with demonstrations that were added meanwhile."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.libero.scene import PATCH, POINTS, SIZE
from tools.train.batches import Pool, augment, kind_map, moved
from tools.train.flow_export import Sizes, write_layout
from tools.train.flow_fit import TOKENIZER, draw_times, noisy_chunks, velocity_loss
from tools.train.flow_network import ACTION_SIZE, Encoded, FlowTrainee, architecture_of, initialize
from tools.train.flow_words import FlowPrompts, write_tokenizer
from tools.train.loop import RECIPE, STATISTICS, Training, restored
from tools.train.objective import kind_loss
from tools.train.recipe import FitOptions, FitRecipe, FlowNetworkRecipe, as_json, from_json
from vla_ros.errors import ConfigError
from vla_ros_models import training as models
from vla_ros_models.checkpoint_files import read_json
from vla_ros_models.normalization import LEROBOT_EPS, make_normalization
from vla_ros_models.pi.architecture import PiArchitecture
from vla_ros_models.pi.processing import BINS, PromptForm

HORIZON, STATE_SIZE, ACTIONS = 16, 8, 7
EXECUTE_STEPS = 8
IMAGES = ("observation.images.image", "observation.images.wrist_image")
NETWORK = FlowNetworkRecipe(vision_width=256, vision_blocks=6, vision_heads=4)
INSTRUCTIONS = {
    number: f"pick up the black bowl {where} and place it on the plate"
    for number, where in {
        0: "between the plate and the ramekin",
        1: "next to the ramekin",
        2: "from table center",
        6: "next to the cookie box",
        8: "next to the plate",
    }.items()
}
"""The benchmark's instruction of each task."""

_WORDS = dict.fromkeys(" ".join(INSTRUCTIONS.values()).split())
_NUMBERS = map(str, range(-1, BINS))
_MARKS = ("<pad>", "<eos>", "<bos>", "<unk>", "\n", "Task", "State", "Action", ":", ",", ";", ".")
VOCABULARY = tuple(dict.fromkeys((*_MARKS, *_WORDS, *_NUMBERS)))
FORM = PromptForm(length=64, state="as_is", padded_state=STATE_SIZE)
_KINDS = torch.tensor([0, 0, 1, 2, 3])  # of OBJECTS: two bowls, plate, ramekin, cookies
_NOTHING = 4
_STATE_NOISE = 1.5  # deviation of the state in training, in bins of the prompt
_METRE = 5.0  # scale of the positions that the network tells
_HELD_OUT = 40  # every 40th episode


def network_of(recipe: FlowNetworkRecipe) -> PiArchitecture:
    return architecture_of(recipe, len(VOCABULARY), HORIZON, SIZE, PATCH)


@dataclass(frozen=True)
class Frames(Pool):
    """All demonstrations on one device; ``images`` are uint8 [N, cameras, SIZE, SIZE, 3]."""

    states: Tensor  # float32 [N, 8], in bins
    chunks: Tensor  # float32 [N, H, 8], normalised
    places: Tensor  # float32 [N, 6], bowl and plate relative to the tip, metres
    patches: Tensor  # int64 [N, objects], patch of each object in the first image; -1 outside
    asked: Tensor  # int64 [N], the instruction
    positions: Tensor  # float32 [N, cameras, patches, 3], m, NaN where unknown; patches 0: not recorded
    prompts: FlowPrompts  # of every instruction


@dataclass(frozen=True, eq=False)
class Batch(models.Batch):
    """F frames with K samples each."""

    images: Tensor  # [F, cameras, SIZE, SIZE, 3], float32 in [0, 1]
    prompts: Tensor  # int64 [F, L], padded
    lengths: Tensor  # int64 [F]
    chunks: Tensor  # float32 [F * K, H, 8], normalised
    noise: Tensor  # float32 [F * K, H, 8]
    times: Tensor  # float32 [F * K, H]; 0 where real-time chunking gives the action
    places: Tensor  # float32 [F, 6]
    patches: Tensor  # int64 [F, 2], of bowl and plate
    kinds: Tensor  # int64 [F, patches]
    positions: Tensor | None  # float32 [F, cameras, patches, 3], metres; None without geometric tokens


class Losses(NamedTuple):
    """The loss of a batch and its parts; ``missed_mm`` is the mean error of a position."""

    total: Tensor
    flow: Tensor
    patches: Tensor
    kinds: Tensor
    places: Tensor
    missed_mm: Tensor


class Trainee(FlowTrainee):
    """The network with heads that tell where bowl and plate are; they are dropped after training."""

    def __init__(self, architecture: PiArchitecture) -> None:
        super().__init__(architecture)
        width, patches = architecture.prefix.hidden_size, architecture.vision.patches
        self.place_head = nn.Linear(width, 2 * patches)
        self.kind_head = nn.Linear(width, _NOTHING + 1)
        self.position_head = nn.Linear(width, 6)

    def told(self, found: Encoded) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits of the patches [F, 2, P] and kinds [F, P, kinds], and the positions [F, 6]."""
        count = self.architecture.vision.patches
        patches = self.place_head(found.last).float().unflatten(-1, (2, -1))
        kinds = self.kind_head(found.patches[:, :count]).float()
        return patches, kinds, self.position_head(found.last).float()


class Run(Training[Frames, Trainee]):
    """A training run in ``folder``; ``data`` is read when it begins and when it resumes."""

    def __init__(
        self,
        folder: Path,
        data: Path,
        fit: FitRecipe,
        options: FitOptions,
        network: FlowNetworkRecipe = NETWORK,
    ) -> None:
        self._data, self._network = data, network
        trainee = Trainee(network_of(network))
        initialize(trainee, fit.seed)
        recipes = {"network": as_json(network), "fit": as_json(fit)}
        super().__init__(folder, recipes, trainee, losses, fit, options)

    def load(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Frames:
        paths = sorted(self._data.glob("*.npz"))
        if not paths:
            raise ConfigError(f"{self._data}: no demonstrations; run python -m tools.libero.record first")
        parts = []
        for number, path in enumerate(paths):
            with np.load(path) as arrays:
                parts.append(_shard(arrays))
            progress(number + 1, len(paths))
        shards = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name != "images"}
        images = torch.cat([torch.from_numpy(part["images"]).to(self.device) for part in parts])
        if not (self.folder / STATISTICS).exists():
            statistics = {"observation.state": _quantiles(shards["states"]), "action": _action_quantiles(shards)}
            (self.folder / STATISTICS).write_text(json.dumps(statistics, indent=1) + "\n", encoding="utf-8")
            write_tokenizer(self.folder / TOKENIZER, VOCABULARY)
        if self._network.geometry and not shards["positions"].size:
            raise ConfigError(f"{self._data}: has no points, which --geometry needs; record them with --points")
        stored = json.loads((self.folder / STATISTICS).read_text(encoding="utf-8"))
        normal = {key: make_normalization("quantile", value, key, LEROBOT_EPS) for key, value in stored.items()}
        chunks = normal["action"].normalize(shards["chunks"].astype(np.float64))
        chunks = np.pad(chunks, ((0, 0), (0, 0), (0, ACTION_SIZE - ACTIONS)))
        states = (normal["observation.state"].normalize(shards["states"].astype(np.float64)) + 1) / 2 * BINS
        spots = np.floor(shards["pixels"] * (SIZE // PATCH)).astype(np.int64)
        inside = ((spots >= 0) & (spots < SIZE // PATCH)).all(-1)
        patches = np.where(inside, spots[..., 1] * (SIZE // PATCH) + spots[..., 0], -1)
        tasks = sorted(INSTRUCTIONS)
        held = shards["episodes"] % _HELD_OUT == _HELD_OUT - 1
        prompts = [INSTRUCTIONS[task] for task in tasks]
        return Frames(
            images=images,
            training=moved(np.flatnonzero(~held), self.device),
            held_out=moved(np.flatnonzero(held) if held.any() else np.arange(len(held))[-1:], self.device),
            states=moved(states, self.device, torch.float32),
            chunks=moved(chunks, self.device, torch.float32),
            places=moved(shards["places"], self.device, torch.float32),
            patches=moved(patches, self.device),
            asked=moved(np.searchsorted(tasks, shards["tasks"]), self.device),
            positions=moved(shards["positions"], self.device, torch.float32),
            prompts=FlowPrompts(self.folder / TOKENIZER, prompts, self.device, VOCABULARY, FORM),
        )

    def draw(self, frames: Frames, step: int, *, held_out: bool = False) -> Batch:
        rows, random = frames.rows(step, self.recipe.seed, self.recipe.batch, held_out)
        device = frames.images.device

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, device=device)

        images = frames.images[rows]
        # One change of colour for both cameras: they see the same light.
        seen = images.flatten(1, 2)
        seen = seen.float() if held_out else augment(seen, random)
        states = frames.states[rows] + (0.0 if held_out else _STATE_NOISE) * normal(len(rows), STATE_SIZE)
        bins = states.floor().long().clamp(-1, BINS - 1)
        words, lengths = frames.prompts.fill(frames.asked[rows], bins)
        chunks = frames.chunks[rows].repeat_interleave(self.recipe.samples, dim=0)
        times, _, _ = draw_times(len(chunks), HORIZON, self._network.max_delay, random)
        patches = frames.patches[rows]
        kinds = _KINDS.to(device).expand(len(rows), -1)
        board = kind_map(kinds, patches, (SIZE // PATCH) ** 2)
        return Batch(
            seen.view(images.shape) / 255.0,
            words,
            lengths,
            chunks,
            normal(*chunks.shape),
            times,
            frames.places[rows],
            patches[:, [0, 2]],
            board.clamp(max=_NOTHING),
            frames.positions[rows] if self._network.geometry else None,
        )

    def measure(self, frames: Frames, batch: Batch) -> Mapping[str, float]:
        """Return the losses, and errors of sampled chunks in the benchmark's units (of translation 0.05 m)."""
        every = self.recipe.samples
        found = losses(self.trainee, batch, self.recipe)
        prefix = self.trainee.encode(batch.images, batch.prompts, batch.lengths, batch.positions)
        missed = (self.trainee.sample(prefix, batch.noise[::every], 5) - batch.chunks[::every]).abs()
        return {
            **{name: float(value) for name, value in found._asdict().items()},
            "first": float(missed[:, 0, :3].mean()),
            "last": float(missed[:, -1, :3].mean()),
            "gripper_wrong": float((missed[..., 6] > 1.0).float().mean()),
        }


def _shard(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return a shard's frames, with chunks of the next :data:`HORIZON` actions; the last action is repeated."""
    actions, lengths, frames = arrays["actions"], arrays["lengths"], arrays["frames"]
    begins, episode = np.cumsum(lengths) - lengths, np.repeat(np.arange(len(frames)), frames)
    rows = np.minimum(
        (begins[episode] + arrays["steps"])[:, None] + np.arange(HORIZON), (begins + lengths - 1)[episode][:, None]
    )
    found = {name: arrays[name] for name in ("images", "states", "places", "pixels", "positions")}
    # Spreads held-out episodes over the shards; the same in every process, so a resumed run holds out the same.
    number = zlib.crc32(actions.tobytes())
    return {**found, "chunks": actions[rows], "tasks": arrays["tasks"][episode], "episodes": number + episode}


def _quantiles(values: Any) -> dict[str, Any]:
    low, high = np.percentile(values, [1, 99], axis=0)
    return {"q01": low.tolist(), "q99": high.tolist()}


def _action_quantiles(shards: Mapping[str, Any]) -> dict[str, Any]:
    found = _quantiles(shards["chunks"].reshape(-1, ACTIONS))
    found["q01"][-1], found["q99"][-1] = -1.0, 1.0
    return found


def losses(trainee: Trainee, batch: Batch, recipe: FitRecipe) -> Losses:
    noisy = noisy_chunks(batch.chunks, batch.noise, batch.times)
    prefix = trainee.encode(batch.images, batch.prompts, batch.lengths, batch.positions)
    velocity = trainee.velocity(prefix, noisy, batch.times)
    flow = velocity_loss(velocity, batch.chunks, batch.noise, batch.times)
    where, kinds, positions = trainee.told(prefix)
    patch = functional.cross_entropy(where.flatten(0, 1), batch.patches.flatten(), ignore_index=-1)
    kind = kind_loss(kinds, batch.kinds, recipe)
    off = positions - _METRE * batch.places
    place = functional.smooth_l1_loss(off, torch.zeros_like(off), beta=0.1)
    total = flow + recipe.location_weight * (patch + 4 * place) + recipe.kind_weight * kind
    return Losses(total, flow, patch, kind, place, off.abs().mean() / _METRE * 1e3)


def export(run: Path, folder: Path) -> int:
    """Write the checkpoint of a run to ``folder``; return the number of its weights."""
    network = from_json(FlowNetworkRecipe, read_json(run / RECIPE)["network"])
    trainee = Trainee(network_of(network))
    restored(run, trainee)
    sizes = Sizes(IMAGES, STATE_SIZE, ACTIONS, FORM.length, EXECUTE_STEPS, points=POINTS)
    weights = write_layout(folder, trainee, read_json(run / STATISTICS), sizes, network.max_delay)
    shutil.copyfile(run / TOKENIZER, folder / TOKENIZER)
    return weights
