"""The order in which an arm is commissioned: stand, arm, each joint, silence, the gripper.

It runs on the thread that spins, a little every 20 ms, as a generator: each ``yield`` waits for the next tick. It
proposes motions to the node and nothing else: limits, collisions and watchdogs are the node's.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from vla_ros.config import ArmConfig, CameraConfig, Config
from vla_ros.control.clock import Clock
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import State
from vla_ros.errors import VlaRosError
from vla_ros.node.policy_node import PolicyNode
from vla_ros.types import FloatArray
from vla_ros_lab.commission.answers import Person
from vla_ros_lab.commission.measure import JointResponse, Rhythm, Track, measure_motion, middle
from vla_ros_lab.commission.motion import TICK, Heard, MovedJoint, ScriptedSource, grips, joints_of

STANDS, SETTLES, RESTS, SILENT = 3.0, 1.5, 1.2, 2.0
"""Seconds: hear the arm stand; let it sag after the first command; rest after a ramp; send nothing."""
_STILL, _GIVES = 0.03, 0.15  # rad: that a joint may be from where it should be; that it may sag or trail
_CREEP = 0.25  # share of the speed at which the node falls silent
_WAIT = 10.0  # s for the first joint state, and for the node to be armed
_NODE_ENDS = 0.9  # s; shortly after that, the node itself ends a velocity
_DEGREES = 180 / math.pi
_BUSY = {Reason.SUSPENDED, Reason.JOINT_STATE_STALE}  # reasons to hold of a machine that is too slow

Script = Generator[None, None, None]


class SurpriseError(VlaRosError):
    """Something moved as nobody commanded it, or nothing moved: everything ends."""


class HeldError(SurpriseError):
    """The node held the arm for a reason of this machine, and will go on."""


@dataclass(frozen=True)
class Grip:
    """A gripper that was closed and opened; positions of its measured joint, rad or m."""

    closed: float
    opened: float
    speed: float  # in the middle of its way, rad/s or m/s
    obeys: bool  # False if a person saw it open when it was told to close, or close


@dataclass
class Found:
    """What was found so far, by topic, joint or arm."""

    states: dict[str, Rhythm] = field(default_factory=dict)
    cameras: dict[str, Rhythm] = field(default_factory=dict)
    motions: dict[MovedJoint, tuple[Track, Track, tuple[float, float]]] = field(default_factory=dict)
    drifts: dict[MovedJoint, float] = field(default_factory=dict)  # rad or m while the node was silent
    coasts: dict[str, float] = field(default_factory=dict)  # s that an arm moved on after a last velocity
    grips: dict[str, Grip] = field(default_factory=dict)
    fingers: dict[str, Track] = field(default_factory=dict)
    surprise: str = ""

    @cached_property
    def responses(self) -> dict[MovedJoint, JointResponse]:
        """How each joint followed; takes too long for the thread that spins."""
        return {joint: measure_motion(*motion, RESTS) for joint, motion in self.motions.items()}

    @property
    def ends_after(self) -> dict[str, float]:
        """When each arm's driver ends a velocity by itself, s; infinite if it does not."""
        late = {
            arm: max(one.delay for each, one in self.responses.items() if each.arm == arm) for arm in self.coasts
        }
        found = {arm: coast - late[arm] for arm, coast in self.coasts.items()}
        return {arm: after if after < _NODE_ENDS else math.inf for arm, after in found.items()}


def _nowhere(now: float) -> float:
    return 0.0


class Commissioning:
    """Commissions the arms of the node that :meth:`ends` gets, with :attr:`source` as its source.

    Attributes:
        found: What was measured.
        ended: There is nothing left to do; ``complete`` if all was done.
    """

    def __init__(self, config: Config, cameras: CameraConfig, person: Person, speed: float, way: float) -> None:
        clock = Clock()
        self.source, self._heard = ScriptedSource(config, clock, self._motion), Heard(config, cameras, clock)
        self._config, self._person, self._speed, self._way = config, person, speed, way
        self._joints, self._time, self.found = joints_of(config), clock.steady, Found()
        self.ended = self.complete = self._ticks = self._held = False
        self._moves: MovedJoint | None = None
        self._ramp = self._expected = _nowhere  # of the moving joint: what is added to its goal, and its way
        self._span = 0.0, 0.0  # smallest and largest way that it should have been at
        self._goal: dict[MovedJoint, float] = {}  # commanded positions, or zeros for velocities
        self._home: dict[MovedJoint, float] = {}  # measured before a motion
        self._opening: dict[str, float] = {}  # by arm, 0 to 1
        self._free = _GIVES  # rad, which the joints that are not to move may move: they sag at the first command
        self._steps = self._run()

    def ends(self, node: PolicyNode) -> Callable[[], bool]:
        """Take the node before it is configured; return what tells that everything has ended."""
        self._node = node
        self._heard.listen(node.wiring)
        node.wiring.timer(TICK, self._step)
        return lambda: self.ended

    def _step(self) -> None:
        """Go on with the script, and ask the source for its next action."""
        if self.ended or not self._node.is_active:
            return
        try:
            held = self._watch() if self._node.safety.state is not State.DISARMED else ""
            again, self._held = self._held, bool(held)
            if held and not again:
                self._steps.throw(HeldError(held))
            else:
                next(self._steps)
            if self._ticks:
                self._heard.tick()
        except StopIteration:
            self.ended = self.complete = True
        except SurpriseError as surprise:
            self.found.surprise, self.ended = str(surprise), True
            self._node.stop(str(surprise))

    # The order

    def _run(self) -> Script:
        yield from self._stand()
        yield from self._patiently(self._arm)
        for arm in self._config.arms:
            joints = [joint for joint in self._joints if joint.arm == arm.name]
            for joint in joints:
                yield from self._patiently(self._joint, joint, arm.limits.joint_margin)
            silent = (self._coast, joints[-1]) if joints[-1].by_velocity else (self._silence, joints)
            yield from self._patiently(*silent)
            if grips(arm):
                yield from self._patiently(self._grip, arm)
        self._node.enable(False)

    def _patiently(self, part: Callable[..., Script], *arguments: Any) -> Script:
        """Run a part of the script; begin it anew, four times at most, if this machine was too busy meanwhile."""
        for left in range(4, -1, -1):
            try:
                yield from part(*arguments)
                return
            except HeldError as held:
                if not left:
                    raise
                print(f"Again, because {held}")
            self._rest()
            self._home = {}
            yield from self._sleep(_WAIT, lambda: self._node.safety.state is State.ARMED)
            self._begin_here()
            yield from self._sleep(SETTLES)

    def _stand(self) -> Script:
        """Hear the standing arm: where it is, and when messages come."""
        print(f"Listening for {STANDS:g} s; nothing moves.")
        yield from self._sleep(_WAIT, lambda: not self._unheard())
        if lacking := self._unheard():
            raise SurpriseError(f"no joint state has {', '.join(lacking)} within {_WAIT:g} s (robot.joint_names)")
        since = self._time()
        yield from self._sleep(STANDS)
        topics = {arm.joint_states for arm in self._config.arms}
        rhythms = {topic: self._heard.rhythm(topic, since) for topic in self._heard.times}
        self.found.states = {topic: each for topic, each in rhythms.items() if topic in topics}
        self.found.cameras = {topic: each for topic, each in rhythms.items() if topic not in topics}
        print("The driver says that the joints are at")
        outside = list[str]()
        for joint in self._joints:
            at = self._heard.now(joint.key)
            print(f"  {joint!s:24} {at:8.3f} " + ("m" if joint.slides else f"rad = {at * _DEGREES:7.1f} degrees"))
            if not joint.low - 0.1 <= at <= joint.high + 0.1:
                fits = joint.low - 0.1 <= at / _DEGREES <= joint.high + 0.1 and not joint.slides
                hint = f"; in degrees it would be {at / _DEGREES:.3f} rad, which is inside" if fits else ""
                outside.append(f"{joint} is at {at:.3f}, the URDF allows {joint.low:.3f} to {joint.high:.3f}{hint}")
        if outside:
            raise SurpriseError("the joint states do not fit the URDF: " + "; ".join(outside))
        question = "Is each joint there, by the scale on the arm or its pendant?"
        yield from self._confirm(question, "a joint is not where the driver says")
        ready = (
            "The arm will move now. Is the emergency stop in a person's hand, and nothing within 30 cm of the arm?"
        )
        yield from self._confirm(f"{ready} Enter stops at any time.", "not ready")

    def _unheard(self) -> list[str]:
        return [str(joint) for joint in self._joints if math.isnan(self._heard.now(joint.key))]

    def _arm(self) -> Script:
        self._opening = {arm.name: self._openness(arm) for arm in self._config.arms}
        self._begin_here()
        self._ticks, until = True, self._time() + _WAIT
        yield from self._sleep(0.5)
        while self._node.safety.state is not State.ARMED:
            why = self._node.enable(True)[1]
            if self._time() > until:
                raise SurpriseError(f"the node cannot be armed: {why}")
            yield from self._sleep(0.2)
        yield from self._sleep(SETTLES)

    def _joint(self, joint: MovedJoint, margin: float) -> Script:
        """Move one joint out and back, and record how it follows."""
        way, speed = self._way * joint.scale, self._speed * joint.scale
        at = self._heard.now(joint.key)
        room = {1.0: joint.high - margin - 0.02 - at, -1.0: at - joint.low - margin - 0.02}
        sign = max(room, key=lambda side: min(room[side], way))
        way = min(way, room[sign])
        if way < self._way * joint.scale / 3:
            raise SurpriseError(
                f"{joint} has no room: it is at {at:.3f}, its limits are {joint.low:.3f} to {joint.high:.3f}"
            )
        unit = f"{way * 1000:.0f} mm" if joint.slides else f"{way * _DEGREES:.0f} degrees"
        print(f"{joint}: {'+' if sign > 0 else '-'}{unit} along its axis ({joint.axis}) and back.")
        self._free = _STILL
        self._remember()
        since = self._time()
        began, takes = since + 0.3, way / speed
        back, end = began + takes + RESTS, began + 2 * takes + RESTS

        def offset(now: float) -> float:
            return sign * speed * float(np.clip(min(now - began, takes, end - now), 0.0, takes))

        def velocity(now: float) -> float:
            return sign * speed * (float(began <= now < began + takes) - float(back <= now < end))

        self._moves, self._ramp, self._expected = joint, velocity if joint.by_velocity else offset, offset
        yield from self._sleep(end + RESTS - since)
        self._rest()
        commanded, measured = self._heard.commanded(joint, since), self._heard.measured(joint.key, since)
        if joint.by_velocity:
            commanded = replace(commanded, position=commanded.position + measured.position[0])
        if np.ptp(commanded.position) < 0.7 * way:
            raise SurpriseError(f"{joint}: limits.* or collision.check did not let it move by {way:.3f}")
        if np.ptp(measured.position) < way / 5:
            raise SurpriseError(f"{joint} did not move when commanded: is its brake on, its driver not active?")
        self.found.motions[joint] = commanded, measured, (began + takes, end)
        side, how = ("positive" if sign > 0 else "negative"), ("slide" if joint.slides else "turn")
        question = f"Did {joint} {how}, first in the {side} direction of its axis?"
        yield from self._confirm(question, f"{joint} is another joint or sign")

    def _silence(self, joints: list[MovedJoint]) -> Script:
        """Send nothing, and see whether the driver holds."""
        print(f"Silent for {SILENT:g} s: does the driver hold?")
        self._ticks, since = False, self._time()
        yield from self._sleep(SILENT)
        self._ticks = True
        for joint in joints:
            self.found.drifts[joint] = float(np.ptp(self._heard.measured(joint.key, since).position))

    def _coast(self, joint: MovedJoint) -> Script:
        """Send a slow velocity once, and see when the driver ends it; the node ends it after a second."""
        print(f"One slow velocity for {joint}, then silence: does the driver end it?")
        before, speed, began = self._node.config, _CREEP * self._speed * joint.scale, self._time()
        self._node.reconfigure(replace(before, timeouts=replace(before.timeouts, velocity=1.0)))
        self._remember()
        self._moves, self._ramp = joint, lambda now: speed
        self._expected = lambda now: speed * min(now - began, 1.4)
        yield from self._sleep(0.3)
        self._ticks = False
        yield from self._sleep(0.1)
        last = self._heard.commands[joint.key][-1][0]
        yield from self._sleep(SILENT)
        moved = self._heard.measured(joint.key, last - 0.3)
        going = moved.time[np.gradient(moved.position, moved.time) > speed / 2]
        self.found.coasts[joint.arm] = float(going[-1]) - last if len(going) else 0.0
        self._rest()
        self._remember()
        self._node.reconfigure(before)

    def _grip(self, arm: ArmConfig) -> Script:
        """Close and open the gripper; it ends as it was, at the nearer end."""
        key = arm.name, self._finger(arm)[0]
        if math.isnan(self._heard.now(key)):
            print(f"{key[1]} is in no joint state, so the gripper is not measured (gripper.measured_by).")
            return
        nearer, ends, obeys = round(self._opening[arm.name]), dict[int, float](), True
        for opening in (1 - nearer, nearer):
            print(f"The gripper {'opens' if opening else 'closes'}.")
            self._opening[arm.name], since = float(opening), self._time()
            yield from self._sleep(0.5)
            yield from self._sleep(
                5.0, lambda: bool(np.ptp(self._heard.measured(key, self._time() - 0.4).position) < 2e-3)
            )
            track = self.found.fingers[arm.name] = self._heard.measured(key, since)
            ends[opening] = self._heard.now(key)
            obeys &= yield from self._person.ask(f"Is the gripper {'open' if opening else 'closed'} now?")
        self.found.grips[arm.name] = Grip(ends[0], ends[1], abs(middle(track)[0]), obeys)

    # What may happen meanwhile

    def _watch(self) -> str:
        """Raise SurpriseError if a person or the node ends the motion, or a joint is where it should not be.

        Returns why the node holds the arm if the reason is this machine's.
        """
        if self._moves is not None and self._person.pressed():
            raise SurpriseError("a person pressed Enter")
        status = self._node.safety.status
        if status.state in (State.HOLDING, State.STOPPED):
            told = f"the node held the arm: {self._node.safety.explain()}"
            if status.state is State.HOLDING and status.holds.keys() <= _BUSY:
                return told
            raise SurpriseError(told)
        ahead = self._expected(self._time())
        self._span = min(self._span[0], ahead), max(self._span[1], ahead)
        for joint, home in self._home.items():
            moved, still = self._heard.now(joint.key) - home, _STILL * joint.scale
            said = f"{joint} moved by {moved:+.3f}"
            if joint is not self._moves:
                if abs(moved) > self._free * joint.scale:
                    raise SurpriseError(f"{said}, {self._meanwhile}")
            elif not self._span[0] - still <= moved <= self._span[1] + still:
                times = (
                    f"too far, {abs(moved / ahead) if ahead else math.inf:.0f} times; is one of the two in degrees?"
                )
                wrong = "the wrong way; commands and joint states have different signs"
                how = wrong if moved * sum(self._span) < 0 else times
                raise SurpriseError(f"{said} when commanded by {ahead:+.3f}: {how}")
            elif abs(moved - ahead) > _GIVES * joint.scale:
                why = "is something in its way, its brake on, or another joint's command its own?"
                raise SurpriseError(f"{said} when commanded by {ahead:+.3f}: it does not follow; {why}")
        return ""

    @property
    def _meanwhile(self) -> str:
        if not self._ticks:
            return "though no command came: its driver does not hold it"
        when = f"while {self._moves} was commanded to" if self._moves else "though it was told to stay where it was"
        return f"{when}; is robot.joint_names in the controller's order, do both have the same unit?"

    # Helpers

    def _motion(self, now: float) -> FloatArray:
        """Return what all arms are commanded at a time."""
        numbers = list[float]()
        for arm in self._config.arms:
            for joint in (each for each in self._joints if each.arm == arm.name):
                numbers.append(self._goal[joint] + (self._ramp(now) if joint is self._moves else 0.0))
            if grips(arm):
                closed, opened = arm.gripper.closed_value, arm.gripper.open_value
                numbers.append(closed + self._opening[arm.name] * (opened - closed))
        return np.array(numbers)

    def _begin_here(self) -> None:
        """Begin the next motion where the arms are measured, as the node does after an arming and a hold."""
        self._remember()
        self._goal = {joint: 0.0 if joint.by_velocity else at for joint, at in self._home.items()}
        self._free = _GIVES

    def _remember(self) -> None:
        self._home, self._span = {joint: self._heard.now(joint.key) for joint in self._joints}, (0.0, 0.0)

    def _rest(self) -> None:
        self._moves, self._ramp, self._expected, self._ticks = None, _nowhere, _nowhere, True

    def _finger(self, arm: ArmConfig) -> tuple[str, float, float]:
        """Return the joint that shows an arm's opening, and its positions when closed and open."""
        gripper, gauge = arm.gripper, arm.gripper.gauge
        if gauge:
            return gauge.joint, gauge.closed, gauge.open
        return arm.robot.gripper_joint_names[0], gripper.closed_position, gripper.open_position

    def _openness(self, arm: ArmConfig) -> float:
        """Return how far the gripper is open, 0 to 1; 1 where that is not measured."""
        if not grips(arm):
            return 0.0
        name, closed, opened = self._finger(arm)
        share = (self._heard.now((arm.name, name)) - closed) / (opened - closed)
        return 1.0 if math.isnan(share) else float(np.clip(share, 0.0, 1.0))

    def _sleep(self, seconds: float, ready: Callable[[], bool] = lambda: False) -> Script:
        """Wait for some time, or until ``ready()``."""
        until = self._time() + seconds
        while not ready() and self._time() < until:
            yield

    def _confirm(self, question: str, otherwise: str) -> Script:
        """Ask a person; raise SurpriseError unless the answer is yes."""
        if not (yield from self._person.ask(question)):
            raise SurpriseError(f"a person says: {otherwise}")
