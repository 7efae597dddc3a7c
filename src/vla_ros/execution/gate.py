"""The one place where commands are written to the drivers.

Everything is written within :meth:`CommandGate.sending`, under the lock of :class:`Safety`: no two threads write at
once, and once a stop has returned, no motion is written.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from vla_ros.config import Config
from vla_ros.control.command import Command, lifetime
from vla_ros.control.reasons import Reason
from vla_ros.control.robot import RobotController
from vla_ros.control.suspension import LONGEST
from vla_ros.errors import VlaRosError, WriteError
from vla_ros.execution.context import Context
from vla_ros.execution.graph_watch import GraphWatch
from vla_ros.execution.outputs import Outputs
from vla_ros.types import JointState

_SUPERVISION_VALID = 0.05  # s; after this time the inputs are supervised again
_PERIOD = 0.005  # s
_TRIES = 20  # times that one motion is supervised anew
_FAILURES, _WITHIN = 3, 10.0  # so many writes that failed within so many seconds stop the arm


class CommandGate:
    """Lets commands through while :class:`Safety` and the watchdog allow motion. Thread-safe.

    This class serves a simulated driver, which is always present, and holds a position by itself; it also ends
    velocities. ``prepare`` builds the messages of all arms' commands and returns a function that writes them,
    ``expired`` returns zeros for the arms whose velocities have expired.
    """

    def __init__(
        self,
        context: Context,
        prepare: Callable[[Sequence[Command]], Callable[[], None]],
        controller: RobotController,
        expired: Callable[[], Sequence[Command]],
    ) -> None:
        self._context, self._safety = context, context.safety
        self.prepare, self._expired = prepare, expired
        self.controller = controller  # makes the hold commands
        self._failures: deque[float] = deque(maxlen=_FAILURES)  # when writes failed; steady clock, s
        self._interruptions = self._safety.interruptions  # count at the last hold

    @contextmanager
    def open(self) -> Iterator[bool]:
        """Context in which a motion is written; yields True if it may be written.

        Supervises before, and again if this thread was delayed since then; yields False if it always was.
        """
        clock = self._context.clock
        for _ in range(_TRIES):
            self.supervise()
            supervised = clock.steady()
            with self.sending() as may_move:
                if clock.steady() - supervised <= _SUPERVISION_VALID:
                    yield may_move
                    return
        self._log(f"no command was sent: this thread was delayed {_TRIES} times by {_SUPERVISION_VALID:g} s")
        yield False

    @contextmanager
    def sending(self) -> Iterator[bool]:
        """Context in which anything is written; yields True if a motion may be.

        Before and after it, the process may turn out to have been suspended: then the arm holds (``suspended``).
        """
        with self._safety.sending():
            self._hold_if_suspended()
            try:
                yield self._safety.may_move
            finally:
                self._hold_if_suspended()

    def hand_over(self, controller: RobotController) -> None:
        """Let another controller of the arms go on from the last command, and make the holds."""
        with self.sending():
            controller.continue_from(self.controller)
            self.controller = controller

    def write_failed(self, error: VlaRosError) -> frozenset[str]:
        """Hold because a write within :meth:`sending` has failed, or stop; return the arms that got their command.

        The hold lasts until a hold was written to every arm; here, where there is no driver, until the next look.
        """
        now = self._context.clock.steady()
        self._failures.append(now)
        self._safety.hold(Reason.DRIVER_WRITE, str(error))
        if len(self._failures) == _FAILURES and now - self._failures[0] <= _WITHIN:
            self._safety.stop(
                Reason.DRIVER_UNREACHABLE, f"{_FAILURES} writes failed within {_WITHIN:g} s, at last: {error}"
            )
        self._log(f"a command could not be written: {error}")
        return error.arms if isinstance(error, WriteError) else frozenset()

    def keep_alive(self, *, steps: bool = False) -> None:
        """Announce that the thread that sends motions runs, or ``steps``; call it at least ten times a second."""

    def configure(self, config: Config) -> None:
        """Apply changed options to the commands that follow; call it on the thread that sends motions."""

    def supervise(self) -> None:
        """Let safety react to the watchdog's findings."""
        now = self._context.clock.now()
        self._safety.clear(Reason.DRIVER_WRITE)
        self._context.watchdog.see_driver(1, now)
        self._safety.follow(self._context.watchdog.active(now))
        if self._safety.interruptions != self._interruptions:
            self._interruptions = self._safety.interruptions
            holds, _ = self.controller.hold(self._context.inputs.fresh_joints(math.inf))
            if velocities := [command for command in holds if command.is_velocity]:
                with self.sending() as may_move:
                    if not may_move:
                        self.prepare(velocities)()
        self.end_expired_velocities()

    def end_expired_velocities(self) -> None:
        """Send zeros if no command followed within ``timeouts.velocity`` (:meth:`Outputs.expired`)."""
        if not self._expired():
            return
        with self.sending():  # a command sent meanwhile has replaced its velocity
            expired = self._expired()
            write = self.prepare(expired)
            try:
                write()
            except VlaRosError as error:
                self.write_failed(error)
        if expired:
            seconds = lifetime(self._context.options.current)
            self._safety.react(Reason.VELOCITY_EXPIRED, f"no new velocity for {seconds:.3g} s")

    def _hold_if_suspended(self) -> bool:
        """Hold while nothing may move after a suspension of the process; return True then."""
        return False

    def _log(self, text: str) -> None:
        self._context.throttled.log("hold", text, "error")


class DriverGate(CommandGate):
    """The gate of real drivers: also sends a hold to every arm each time that motion ends, and ends velocities.

    An arm with a velocity output stops at once. The position of another one must have arrived within
    ``timeouts.joint_state`` and must have been published after the process last resumed (:class:`Suspension`);
    until then, and until it could be written, its hold is due.

    Args:
        context: The node's context.
        controller: Makes the hold commands.
        outputs: The drivers' topics.
        watch: Finds other commanders.
        poll: Reads joint states that the graph thread has not processed yet.
    """

    def __init__(
        self,
        context: Context,
        controller: RobotController,
        outputs: Outputs,
        watch: GraphWatch,
        poll: Callable[[], None],
    ) -> None:
        super().__init__(context, outputs.prepare, controller, outputs.expired)
        self._suspension = context.suspension
        self._outputs, self._watch, self._poll = outputs, watch, poll
        outputs.write_failed = self.write_failed
        self._due: frozenset[str] = frozenset()  # arms to which a hold is due
        self._measured = tuple(arm.name for arm in controller.arms if arm.joint_names)
        self._reopened = -math.inf  # when the process resumed from the last suspension that is over
        self._looked = -math.inf  # when the last look at other commanders began (Clock.awake)

    def look(self, *, at_once: bool = False) -> None:
        """Check for other publishers of this node's commands (:meth:`GraphWatch.look`)."""
        began = self._context.clock.awake()
        self._watch.look(at_once=at_once)
        self._looked = began

    def supervise(self) -> None:
        """Let safety react to all findings, hold, and end expired velocities; also called 50 times a second."""
        now, guard = self._context.clock.now(), self._look_at_guard()
        topic, subscribers = self._outputs.subscribers
        self._context.watchdog.see_driver(subscribers, now, topic)
        self.send_due_holds()
        with self._safety.sending():
            if not self._hold_if_suspended():
                self._safety.clear(Reason.SUSPENDED)
            if not self._due:
                self._safety.clear(Reason.DRIVER_WRITE)
            self._safety.follow({**self._watch.found, **guard, **self._context.watchdog.active(now)})
        self.send_due_holds()  # another thread may be busy with the event
        self.end_expired_velocities()

    def keep_alive(self, *, steps: bool = False) -> None:
        self._outputs.keep_alive(steps=steps)

    def configure(self, config: Config) -> None:
        self._outputs.configure(config)

    def _look_at_guard(self) -> Mapping[Reason, str]:
        """Return why a guard lets nothing move; hold if it holds by itself."""
        try:
            return self._outputs.look()
        except WriteError as error:
            with self.sending():
                self.write_failed(error)
            return {}

    def forget_holds(self) -> None:
        """Forget holds that are due, because a person has taken over the arm."""
        with self.sending():
            self._due = frozenset()

    def finish_holds(self, seconds: float) -> None:
        """Wait up to ``seconds`` until every hold that is due was sent; log to whom none was."""
        until = self._context.clock.steady() + seconds
        while self._due and self._context.clock.steady() < until:
            self._context.clock.sleep(_PERIOD)
            self.send_due_holds()
        if self._due:
            self._log(f"no hold was sent to {' and '.join(sorted(self._due))}")

    def write_failed(self, error: VlaRosError) -> frozenset[str]:
        """Hold every arm as soon as that can be written (:meth:`CommandGate.write_failed`)."""
        got = super().write_failed(error)
        self._interruptions = self._safety.interruptions
        self._due = frozenset(arm.name for arm in self.controller.arms)
        return got

    def send_due_holds(self) -> None:
        """Send the holds that are due. Call it when motion has ended, and fifty times a second."""
        if not self._due and self._safety.interruptions == self._interruptions:
            return
        try:
            self._poll()
        except Exception as error:  # hold at the last known position
            found = f"joint states could not be read: {type(error).__name__}: {error}"
            self._context.throttled.log("unread", found, "error")  # what is said of the hold must not replace it
        with self.sending() as may_move:
            if self._safety.interruptions != self._interruptions:
                self._interruptions = self._safety.interruptions
                self._due = frozenset(arm.name for arm in self.controller.arms)
            if may_move:  # the reason has ended, and motion may already have been sent
                self._due = frozenset()
            if self._due:
                self._send_holds(self._fresh_joints())

    def _fresh_joints(self) -> Mapping[str, JointState]:
        timeout = self._context.options.current.timeouts.joint_state + LONGEST
        return self._context.inputs.fresh_joints(timeout, self._suspension.resumed)

    def _send_holds(self, fresh: Mapping[str, JointState]) -> None:
        resumed = self._suspension.resumed
        commands, refusals = self.controller.hold(fresh, self._due)
        failed = set[str]()
        for command in commands:  # an arm that cannot be reached keeps no other from its hold
            write = self.prepare([command])
            try:
                write()
            except VlaRosError as error:
                failed.add(command.arm)
                super().write_failed(error)
        self._suspension.notice()
        if self._suspension.resumed != resumed:  # suspended while it sent: what was sent is corrected
            return
        # An arm whose measurement is unusable has nothing to hold; one without waits for a measurement.
        self._due = self._due - ({command.arm for command in commands} | fresh.keys()) | failed
        for refused in refusals:
            self._log(f"no hold could be sent{' yet' if self._due else ''}: {refused.detail}")

    def _hold_if_suspended(self) -> bool:
        """Hold while nothing may move after a suspension of the process; return True then.

        It is over when every arm's joint state was published afterwards, the holds were sent, other commanders were
        looked for, and messages that got lost meanwhile have been sent again.
        """
        self._suspension.notice()
        resumed = self._suspension.resumed
        if resumed <= self._reopened:
            return False
        fresh = self._context.inputs.fresh_joints(math.inf, resumed)
        missing = [name for name in self._measured if name not in fresh]
        alone = self._context.options.current.control.arms_hold_alone and len(missing) < len(self._measured)
        if missing and not alone:
            wanted = "no joint state was published since it resumed"
        elif self._due & fresh.keys():
            wanted = "the hold was not sent yet"
        elif self._looked < resumed:
            wanted = "the graph was not searched for other commanders since it resumed"
        elif self._context.clock.awake() < self._suspension.settled:
            wanted = "a stop that was sent meanwhile may still arrive"
        else:
            self._reopened = resumed
            return False
        lasted = self._suspension.lasted
        self._safety.hold(Reason.SUSPENDED, f"the process did not run for {lasted:.3g} s; {wanted}")
        return True
