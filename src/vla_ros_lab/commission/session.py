"""The order in which an arm is commissioned: stand, arm, each joint, silence, the gripper.

It runs on the thread that spins, a little every 20 ms, as a generator: each ``yield`` waits for the next tick. It
proposes motions to the node and nothing else: limits, collisions and watchdogs are the node's.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from vla_ros.config import ArmConfig, Config
from vla_ros.contract.state import Arm
from vla_ros.control.clock import Clock
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import State
from vla_ros.errors import VlaRosError
from vla_ros.node.policy_node import PolicyNode
from vla_ros.types import FloatArray
from vla_ros_lab.commission.measure import Response, Rhythm, Track, respond
from vla_ros_lab.commission.motion import TICK, Heard, ScriptedSource, by_velocity, grips

STANDS, SETTLES, RESTS, SILENT = 3.0, 1.5, 1.2, 2.0
"""Seconds: hear the arm stand; let it sag after the first command; rest after a ramp; send nothing."""
_SLIDES = 0.2  # m per rad: way and speed of a sliding joint, compared with one that turns
_STILL = 0.03  # rad or m (times _SLIDES) that a joint may be from where it should be, besides its noise
_GIVES = 0.15  # rad; the most that an arm may sag at its first command, or trail behind a command
_CREEP = 0.25  # share of the speed at which the node falls silent
_WAIT = 10.0  # s for the first joint state, and for the node to be armed
_DEGREES = 180 / math.pi
_BUSY = {Reason.SUSPENDED, Reason.JOINT_STATE_STALE, Reason.JOINT_STATE_INVALID}  # of a machine that did not run


def _nowhere(now: float) -> float:
    return 0.0


class SurpriseError(VlaRosError):
    """Something moved as nobody commanded it, or nothing moved: everything ends."""


class Motion(NamedTuple):
    """A joint's way out and back, and when each ramp ended."""

    commanded: Track
    measured: Track
    ends: tuple[float, float]


class HeldError(VlaRosError):
    """The node held the arm for a reason of this machine, and will go on."""


@dataclass(frozen=True)
class Grip:
    """A gripper that was closed and opened; positions of its measured joint, rad or m."""

    closed: float
    opened: float
    speed: float  # between a tenth and nine tenths of the way, rad/s or m/s
    obeys: bool  # False if a person saw it open when it was told to close, or close
    track: Track


@dataclass
class Measured:
    """What was found so far; arms and joints by name."""

    states: dict[str, Rhythm] = field(default_factory=dict)  # by topic
    cameras: dict[str, Rhythm] = field(default_factory=dict)  # by topic
    poses: dict[tuple[str, str], float] = field(default_factory=dict)  # where each joint stood before
    motions: dict[tuple[str, str], Motion] = field(default_factory=dict)
    drifts: dict[tuple[str, str], float] = field(default_factory=dict)  # rad or m while the node was silent
    coasts: dict[str, float] = field(default_factory=dict)  # s, by arm: how long it moved on after a last velocity
    grips: dict[str, Grip] = field(default_factory=dict)
    surprise: str = ""

    def responses(self) -> dict[tuple[str, str], Response]:
        """Return how each joint followed; takes too long for the thread that spins."""
        return {name: respond(*each, RESTS) for name, each in self.motions.items()}


class Session:
    """Commissions the arms of ``node``; :meth:`step` is due every 20 ms.

    ``ask`` shows a question and returns a function that returns None until there is an answer, then whether it was
    yes. ``pressed`` is True if a person wants to stop.
    """

    def __init__(
        self,
        config: Config,
        arms: Mapping[str, Arm],
        source: ScriptedSource,
        heard: Heard,
        clock: Clock,
        say: Callable[[str], None],
        ask: Callable[[str], Callable[[], bool | None]],
        pressed: Callable[[], bool],
        speed: float,
        way: float,
    ) -> None:
        self._config, self._arms, self._source, self._heard, self._clock = config, arms, source, heard, clock
        self._say, self._ask, self._pressed, self._speed, self._way = say, ask, pressed, speed, way
        self.found, self.ended, self.complete = Measured(), False, False
        self._node: PolicyNode | None = None
        self._moves: tuple[str, str] | None = None  # the joint that is to move
        self._goal: dict[str, FloatArray] = {}  # by arm: commanded positions [N], or zeros for velocities
        self._opening: dict[str, float] = {}  # by arm, 0 to 1
        self._home: dict[tuple[str, str], float] = {}  # measured before a motion
        self._ramp = self._expected = (
            _nowhere  # of the moving joint: added to its goal, and the way it should be at
        )
        self._span = 0.0, 0.0  # smallest and largest way that it should have been at
        self._free = _GIVES  # what the joints that are not to move may move, rad: an arm sags at its first command
        self._ticks = self._held = False
        self._steps: Generator[None, None, None] = self._run()

    def ends(self, node: PolicyNode) -> Callable[[], bool]:
        """Take the node before it is configured; return what tells that everything has ended."""
        self._node = node
        self._heard.listen(node.wiring)
        node.wiring.timer(TICK, self.step)
        return lambda: self.ended

    def step(self) -> None:
        """Go on with the script, and ask the source for its next action."""
        assert self._node is not None
        if self.ended or not self._node.is_active:
            return
        try:
            held = self._watch(self._node) if self._node.safety.state is not State.DISARMED else ""
            if held and not self._held:
                self._steps.throw(HeldError(held))
            else:
                next(self._steps)
            self._held = bool(held)
            if self._ticks:
                self._heard.tick()
        except StopIteration:
            self.ended = self.complete = True
        except (SurpriseError, HeldError) as surprise:
            self.found.surprise, self.ended = str(surprise), True
            self._node.stop(str(surprise))

    # The order

    def _run(self) -> Generator[None, None, None]:
        yield from self._stand()
        yield from self._arm()
        for arm in self._config.arms:
            for joint in self._joints(arm):
                yield from self._patiently(partial(self._joint, arm, joint))
            yield from self._patiently(partial(self._coast if by_velocity(arm) else self._silence, arm))
            if grips(arm):
                yield from self._patiently(partial(self._grip, arm))
        assert self._node is not None
        self._node.enable(False)

    def _patiently(self, part: Callable[[], Iterator[None]]) -> Iterator[None]:
        """Run a part of the script; begin it anew, twice at most, if this machine was too busy meanwhile."""
        assert self._node is not None
        for left in (2, 1, 0):
            try:
                yield from part()
                return
            except HeldError as held:
                if not left:
                    raise
                self._say(f"Again, because {held}")
                self._home = {}
            self._moves, self._ramp, self._expected, self._ticks = None, _nowhere, _nowhere, True
            yield from self._until(lambda: self._node.safety.state is State.ARMED, _WAIT)  # type: ignore[union-attr]
            self._begin_here()
            yield from self._sleep(SETTLES)

    def _begin_here(self) -> None:
        """Begin the next motion where the arms are measured, as the node does after a hold."""
        for arm in self._config.arms:
            at = np.array([self._heard.now(arm.name, joint) for joint in self._joints(arm)])
            self._goal[arm.name] = np.zeros(len(at)) if by_velocity(arm) else at
        self._free = _GIVES
        self._remember()

    def _stand(self) -> Iterator[None]:
        """Hear the standing arm: where it is, and when messages come."""
        joints = self._all()
        self._say(f"Listening for {STANDS:g} s; nothing moves.")
        yield from self._until(lambda: not any(math.isnan(self._heard.now(*each)) for each in joints), _WAIT)
        if lacking := [joint for arm, joint in joints if math.isnan(self._heard.now(arm, joint))]:
            raise SurpriseError(f"no joint state has {', '.join(lacking)} within {_WAIT:g} s (robot.joint_names)")
        since = self._clock.steady()
        yield from self._sleep(STANDS)
        topics = dict.fromkeys(arm.joint_states for arm in self._config.arms)
        self.found.states = {topic: self._heard.rhythm(topic, since) for topic in topics}
        self.found.cameras = {
            topic: self._heard.rhythm(topic, since) for topic in self._heard.times if topic not in topics
        }
        self.found.poses = {each: self._heard.measured(*each, since).mean for each in joints}
        self._check_units()
        lines = [
            f"  {joint:24} {at:8.3f} {unit} {f'= {at * _DEGREES:7.1f} degrees' if unit == 'rad' else ''}"
            for (arm, joint), at in self.found.poses.items()
            for unit in ("m" if self._slides(arm, joint) else "rad",)
        ]
        self._say("The driver says that the joints are at\n" + "\n".join(lines))
        yield from self._confirm(
            "Is each joint there, by the scale on the arm or its pendant?", "a joint is not there"
        )

    def _check_units(self) -> None:
        """Raise SurpriseError if a joint stands where the URDF does not let it be."""
        outside = []
        for (arm, joint), at in self.found.poses.items():
            low, high = self._limits(arm, joint)
            if not low - 0.1 <= at <= high + 0.1:
                fits = low - 0.1 <= at / _DEGREES <= high + 0.1 and not self._slides(arm, joint)
                hint = f"; in degrees it would be {at / _DEGREES:.3f} rad, which is inside" if fits else ""
                outside.append(f"{joint} is at {at:.3f}, the URDF allows {low:.3f} to {high:.3f}{hint}")
        if outside:
            raise SurpriseError("the joint states do not fit the URDF: " + "; ".join(outside))

    def _arm(self) -> Iterator[None]:
        assert self._node is not None
        yield from self._confirm(
            "The arm will move now. Is the emergency stop in a person's hand, and nothing within 30 cm of the arm? "
            "Enter stops at any time.",
            "not ready",
        )
        self._opening = {arm.name: self._openness(arm) if grips(arm) else 0.0 for arm in self._config.arms}
        self._begin_here()
        self._source.motion = self._motion
        self._ticks, began = True, self._clock.steady()
        yield from self._sleep(0.5)
        while self._node.safety.state is not State.ARMED:
            why = self._node.enable(True)[1]
            if self._clock.steady() - began > _WAIT:
                raise SurpriseError(f"the node cannot be armed: {why}")
            yield from self._sleep(0.2)
        yield from self._sleep(SETTLES)

    def _joint(self, arm: ArmConfig, joint: str) -> Iterator[None]:
        """Move one joint out and back, and measure how it follows."""
        slides = self._slides(arm.name, joint)
        way, speed = (each * (_SLIDES if slides else 1.0) for each in (self._way, self._speed))
        low, high = self._limits(arm.name, joint)
        at = self._heard.now(arm.name, joint)
        margin = arm.limits.joint_margin + 0.02
        room = {1.0: high - margin - at, -1.0: at - low - margin}
        sign = max(room, key=lambda side: (room[side] >= way, room[side]))
        if room[sign] < way / 3:
            raise SurpriseError(
                f"{joint} has no room to move: it is at {at:.3f}, its limits are {low:.3f} to {high:.3f}; move it "
                "to the middle of its workspace"
            )
        way = min(way, room[sign])
        kinematics = self._arms[arm.name].kinematics
        axis = kinematics.description.elements[joint].find("axis") if kinematics else None
        named = "1 0 0" if axis is None else axis.get("xyz", "1 0 0")
        unit = f"{way * 1000:.0f} mm" if slides else f"{way * _DEGREES:.0f} degrees"
        self._say(f"{joint}: {'+' if sign > 0 else '-'}{unit} along its axis ({named}) and back.")
        self._free = _STILL
        self._remember()
        self._moves = (arm.name, joint)
        began = self._clock.steady() + 0.3
        takes = way / speed
        back, end = began + takes + RESTS, began + 2 * takes + RESTS

        def offset(now: float) -> float:
            return sign * speed * float(np.clip(min(now - began, takes, end - now), 0.0, takes))

        def velocity(now: float) -> float:
            return sign * speed * (float(began <= now < began + takes) - float(back <= now < end))

        self._ramp, self._expected = velocity if by_velocity(arm) else offset, offset
        since = self._clock.steady()
        yield from self._until(lambda: self._clock.steady() >= end + RESTS, math.inf)
        self._moves, self._ramp, self._expected = None, _nowhere, _nowhere
        commanded, measured = (get(arm.name, joint, since) for get in (self._heard.commanded, self._heard.measured))
        if by_velocity(arm):
            commanded = replace(commanded, position=commanded.position + measured.position[0])
        reach = float(np.ptp(commanded.position))
        if reach < 0.7 * way:
            raise SurpriseError(
                f"{joint}: the node's limits let it move {reach:.3f} of {way:.3f} (limits.*, collision.check)"
            )
        if float(np.ptp(measured.position)) < way / 5:
            raise SurpriseError(
                f"{joint} did not move when it was commanded to: is its brake on, its driver active?"
            )
        self.found.motions[arm.name, joint] = Motion(commanded, measured, (began + takes, end))
        side, how = ("positive" if sign > 0 else "negative"), ("slide" if slides else "turn")
        yield from self._confirm(
            f"Did {joint} {how}, first in the {side} direction of its axis?", f"{joint} is another joint or sign"
        )

    def _silence(self, arm: ArmConfig) -> Iterator[None]:
        """Send nothing, and see whether the driver holds."""
        self._say(f"Silent for {SILENT:g} s: does the driver hold?")
        before = {joint: self._heard.now(arm.name, joint) for joint in self._joints(arm)}
        self._ticks, since = False, self._clock.steady()
        yield from self._sleep(SILENT)
        self._ticks = True
        for joint, at in before.items():
            moved = self._heard.measured(arm.name, joint, since).position - at
            self.found.drifts[arm.name, joint] = float(np.abs(moved).max())

    def _coast(self, arm: ArmConfig) -> Iterator[None]:
        """Send a slow velocity once, and see when the driver ends it; the node ends it after a second."""
        assert self._node is not None
        joint = self._joints(arm)[-1]
        self._say(f"One slow velocity for {joint}, then silence: does the driver end it?")
        before = self._node.config
        self._node.reconfigure(replace(before, timeouts=replace(before.timeouts, velocity=1.0)))
        speed = _CREEP * self._speed * (_SLIDES if self._slides(arm.name, joint) else 1.0)
        self._remember()
        began = self._clock.steady()
        self._moves, self._ramp = (arm.name, joint), lambda now: speed
        self._expected = lambda now: speed * min(now - began, 1.4)
        yield from self._sleep(0.3)
        self._ticks = False
        yield from self._sleep(0.1)
        last = self._heard.commands[arm.name, joint][-1][0]
        yield from self._sleep(SILENT)
        self._moves, self._ramp, self._expected, self._ticks = None, _nowhere, _nowhere, True
        self._remember()
        moved = self._heard.measured(arm.name, joint, last - 0.3)
        going = Track(moved.time, np.gradient(moved.position, moved.time)).position > speed / 2
        self.found.coasts[arm.name] = float(moved.time[going][-1]) - last if going.any() else 0.0
        self._node.reconfigure(before)

    def _grip(self, arm: ArmConfig) -> Iterator[None]:
        """Close and open the gripper; it ends as it was, at the nearer end."""
        gauge = arm.gripper.gauge
        finger = gauge.joint if gauge else arm.robot.gripper_joint_names[0]
        if math.isnan(self._heard.now(arm.name, finger)):
            self._say(f"{finger} is in no joint state, so the gripper is not measured (gripper.measured_by).")
            return
        nearer, ends, tracks, obeys = round(self._opening[arm.name]), dict[int, float](), list[Track](), True
        for opening in (1 - nearer, nearer):
            self._say(f"The gripper {'opens' if opening else 'closes'}.")
            self._opening[arm.name], since = float(opening), self._clock.steady()
            yield from self._sleep(0.5)
            yield from self._until(partial(self._rests, arm.name, finger), 5.0)
            tracks.append(self._heard.measured(arm.name, finger, since))
            ends[opening] = self._heard.now(arm.name, finger)
            obeys &= yield from self._asked(f"Is the gripper {'open' if opening else 'closed'} now?")
        track, start, end = tracks[1], ends[1 - nearer], ends[nearer]
        inner = np.abs(track.position - start) / max(abs(end - start), 1e-9)
        when = track.time[(inner > 0.1) & (inner < 0.9)]
        speed = 0.8 * abs(end - start) / max(float(np.ptp(when)), 1e-3) if len(when) > 1 else math.nan
        self.found.grips[arm.name] = Grip(ends[0], ends[1], speed, obeys, track)

    # What may happen meanwhile

    def _watch(self, node: PolicyNode) -> str:
        """Raise SurpriseError if a person or the node ends the motion, or a joint is where it should not be.

        Returns why the node holds the arm if the reason is this machine's.
        """
        if self._moves is not None and self._pressed():
            raise SurpriseError("a person pressed Enter")
        status = node.safety.status
        if status.state in (State.HOLDING, State.STOPPED):
            reasons = {**status.holds, **({status.stopped_by: status.detail} if status.stopped_by else {})}
            told = "; ".join(f"{reason.value}: {detail}" for reason, detail in reasons.items())
            if status.state is State.HOLDING and Reason.SUSPENDED in reasons and reasons.keys() <= _BUSY:
                return f"the node held the arm: {told}"
            if self._held and reasons.keys() <= _BUSY:
                return told
            raise SurpriseError(f"the node held the arm: {told}")
        now = self._clock.steady()
        ahead = self._expected(now)
        self._span = min(self._span[0], ahead), max(self._span[1], ahead)
        for (arm, joint), home in self._home.items():
            moved, scale = self._heard.now(arm, joint) - home, _SLIDES if self._slides(arm, joint) else 1.0
            if (arm, joint) != self._moves:
                if abs(moved) > self._free * scale:
                    raise SurpriseError(f"{joint} moved by {moved:+.3f}, {self._meanwhile}")
                continue
            if moved * (self._span[0] + self._span[1]) < 0 and abs(moved) > _STILL * scale:
                raise SurpriseError(
                    f"{joint} moved the wrong way: by {moved:+.3f} when commanded by {ahead:+.3f}; commands "
                    "and joint states have different signs"
                )
            if not self._span[0] - _STILL * scale <= moved <= self._span[1] + _STILL * scale:
                raise SurpriseError(
                    f"{joint} moved too far: by {moved:+.3f} when commanded by {ahead:+.3f}, "
                    f"{moved / ahead if ahead else math.inf:.0f} times; is one of the two in degrees?"
                )
            if abs(moved - ahead) > _GIVES * scale:
                raise SurpriseError(
                    f"{joint} does not follow: it moved by {moved:+.3f} when commanded by {ahead:+.3f}; is "
                    "something in its way, its brake on, or another joint's command its own?"
                )
        return ""

    @property
    def _meanwhile(self) -> str:
        if self._moves is not None:
            return f"while {self._moves[1]} was commanded to; is robot.joint_names in the controller's order?"
        if self._free > _STILL:
            return (
                "at its first command, which was where it was measured; is robot.joint_names in the controller's "
                "order, do commands and joint states have the same unit?"
            )
        return "without a command" if self._ticks else "though no command came: its driver does not hold it"

    # Helpers

    def _motion(self, now: float) -> FloatArray:
        """Return what all arms are commanded at a time."""
        numbers = list[FloatArray]()
        for arm in self._config.arms:
            row = self._goal[arm.name].copy()
            if self._moves is not None and self._moves[0] == arm.name:
                row[self._joints(arm).index(self._moves[1])] += self._ramp(now)
            numbers.append(row)
            if grips(arm):
                closed, opened = arm.gripper.closed_value, arm.gripper.open_value
                numbers.append(np.array([closed + self._opening[arm.name] * (opened - closed)]))
        return np.concatenate(numbers)

    def _joints(self, arm: ArmConfig) -> tuple[str, ...]:
        return self._arms[arm.name].joints

    def _all(self) -> list[tuple[str, str]]:
        return [(arm.name, joint) for arm in self._config.arms for joint in self._joints(arm)]

    def _slides(self, arm: str, joint: str) -> bool:
        kinematics = self._arms[arm].kinematics
        assert kinematics is not None
        return bool(kinematics.is_prismatic[kinematics.joint_names.index(joint)])

    def _limits(self, arm: str, joint: str) -> tuple[float, float]:
        kinematics = self._arms[arm].kinematics
        assert kinematics is not None
        index = kinematics.joint_names.index(joint)
        return float(kinematics.position_low[index]), float(kinematics.position_high[index])

    def _openness(self, arm: ArmConfig) -> float:
        """Return how far the gripper is open, 0 to 1; 1 where that is not measured."""
        gauge = arm.gripper.gauge
        finger = gauge.joint if gauge else arm.robot.gripper_joint_names[0]
        ends = (gauge.closed, gauge.open) if gauge else (arm.gripper.closed_position, arm.gripper.open_position)
        at = self._heard.now(arm.name, finger)
        return 1.0 if math.isnan(at) else float(np.clip((at - ends[0]) / (ends[1] - ends[0]), 0.0, 1.0))

    def _rests(self, arm: str, joint: str) -> bool:
        recent = self._heard.measured(arm, joint, self._clock.steady() - 0.4).position
        return len(recent) > 2 and float(np.ptp(recent)) < 2e-3

    def _remember(self) -> None:
        self._home, self._span = {each: self._heard.now(*each) for each in self._all()}, (0.0, 0.0)

    def _sleep(self, seconds: float) -> Iterator[None]:
        until = self._clock.steady() + seconds
        yield from self._until(lambda: self._clock.steady() >= until, math.inf)

    def _until(self, ready: Callable[[], bool], patience: float) -> Iterator[None]:
        end = self._clock.steady() + patience
        while not ready() and self._clock.steady() < end:
            yield

    def _confirm(self, question: str, otherwise: str) -> Iterator[None]:
        """Ask a person; raise SurpriseError unless the answer is yes."""
        if not (yield from self._asked(question)):
            raise SurpriseError(f"a person says: {otherwise}")

    def _asked(self, question: str) -> Generator[None, None, bool]:
        answer = self._ask(question)
        while (said := answer()) is None:
            yield
        return said
