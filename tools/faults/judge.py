"""Checks the invariants on the robot's records. Pure logic.

A motion has the stamp of a frame, and a hold has the stamp of a joint state; any other stamp is a violation. (A
``JointTrajectory`` whose frame is stamped ahead of the clock would have the time of sending; no row sends one.)
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from tools.faults.driver import ARM, FINGERS, TWIST
from tools.faults.handover import late_commands
from tools.faults.records import Record
from vla_ros.config import VELOCITY_OUTPUTS, Config
from vla_ros.kinematics.rotations import rotation_angle
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray

GRACE = 0.15
"""Seconds that a message may take between processes on a busy machine."""
_RECORDED = 0.05  # s; by which the robot may record a joint state before it sends it
_SAG = 0.02  # rad; a hold keeps its position while the measured arm is within this distance
_BELIEVABLE = 0.1  # rad; no command may be based on a joint measured further outside its limits
_ROUNDING = 1e-6
_CLOCKS = 1e6  # ns; rounding of what is computed from two clocks
_CORRECTED = 1.0  # s; a command that was being sent during a suspension must be corrected within this time


@dataclass(frozen=True)
class Violation:
    """A violated invariant."""

    name: str  # name of the invariant
    time: float  # seconds of the steady clock
    detail: str  # what was found and what is allowed


@dataclass(frozen=True)
class Permission:
    """Says that a person or a fault allows or forbids motion, starting at ``time``."""

    time: float  # seconds of the steady clock
    allowed: bool  # True if motion is allowed
    grace: float = GRACE  # seconds for which motions may still arrive after motion was forbidden
    why: str = ""  # why motion is forbidden
    armed: bool = False  # True if a person armed, so that no earlier frame may move the arm
    renewed: bool = False  # True if the task changed, so that after ``grace`` no earlier frame may move the arm


class Judge:
    """Checks the records of one arm.

    Args:
        config: The node's options.
        kinematics: The arm's kinematics.
        period: Duration of a step in seconds: ``1 / control.rate_hz``, or 1/30 s if that is 0.
        lag: Seconds by which the fault delays the robot's process.
        memory: Seconds for which the fault keeps the node from measuring, so that it holds an old measurement.
        busy: Seconds for which the node may have waited for a processor when a velocity had to end.
        steps: Steps of a chunk; the frame of step k is k periods older.
        simulated: The ROS clock may jump, so the age of a frame is measured on the steady clock.
        pieces: The fault damages single joints of joint states. A command may be based on positions from different
            joint states, and the tip is not checked.
        person: A person may take over. A person's motion has the stamp of no message, but the time of its step.
        suspensions: When the node was suspended and when it resumed, ascending. Every command that arrives
            afterwards must be based on a joint state that the robot sent afterwards.

    Attributes:
        interrupted: For each command that the middleware was sending when the node was suspended, by its source
            timestamp, seconds from its arrival to the hold that corrects it. No process can prevent such a command.
    """

    def __init__(
        self,
        config: Config,
        kinematics: Kinematics,
        period: float,
        *,
        lag: float = 0.0,
        memory: float = 0.0,
        busy: float = 0.0,
        steps: int = 1,
        simulated: bool = False,
        pieces: bool = False,
        person: bool = False,
        suspensions: Sequence[tuple[float, float]] = (),
    ) -> None:
        self._config = config
        self._limits = config.limits
        self._arm = kinematics
        self._period = period
        self._slack = GRACE + lag
        self._memory, self._busy = memory, busy
        self._steps = steps
        self._simulated = simulated
        self._pieces = pieces
        self._person = person
        self._reads_late = person or lag > 0
        self._suspensions = suspensions
        self._resumed = [resumed for _, resumed in suspensions]
        self.interrupted: list[float] = []
        self._held: set[int] = set()  # stamps of joint states
        self._before = (-math.inf, np.full(len(ARM), np.nan))  # time and positions of the last command
        self._last_hold = np.full(len(ARM), np.nan)
        margin = config.limits.joint_margin
        self._low, self._high = kinematics.position_low + margin, kinematics.position_high - margin
        # Seconds for which a joint state may have been the newest that the node knew.
        self._window = config.timeouts.joint_state + config.timeouts.inference + self._slack

    def check(self, records: Sequence[Record], permissions: Sequence[Permission]) -> list[Violation]:
        """Return all violations of a run.

        Args:
            records: All messages that the robot sent and received.
            permissions: When motion was allowed, in order of time; before the first one, motion is forbidden.
        """
        frames = {record.stamp: record.time for record in records if record.kind == "frame" and record.stamp}
        commands = sorted((record for record in records if record.kind == "command"), key=lambda r: r.time)
        late = [*self._late(commands, frames)]
        commands = [command for command in commands if not self._was_interrupted(command)]
        late += [] if self._simulated else self._after_stops(records, commands, frames, permissions)
        if self._config.control.output in VELOCITY_OUTPUTS:
            return [*late, *self._velocities(records, commands, frames, permissions)]
        measured = sorted((r for r in records if r.kind == "joints" and self._usable(r)), key=lambda r: r.time)
        times = [record.time for record in measured]
        self._held = {record.stamp for record in records if record.kind == "joints"}
        found = [
            violation
            for command in commands
            for violation in self._one(
                command,
                frames,
                measured[bisect_right(times, self._since(command)) : bisect_right(times, command.time)],
                permissions,
            )
        ]
        sent = [record for record in records if record.kind != "command"] + commands
        eases = self._limits.max_joint_acceleration > 0
        handed = late_commands(sent, eases=eases) if self._person else ()
        handovers = [Violation("handover", command.time, found) for command, found in handed]
        return [*late, *found, *self._between(commands, frames), *handovers]

    def _was_interrupted(self, command: Record) -> bool:
        """Return True if the node was suspended between sending a command and its arrival."""
        sent = command.time - command.delay
        return any(sent <= begin and end <= command.time for begin, end in self._suspensions)

    def _late(self, commands: Sequence[Record], frames: Mapping[int, float]) -> Iterator[Violation]:
        """Check that a hold follows each motion during whose sending the node was suspended."""
        for index, command in enumerate(commands):
            if not self._was_interrupted(command):
                continue
            holds = (each for each in commands[index:] if not self._moves(each, frames))
            took = next(holds, Record("command", math.inf)).time - command.time
            self.interrupted.append(took)
            if took > _CORRECTED:
                yield Violation(
                    "corrected", command.time, f"by a hold {took:.3g} s later, allowed {_CORRECTED:g} s"
                )

    def _after_stops(
        self,
        records: Sequence[Record],
        commands: Sequence[Record],
        frames: Mapping[int, float],
        permissions: Sequence[Permission],
    ) -> Iterator[Violation]:
        """Check that no motion is sent after the node has said that it is stopped, however busy the machine is.

        Both times are the node's: that of the status, and the middleware's of the command. The next arming ends it.
        """
        armings = [each.time for each in permissions if each.armed]
        motions = [
            (command.ros - command.delay * 1e9, command) for command in commands if self._moves(command, frames)
        ]
        for status in records:
            said = json.loads(status.text) if status.kind == "status" else {}
            if said.get("state") != "stopped":
                continue
            until = next((time for time in armings if time > status.time), math.inf)
            for sent, command in motions:
                if sent > said["stamp"] + _CLOCKS and command.time - command.delay < until:
                    late = (sent - said["stamp"]) / 1e9
                    yield Violation(
                        "stopped", command.time, f"a motion {late:.4f} s after the node said it had stopped"
                    )

    def _moves(self, command: Record, frames: Mapping[int, float]) -> bool:
        if self._config.control.output in VELOCITY_OUTPUTS:
            return bool(np.any(command.positions or ()))
        return command.stamp in frames

    def _since(self, command: Record) -> float:
        """Return the time at which the node last resumed before a command, or -infinity."""
        index = bisect_right(self._resumed, command.time)
        return self._resumed[index - 1] - _RECORDED if index else -math.inf

    def _between(self, commands: Sequence[Record], frames: Mapping[int, float]) -> Iterator[Violation]:
        """Check that each command between steps is within reach of the previous one.

        If commands arrive faster than the robot reads them, older ones are lost.
        """
        control = self._config.control
        if not control.command_rate_hz:
            return
        interval = self._period / max(1, round(self._period * control.command_rate_hz))
        fastest = self._arm.velocity_limits * self._limits.velocity_scale
        for earlier, before, command in zip(commands, commands[1:], commands[2:], strict=False):
            since = command.time - earlier.time  # after a pause, a robot reads an old command and then the newest
            if before.stamp in frames and command.stamp in frames and FINGERS not in (before.names, command.names):
                moved = np.abs(_arm(command) - _arm(before))
                if np.any(moved > fastest * (interval + since) + _ROUNDING):
                    found = f"{moved.max():.4g} rad from the last command, {since:.4g} s after the one before it"
                    yield Violation("between", command.time, found)

    def _one(
        self,
        command: Record,
        frames: Mapping[int, float],
        known: Sequence[Record],
        permissions: Sequence[Permission],
    ) -> Iterator[Violation]:
        positions = command.positions or ()
        expected = (ARM, FINGERS) if self._config.topics.gripper else (ARM + FINGERS,)
        if command.names not in expected or len(positions) != len(command.names):
            yield Violation("shape", command.time, f"{len(positions)} positions of {command.names}")
        elif not np.isfinite(positions).all():
            yield Violation("finite", command.time, f"positions {positions}")
        elif command.stamp in frames or (self._person and command.stamp not in self._held):
            sent = frames.get(command.stamp, command.time - (command.ros - command.stamp) / 1e9)
            age = command.time - sent if self._simulated else (command.ros - command.stamp) / 1e9
            yield from self._fingers(command)
            if command.names != FINGERS:
                yield from self._motion(command, known, age - command.delay)
            yield from _permitted(command, permissions, sent)
        elif command.names == FINGERS:
            yield from _armed_once(command, permissions)
        else:
            yield from self._hold(command, known)
            yield from _armed_once(command, permissions)

    def _usable(self, record: Record) -> bool:
        """Return True if a command may be based on this joint state; with ``pieces``, on one of its joints.

        Never on one of zeros: no arm is there.
        """
        if not any(record.positions or (1.0,)):
            return False
        believed = np.isfinite(self._believed(_arm(record)))
        return bool(believed.any() if self._pieces else believed.all())

    def _believed(self, arm: FloatArray) -> FloatArray:
        """Return the positions [7], with NaN for joints that are missing or outside their limits."""
        low, high = self._arm.position_low - _BELIEVABLE, self._arm.position_high + _BELIEVABLE
        found: FloatArray = np.where((low <= arm) & (arm <= high), arm, np.nan)
        return found

    def _nearest(self, wanted: FloatArray, records: Sequence[Record]) -> FloatArray:
        """Return for each joint the position in ``records`` that is nearest to ``wanted``, or NaN."""
        known = np.array([self._believed(_arm(record)) for record in records] or [np.full(len(ARM), np.nan)])
        off = np.where(np.isnan(known), np.inf, np.abs(known - wanted))
        nearest: FloatArray = known[off.argmin(axis=0), np.arange(len(ARM))]
        return nearest

    def _velocities(
        self,
        records: Sequence[Record],
        commands: Sequence[Record],
        frames: Mapping[int, float],
        permissions: Sequence[Permission],
    ) -> Iterator[Violation]:
        """Check that velocities are permitted, within limits, based on a frame, and end in time."""
        stands = (self._config.timeouts.velocity or 2 * self._period) + self._slack + self._memory + self._busy
        names = TWIST if self._config.control.output == "twist_stamped" else ARM
        for command, following in zip_longest(commands, commands[1:]):
            velocity = np.array(command.positions or ())
            if command.names != names or len(velocity) != len(names) or not np.isfinite(velocity).all():
                yield Violation("shape", command.time, f"{command.positions} of {command.names}")
                continue
            if not velocity.any():
                yield from _armed_once(command, permissions)
                continue
            if command.stamp not in frames:
                yield Violation("stamp", command.time, f"a motion with stamp {command.stamp}, which no frame has")
                continue
            until = following.time - following.delay if following else max(record.time for record in records)
            stood = until - (command.time - command.delay)
            if stood > stands:
                yield Violation("stands", command.time, f"for {stood:.3f} s, allowed {stands:.3f} s")
            wrong = self._twist(velocity) if names == TWIST else self._joint_velocity(velocity)
            if wrong:
                yield Violation("step", command.time, wrong)
            yield from _permitted(command, permissions, frames[command.stamp])
        if names == ARM:
            yield from self._passed(records)

    def _twist(self, velocity: FloatArray) -> str:
        """Return what is wrong with a twist, or ""."""
        limits = self._limits
        moved, turned = (float(np.linalg.norm(part)) * self._period for part in (velocity[:3], velocity[3:]))
        if moved > limits.max_translation_step * 1.01 + 2e-4 or turned > limits.max_rotation_step * 1.01 + 2e-4:
            return f"{moved:.4g} m and {turned:.4g} rad in {self._period:g} s"
        return ""

    def _joint_velocity(self, velocity: FloatArray) -> str:
        """Return what is wrong with joint velocities, or ""."""
        fastest = np.minimum(
            self._arm.velocity_limits * self._limits.velocity_scale, self._limits.max_joint_step / self._period
        )
        worst = int((np.abs(velocity) - fastest).argmax())
        if abs(velocity[worst]) > fastest[worst] + _ROUNDING:
            return f"{ARM[worst]} would move at {velocity[worst]:.4g} rad/s, allowed {fastest[worst]:.4g}"
        return ""

    def _passed(self, records: Sequence[Record]) -> Iterator[Violation]:
        """Check that velocities move no joint beyond its limit by more than message delays explain."""
        slack = self._arm.velocity_limits * self._limits.velocity_scale * self._slack
        for record in records:
            if record.kind != "joints" or record.positions is None:
                continue
            beyond = np.maximum(self._low - _arm(record), _arm(record) - self._high) - slack
            if np.nanmax(beyond) > 0:
                yield Violation("position", record.time, f"{ARM[int(np.nanargmax(beyond))]} went beyond its limit")

    def _fingers(self, command: Record) -> Iterator[Violation]:
        gripper = self._config.gripper
        fingers = np.array([p for n, p in zip(command.names, command.positions or (), strict=True) if n in FINGERS])
        ends = sorted((gripper.closed_position, gripper.open_position))
        if np.any(fingers < ends[0] - _ROUNDING) or np.any(fingers > ends[1] + _ROUNDING):
            yield Violation("gripper", command.time, f"fingers at {fingers}, allowed {ends}")

    def _motion(self, command: Record, known: Sequence[Record], age: float) -> Iterator[Violation]:
        timeouts = self._config.timeouts
        allowed = timeouts.frame_age + timeouts.inference + self._steps * self._period + self._slack
        if age > allowed:
            yield Violation("age", command.time, f"frame {age:.3f} s old, allowed {allowed:.3f} s")
        # The command is near one of the newest joint states; only the node knows which.
        wanted, complaint = _arm(command), f"blind: no usable joint state for {self._window:.3g} s"
        late = [record for record in known if record.time >= command.time - self._window]
        candidates = [self._nearest(wanted, late)] if self._pieces else [_arm(record) for record in reversed(late)]
        (at, before), self._before = self._before, (command.time, wanted)
        # A step begins at the last command, or at the measured position if there is none. A robot that reads late
        # loses commands between two.
        steps = (command.time - at) / self._period
        steps = 1 + steps if self._reads_late else max(1.0, round(min(steps, 1e6)))
        reach = self._limits.following_error + _ROUNDING
        near = [each for each in candidates if np.all(np.abs(wanted - each) <= reach)]
        if near and not np.isnan(before).any() and not self._step(before, wanted, steps):
            return
        if candidates and not near:
            complaint = f"following: further than {self._limits.following_error:g} rad from every joint state"
        for measured in near:
            if np.isnan(measured).any():
                continue
            wrong = self._step(measured, wanted)
            if not wrong:
                return
            complaint = wrong if complaint.startswith("blind") else complaint
        name, _, detail = complaint.partition(": ")
        yield Violation(name, command.time, detail)

    def _step(self, measured: FloatArray, wanted: FloatArray, steps: float = 1.0) -> str:
        """Return what is wrong with a motion from ``measured`` to ``wanted`` in so many steps, or ""."""
        limits, step = self._limits, np.abs(wanted - measured)
        outside = np.maximum(self._low - measured, measured - self._high)
        beyond = np.maximum(self._low - wanted, wanted - self._high)
        if np.any(beyond > np.maximum(0.0, outside) + _ROUNDING):
            return f"position: joint {ARM[int(beyond.argmax())]} is {beyond.max():.4g} rad beyond its limit"
        reach = self._arm.velocity_limits * limits.velocity_scale * self._period * steps
        if np.any(step > reach + _ROUNDING):
            worst = int((step - reach).argmax())
            return f"velocity: {ARM[worst]} would move {step[worst]:.4g} rad in {self._period:.4g} s"
        if np.any(step > steps * limits.max_joint_step + _ROUNDING):
            return f"jump: a step of {step.max():.4g} rad, allowed {limits.max_joint_step:g}"
        if self._pieces:  # only the node knows where the tip was
            return ""
        begin, end = self._arm.forward(measured), self._arm.forward(wanted)
        moved = float(np.linalg.norm(end.position - begin.position))
        if moved > steps * limits.max_translation_step * 1.01 + 2e-4:
            return f"translation: the tip would move {moved:.4g} m, allowed {limits.max_translation_step:g}"
        turned = rotation_angle(end.rotation @ begin.rotation.T)
        if turned > steps * limits.max_rotation_step * 1.01 + 2e-4:
            return f"rotation: the tip would turn {turned:.4g} rad, allowed {limits.max_rotation_step:g}"
        further = self._out_of_box(end.position) - self._out_of_box(begin.position)
        # A step that the collision check shortens ends on its way, which bends.
        if np.any(further > (1.01e-3 if self._config.collision.check else 1e-6)):
            return f"workspace: the tip would move {further.max():.4g} m further out of the box"
        return ""

    def _out_of_box(self, position: FloatArray) -> FloatArray:
        if not self._limits.workspace_low:
            return np.zeros(3)
        low, high = np.array(self._limits.workspace_low), np.array(self._limits.workspace_high)
        outside: FloatArray = np.maximum(0.0, np.maximum(low - position, position - high))
        return outside

    def _hold(self, command: Record, known: Sequence[Record]) -> Iterator[Violation]:
        measured = next((record for record in reversed(known) if record.stamp == command.stamp), None)
        if measured is None:
            yield Violation(
                "stamp", command.time, f"{command.stamp} is not the stamp of a frame or of a usable joint state"
            )
            return
        held, there = _arm(command), _arm(measured)
        if self._pieces:
            begin = min(measured.time, command.time - self._window)
            there = self._nearest(held, [record for record in known if record.time >= begin])
        off = float(np.abs(held - there).max())
        # An arm that has only sagged from where it was held before is held there again.
        again = np.allclose(held, self._last_hold, atol=_ROUNDING)
        self._before, self._last_hold = (command.time, held), held
        if off > _SAG + again * 0.2 * self._limits.following_error + _ROUNDING:
            yield Violation("hold", command.time, f"{off:.4g} rad from the position measured at its stamp")
        told = command.time - command.delay
        since = told - self._window - self._memory
        elsewhere = [
            record
            for record in known
            if measured.time < record.time < since and not np.isnan(self._believed(_arm(record))).any()
        ]
        if elsewhere:
            yield Violation(
                "hold", command.time, f"at a position measured {told - measured.time:.3f} s before it was sent"
            )


def _permitted(command: Record, permissions: Sequence[Permission], sent: float) -> Iterator[Violation]:
    """Check a motion that is based on a frame sent at ``sent``."""
    told = command.time - command.delay  # when the node sent it; a busy robot reads it later
    index = bisect_right([each.time for each in permissions], told) - 1
    if index < 0:
        yield Violation("disarmed", command.time, "a motion before the first arming")
        return
    last = permissions[index]
    if not last.allowed and told > last.time + last.grace:
        yield Violation("forbidden", command.time, f"a motion {told - last.time:.3f} s after: {last.why}")
    if last.armed and sent < last.time - GRACE:
        yield Violation("before", command.time, f"on a frame from {last.time - sent:.3f} s before the arming")
    if last.renewed and sent < last.time - GRACE and told > last.time + last.grace:
        yield Violation("task", command.time, f"on a frame from {last.time - sent:.3f} s before the task changed")


def _armed_once(command: Record, permissions: Sequence[Permission]) -> Iterator[Violation]:
    if not any(each.allowed and each.time <= command.time for each in permissions):
        yield Violation("disarmed", command.time, "a hold before the first arming")


def _arm(record: Record) -> FloatArray:
    """Return the positions [7] of the arm's joints, NaN for missing joints."""
    by_name = dict(zip(record.names, record.positions or (), strict=False))
    return np.array([by_name.get(name, np.nan) for name in ARM])
