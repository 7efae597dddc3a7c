"""Resamples a bag to episodes at one rate: what a policy would have seen at each tick, and the next action.

At a tick, image, joint state and feeds are the newest ones, unless older than their timeouts. The action leads to
the command in force just before the next tick. docs/export.md has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vla_ros.config import Config
from vla_ros.contract.action import ActionWriter
from vla_ros.contract.binding import make_arms
from vla_ros.contract.parts import Part, parse_parts
from vla_ros.contract.spec import StateFeature
from vla_ros.contract.state import Arm, Measured, StateError, bind_state
from vla_ros.export.dataset import ExportError
from vla_ros.export.recording import Recorded
from vla_ros.replay.bag import Bag
from vla_ros.replay.prepare import fit
from vla_ros.replay.topics import select
from vla_ros.types import FloatArray, IntArray, JointState, UInt8Array

_SHORTEST = 2  # ticks


@dataclass(frozen=True)
class Options:
    """How bags become episodes."""

    state: str  # parts of the state vector, as text; "" takes joint positions and gripper of every arm
    action: str  # parts of the action; "" takes ``features.action``, or else the same
    goal: str  # target of the actions: the ``commands``, or the ``measured`` position one tick later
    # Times of the recorder (``received``), of the headers (``stamp``), or none: every image of the first camera is
    # a tick (``frames``; a simulation in lockstep).
    clock: str
    rate: int  # ticks per second; 0 takes the first camera's
    # ``bag`` (split at pauses and where the instruction changes); ``armed`` (besides, only while the node was, by
    # its status); or a topic of std_msgs/Bool that is true during an episode.
    episodes: str
    gap_s: float  # a longer pause of the first camera ends an episode
    instruction: str  # in place of the recorded one; "" keeps that
    topics: Mapping[str, str]  # role to topic, from ``--topics``


@dataclass(frozen=True)
class Episode:
    """T ticks without a gap."""

    task: str  # the instruction
    state: FloatArray  # float64 [T, N]
    action: FloatArray  # float64 [T, D]
    frames: tuple[IntArray, ...]  # per camera int64 [T], rows of its images


class Resampler:
    """Makes the episodes of one bag; ``names`` are those of the numbers of state and action.

    ``notes`` counts what was left out. Raises VlaRosError if the bag has no camera, joint states or commands, or a
    part needs what the robot does not have.
    """

    def __init__(self, bag: Bag, config: Config, options: Options) -> None:
        selection = select(bag.topics, config, {**options.topics, "truth": "none"}, empty=bag.empty)
        self._path, self._options = bag.path, options
        self._config = config = fit(config, selection)
        arms = make_arms(config)
        state = parse_parts(options.state) if options.state else _everything(arms)
        named = options.action or " + ".join(config.features.action)
        action = parse_parts(named, action=True) if named else _everything(arms)
        feature = StateFeature("observation.state", state)
        self._state = bind_state(feature, arms, dict(selection.state))
        self._action = ActionWriter(action, arms, config.control)
        self.names = names_of(state, arms), names_of(action, arms)
        self._recorded = Recorded(bag, selection, config, arms, stamped=options.clock == "stamp")
        self.notes: Counter[str] = Counter()

    @property
    def rate(self) -> int:
        """Ticks per second."""
        if self._options.rate:
            return self._options.rate
        gaps = np.diff(self._recorded.times[0])
        return max(1, round(1e9 / float(np.median(gaps)))) if len(gaps) else 1

    @property
    def ticks(self) -> int:
        """Upper bound of the ticks in all episodes."""
        times = self._recorded.times[0]
        whole = self._options.clock == "frames"
        return len(times) if whole else int((times[-1] - times[0]) / 1e9 * self.rate) + 1

    def image_sizes(self) -> dict[str, tuple[int, int]]:
        """Map each camera key to the (height, width) of its images."""
        first = np.zeros(1, np.int64)
        keys = enumerate(self._config.camera.keys)
        shapes = {key: next(self.images(index, first)).shape for index, key in keys}
        return {key: (shape[0], shape[1]) for key, shape in shapes.items()}

    def images(self, camera: int, rows: IntArray) -> Iterator[UInt8Array]:
        """Return the images of one camera, as :attr:`Episode.frames` numbers them."""
        return self._recorded.images(camera, rows)

    def episodes(self, rate: int) -> Iterator[Episode]:
        """Episodes at ``rate`` ticks per second, in order of time; :attr:`notes` says what was left out."""
        for begin, end in self._stretches():
            edges = self._edges(begin, end, 1_000_000_000 // rate)
            ticks = edges[:-1]
            frames = [self._newest_images(times, ticks) for times in self._recorded.times]
            rows = [self._row(tick, following, 1 / rate) for tick, following in pairwise(edges.tolist())]
            seen = np.all([one >= 0 for one in frames], axis=0)
            self.notes["ticks with a stale or missing image"] += int((~seen).sum())
            task = self._task(begin)
            for run in _runs(seen & np.array([row is not None for row in rows])):
                if run.stop - run.start < _SHORTEST:
                    self.notes["pieces of a single tick"] += 1
                    continue
                kept = [row for row in rows[run] if row is not None]
                state, action = (np.stack(column) for column in zip(*kept, strict=True))
                yield Episode(task, state, action, tuple(one[run] for one in frames))

    def _edges(self, begin: int, end: int, period: int) -> IntArray:
        """Return the ticks from ``begin`` to ``end``, and the time of the one after the last."""
        if self._options.clock != "frames":
            return begin + np.arange((end - begin) // period + 2) * period
        times = self._recorded.times[0]
        return times[(times >= begin) & (times <= end)]

    def _stretches(self) -> list[tuple[int, int]]:
        """Return start and end of each segment without a pause of the first camera or a new instruction."""
        times = self._recorded.times[0]
        cuts = set((np.flatnonzero(np.diff(times) > self._options.gap_s * 1e9) + 1).tolist())
        if not self._options.instruction:
            cuts |= {int(np.searchsorted(times, time)) for time, _ in self._recorded.recording.instructions[1:]}
        edges = sorted({0, len(times), *cuts})
        whole = [(int(times[a]), int(times[b - 1])) for a, b in pairwise(edges) if b > a]
        if self._options.episodes == "bag":
            return whole
        marked = self._recorded.marked(self._options.episodes)
        return [(max(a, c), min(b, d)) for a, b in whole for c, d in marked if max(a, c) < min(b, d)]

    def _newest_images(self, times: IntArray, ticks: IntArray) -> IntArray:
        """Return the row of the newest image at each tick, -1 if it is older than ``timeouts.camera``."""
        rows = np.searchsorted(times, ticks, side="right") - 1
        age = ticks - times[np.maximum(rows, 0)]
        return np.where((rows >= 0) & (age <= self._config.timeouts.camera * 1e9), rows, -1)

    def _row(self, tick: int, following: int, seconds: float) -> tuple[FloatArray, FloatArray] | None:
        """Return the state and action at a tick; None if something is missing, which is counted in the notes."""
        recorded = self._recorded
        now = recorded.joints.newest(tick)
        if now is None or recorded.joints.age(tick) > self._config.timeouts.joint_state * 1e9:
            self.notes["ticks with a stale or missing joint state"] += 1
            return None
        try:
            state = self._state.read(Measured(now, recorded.recording.inputs(tick, 0, "").state), now.stamp, 0.0)
        except StateError as error:
            self.notes[str(error)] += 1
            return None
        goal = self._goal(following - 1)
        start = self._goal(tick - 1) if self._config.control.delta_from == "commanded" else now
        if goal is None:
            self.notes["ticks before the first command"] += 1
            return None
        action = self._action.write(start or now, goal, seconds)
        if not np.isfinite(action).all():
            names = ", ".join(name for name, value in zip(self.names[1], action, strict=True) if np.isnan(value))
            self.notes[f"ticks without {names}"] += 1
            return None
        return state, action

    def _goal(self, time: int) -> JointState | None:
        """Return the commanded, or the measured, position at ``time``."""
        commands = self._options.goal == "commands"
        return self._recorded.commanded(time) if commands else self._recorded.joints.newest(time)

    def _task(self, begin: int) -> str:
        """Return the instruction at an episode's start; the first one also applies before it was recorded."""
        recorded = self._recorded.recording.instruction(begin, self._config.policy.instruction)
        if not (self._options.instruction or recorded):
            raise ExportError(
                f"{self._path}: no instruction was recorded; name its topic with --topics instruction=/topic, or "
                "give the text with --instruction"
            )
        return self._options.instruction or recorded


def _everything(arms: Mapping[str, Arm]) -> tuple[Part, ...]:
    """Return the joint positions of every arm, and the gripper of arms with fingers."""
    parts = []
    for name, arm in arms.items():
        parts.append(Part(name, "joint_position", "rad"))
        if arm.fingers:
            parts.append(Part(name, "gripper", "0..1"))
    return tuple(parts)


def _runs(usable: NDArray[np.bool_]) -> list[slice]:
    """Return the slices in which every tick is usable."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], usable, [False])).astype(int)))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def names_of(parts: Sequence[Part], arms: Mapping[str, Arm]) -> tuple[str, ...]:
    """Return LeRobot-style names for all numbers: ``elbow.pos``, or ``left_gripper.pos`` with several arms."""
    several = len(arms) > 1
    found: list[str] = []
    for part in parts:
        arm = arms.get(part.arm)
        size = part.size(len(arm.joints), len(arm.fingers)) if arm else part.count
        what = {"joint_velocity": "vel", "joint_effort": "effort", "joint_delta": "delta"}.get(part.quantity, "pos")
        per_joint = part.joints or (arm.joints if arm else ())
        if part.quantity == "fingers" and arm:
            per_joint = arm.fingers
        if part.quantity == "gripper":
            names = ["gripper.pos"]
        elif len(per_joint) == size and part.quantity.startswith(("joint_", "fingers")):
            names = [f"{joint}.{what}" for joint in per_joint]
        else:
            names = [f"{part.form if part.quantity == 'feed' else part.quantity}.{index}" for index in range(size)]
        found += [f"{part.arm}_{name}" if several and part.arm else name for name in names]
    return tuple(found)
