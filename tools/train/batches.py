"""Batches that depend only on the recipe and the step, made on the device that holds the frames."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from tools.train import shards
from tools.train.labels import KINDS, PATCH
from tools.train.network import ACTION_TOKENS
from tools.train.recipe import HELD_OUT_EVERY
from vla_ros_lab.sim.tasks import SLOTS
from vla_ros_models import training as models

logger = logging.getLogger(__name__)

NOT_ASKED = -100
"""Value of targets that the losses ignore."""

BRIGHTNESS = (0.5, 1.2)
CONTRAST = (0.8, 1.2)
TINT = 0.06
_JITTERED = 0.8


@dataclass(frozen=True, eq=False)
class Batch(models.Batch):
    """F frames, each with P instructions; R = F * P."""

    images: Tensor  # [F, H, W, 3] RGB in 0 to 255, float32 where augmented, else uint8
    prompts: Tensor  # int64 [R, L], padded
    lengths: Tensor  # int64 [R]
    tokens: Tensor  # int64 [R, 7], the expert's action
    places: Tensor  # int64 [R], patch of the named object; :data:`NOT_ASKED` if it is not visible
    kinds: Tensor  # int64 [F, patches], the object in each patch; ``len(KINDS)`` for no object


@dataclass(frozen=True)
class Pool:
    """Images of all demonstrations on one device, of which some are held out."""

    images: Tensor  # uint8 [N, H, W, 3]
    training: Tensor  # int64, indices of training frames
    held_out: Tensor  # int64, indices of held-out frames

    def rows(self, step: int, seed: int, frames: int, held_out: bool) -> tuple[Tensor, torch.Generator]:
        """Draw F ``frames`` for a step; return their indices, and the generator of all else in the batch."""
        device = self.images.device
        random = torch.Generator(device).manual_seed((seed * 2 + held_out) * 100_000_007 + step)
        pool = self.held_out if held_out else self.training
        return pool[torch.randint(len(pool), (frames,), generator=random, device=device)], random


class Choice(NamedTuple):
    """F frames of the simulated table, each with P instructions; R = F * P."""

    rows: Tensor  # int64 [F], indices of the frames
    chosen: Tensor  # int64 [F, P], task times SLOTS plus slot: the followed instruction first, then others
    named: Tensor  # int64 [R], task times ``len(KINDS)`` plus kind
    images: Tensor  # [F, H, W, 3] RGB in 0 to 255, float32 where augmented, else uint8
    places: Tensor  # int64 [R], patch of the named object; :data:`NOT_ASKED` if it is not visible
    kinds: Tensor  # int64 [F, patches], the object in each patch; ``len(KINDS)`` for no object
    random: torch.Generator
    positions: Tensor  # float32 [F, patches, 3], metres, NaN where unknown; [F, 0, 3] if not recorded


@dataclass(frozen=True)
class TableFrames(Pool):
    """Frames of the simulated table, labelled for every task and object."""

    kinds: Tensor  # int64 [N, SLOTS], -1 for empty slots
    patches: Tensor  # int64 [N, SLOTS], -1 for objects that are not visible
    asked: Tensor  # int64 [N], task times SLOTS plus slot of the instruction that was followed
    positions: Tensor  # float32 [N, patches, 3], metres, NaN where unknown; [N, 0, 3] if not recorded

    def choose(
        self, step: int, seed: int, frames: int, prompts: int, tasks: int, *, held_out: bool = False, shift: int = 0
    ) -> Choice:
        """Draw F ``frames`` with P ``prompts`` each; held-out frames are not augmented.

        ``shift`` is the largest number of patches by which images move, with what is known of their patches.
        """
        rows, random = self.rows(step, seed, frames, held_out)
        asked, kinds, patches = self.asked[rows], self.kinds[rows], self.patches[rows]
        images, positions = self.images[rows], self.positions[rows]
        if shift and not held_out:
            moves = torch.randint(-shift, shift + 1, (frames, 2), generator=random, device=images.device)
            patches = shifted_patches(patches, moves, images.shape[1] // PATCH)
            images = shifted(images, moves * PATCH)
            if positions.shape[1]:
                board = positions.reshape(frames, -1, images.shape[2] // PATCH, 3)
                positions = shifted(board, moves, torch.nan).flatten(1, 2)
        weights = (kinds >= 0).float().repeat(1, tasks).scatter(1, asked[:, None], 0.0)  # [F, tasks * SLOTS]
        others = torch.multinomial(weights, prompts - 1, generator=random) if prompts > 1 else asked[:, None][:, :0]
        chosen = torch.cat([asked[:, None], others], dim=1)
        slots = chosen % SLOTS
        places = patches.gather(1, slots).flatten()
        return Choice(
            rows,
            chosen,
            (chosen // SLOTS * len(KINDS) + kinds.gather(1, slots)).flatten(),
            images if held_out else augment(images, random),
            places.masked_fill(places < 0, NOT_ASKED),
            kind_map(kinds, patches, (images.shape[1] // PATCH) ** 2),
            random,
            positions,
        )


@dataclass(frozen=True)
class Frames(TableFrames):
    """Demonstrations whose labels are tokens."""

    tokens: Tensor  # int16 [N, tasks * SLOTS, 7]
    prompts: Tensor  # int64 [tasks * kinds, L]
    lengths: Tensor  # int64 [tasks * kinds]

    def draw(self, step: int, seed: int, frames: int, prompts: int, *, held_out: bool = False) -> Batch:
        """Draw a batch, which depends only on ``step`` and ``seed``."""
        found = self.choose(step, seed, frames, prompts, self.tokens.shape[1] // SLOTS, held_out=held_out)
        tokens = self.tokens[found.rows].long().gather(1, found.chosen[..., None].expand(-1, -1, ACTION_TOKENS))
        return Batch(
            found.images,
            self.prompts[found.named],
            self.lengths[found.named],
            tokens.flatten(0, 1),
            found.places,
            found.kinds,
        )


def shifted(boards: Tensor, moves: Tensor, outside: float | None = None) -> Tensor:
    """Move each of ``boards`` [F, H, W, C] by ``moves`` [F, 2] down and right.

    What comes in is ``outside``, or the edge repeated.
    """
    frames, height, width = boards.shape[:3]
    at = [
        torch.arange(size, device=boards.device) - moves[:, axis, None] for axis, size in enumerate((height, width))
    ]
    rows, columns = (one.clamp(0, size - 1) for one, size in zip(at, (height, width), strict=True))
    found = boards[torch.arange(frames, device=boards.device)[:, None, None], rows[:, :, None], columns[:, None]]
    if outside is None:
        return found
    inside = (at[0] == rows)[:, :, None] & (at[1] == columns)[:, None]
    return torch.where(inside[..., None], found, outside)


def shifted_patches(patches: Tensor, moves: Tensor, side: int) -> Tensor:
    """Move patches [F, S] of boards of ``side`` by ``moves`` [F, 2]; -1 stays, and is what leaves the board."""
    rows, columns = patches // side + moves[:, :1], patches % side + moves[:, 1:]
    inside = (patches >= 0) & (rows >= 0) & (rows < side) & (columns >= 0) & (columns < side)
    return torch.where(inside, rows * side + columns, -1)


def kind_map(kinds: Tensor, patches: Tensor, count: int) -> Tensor:
    """Return the object in each patch, int64 [F, count], from kinds and patches; ``len(KINDS)`` for no object."""
    spare = torch.where((kinds >= 0) & (patches >= 0), patches, count)  # for invisible objects
    board = torch.full((len(kinds), count + 1), len(KINDS), dtype=torch.int64, device=kinds.device)
    return board.scatter(1, spare, kinds)[:, :count]


def augment(images: Tensor, random: torch.Generator) -> Tensor:
    """Vary brightness, contrast and tint of each image, uint8 [F, H, W, 3]; returns float32 in 0 to 255."""
    count = len(images)

    def uniform(low: float, high: float, channels: int = 1) -> Tensor:
        drawn = torch.rand(count, 1, 1, channels, generator=random, device=images.device)
        return low + (high - low) * drawn

    pixels = images.float()
    mean = pixels.mean(dim=(1, 2, 3), keepdim=True)
    changed = (pixels - mean) * uniform(*CONTRAST) + mean
    changed = changed * uniform(*BRIGHTNESS) * uniform(1 - TINT, 1 + TINT, 3)
    keep = uniform(0.0, 1.0) > _JITTERED
    return torch.where(keep, pixels, changed).clamp_(0, 255)


def table_frames(
    paths: list[Path], labels: shards.Labels, device: torch.device, progress: Callable[[int], None]
) -> dict[str, Tensor]:
    """Return the fields of :class:`TableFrames` on the device."""
    training, held_out = split(labels)
    return {
        "images": load_images(paths, len(labels), device, progress),
        "training": moved(training, device),
        "held_out": moved(held_out, device),
        "kinds": moved(labels.kinds, device),
        "patches": moved(labels.patches, device),
        "positions": moved(labels.positions, device, torch.float32),
        "asked": moved(labels.asked[:, 0].astype(np.int64) * SLOTS + labels.asked[:, 1], device),
    }


def moved(values: ArrayLike, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)


def split(labels: shards.Labels) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the indices of the training frames and of the held-out frames."""
    held_out = labels.seeds % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    rows = np.arange(len(labels))
    return rows[~held_out], rows[held_out] if held_out.any() else rows[-1:]


def load_images(paths: list[Path], count: int, device: torch.device, progress: Callable[[int], None]) -> Tensor:
    """Decompress the images of all ``count`` frames onto the device, uint8 [N, H, W, 3]."""
    images: Tensor | None = None
    done = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for path in paths:
            pixels = shards.unpack(shards.read(path), pool)
            if images is None:
                images = torch.empty(count, *pixels.shape[1:], dtype=torch.uint8, device=device)
            images[done : done + len(pixels)] = torch.from_numpy(pixels).to(device)
            done += len(pixels)
            progress(done)
    assert images is not None  # read_labels raises if the folder is empty
    return images
