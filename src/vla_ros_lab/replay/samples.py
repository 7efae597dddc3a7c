"""Results of all played frames as arrays, in memory and on disk."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import GripperConfig
from vla_ros.types import FloatArray, IntArray
from vla_ros_lab.replay import metrics
from vla_ros_lab.replay.storage import BagError, Loss


@dataclass
class Samples:
    """Results of one or several bags: F frames with a result, actions with D dimensions."""

    bag: str  # path of the bag
    times: IntArray  # int64 [F], times at which the recorder received the frames, nanoseconds
    stamps: IntArray  # int64 [F], header stamps in nanoseconds
    episodes: IntArray  # int64 [F], counted from 0
    predicted: FloatArray  # float64 [F, D]
    recorded: FloatArray  # float64 [F, D], NaN where unknown
    normalized: FloatArray  # float64 [F, D], NaN if the policy does not return them
    openings: FloatArray  # float64 [F, G], measured opening of each gripper (0 closed, 1 open), NaN if not measured
    commands: dict[str, FloatArray]  # joint to float64 [F], NaN without a command
    stages_ms: dict[str, FloatArray]  # stage to float64 [F], NaN where it did not run
    age_ms: FloatArray  # float64 [F], recorded time from a frame's arrival to its command; NaN in open loop
    instructions: tuple[str, ...]  # one per episode
    rule: str = "none"  # how recorded actions were paired with frames, a key of ``truth.RULES``
    problem: str = ""  # why nothing can be compared, or ""
    received: int = 0  # number of frames of the first camera
    skipped: int = 0  # frames that arrived while the policy was busy or that ``--every`` skipped
    dropped: Counter[str] = field(default_factory=Counter)  # unusable frames, by reason
    refused: Counter[str] = field(default_factory=Counter)  # commands that were refused, by reason
    stops: list[tuple[int, str]] = field(default_factory=list)  # times at which bodies come too near, and which
    limited: Counter[str] = field(default_factory=Counter)  # how often each limit shortened a command
    notes: Counter[str] = field(default_factory=Counter)  # ignored messages of other topics
    losses: list[Loss] = field(default_factory=list)  # unreadable parts of the bag
    topics: dict[str, str] = field(default_factory=dict)  # role to topic
    execution: dict[str, float] = field(default_factory=dict)  # steadiness of the plan; empty in open loop
    images: int = 0  # images that were prepared on the host
    wall_s: float = 0.0  # duration in seconds
    complete: bool = True  # False after an interruption

    @property
    def seconds(self) -> FloatArray:
        """Time of each frame since the first one, float64 [F]."""
        return np.asarray((self.times - self.times[:1]) * 1e-9, float)

    @property
    def compared(self) -> IntArray:
        return np.flatnonzero(np.isfinite(self.recorded).any(axis=1))

    def take(self, rows: IntArray) -> "Samples":
        """Return the frames ``rows``; the counters still count all frames."""
        taken: dict[str, Any] = {name: getattr(self, name)[rows] for name in _ARRAYS}
        for name in _TABLES:
            taken[name] = {key: column[rows] for key, column in getattr(self, name).items()}
        return dataclasses.replace(self, **taken)


_ARRAYS = ("times", "stamps", "episodes", "predicted", "recorded", "normalized", "openings", "age_ms")
_TABLES = ("commands", "stages_ms")
_COUNTERS = ("dropped", "refused", "limited", "notes")
_TOTALS = ("received", "skipped", "dropped", "refused", "limited", "images", "wall_s")


def commanded(samples: Samples, grippers: Sequence[int], gripper: GripperConfig) -> Samples:
    """Replace gripper numbers with the numbers sent to the fingers: in binary mode, open or closed."""
    if gripper.mode != "binary":
        return samples
    changed = {name: getattr(samples, name).copy() for name in ("predicted", "recorded")}
    for actions in changed.values():
        closed = metrics.is_closed(actions[:, list(grippers)], gripper)
        actions[:, list(grippers)] = gripper.open_value + closed * (gripper.closed_value - gripper.open_value)
    return dataclasses.replace(samples, **changed)


def save_samples(samples: Samples, path: Path) -> None:
    """Write a ``.npz`` file without pickle, atomically."""
    values = dict(vars(samples))
    arrays = {name: values.pop(name) for name in _ARRAYS}
    arrays |= {f"{table}/{key}": column for table in _TABLES for key, column in values.pop(table).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        np.savez_compressed(file, plain=np.array(json.dumps(values)), **arrays)
    partial.replace(path)


def load_samples(path: Path) -> Samples:
    """Read a file written by :func:`save_samples`; raises BagError if it is damaged or from another version."""
    try:
        with np.load(path, allow_pickle=False) as file:
            values: dict[str, Any] = json.loads(str(file["plain"]))
            values |= {name: file[name] for name in _ARRAYS}
            for table in _TABLES:
                keys = [name for name in file.files if name.startswith(f"{table}/")]
                values[table] = {name.removeprefix(f"{table}/"): file[name] for name in keys}
        values |= {name: Counter(values[name]) for name in _COUNTERS}
        values["instructions"] = tuple(values["instructions"])
        values["stops"] = [(time, text) for time, text in values["stops"]]
        values["losses"] = [Loss(*loss) for loss in values["losses"]]
        return Samples(**values)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        found = f"{path}: partial results cannot be read ({error})"
        raise BagError(f"{found}; delete the file to start again") from None


def resumed(first: Samples, rest: Samples) -> Samples:
    """Join two parts of one bag: ``rest`` continues where ``first`` ended."""
    if not len(first.times):
        return rest
    continued = bool(rest.instructions) and rest.instructions[0] == first.instructions[-1]
    episodes = rest.episodes + first.episodes[-1] + (not continued)
    losses = [*first.losses, *(loss for loss in rest.losses if loss not in first.losses)]
    joined = _joined([first, dataclasses.replace(rest, episodes=episodes)])
    instructions = first.instructions + rest.instructions[continued:]
    stops = [*first.stops, *rest.stops]
    return dataclasses.replace(joined, instructions=instructions, losses=losses, stops=stops)


def gather(bags: Sequence[Samples]) -> Samples:
    """Join all bags one second apart and number their episodes consecutively."""
    parts, episode, origin = [], 0, 0
    for bag in bags:
        times = bag.times - bag.times[:1] + origin
        parts.append(dataclasses.replace(bag, times=times, episodes=bag.episodes + episode))
        if len(times):
            origin, episode = int(times[-1]) + 1_000_000_000, int(parts[-1].episodes[-1]) + 1
    return _joined(parts)


def _joined(parts: Sequence[Samples]) -> Samples:
    """Concatenate the arrays and add the counters; other fields come from the last part."""
    joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
    for name in _TOTALS:
        first, *rest = (getattr(part, name) for part in parts)
        joined[name] = sum(rest, first)
    for name in _TABLES:
        tables = [(getattr(part, name), np.full(len(part.times), np.nan)) for part in parts]
        keys = dict.fromkeys(key for table, _ in tables for key in table)
        joined[name] = {key: np.concatenate([table.get(key, unknown) for table, unknown in tables]) for key in keys}
    return dataclasses.replace(parts[-1], **joined)
