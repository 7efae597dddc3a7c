"""The order in which an arm is commissioned: stand, arm, each joint, the gripper, silence.

It goes on every TICK, as a generator: each ``yield`` waits for the next tick. It proposes motions to the node and
nothing else: limits, collisions and watchdogs are the node's.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from vla_ros.config import Config
from vla_ros.control.clock import Clock
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import Safety, State
from vla_ros.errors import VlaRosError
from vla_ros.types import FloatArray
from vla_ros.vision.messages import encode_image
from vla_ros_lab.commission.measure import TICK, Rhythm, Track, rhythm
from vla_ros_lab.commission.motion import KEY, NODE_ENDS, Heard, MovedAxis, ScriptedSource, axes_of

STANDS, SETTLES, RESTS, GRIPS, SILENT = 3.0, 1.5, 1.2, 3.0, 2.0
"""Seconds: hear the arm stand; let it sag at first; rest after a ramp; move a gripper; send nothing."""
STILL, GIVES = 0.03, 0.15  # rad: that a joint may be from where it should be; that it may sag or trail
_CREEP = 0.25  # share of the speed at which the node falls silent
_WAIT = 10.0  # s for the first joint state, and for the node to be armed
_DEGREES = 180 / math.pi
_BLACK = np.zeros((1, 1, 3), np.uint8)

Script = Generator[None, None, None]


def _nowhere(now: float) -> float:
    return 0.0


class Surprise(VlaRosError):  # noqa: N818 (what it is called everywhere)
    """Something moved as nobody commanded it, or nothing moved: everything ends."""


class AxisMotion(NamedTuple):
    """A motion out and back, whose ways ended at the times ``ends``."""

    commanded: Track
    measured: Track
    ends: tuple[float, float]
    rests: float  # s after each of them
    confirmed: bool  # by a person


class Commissioning:
    """Commissions an arm. A rig assigns the node's ``safety``, ``arm`` and ``configure``, and steps every tick.

    ``typed`` returns the line that a person has typed since the last call, "" if none; None: every answer is yes.

    Attributes:
        rhythms: Of each topic.
        motions: Of each axis.
        drifts: How far each axis moved while nothing was sent.
        coasts: How long an axis moved on after its last velocity, s.
        surprise: What ended everything.
        ended: There is nothing left to do.
    """

    safety: Safety
    arm: Callable[[], Any]
    configure: Callable[[Config], Any]

    def __init__(
        self, config: Config, clock: Clock, typed: Callable[[], str] | None, speed: float, way: float
    ) -> None:
        self._joints, self.axes, tips = axes_of(config)
        self.source, self.heard = ScriptedSource(self.axes, clock, self._numbers), Heard(clock, tips)
        self._config, self._clock, self._typed, self._speed, self._way = config, clock, typed, speed, way
        self.rhythms, self.motions = dict[str, Rhythm](), dict[MovedAxis, AxisMotion]()
        self.drifts, self.coasts = dict[MovedAxis, float](), dict[MovedAxis, float]()
        self.surprise, self.ended, self._ticks, self._script = "", False, False, self._run()
        self._home = dict[MovedAxis, float]()  # commanded positions; the opening of a gripper, 0 to 1
        self._seen = dict[MovedAxis, float]()  # measured before a motion
        self._way_of: tuple[MovedAxis | None, Callable[[float], float]] = None, _nowhere  # what moves, and its way
        self._span, self._free = (0.0, 0.0), GIVES  # ways on which it may be; which the others may move

    def step(self, tick: Callable[[bytes], Any]) -> None:
        """Go on with the script, and ask the source for its next action by an image."""
        try:
            next(self._script)
            if self._ticks:
                tick(encode_image(_BLACK, self._clock.ros(), KEY))
        except StopIteration:
            self.ended = True
        except Surprise as surprise:
            self.surprise, self.ended = str(surprise), True
            self.safety.stop(Reason.OPERATOR_STOP, self.surprise)

    def _run(self) -> Script:
        yield from self._stand()
        for axis in self.axes:
            at, width = self.heard.now(axis.key), axis.high - axis.low
            open_by_now = 1.0 if math.isnan(at) else float(np.clip((at - axis.low) / width, 0.0, 1.0))
            self._home[axis] = open_by_now if axis.grips else at
        self._ticks, until = True, self._clock.steady() + _WAIT
        yield from self._sleep(0.5)
        while self.safety.state is not State.ARMED:
            self.arm()
            if self._clock.steady() > until:
                raise Surprise(f"the node cannot be armed: {self.safety.explain()}")
            yield
        yield from self._sleep(SETTLES)
        for axis in self.axes:
            self._free = STILL
            if axis.grips and math.isnan(self.heard.now(axis.key)):
                print(f"{axis} is in no joint state, so the gripper is not measured (gripper.measured_by).")
            else:
                yield from self._move(axis)
        for arm in self._config.arms:
            yield from self._fall_silent([axis for axis in self.axes if axis.arm == arm.name])
        self.safety.disarm()

    def _fall_silent(self, axes: list[MovedAxis]) -> Script:
        """Send nothing, by velocity after a slow one: see how far the arm drifts, or when its driver ends it."""
        print(f"Silent for {SILENT:g} s: does the driver hold, and end a velocity?")
        creeping, began, speed = axes[0], self._clock.steady(), _CREEP * self._speed * axes[0].scale
        if creeping.by_velocity:
            self.configure(replace(self._config, timeouts=replace(self._config.timeouts, velocity=NODE_ENDS)))
            yield from self._follow(creeping, lambda now: speed * min(now - began, 2.0), 0.3)
        self._ticks = False
        yield from self._sleep(0.1)
        since = self.heard.last(creeping)
        yield from self._sleep(SILENT)
        self.configure(self._config)
        self._ticks, self._way_of = True, (None, _nowhere)
        for axis in axes:
            track = self.heard.measured(axis.key, since)
            self.drifts[axis] = float(np.ptp(track.position))
        if creeping.by_velocity:
            track = self.heard.measured(creeping.key, since - 0.3)
            going = track.time[np.gradient(track.position, track.time) > speed / 2]
            self.coasts[creeping] = float(going[-1]) - since if len(going) else 0.0

    def _stand(self) -> Script:
        """Hear the standing arm: where it is, and when messages come."""
        print(f"Listening for {STANDS:g} s; nothing moves.")
        yield from self._sleep(
            _WAIT, lambda: not any(math.isnan(self.heard.now(each.key)) for each in self._joints)
        )
        since, outside = self._clock.steady(), list[str]()
        yield from self._sleep(STANDS)
        for topic, rows in self.heard.times.items():
            self.rhythms[topic] = rhythm(*np.array([row for row in rows if row[0] >= since]).reshape(-1, 2).T)
        print("The driver says that the joints are at")
        for joint in self._joints:
            at, limits = self.heard.now(joint.key), f"the URDF allows {joint.low:.3f} to {joint.high:.3f}"
            unit = "m" if joint.slides else f"rad = {at * _DEGREES:7.1f} degrees"
            print(f"  {joint!s:24} {at:8.3f} {unit}")
            if math.isnan(at):
                raise Surprise(f"no joint state has {joint} within {_WAIT:g} s (robot.joint_names)")
            if not joint.low - 0.1 <= at <= joint.high + 0.1:
                fits = joint.low - 0.1 <= at / _DEGREES <= joint.high + 0.1
                hint = f"; in degrees it would be {at / _DEGREES:.3f} rad, which is inside" if fits else ""
                outside.append(f"{joint} is at {at:.3f}, {limits}{hint}")
        if outside:
            raise Surprise("the joint states do not fit the URDF: " + "; ".join(outside))
        if not (yield from self._ask("Is each joint there, by the scale on the arm or its pendant?")):
            raise Surprise("a person says: a joint is not where the driver says")
        ready = "The arm will move. Is the emergency stop in a person's hand, and nothing within 30 cm of the arm?"
        if not (yield from self._ask(f"{ready} Enter stops at any time.")):
            raise Surprise("a person says: not ready")

    def _move(self, axis: MovedAxis) -> Script:
        """Move one axis out and back, and keep how it follows."""
        if axis.grips:  # from its nearer end to the other and back, as fast as it goes
            self._home[axis] = nearer = round(self._home[axis])
            way, takes, rests, lead = 1.0 - 2 * nearer, TICK, GRIPS, GRIPS
            print(f"{axis}: the gripper {'closes and opens' if nearer else 'opens and closes'}.")
            question = f"Did it first {'close, then open' if nearer else 'open, then close'}?"
        else:
            way, rests, lead = self._room(axis), RESTS, 0.3
            takes, slides = abs(way) / (self._speed * axis.scale), axis.slides
            unit = f"{1000 * way:+.0f} mm" if slides else f"{way * _DEGREES:+.0f} degrees"
            print(f"{axis}: {unit} along its axis ({axis.axis}) and back.")
            side = "positive" if way > 0 else "negative"
            question = f"Did {axis} {'slide' if slides else 'turn'}, first in the {side} direction of its axis?"
        since = self._clock.steady()
        began, back = since + lead, since + lead + 2 * takes + rests

        def follows(now: float) -> float:
            return way * float(np.clip(min(now - began, back - now) / takes, 0.0, 1.0))

        yield from self._follow(axis, follows, back + rests - since)
        self._way_of, measured = (None, _nowhere), self.heard.measured(axis.key, since)
        if axis.grips:
            times, width = np.arange(since, back + rests, TICK), axis.high - axis.low
            places = [axis.low + width * (self._home[axis] + follows(now)) for now in times.tolist()]
            commanded = Track(times, np.array(places))
        else:
            commanded = self.heard.commanded(axis, since)
            if np.ptp(commanded.position) < 0.7 * abs(way):
                raise Surprise(f"{axis}: limits.* or collision.check did not let it move by {way:.3f}")
            if np.ptp(measured.position) < abs(way) / 5:
                raise Surprise(f"{axis} did not move when commanded: is its brake on, its driver not active?")
        confirmed = yield from self._ask(question)
        self.motions[axis] = AxisMotion(commanded, measured, (began + takes, back), rests, confirmed)
        if not confirmed and not axis.grips:
            raise Surprise(f"a person says: {axis} is another joint or sign")

    def _room(self, axis: MovedAxis) -> float:
        """Return how far an axis moves, to the side with more room."""
        margin = next(arm.limits.joint_margin for arm in self._config.arms if arm.name == axis.arm) + 0.02
        at, most = self.heard.now(axis.key), self._way * axis.scale
        room = {1.0: axis.high - margin - at, -1.0: at - axis.low - margin}
        sign = max(room, key=lambda side: min(room[side], most))
        if room[sign] < most / 3:
            raise Surprise(
                f"{axis} has no room: it is at {at:.3f}, its limits are {axis.low:.3f} to {axis.high:.3f}"
            )
        return sign * min(room[sign], most)

    def _follow(self, axis: MovedAxis, way: Callable[[float], float], seconds: float) -> Script:
        """Move an axis on a way that depends on the time."""
        self._seen = {each: self.heard.now(each.key) for each in self.axes}
        self._span, self._way_of = (0.0, 0.0), (axis, way)
        yield from self._sleep(seconds)

    def _watch(self) -> None:
        """Raise Surprise if a person or the node ends the motion, or something is where it should not be."""
        moving, way = self._way_of
        if moving and self._typed and self._typed():
            raise Surprise("a person pressed Enter")
        if self.safety.state in (State.HOLDING, State.STOPPED):
            raise Surprise(f"the node held the arm: {self.safety.explain()}")
        ahead = way(self._clock.steady())
        self._span = low, high = min(self._span[0], ahead), max(self._span[1], ahead)
        for axis in (each for each in self.axes if not each.grips):
            moved, still = self.heard.now(axis.key) - self._seen.get(axis, self._home[axis]), STILL * axis.scale
            said, hint = f"{axis} moved by {moved:+.3f}", ""
            if axis is not moving:
                if abs(moved) > self._free * axis.scale:
                    order = "is robot.joint_names in the controller's order, do both have the same unit?"
                    when = f"while {moving} was commanded to" if moving else "though it was told to stay"
                    hint = (
                        f"{when}; {order}" if self._ticks else "though no command came: its driver does not hold it"
                    )
            elif not low - still <= moved <= high + still:
                far = f"{abs(moved) / max(high, -low, 1e-9):.3g} times as far; is one of the two in degrees?"
                wrong = "the wrong way; commands and joint states have different signs"
                hint = f"when commanded by {ahead:+.3f}: {wrong if moved * (low + high) < 0 else far}"
            elif abs(moved - ahead) > GIVES * axis.scale:
                why = "is something in its way, its brake on, or another joint's command its own?"
                hint = f"when commanded by {ahead:+.3f}: it does not follow; {why}"
            if hint:
                raise Surprise(f"{said}, {hint}")

    def _numbers(self, now: float) -> FloatArray:
        """Return the number that each axis is commanded at a time, as :class:`ScriptedSource` proposes it."""
        (moving, way), numbers = self._way_of, list[float]()
        for axis in self.axes:
            ahead, then = (way(now), way(now + TICK)) if axis is moving else (0.0, 0.0)
            if axis.by_velocity:
                numbers.append((then - ahead) / (1.0 if axis.is_tip else TICK))
            elif axis.grips:
                closed, opened = axis.values
                numbers.append(closed + (self._home[axis] + ahead) * (opened - closed))
            else:
                numbers.append(self._home[axis] + ahead)
        return np.array(numbers)

    def _sleep(self, seconds: float, ready: Callable[[], bool] = lambda: False) -> Script:
        """Wait for some time, or until ``ready()``; raises Surprise as :meth:`_watch` does."""
        until = self._clock.steady() + seconds
        while not ready() and self._clock.steady() < until:
            yield
            if self.safety.state is not State.DISARMED:
                self._watch()

    def _ask(self, question: str) -> Generator[None, None, bool]:
        if self._typed:
            self._typed()  # what was typed before is no answer
        print(f"{question} [y/n] ", end="" if self._typed else "y\n", flush=True)
        if self._typed is None:
            return True
        while not (answer := self._typed()):
            yield from self._sleep(TICK)
        return answer.strip().lower() in ("y", "yes")
