"""Files of demonstrations: losslessly compressed frames and plain arrays, one ``.npz`` per shard."""

import os
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_ros.errors import VlaRosError
from vla_ros.types import UInt8Array

_LEVEL = 1  # compresses a rendered frame to a twelfth in about a millisecond; higher levels gain little


@dataclass(frozen=True)
class Labels:
    """Everything about N frames except their pixels."""

    seeds: NDArray[np.int64]  # int64 [N], seed of the episode
    steps: NDArray[np.int16]  # int16 [N], step within the episode
    kinds: NDArray[np.int8]  # int8 [N, SLOTS], index in :data:`~.labels.KINDS` of each object, -1 for empty slots
    patches: NDArray[np.int16]  # int16 [N, SLOTS], patch of the object's centre, -1 if it is not visible
    states: NDArray[np.float32]  # float32 [N, 8], joint positions (radians) and opening of one finger (metres)
    # Float32 [N, tasks, SLOTS, 7], the expert's undisturbed action for every task and object; with a horizon H,
    # chunks [N, tasks, SLOTS, H, 8] of joint positions and gripper.
    actions: NDArray[np.float32]
    asked: NDArray[np.int8]  # int8 [N, 2], task and slot that the arm was following
    noise: NDArray[np.float32]  # float32 [N], standard deviation of the episode's disturbance, metres
    # Float32 [N, patches, 3], where the surface in each patch is, metres; [N, 0, 3] if it was not recorded.
    positions: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.seeds)


@dataclass(frozen=True)
class Shard:
    """Frames of some episodes."""

    labels: Labels  # labels of the frames
    blob: UInt8Array  # uint8, the concatenated compressed frames
    offsets: NDArray[np.int64]  # int64 [N + 1], start of each frame
    size: tuple[int, int]  # (height, width) of a frame
    results: NDArray[np.int64]  # int64 [episodes, 3]: seed, success (0 or 1), steps

    def frame(self, index: int) -> UInt8Array:
        data = zlib.decompress(self.blob[self.offsets[index] : self.offsets[index + 1]].data)
        return np.frombuffer(data, np.uint8).reshape(*self.size, 3)


def pack(frames: Sequence[UInt8Array]) -> tuple[UInt8Array, NDArray[np.int64]]:
    """Return the frames as ``blob`` and ``offsets`` of a :class:`Shard`."""
    pieces = [zlib.compress(np.ascontiguousarray(frame).data, _LEVEL) for frame in frames]
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    return np.frombuffer(b"".join(pieces), np.uint8), offsets


def write(path: Path, shard: Shard) -> None:
    """Write a shard atomically."""
    arrays: dict[str, Any] = {field.name: getattr(shard.labels, field.name) for field in fields(Labels)}
    arrays |= {
        "blob": shard.blob,
        "offsets": shard.offsets,
        "size": np.array(shard.size),
        "results": shard.results,
    }
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("wb") as stream:
        np.savez(stream, **arrays)
    part.replace(path)


def read(path: Path) -> Shard:
    """Read a shard.

    Raises:
        VlaRosError: The shard is damaged.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            labels = Labels(**{field.name: arrays[field.name] for field in fields(Labels)})
            height, width = (int(value) for value in arrays["size"])
            return Shard(labels, arrays["blob"], arrays["offsets"], (height, width), arrays["results"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise VlaRosError(
            f"{path}: is damaged ({error}); delete it and run `python -m tools.train data` again"
        ) from error


def read_labels(paths: Sequence[Path]) -> Labels:
    """Return the concatenated labels of several shards.

    Raises:
        VlaRosError: A shard is damaged, or there are no shards.
    """
    if not paths:
        raise VlaRosError("no demonstrations: run `python -m tools.train data` first")
    parts = [read(path).labels for path in paths]
    return Labels(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Labels)}
    )


def unpack(shard: Shard, pool: ThreadPoolExecutor) -> UInt8Array:
    """Return all frames of a shard, uint8 [N, H, W, 3]; zlib releases the GIL, so threads help."""
    frames = np.empty((len(shard.labels), *shard.size, 3), np.uint8)

    def one(index: int) -> None:
        frames[index] = shard.frame(index)

    list(pool.map(one, range(len(frames))))
    return frames
