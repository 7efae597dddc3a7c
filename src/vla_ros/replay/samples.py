"""What one bag gave, as arrays: kept in memory while it runs, on disk so that an interrupted run can go on."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import GripperConfig
from vla_ros.replay import metrics
from vla_ros.replay.records import BagError, Loss
from vla_ros.types import FloatArray, IntArray


@dataclass
class Samples:
    """Everything about the frames of one bag; F answered frames, D numbers in an action.

    Attributes:
        bag: Path of the bag.
        times: Int64 [F], nanoseconds of the recorder.
        stamps: Int64 [F], header stamps in nanoseconds.
        episodes: Int64 [F], counted from 0 in this bag.
        predicted: Float64 [F, D].
        recorded: Float64 [F, D], NaN where unknown.
        normalized: Float64 [F, D], NaN where the policy does not tell.
        commands: Float64 [F, N], NaN where there was none.
        command_names: Joints of a command.
        stages_ms: Stage to float64 [F], NaN where it did not happen.
        age_ms: Float64 [F]: recorded time from a frame's arrival to its command; NaN in open loop.
        instructions: One per episode.
        rule: How recorded actions were paired, a key of ``truth.RULES``.
        problem: Why nothing can be compared, or "".
        received: Camera frames seen.
        skipped: Frames that came while the policy was busy, or were left out by ``--every``.
        dropped: Frames that could not be used, by reason.
        refused: Commands that were refused, by reason.
        limited: How often each limit shortened a command.
        notes: What was left out of other topics.
        losses: What of the bag could not be read.
        topics: Role to topic.
        pictures: Pictures that were really prepared.
        wall_s: Seconds that it took.
        complete: False where it was interrupted or limited.
        openings: Float64 [F], how far open the measured fingers were at each frame (1 as at
            ``gripper.open_position``); empty where they are not measured.
    """

    bag: str
    times: IntArray
    stamps: IntArray
    episodes: IntArray
    predicted: FloatArray
    recorded: FloatArray
    normalized: FloatArray
    commands: FloatArray
    command_names: tuple[str, ...]
    stages_ms: dict[str, FloatArray]
    age_ms: FloatArray
    instructions: tuple[str, ...]
    rule: str = "none"
    problem: str = ""
    received: int = 0
    skipped: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    limited: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    losses: list[Loss] = field(default_factory=list)
    topics: dict[str, str] = field(default_factory=dict)
    pictures: int = 0
    wall_s: float = 0.0
    complete: bool = True
    openings: FloatArray = field(default_factory=lambda: np.zeros(0))


_ARRAYS = ("times", "stamps", "episodes", "predicted", "recorded", "normalized", "commands", "age_ms", "openings")
_COUNTERS = ("dropped", "refused", "limited", "notes")
_PLAIN = ("bag", "rule", "problem", "received", "skipped", "topics", "pictures", "wall_s", "complete")


def commanded(samples: Samples, gripper_index: int | None, gripper: GripperConfig) -> Samples:
    """The same with gripper numbers as they reach the fingers: in binary mode wide open or closed.

    A policy that closes with 0.7 is not wrong by 0.7 where the threshold lies above it.
    """
    if gripper_index is None or gripper.mode != "binary":
        return samples
    convention = (gripper.open_value, gripper.closed_value, gripper.threshold)
    changed = {}
    for name in ("predicted", "recorded"):
        actions = getattr(samples, name).copy()
        closed = metrics.is_closed(actions[:, gripper_index], *convention)
        opened = np.where(closed > 0.5, gripper.closed_value, gripper.open_value)
        actions[:, gripper_index] = np.where(np.isfinite(closed), opened, np.nan)
        changed[name] = actions
    return dataclasses.replace(samples, **changed)


def save(samples: Samples, path: Path) -> None:
    """Write to a ``.npz`` file without pickle; a crash leaves the older file whole."""
    plain: dict[str, Any] = {name: getattr(samples, name) for name in (*_PLAIN, *_COUNTERS)}
    plain["command_names"] = list(samples.command_names)
    plain["instructions"] = list(samples.instructions)
    plain["losses"] = [[loss.file, loss.where, loss.what] for loss in samples.losses]
    arrays = {name: getattr(samples, name) for name in _ARRAYS}
    arrays |= {f"stage/{name}": values for name, values in samples.stages_ms.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        np.savez_compressed(file, plain=np.array(json.dumps(plain)), **arrays)
    partial.replace(path)


def load(path: Path) -> Samples:
    """Read what :func:`save` wrote.

    Raises:
        BagError: The file is damaged or of another version.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            plain = json.loads(str(file["plain"]))
            arrays = {name: file[name] for name in _ARRAYS}
            stages = {name.removeprefix("stage/"): file[name] for name in file.files if name.startswith("stage/")}
        fields: dict[str, Any] = {name: plain[name] for name in _PLAIN}
        fields |= {name: Counter(plain[name]) for name in _COUNTERS}
        return Samples(
            **fields,
            **arrays,
            stages_ms=stages,
            command_names=tuple(plain["command_names"]),
            instructions=tuple(plain["instructions"]),
            losses=[Loss(*loss) for loss in plain["losses"]],
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise BagError(f"{path}: partial results cannot be read ({error}); delete the file to begin anew") from None


def join(first: Samples, rest: Samples) -> Samples:
    """Two parts of one bag as one: ``rest`` went on where ``first`` was interrupted.

    Both were paired with recorded actions by themselves, so only the frame at the seam can lack its own.
    """
    if not len(first.times):
        return rest
    offset = int(first.episodes[-1])
    same = bool(rest.instructions) and rest.instructions[0] == first.instructions[-1]
    offset += 0 if same else 1
    count, total = len(first.times), len(first.times) + len(rest.times)
    stages = {}
    for name in {*first.stages_ms, *rest.stages_ms}:
        stages[name] = np.full(total, np.nan)
        stages[name][:count] = first.stages_ms.get(name, np.nan)
        stages[name][count:] = rest.stages_ms.get(name, np.nan)
    merged: dict[str, Any] = {
        name: np.concatenate((getattr(first, name), getattr(rest, name)))
        for name in _ARRAYS
        if name not in ("episodes", "commands")
    }
    merged |= {name: getattr(rest, name) for name in ("bag", "rule", "problem", "topics", "complete")}
    merged |= {name: getattr(first, name) + getattr(rest, name) for name in ("dropped", "refused", "limited")}
    same_joints = first.commands.shape[1:] == rest.commands.shape[1:]
    return Samples(
        **merged,
        episodes=np.concatenate((first.episodes, rest.episodes + offset)),
        commands=np.concatenate((first.commands, rest.commands)) if same_joints else np.full((total, 0), np.nan),
        command_names=rest.command_names if same_joints else (),
        stages_ms=stages,
        instructions=first.instructions + (rest.instructions[1:] if same else rest.instructions),
        received=first.received + rest.received,
        skipped=first.skipped + rest.skipped,
        notes=rest.notes,
        losses=[*first.losses, *(loss for loss in rest.losses if loss not in first.losses)],
        pictures=first.pictures + rest.pictures,
        wall_s=first.wall_s + rest.wall_s,
    )
