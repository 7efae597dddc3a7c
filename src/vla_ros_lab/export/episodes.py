"""Resamples a bag at one rate to episodes: state, images and action of each tick.

At each tick, images, joint state and state topics are the newest received, unless they are older than their
timeouts. The action leads to the command in force just before the next tick. docs/export.md has the rules.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vla_ros.config import Config
from vla_ros.contract.action import ActionWriter
from vla_ros.contract.binding import make_arms
from vla_ros.contract.components import TOPIC, Component, parse_components
from vla_ros.contract.spec import StateFeature
from vla_ros.contract.state import Arm, Measured, StateError, bind_state
from vla_ros.types import FloatArray, IntArray, JointState
from vla_ros_lab.export.dataset import ExportError
from vla_ros_lab.export.recording import CORRECTING, PAUSED, Interval, RecordedJoints
from vla_ros_lab.replay import series
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.prepare import fit
from vla_ros_lab.replay.topics import topics_of

_SHORTEST = 2  # ticks
_UNSHOWN = 0.25  # share of a camera's images that may be in no frame without a remark
_SUFFIXES = {"joint_velocity": "vel", "joint_effort": "effort", "joint_delta": "delta"}


@dataclass(frozen=True)
class ExportOptions:
    """How bags become episodes: the options of ``vla-ros export`` with the same names."""

    state: str = ""  # parts of the state vector; "" for the joint positions and gripper of every arm
    action: str = ""  # parts of the action; "" for ``features.action``, or else the parts ``state`` has by default
    goal: str = "commands"  # actions lead to the ``commands``, or to the ``measured`` position one tick later
    # ``received`` uses the recorder's times, ``stamp`` header stamps; ``frames`` makes every image of the first
    # camera a tick (for a simulation in lockstep).
    clock: str = "received"
    fps: int = 0  # ticks per second; 0 for the rate of the first camera
    # ``bag`` splits each bag at pauses and where the instruction changes; ``armed`` also keeps only the time while
    # the node was armed; a topic of std_msgs/Bool keeps only the time while it was true. ``events`` are the node's
    # episodes that were not discarded, without pauses of the arm; ``corrections`` the time in them in which a
    # person moved the arm; ``taught`` the corrections of those in which a person corrected, and the others whole;
    # ``auto`` is ``events`` if the bag has any, else ``bag``.
    episodes: str = "auto"
    failures: bool = True  # False leaves out episodes that a person labelled ``failure``
    gap: float = 2.0  # seconds; a longer pause of the first camera ends an episode
    instruction: str = ""  # used instead of the recorded instruction, unless empty
    topics: Mapping[str, str] = field(default_factory=dict)  # role to topic, from ``--topics``


@dataclass(frozen=True)
class ResampledEpisode:
    """An episode resampled to T ticks at a constant rate."""

    times: IntArray  # int64 [T], ns on the chosen clock
    task: str  # the instruction
    state: FloatArray  # float64 [T, N]
    action: FloatArray  # float64 [T, D]
    frames: tuple[IntArray, ...]  # for each camera the indices of its images, int64 [T]
    intervention: NDArray[np.bool_]  # whether a person moved the arm, [T]
    label: str  # of the episode that its last tick ends; "" if the episode goes on, or has no label

    @property
    def success(self) -> bool:
        return self.label == "success"

    def without(self, ticks: NDArray[np.bool_]) -> list["ResampledEpisode"]:
        """Return the episodes between ``ticks``, bool [T], that are long enough; the last one has the label."""
        runs = _runs(~ticks)
        return [
            ResampledEpisode(
                self.times[run],
                self.task,
                self.state[run],
                self.action[run],
                tuple(rows[run] for rows in self.frames),
                self.intervention[run],
                self.label if run is runs[-1] else "",
            )
            for run in runs
            if run.stop - run.start >= _SHORTEST
        ]


class Resampler:
    """Makes the episodes of one bag.

    ``names`` contains the names of the numbers in the state and in the action; ``notes`` counts what was left
    out, ``remarks`` says what was decided between two readings; ``recorded`` contains the images. ``clock`` is the
    option, and may become ``frames`` later.
    Raises VlaRosError if the bag has no camera, joint states or commands, or if a part needs something that the
    robot does not have.
    """

    def __init__(self, bag: Bag, config: Config, options: ExportOptions) -> None:
        selection = topics_of(bag, config, {**options.topics, "truth": "none"})
        self._path, self._options, self.clock = bag.path, options, options.clock
        self._config = config = fit(config, selection)
        arms = make_arms(config)
        state = parse_components(options.state) if options.state else _everything(arms)
        named = options.action or " + ".join(config.features.action)
        action = parse_components(named, action=True) if named else _everything(arms)
        feature = StateFeature("observation.state", state)
        self._state = bind_state(feature, arms, dict(selection.state))
        self._action = ActionWriter(action, arms, config.control)
        self.names = names_of(state, arms), names_of(action, arms)
        self.recorded = RecordedJoints(bag, selection, config, arms, stamped=options.clock == "stamp")
        self.notes = Counter(self.recorded.notes)
        self.remarks = dict.fromkeys(self.recorded.recording.remarks)
        self._shown = self._unshown = 0  # images of the first camera, at its own rate

    def rate(self) -> int:
        """Return the ticks per second; raises ExportError if the first camera's rate is uncertain."""
        if self._options.fps:
            return self._options.fps
        advice = f"name the rate with --fps{self._other_clock}"
        rate, remark = self.recorded.cameras[0].rate(self._options.gap, advice)
        self.remarks |= {remark: None} if remark else {}
        return max(1, round(rate))

    @property
    def _other_clock(self) -> str:
        return "" if self._options.clock == "stamp" else "; --clock stamp uses the images' own times"

    def ticks(self, rate: int) -> int:
        """Return an upper bound of the number of ticks in all episodes."""
        times = self.recorded.times[0]
        waits = np.diff(times)
        seconds = float(waits[waits <= self._options.gap * 1e9].sum()) / 1e9
        return len(times) if self.clock == "frames" else int(seconds * rate) + 1

    def image_sizes(self) -> dict[str, tuple[int, int]]:
        """Map each camera key to the (height, width) of its images."""
        return {key: one.size for key, one in zip(self._config.camera.keys, self.recorded.cameras, strict=True)}

    @property
    def depths(self) -> tuple[str, ...]:
        """Keys of the cameras that measure depth."""
        cameras = zip(self._config.camera.keys, self.recorded.cameras, strict=True)
        return tuple(key for key, one in cameras if one.is_depth)

    def episodes(self, rate: float) -> Iterator[ResampledEpisode]:
        """Yield the episodes at ``rate`` ticks per second in order of time."""
        yield from self._episodes(rate)
        if not self._options.fps and self._unshown > _UNSHOWN * (self._shown + self._unshown):
            found = f"{self.recorded.cameras[0].topic}: {self._unshown} images are in no frame of the data set"
            cause = f"they came in bursts or with a recorder's coarse clock{self._other_clock}"
            self.remarks[f"{found}: {cause}"] = None

    def _episodes(self, rate: float) -> Iterator[ResampledEpisode]:
        for begin, end, label in self._segments():
            edges = self._edges(begin, end, int(1_000_000_000 / rate))
            ticks = edges[:-1]
            modes = self._modes(ticks)
            ticks, following, modes = (one[modes != PAUSED] for one in (ticks, edges[1:], modes))
            frames = [self._newest_images(times, ticks) for times in self.recorded.times]
            seen = np.all([one >= 0 for one in frames], axis=0)
            if len(shown := np.unique(frames[0][seen])):
                self._shown += len(shown)
                self._unshown += int(shown[-1] - shown[0]) + 1 - len(shown)
            rows = list(self._rows(ticks, following, seen, 1 / rate))
            self.notes["ticks with a stale or missing image"] += int((~seen).sum())
            task = self._task(begin)
            runs = _runs(seen & np.array([row is not None for row in rows], bool))
            for run in runs:
                if run.stop - run.start < _SHORTEST:
                    self.notes["episodes of a single tick"] += 1
                    continue
                kept = [row for row in rows[run] if row is not None]
                state, action = (np.stack(column) for column in zip(*kept, strict=True))
                images = tuple(one[run] for one in frames)
                ended = label if run is runs[-1] else ""
                yield ResampledEpisode(ticks[run], task, state, action, images, modes[run] == CORRECTING, ended)

    def _edges(self, begin: int, end: int, period: int) -> IntArray:
        """Return the ticks from ``begin`` to ``end``, and the end of the last tick."""
        if self.clock != "frames":
            return begin + np.arange((end - begin) // period + 2) * period
        times = self.recorded.times[0]
        return times[(times >= begin) & (times <= end + 1)]  # an image at the very end closes the last tick

    def _segments(self) -> list[tuple[int, int, str]]:
        """Return the start and end of each segment, and the label if it ends with its episode.

        Segments are separated by pauses of the first camera and by new instructions, and limited to the times that
        the option ``episodes`` keeps.
        """
        times = self.recorded.times[0]
        cuts = set((np.flatnonzero(np.diff(times) > self._options.gap * 1e9) + 1).tolist())
        if not self._options.instruction:
            cuts |= {int(np.searchsorted(times, time)) for time, _ in self.recorded.recording.instructions[1:]}
        edges = sorted({0, len(times), *cuts})
        whole = [(int(times[a]), int(times[b - 1])) for a, b in pairwise(edges) if b > a]
        found: list[tuple[int, int, str]] = []
        for one in self._marked():
            inside = [(max(a, one.begin), min(b, one.end)) for a, b in whole]
            inside = [(begin, end) for begin, end in inside if begin < end]
            found += [(*span, one.label if span == inside[-1] else "") for span in inside]
        return sorted(found)

    def _marked(self) -> list[Interval]:
        """Return the times that the option ``episodes`` keeps, with their labels."""
        recorded, kind = self.recorded, self._options.episodes
        if kind == "bag" or (kind in ("auto", "taught") and not recorded.events):
            times = recorded.times[0]
            return [Interval(int(times[0]), int(times[-1]), "")]
        if kind in ("auto", "events", "corrections", "taught"):
            return recorded.intervals(kind, self.notes, failures=self._options.failures)
        return [Interval(begin, end, "") for begin, end in recorded.marked(kind)]

    def _modes(self, ticks: IntArray) -> NDArray[np.str_]:
        """Return who moves the arm at each tick: one of the node's modes; autonomous if nothing was recorded."""
        events = self.recorded.events
        if self._options.episodes == "bag" or not events:
            return np.full(len(ticks), "autonomous")
        rows = np.searchsorted([event.time for event in events], ticks, side="right") - 1
        return np.array([event.mode for event in events])[np.maximum(rows, 0)]

    def _newest_images(self, times: IntArray, ticks: IntArray) -> IntArray:
        """Return the index of the newest image at each tick; -1 if it is older than ``timeouts.camera``."""
        rows = np.searchsorted(times, ticks, side="right") - 1
        age = ticks - times[np.maximum(rows, 0)]
        return np.where((rows >= 0) & (age <= self._config.timeouts.camera * 1e9), rows, -1)

    def _rows(
        self, ticks: IntArray, following: IntArray, seen: NDArray[np.bool_], seconds: float
    ) -> Iterator[tuple[FloatArray, FloatArray] | None]:
        """Yield the state and action of each tick, which lasts until ``following``; a gap ends what was begun."""
        whole, before = False, 0
        for tick, end, visible in zip(ticks.tolist(), following.tolist(), seen, strict=True):
            if not whole or tick != before:
                self._state.begin_task()
                self._action.begin_task()
            row = self._row(tick, end, seconds)
            whole, before = bool(visible) and row is not None, end
            yield row

    def _row(self, tick: int, following: int, seconds: float) -> tuple[FloatArray, FloatArray] | None:
        recorded = self.recorded
        now = recorded.joints.newest(tick)
        if now is None or recorded.joints.age(tick) > self._config.timeouts.joint_state * 1e9:
            self.notes["ticks with a stale or missing joint state"] += 1
            return None
        try:
            state = self._state.read(Measured(now, recorded.recording.inputs(tick, "").state), now.stamp, 0.0)
        except StateError as error:
            self.notes[str(error)] += 1
            return None
        goal = self._goal(following - 1)
        if goal is None:
            self.notes["ticks before the first command"] += 1
            return None
        start = self._goal(tick - 1) if self._config.control.delta_from == "commanded" else now
        action = self._action.write(start or now, goal, seconds)
        if not np.isfinite(action).all():
            names = ", ".join(name for name, value in zip(self.names[1], action, strict=True) if np.isnan(value))
            self.notes[f"ticks without {names}"] += 1
            return None
        return state, action

    def _goal(self, time: int) -> JointState | None:
        """Return the commanded or measured position at ``time``, depending on the option ``goal``."""
        commands = self._options.goal == "commands"
        return self.recorded.commanded(time) if commands else self.recorded.joints.newest(time)

    def _task(self, begin: int) -> str:
        configured = self._config.policy.instruction
        recorded = self.recorded.recording.instruction(begin)
        if configured and recorded not in ("", configured) and not self._options.instruction:
            self.remarks[series.other_instruction(configured, repr(recorded))] = None
        if task := self._options.instruction or recorded or configured:
            return task
        advice = "name its topic with --topics instruction=/topic, or give the text with --instruction"
        raise ExportError(f"{self._path}: no instruction was recorded; {advice}")


def _everything(arms: Mapping[str, Arm]) -> tuple[Component, ...]:
    """Return the joint positions of every arm, and the gripper of arms with fingers."""
    parts = []
    for name, arm in arms.items():
        parts.append(Component(name, "joint_position", "rad"))
        if arm.fingers:
            parts.append(Component(name, "gripper", "0..1"))
    return tuple(parts)


def _runs(usable: NDArray[np.bool_]) -> list[slice]:
    """Return the longest slices in which every tick is usable."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], usable, [False])).astype(int)))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def names_of(parts: Sequence[Component], arms: Mapping[str, Arm]) -> tuple[str, ...]:
    """Return names in LeRobot's style: ``elbow.pos``, or ``left_elbow.pos`` with several arms."""
    several = len(arms) > 1
    found: list[str] = []
    for part in parts:
        arm = arms.get(part.arm)
        size = part.size(len(arm.joints), len(arm.fingers)) if arm else part.count
        if arm and part.quantity == "gripper":
            names = ["gripper.pos"]
        elif arm and part.quantity.startswith(("joint_", "fingers")):
            joints = arm.fingers if part.quantity == "fingers" else part.joints or arm.joints
            names = [f"{joint}.{_SUFFIXES.get(part.quantity, 'pos')}" for joint in joints]
        else:
            names = [f"{part.form if part.quantity == TOPIC else part.quantity}.{index}" for index in range(size)]
        found += [f"{part.arm}_{name}" if several and part.arm else name for name in names]
    return tuple(found)
