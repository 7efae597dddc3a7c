"""Results of one bag as arrays: in memory while it runs, on disk so that an interrupted run can be resumed."""

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
    """Everything about the frames of one bag: F answered frames, D numbers in an action.

    Attributes:
        bag: Path of the bag.
        times: Int64 [F], receive times of the recorder in nanoseconds.
        stamps: Int64 [F], header stamps in nanoseconds.
        episodes: Int64 [F], counted from 0 in this bag.
        predicted: Float64 [F, D].
        recorded: Float64 [F, D], NaN where unknown.
        normalized: Float64 [F, D], NaN if the policy does not return them.
        openings: Float64 [F], how far open the measured fingers were at each frame (1 as at
            ``gripper.open_position``), NaN if they are not measured.
        commands: Float64 [F, N], NaN where there was none.
        command_names: Joints of a command.
        stages_ms: Stage to float64 [F], NaN where it did not run.
        age_ms: Float64 [F], recorded time from a frame's arrival to its command; NaN in open loop.
        instructions: One per episode.
        rule: How recorded actions were paired with frames, a key of ``truth.RULES``.
        problem: Why nothing can be compared, or "".
        received: Frames of the first camera.
        skipped: Frames that arrived while the policy was busy, or were left out by ``--every``.
        dropped: Frames that could not be used, by reason.
        refused: Commands that were refused, by reason.
        limited: How often each limit shortened a command.
        notes: What was left out of other topics.
        losses: What of the bag could not be read.
        topics: Role to topic.
        images: Images that were prepared on the host.
        wall_s: Duration in seconds.
        complete: False if it was interrupted.
    """

    bag: str
    times: IntArray
    stamps: IntArray
    episodes: IntArray
    predicted: FloatArray
    recorded: FloatArray
    normalized: FloatArray
    openings: FloatArray
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
    images: int = 0
    wall_s: float = 0.0
    complete: bool = True


_ARRAYS = ("times", "stamps", "episodes", "predicted", "recorded", "normalized", "openings", "commands", "age_ms")
_TOTALS = ("received", "skipped", "dropped", "refused", "limited", "images", "wall_s")


def commanded(samples: Samples, gripper_index: int | None, gripper: GripperConfig) -> Samples:
    """The same with gripper numbers as they reach the fingers: fully open or closed in binary mode.

    A policy that closes with 0.7 is not wrong by 0.7 if the threshold lies above it.
    """
    if gripper_index is None or gripper.mode != "binary":
        return samples
    changed = {}
    for name in ("predicted", "recorded"):
        actions = changed[name] = getattr(samples, name).copy()
        closed = metrics.is_closed(actions[:, gripper_index], gripper)
        actions[:, gripper_index] = gripper.open_value + closed * (gripper.closed_value - gripper.open_value)
    return dataclasses.replace(samples, **changed)


def save(samples: Samples, path: Path) -> None:
    """Writes a ``.npz`` file without pickle; after a crash the older file is still whole."""
    values = dict(vars(samples))
    arrays = {name: values.pop(name) for name in _ARRAYS}
    arrays |= {f"stage/{name}": stage for name, stage in values.pop("stages_ms").items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        np.savez_compressed(file, plain=np.array(json.dumps(values)), **arrays)
    partial.replace(path)


def load(path: Path) -> Samples:
    """Reads what :func:`save` wrote.

    Raises:
        BagError: The file is damaged or of another version.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            values: dict[str, Any] = json.loads(str(file["plain"]))
            values |= {name: file[name] for name in _ARRAYS}
            stages = {name.removeprefix("stage/"): file[name] for name in file.files if name.startswith("stage/")}
        values |= {name: Counter(values[name]) for name in ("dropped", "refused", "limited", "notes")}
        values |= {name: tuple(values[name]) for name in ("command_names", "instructions")}
        values["losses"] = [Loss(*loss) for loss in values["losses"]]
        return Samples(**values, stages_ms=stages)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise BagError(
            f"{path}: partial results cannot be read ({error}); delete the file to start again"
        ) from None


def join(first: Samples, rest: Samples) -> Samples:
    """Joins two parts of one bag: ``rest`` resumed where ``first`` was interrupted.

    Each was paired with recorded actions by itself, so only the frame at the seam can be without its own.
    """
    if not len(first.times):
        return rest
    continued = bool(rest.instructions) and rest.instructions[0] == first.instructions[-1]
    count = len(first.times)

    def padded(part: Samples, name: str) -> FloatArray:
        return part.stages_ms.get(name, np.full(len(part.times), np.nan))

    if first.commands.shape[1:] != rest.commands.shape[1:]:
        first, rest = (
            dataclasses.replace(part, commands=np.full((len(part.times), 0), np.nan), command_names=())
            for part in (first, rest)
        )
    joined: dict[str, Any] = {name: np.concatenate((getattr(first, name), getattr(rest, name))) for name in _ARRAYS}
    joined["episodes"][count:] += int(first.episodes[-1]) + (not continued)
    joined |= {name: getattr(first, name) + getattr(rest, name) for name in _TOTALS}
    return dataclasses.replace(
        rest,
        **joined,
        stages_ms={
            name: np.concatenate((padded(first, name), padded(rest, name)))
            for name in {*first.stages_ms, *rest.stages_ms}
        },
        instructions=first.instructions + rest.instructions[continued:],
        losses=[*first.losses, *(loss for loss in rest.losses if loss not in first.losses)],
    )
