"""Everything that the guard decides: pure logic, whose callers pass what arrives and the time.

When does a motion end?

- A **velocity or twist** when its frame's lifetime ends (``timeouts.velocity``, or two control periods, after the
  node made it) and no newer one was sent: zeros are sent, and the next velocity may follow.
- **Positions** remain in force while the node's control thread sends keep-alives (ten times a second, each for as
  long as an inference may take). When they lapse, a hold is sent, once.
- Either, when the node holds or ends: at once.
- Either, after a stop, a lost heartbeat, or a rejected or dropped frame: velocities at once, positions within
  :data:`SOON` unless the node sends its own hold first.

After a hold of its own, the guard sends no motion until the node has sent a hold. After a stop, it sends none until
a person has reset the node and armed it again.

What proves a fault of the node is rejected, and stops the arm. A motion that may be legal is dropped, and the arm
held, if it is late or if the joint state that it names has not arrived here and it is not legal in any case.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from vla_ros.config import LiveConfig
from vla_ros.control.command import Command
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.suspension import LONGEST
from vla_ros.errors import VlaRosError
from vla_ros.guard.arm import GuardedArm, guarded_arms, parse_options
from vla_ros.guard.checks import ArmCheck
from vla_ros.guard.frames import DamagedError, GuardFrame, Kind
from vla_ros.guard.history import MeasuredRange
from vla_ros.types import FloatArray, JointState

_SECOND = 1_000_000_000
SOON = 20_000_000
"""Nanoseconds for which the guard leaves the hold after a stop to the node."""

_LATE = round(LONGEST * _SECOND)  # ns; a motion that was made longer ago is not sent
_WAIT = 200_000_000  # ns; the joint state that a frame names may arrive after the frame
_AGAIN = 5_000_000  # ns between attempts to hold without a joint state
_AHEAD = 1_000_000  # ns; no frame is from the future

_Prepare = Callable[[Command], Iterable[Callable[[], object]]]
LOOKS, JOINTS_POLLED = 4_000_000, 500_000
"""Nanoseconds between looks at what arrives on the graph, and while a frame waits for a joint state."""


class Guard:
    """Checks frames, sends them, and ends motion.

    Args:
        options: The options with which the arms begin, and which the node changes.
        prepare: Builds a command's messages for the drivers and returns functions that send them; all raise
            whatever the middleware does.
        tell: Tells the node what happened: the event's name and a text.
        hear: Lets the joint states that have arrived be taken (:meth:`joints`).

    Attributes:
        counts: How often each thing happened.
        heard: When the last heartbeat came; assign it.
        stopped: Why nothing may move until a reset, with a detail, or None.
    """

    def __init__(
        self, options: LiveConfig, prepare: _Prepare, tell: Callable[[str, str], None], hear: Callable[[], None]
    ) -> None:
        self._options, self._arms = options, guarded_arms(options.current)
        self._prepare, self._tell, self._hear = prepare, tell, hear
        self.counts = Counter[str]()
        self.stopped: tuple[Reason, str] | None = None
        self._least = self._armings = 0  # the smallest number of armings that may move, and the newest one
        self.heard = self._resumed = 0  # when the last heartbeat came, and when this process last resumed

    # What arrives

    def take(self, frames: Iterable[GuardFrame | DamagedError], now: int) -> None:
        """Take what the channel had. Of several motions, the newest is sent; a hold or a stop replaces them."""
        kept = list[GuardedArm]()
        for frame in frames:
            self._armings = max(self._armings, getattr(frame, "armings", 0))
            if isinstance(frame, DamagedError):
                name, _, why = str(frame).partition(": ")
                self._reject(name, why, now)
            elif frame.kind is Kind.OPTIONS:
                self._configure(frame.text, now)
            elif frame.kind is Kind.STOP:
                self._end_all(now)
            elif frame.kind is Kind.RESET:
                if self.stopped or self._least > self._armings:  # else the node goes on being armed
                    self.stopped, self._least = None, self._armings + 1
                for arm in self._arms:  # the node has forgotten the holds that were due
                    arm.needs_hold = False
                self.note("reset", "")
            elif frame.arm >= len(self._arms):
                self._reject("unknown", f"found arm {frame.arm}, expected less than {len(self._arms)}", now)
            elif frame.kind is Kind.KEEPALIVE:
                self._keep_alive(self._arms[frame.arm], frame, now)
                kept.append(self._arms[frame.arm])
            else:
                self._queue(self._arms[frame.arm], frame, now)
                kept.clear()
        self.look(now)
        for arm in kept:
            self._rehearse(arm, now)

    def joints(self, topic: str, message: JointState, publisher: bytes, now: int, *, stamped: bool) -> None:
        """Take a joint state; its stamp is the time of arrival if it has none."""
        for arm in self._arms:
            if arm.check.arm.joint_states == topic:
                arm.history.add(message, publisher, now, stamped=stamped)
                arm.unmerged.append((message, publisher, now, arm.moves))

    def merge(self) -> None:
        """Merge the joint states that have arrived: for holds, which need not be as quick as commands."""
        timeout = self._options.current.timeouts.joint_state
        for arm in self._arms:
            while arm.unmerged:
                joints, publisher, now, moves = arm.unmerged.popleft()
                arm.merger.keep_trajectory(moves)
                whole = arm.merger.add(joints, joints.stamp if arm.history.stamped else 0, now, timeout, publisher)
                with suppress(Refused):  # it lacks joints, or says what cannot be
                    if whole is not None:
                        arm.check.measured.check(arm.check.measured.positions(whole.joints))
                        arm.newest, arm.arrived = whole.joints, now

    def stop(self, reason: Reason, detail: str, now: int) -> None:
        """Let nothing move until a reset; the first reason stays."""
        self._end_all(now)
        if self.stopped is None:
            self.stopped = reason, detail
            self.note("stopped", f"{reason.value}: {detail}")

    def suspended(self, now: int) -> None:
        """Hold: this process did not run, and the frames that waited meanwhile are void."""
        self._resumed = now
        self.note("suspended", "the guard's process did not run")
        self.hold_all(now)

    # What is due

    def look(self, now: int) -> None:
        """Send the frames whose joint states are there, and end what has to end."""
        timeout = self._options.current.timeouts.heartbeat
        moving = any(arm.moves for arm in self._arms)
        if timeout and moving and self.stopped is None and now - self.heard > timeout * _SECOND:
            self.stop(Reason.HEARTBEAT_LOST, f"none for {timeout:g} s", now)
        for arm in self._arms:
            self._send_waiting(arm, now)
            if arm.deadline is not None and now >= arm.deadline:
                self._expire(arm, now)

    def due(self, now: int) -> int:
        """Return when :meth:`look` has something to do, at the latest in :data:`LOOKS`."""
        times = [now + (JOINTS_POLLED if arm.waiting else LOOKS) for arm in self._arms]
        return min(times + [arm.deadline for arm in self._arms if arm.deadline is not None])

    def hold_all(self, now: int) -> bool:
        """Hold every arm that moves or rests, at once; return True if every hold was sent."""
        for arm in self._arms:
            arm.waiting.clear()
            if arm.moves:
                self._hold(arm, now)
        return not any(arm.moves for arm in self._arms)

    def _queue(self, arm: GuardedArm, frame: GuardFrame, now: int) -> None:
        if frame.kind is Kind.HOLD:
            arm.waiting.clear()
            self._end_motion(arm, now)
        elif frame.time > now + _AHEAD:
            return self._reject("early", f"made {(frame.time - now) / 1e6:.1f} ms from now", now)
        elif now - frame.time > _LATE or frame.time < self._resumed:
            age = (now - frame.time) / 1e6
            return self._drop("late", arm, frame, f"made {age:.1f} ms ago, allowed {_LATE / 1e6:g} ms", now)
        arm.waiting.append((frame, now, arm.newest_check))

    def _send_waiting(self, arm: GuardedArm, now: int) -> None:
        """Check the frames that wait, in their order, and send those that pass.

        Of several motions, one is left out if the next is a legal step from what was sent before.
        """
        passed: tuple[GuardFrame, FloatArray] | None = None
        while arm.waiting:
            (frame, since, arm.check), measured = arm.waiting[0], None
            try:
                arm.check.check_form(frame)
                if frame.kind is not Kind.HOLD and not self._may_move(arm, frame, now):
                    arm.waiting.popleft()
                    continue
                measured = self._measured(arm, frame, now)
                if passed and not self._is_legal(arm, frame, measured):
                    self._pass_on(arm, *passed)
                    passed = None
                speed = self._check(arm, frame, measured)
                if passed and frame.kind is Kind.POSITIONS:  # the node's step began at what is left out
                    begun = passed[0].values
                    speed = np.maximum(speed, np.abs(frame.values - begun)[: len(speed)] / frame.duration)
            except (ValueError, LookupError) as error:
                proves = isinstance(error, ValueError) and (measured is None or measured.exact)
                if not proves and now - since <= _WAIT:
                    break  # the joint state itself may still arrive
                arm.waiting.popleft()
                if not proves:
                    return self._drop("unknown", arm, frame, str(error), now)
                return self._reject("limits", f"{arm.check.arm.name}: {error}", now)
            arm.waiting.popleft()
            passed = frame, speed
            if frame.kind is Kind.HOLD:
                self._pass_on(arm, *passed)
                passed = None
        if passed is not None:
            self._pass_on(arm, *passed)
        if not arm.waiting:
            arm.check = arm.newest_check

    def _is_legal(self, arm: GuardedArm, frame: GuardFrame, measured: MeasuredRange | None) -> bool:
        """Return True if a frame may follow the last command, whatever was proposed since then."""
        with suppress(ValueError):
            self._check(arm, frame, measured, only_last=True)
            return True
        return False

    @property
    def may_move(self) -> bool:
        """True if neither a stop nor a hold forbids what a gripper was asked to do."""
        allowed = self.stopped is None and self._armings >= self._least
        return allowed and not any(arm.needs_hold for arm in self._arms)

    def _may_move(self, arm: GuardedArm, frame: GuardFrame, now: int) -> bool:
        if now >= frame.time + min(frame.lifetime, arm.check.longest_lifetime):
            self.note("expired", f"{arm.check.arm.name}, before it was sent")
            arm.speed = np.abs(frame.values[: len(arm.speed)])  # the node goes on from there
        elif self.stopped is None and frame.armings >= self._least and not arm.needs_hold:
            return True
        else:
            self.counts["void"] += 1
        return False

    def _measured(self, arm: GuardedArm, frame: GuardFrame, now: int) -> MeasuredRange | None:
        """Return where the arm was in the joint state that a frame names; None if it is checked by none.

        Raises LookupError if that is not known, ValueError if it is too old.
        """
        if not arm.needs_joints(frame):
            return None
        found = arm.history.find(frame.joints, frame.publisher)
        if found is None:
            self._hear()
            found = arm.history.find(frame.joints, frame.publisher, arm.check.fastest)
        named = f"names a joint state of {frame.joints / 1e9:.4f} s"
        if found is None:
            raise LookupError(f"{named}, which never arrived here")
        age, oldest = (frame.time - found.arrived) / 1e9, self._options.current.timeouts.joint_state + 2 * LONGEST
        if age > oldest:
            raise (ValueError if found.exact else LookupError)(f"{named}, {age:.3g} s old, allowed {oldest:.3g} s")
        return found

    def _check(
        self, arm: GuardedArm, frame: GuardFrame, measured: MeasuredRange | None, *, only_last: bool = False
    ) -> FloatArray:
        """Return the speed [N] of a frame; raises ValueError if it must not be sent.

        A step starts at the last command. It may also start at the last one that the node has proposed, if the
        guard has held since, or where the arm was, unless the last command is the ``only_last``.
        """
        known = [each for each in (arm.last, arm.proposed) if each is not None]
        if frame.kind is Kind.HOLD:
            self.merge()
        arm.check.check_fingers(frame, arm.newest)
        if frame.kind is Kind.HOLD:
            arm.check.check_hold(frame, measured, arm.following.held, known)
            return np.zeros(len(arm.speed))
        origins: Iterable[FloatArray] = known[:1]
        if measured is not None and not (measured.certain or only_last):  # the last command usually suffices
            origins = chain(known, map(measured.nearest, [frame.values[: len(arm.speed)]]))
        return arm.check.check_motion(frame, measured, origins, arm.speed)

    def _pass_on(self, arm: GuardedArm, frame: GuardFrame, speed: FloatArray) -> None:
        """Send a frame that has passed, unless one of the same arrival could not be written."""
        if arm.needs_hold and frame.kind is not Kind.HOLD:
            return
        arm.sent, (numbers, arm.fingers) = frame, arm.check.split(frame)
        if not self._write(arm.check.command(frame)):
            arm.needs_hold, arm.deadline = True, frame.time  # a part may be written: hold until that succeeds
            return
        self.counts["sent"] += 1
        arm.speed, arm.needs_hold, holds = speed, False, frame.kind is Kind.HOLD
        if not arm.check.sends_velocities and holds:
            arm.following.hold(arm.last if arm.moves else None, numbers, arm.check.envelope.joints.lead)
            arm.following.held = numbers
        elif not arm.check.sends_velocities:
            arm.following.sent(numbers)
        if not arm.check.sends_velocities:
            arm.last = arm.proposed = numbers
        arm.deadline = None if holds else frame.time + min(frame.lifetime, arm.check.longest_lifetime)

    def _keep_alive(self, arm: GuardedArm, frame: GuardFrame, now: int) -> None:
        if arm.deadline is not None and not (arm.check.sends_velocities or self.stopped or arm.needs_hold):
            arm.deadline = max(arm.deadline, min(frame.time, now) + min(frame.lifetime, arm.check.longest_lifetime))

    def _rehearse(self, arm: GuardedArm, now: int) -> None:
        """Check and prepare the last motion again, so that the processor's caches are warm for the next one."""
        if arm.deadline is not None and arm.sent is not None:
            with suppress(Exception):  # nothing of it is sent
                self._check(arm, arm.sent, self._measured(arm, arm.sent, now))
                self._prepare(arm.check.command(arm.sent))

    # Ends of motion

    def _end_all(self, now: int) -> None:
        """Let nothing move until an arming that follows, and end what moves."""
        self._least = self._armings + 1
        for arm in self._arms:
            arm.waiting = deque(each for each in arm.waiting if each[0].kind is Kind.HOLD)
            self._end_motion(arm, now)

    def _end_motion(self, arm: GuardedArm, now: int) -> None:
        """End a motion: a velocity now, positions soon, because the node usually sends its own hold."""
        if arm.deadline is not None:
            arm.needs_hold = True
            arm.deadline = min(arm.deadline, now + (0 if arm.check.sends_velocities else SOON))

    def _expire(self, arm: GuardedArm, now: int) -> None:
        """End a motion in time; the zeros that end a velocity are no hold: the next may go on from its speed."""
        if not arm.check.sends_velocities or arm.needs_hold:
            if not arm.needs_hold:  # the node holds, too, also where no joint state is usable here
                self.note("lapsed", arm.check.arm.name)
            self._hold(arm, now)
        elif arm.sent is not None and self._write(arm.check.command(arm.sent).stopped()):
            arm.deadline = None
            self.note("expired", arm.check.arm.name)
        else:
            arm.deadline = now + _AGAIN

    def _hold(self, arm: GuardedArm, now: int) -> None:
        """Hold an arm where the node would; without a fresh joint state as soon as there is one."""
        arm.needs_hold, arm.deadline = True, now + _AGAIN
        if not arm.check.sends_velocities:
            self._hear()
            self.merge()
            if now - arm.arrived > (self._options.current.timeouts.joint_state + LONGEST) * _SECOND:
                return
        try:
            held = arm.hold()
        except Refused as refused:
            return self._tell("failed", str(refused))
        if self._write(held):
            arm.deadline, arm.speed = None, np.zeros(len(arm.speed))
            if not arm.check.sends_velocities:
                arm.last = held.positions[: len(arm.speed)]
            self.note("held", f"{arm.check.arm.name} at {np.round(held.positions, 4).tolist()}")

    def _reject(self, name: str, why: str, now: int) -> None:
        """Refuse a frame, which means a fault in the node: hold and stop."""
        self.counts[f"rejected_{name}"] += 1
        self.stop(Reason.GUARD_REJECTED, f"{name}: {why}", now)

    def _drop(self, name: str, arm: GuardedArm, frame: GuardFrame, why: str, now: int) -> None:
        """Refuse a frame that may be legal: hold, and tell the node that it has to hold, too, unless it knows."""
        self.counts[f"dropped_{name}"] += 1
        if frame.kind is Kind.HOLD or not arm.needs_hold:
            self.note("dropped", f"{arm.check.arm.name}: {name}: {why}")
        self._end_motion(arm, now)
        arm.needs_hold = True

    def _configure(self, text: str, now: int) -> None:
        try:
            config = parse_options(text)
            checks = [ArmCheck(config, arm.check.arm.name, arm.check.kinematics) for arm in self._arms]
        except (ValueError, VlaRosError) as error:
            return self._reject("options", str(error), now)
        self._options.current = config
        for arm, check in zip(self._arms, checks, strict=True):
            arm.newest_check, arm.merger.speeds = check, check.speeds

    def _write(self, command: Command) -> bool:
        try:
            for send in self._prepare(command):
                send()
        except Exception as error:  # of the middleware
            self.note("unsent", str(error))
            return False
        return True

    def note(self, event: str, text: str) -> None:
        """Count an event and tell the node."""
        self.counts[event] += 1
        self._tell(event, text)

    @property
    def status(self) -> Mapping[str, Any]:
        """State, why it is stopped, and counts, for ``~/status``."""
        state = "stopped" if self.stopped else "moving" if any(arm.moves for arm in self._arms) else "holding"
        return {"state": state, "stopped": self.stopped or (), "counts": dict(self.counts)}
