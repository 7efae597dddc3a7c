"""The action server ``~/run_policy`` for behaviour trees: each goal sets one instruction until it ends."""

from collections.abc import Callable
from typing import Any

from vla_ros.config import node_topics
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import State
from vla_ros.errors import VlaRosError
from vla_ros.execution.context import Context
from vla_ros.graph.node import ABORTED, CANCELED, SUCCEEDED, Backend, ServedGoal
from vla_ros.graph.wiring import Wiring

_TYPE = "rosetta_interfaces/action/RunPolicy"
_PERIOD = 0.05  # s
_FEEDBACK = 0.5  # s


def has_run_policy(graph: Backend) -> bool:
    """Return True if the action's type is available; rclpy needs the package rosetta_interfaces."""
    try:
        graph.action(_TYPE)
    except VlaRosError:
        return False
    return True


class RunPolicy:
    """Runs one goal at a time: sets its prompt as the instruction and clears it when the goal ends.

    A goal does not arm: if the arm is disarmed or stopped, the goal is aborted with the reason. It succeeds when
    ``~/success`` becomes true; it is aborted by a stop, by disarming, by another instruction, and after
    ``timeouts.run``. When it ends, the arm holds (``no_instruction``) unless another instruction has replaced it.
    """

    def __init__(
        self,
        context: Context,
        wiring: Wiring,
        instruct: Callable[[str], tuple[bool, str]],
        remaining: Callable[[], int],
    ) -> None:
        self._context, self._instruct, self._remaining = context, instruct, remaining
        self._goal: ServedGoal | None = None
        self._began = self._reported = 0.0  # steady clock, s
        self._commands = 0  # sent before the goal
        kind = wiring.graph.action(_TYPE)
        self._make_result, self._make_feedback = kind.Result, kind.Feedback
        wiring.action_server(_TYPE, "~/run_policy", self._accept, self._start, self._cancel)
        wiring.subscribe("std_msgs/msg/Bool", node_topics.RUN_SUCCESS, self._on_success, "request")
        wiring.timer(_PERIOD, self._look)
        wiring.on_close(self._close)

    def _accept(self, goal: Any) -> bool:
        if self._goal is not None:
            self._context.logger.warning("run_policy: a goal was rejected because another is running")
        return self._goal is None

    def _start(self, goal: ServedGoal) -> None:
        self._goal, self._began = goal, self._context.clock.steady()
        self._reported, self._commands = self._began, self._context.stats.frames()["commands"]
        if not goal.goal.prompt.strip():
            self._end(ABORTED, "the prompt is empty", keep=True)
        elif self._context.safety.state in (State.DISARMED, State.STOPPED):
            self._end(ABORTED, f"not started: {self._context.safety.explain()}", keep=True)
        else:
            _, answer = self._instruct(goal.goal.prompt)
            self._context.logger.info(f"run_policy: {answer or 'the instruction is unchanged'}")
            if self._context.inputs.snapshot.instruction != goal.goal.prompt.strip():
                self._end(ABORTED, answer, keep=True)

    def _cancel(self, goal: ServedGoal) -> None:
        if goal is self._goal:
            self._end(CANCELED, "canceled")

    def _on_success(self, message: Any) -> None:
        if message.data and self._goal is not None:
            self._end(SUCCEEDED, f"true on {node_topics.RUN_SUCCESS}")

    def _close(self) -> None:
        if self._goal is not None:
            self._end(ABORTED, "the node was shut down")

    def _look(self) -> None:
        """End the goal if it is over, otherwise send feedback."""
        goal, now, safety = self._goal, self._context.clock.steady(), self._context.safety
        if goal is None:
            return
        limit = self._context.options.current.timeouts.run
        if safety.state in (State.DISARMED, State.STOPPED):
            self._end(ABORTED, safety.explain())
        elif self._context.inputs.snapshot.instruction != goal.goal.prompt.strip():
            self._end(ABORTED, "another instruction was given", keep=True)
        elif limit and now - self._began > limit:
            self._end(ABORTED, f"not done within {limit:g} s (timeouts.run)")
        elif now - self._reported >= _FEEDBACK:
            self._reported = now
            status = "executing" if safety.may_move else safety.explain()
            done = self._context.stats.frames()["commands"] - self._commands
            goal.publish_feedback(
                self._make_feedback(published_actions=done, queue_depth=self._remaining(), status=status)
            )

    def _end(self, status: int, message: str, *, keep: bool = False) -> None:
        goal, self._goal = self._goal, None
        assert goal is not None
        if not keep:
            self._context.inputs.set_instruction("")
            self._context.safety.hold(Reason.NO_INSTRUCTION, f"run_policy has ended: {message}")
        self._context.logger.info(f"run_policy ended: {message}")
        goal.end(status, self._make_result(success=status == SUCCEEDED, message=message))
