"""The control loop while a person has taken over: decelerates, follows the person's input, and hands back.

A person's steps take the policy's path: checked for NaN, through :class:`ActionSchedule`,
:class:`RobotController` and :class:`CommandGate`. The arm decelerates, and the other's controller
continues from the last command, so that no command jumps.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from vla_ros.config import Config
from vla_ros.control.following import SETTLED
from vla_ros.control.mode import NO_TASK, Mode
from vla_ros.control.reasons import OF_PATH, OF_PERSON, Reason, Refused
from vla_ros.control.robot import RobotController
from vla_ros.control.schedule import ActionSchedule
from vla_ros.execution.context import Context
from vla_ros.execution.executor import StepExecutor
from vla_ros.execution.gate import CommandGate
from vla_ros.person.source import OPENING, PersonSource, person_config
from vla_ros.types import FloatArray, Observation

_SHORTEST = 0.95  # shortest time between a command of the deceleration and a step, in intervals
_LONGEST_STEP = 0.25  # s; a policy's step that lasts longer is not waited for


class PersonLoop:
    """Executes what a person's ``source`` proposes, through ``gate``. Used from the control thread.

    ``policy`` is the policy's controller. ``tell`` gets where the arms are, as state of an observation, while a
    person wants to correct and cannot yet.
    """

    def __init__(
        self,
        context: Context,
        source: PersonSource,
        policy: RobotController,
        gate: CommandGate,
        tell: Callable[[dict[str, FloatArray]], None] = lambda state: None,
    ) -> None:
        self._context, self._source, self._gate, self._tell = context, source, gate, tell
        self._clock, self._safety, self._policy = context.clock, context.safety, policy
        config = person_config(context.options.current)
        self._controller = RobotController(config, source.spec, policy.kinematics, policy.collision)
        self._schedule = ActionSchedule(config.control, source.spec, (), self._controller.rotations)
        self._executor = StepExecutor(
            context, config, source, self._schedule, self._controller, gate, Mode.CORRECTING
        )
        self.has_begun = False
        self._start = self._due = self._sent = 0.0  # steady clock, s; sent: the last command, or the policy's
        self._seen = 0  # interruptions of motion

    @property
    def acts(self) -> bool:
        """True from a takeover until the arm rests and the policy may continue."""
        return self.has_begun or self._safety.mode is not Mode.AUTONOMOUS

    def configure(self, config: Config) -> None:
        """Apply changed options between steps."""
        self._executor.configure(person_config(config))

    def begin(self, step_ends: float) -> None:
        """Take over once the policy's step has ended, at ``step_ends`` seconds of the steady clock."""
        now = self._clock.steady()
        self._start = min(max(now, step_ends), now + _LONGEST_STEP)
        self.has_begun = True
        self._due, self._sent = self._start, now  # the policy may just have sent a command
        self._executor.halt()
        self._source.reset()
        self._seen = self._safety.interruptions
        self._executor.notice_arming()
        self._gate.hand_over(self._controller)
        self._executor.task = NO_TASK
        self._executor.continue_motion(self._start)

    def run(self) -> float:
        """Do what is due; return when to call again, in seconds of the steady clock."""
        now, executor, safety = self._clock.steady(), self._executor, self._safety
        if now < self._start:
            return self._start
        executor.take_interruption()
        executor.notice_arming()
        if self._seen != safety.interruptions or not safety.is_free:
            self._seen = safety.interruptions
            self._source.reset()
            executor.halt()
        if not safety.is_free:
            safety.release()
            self._gate.supervise()
            if safety.mode is Mode.AUTONOMOUS:
                self._end()
            elif executor.holds_alone:
                self._step()
            return now + executor.period
        if executor.is_void():
            executor.decelerate()
        self._due = max(self._due, self._sent + _SHORTEST * executor.interval)
        if self._due <= now:
            self._due = now + executor.period
            self._step()
        if executor.command_due <= self._clock.steady():
            self._sent = self._clock.steady()
            executor.interpolate(plan_is_empty=False)
        return min(self._due, executor.command_due)

    def _step(self) -> None:
        """Execute the person's step, or rest and say why there is none."""
        executor, safety, mode = self._executor, self._safety, self._safety.mode
        task = executor.newest_task  # before the input is read: a release after that makes the step void
        joints, state = executor.read_joints(), dict[str, FloatArray]()
        try:
            for name, (positions, opening) in self._controller.next_start(joints).items():
                state |= {name: positions, name + OPENING: np.array([opening])}
            executor.end_holds(OF_PATH)
            if mode is not Mode.CORRECTING:
                self._rest(None, state)
                return
            instruction = self._context.inputs.snapshot.instruction
            chunk = self._source.infer(Observation({}, instruction, self._clock.ros(), state))
            self._controller.check(chunk)
        except Refused as refused:
            self._rest(refused, state)
            return
        tries = not safety.is_free  # a step was refused
        if not (tries or safety.go_live(task.handovers)):
            return
        executor.task = task
        self._schedule.load(chunk)
        dt = executor.step_duration()
        step = replace(self._controller.make_step(self._schedule.next(), joints, dt), by_person=True)
        if tries:
            if step.refused is None:
                executor.end_holds()
            return
        executor.take_interruption()
        began = executor.execute(step, dt)
        if began is not None:
            self._sent, self._due = began, executor.step_due

    def _rest(self, refused: Refused | None, state: dict[str, FloatArray]) -> None:
        """Decelerate; at rest, hold for a person's reason, or hand back to the policy."""
        safety = self._safety
        safety.release()
        self._source.reset()
        if state:
            self._tell(state)
        if self._executor.decelerate():
            return
        self._executor.halt()
        if self._clock.steady() - self._sent > SETTLED:  # until then, it may lag
            self._controller.settle(self._executor.read_joints())
        if refused is None:
            self._executor.end_holds()
        if safety.mode is Mode.AUTONOMOUS:
            self._end()
        elif refused is not None and safety.mode is Mode.CORRECTING:
            self._hold(refused)

    def _hold(self, refused: Refused) -> None:
        reason = Reason.PERSON_INVALID if refused.reason is Reason.ACTION_INVALID else refused.reason
        if reason not in OF_PERSON:
            self._executor.hold_for(refused, None)
            return
        for other in OF_PERSON - {reason}:
            self._safety.clear(other)
        if self._safety.mode is Mode.CORRECTING:
            self._safety.hold(reason, refused.detail)

    def _end(self) -> None:
        """Let the policy's controller continue from the last command."""
        self._gate.hand_over(self._policy)
        self._executor.halt()
        self._executor.end_holds()
        self.has_begun = False
