"""Makes a LeRobot v3 data set, with the images as PNG, of demonstrations that were recorded with ``--every 1``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_ros.errors import ConfigError

RATE = 20  # steps of the benchmark in a second
IMAGES = ("observation.images.image", "observation.images.wrist_image")


def make_dataset(folders: Sequence[Path], output: Path, most: int) -> tuple[int, int]:
    """Write at most ``most`` episodes of each instruction that succeeded; return the episodes and their frames."""
    if output.exists():
        raise ConfigError(f"{output}: exists; name another folder or remove it")
    counts: dict[str, int] = {}
    tables: list[pa.Table] = []
    total = 0
    for path in sorted(path for folder in folders for path in folder.glob("*.npz")):
        with np.load(path) as arrays:
            for text, episode in _episodes(path, arrays):
                if counts.get(text, 0) < most:
                    counts[text] = counts.get(text, 0) + 1
                    number = list(counts).index(text)
                    tables.append(_table(episode, len(tables), total, number))
                    total += len(episode["actions"])
    if not tables:
        raise ConfigError(f"{', '.join(map(str, folders))}: no demonstration succeeded")
    (output / "data/chunk-000").mkdir(parents=True)
    (output / "meta").mkdir()
    pq.write_table(pa.concat_tables(tables), output / "data/chunk-000/file-000.parquet")
    tasks = {"task_index": list(range(len(counts))), "task": list(counts)}
    pq.write_table(pa.table(tasks), output / "meta/tasks.parquet")
    sizes = {key: len(tables[0][key][0]) for key in ("observation.state", "action")}
    counters = ("frame_index", "episode_index", "index", "task_index")
    info = {
        "codebase_version": "v3.0",
        "fps": RATE,
        "features": {key: {"dtype": "image"} for key in IMAGES}
        | {key: {"dtype": "float32", "shape": [size]} for key, size in sizes.items()}
        | {"timestamp": {"dtype": "float32", "shape": [1]}}
        | {key: {"dtype": "int64", "shape": [1]} for key in counters},
        "total_episodes": len(tables),
        "total_frames": total,
    }
    (output / "meta/info.json").write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
    return len(tables), total


def _episodes(path: Path, arrays: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield instruction, images, states and actions of each episode that succeeded."""
    frames, lengths = arrays["frames"], arrays["lengths"]
    if not np.array_equal(frames, lengths):
        raise ConfigError(f"{path}: not every step has a frame; record with --every 1")
    kept = {name: arrays[name] for name in ("images", "states", "actions")}
    ends = np.cumsum(lengths)
    for end, length, text, success in zip(ends, lengths, arrays["instructions"], arrays["successes"], strict=True):
        if success:
            yield str(text), {name: values[end - length : end] for name, values in kept.items()}


def _table(episode: Mapping[str, Any], number: int, first: int, task: int) -> pa.Table:
    count = len(episode["actions"])
    rows = np.arange(count)
    columns: dict[str, Any] = {
        key: pa.array([{"bytes": _png(image), "path": None} for image in episode["images"][:, camera]])
        for camera, key in enumerate(IMAGES)
    }
    for key, values in (("observation.state", episode["states"]), ("action", episode["actions"])):
        columns[key] = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    columns |= {"timestamp": pa.array((rows / RATE).astype(np.float32)), "frame_index": rows, "index": first + rows}
    columns |= {"episode_index": np.full(count, number), "task_index": np.full(count, task)}
    return pa.table(columns)


def _png(image: np.ndarray) -> bytes:
    return bytes(cv2.imencode(".png", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))[1])
