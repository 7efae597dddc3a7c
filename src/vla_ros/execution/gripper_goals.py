"""Sends finger positions as goals to a gripper's action server, without waiting for it."""

from collections.abc import Callable
from typing import Any

from vla_ros.config import ArmConfig
from vla_ros.control.command import Command
from vla_ros.control.reasons import Reason
from vla_ros.errors import WriteError
from vla_ros.execution.context import Surroundings
from vla_ros.graph.wiring import Wiring

ACTION_TYPES = {
    "gripper_command": {"": "control_msgs/action/GripperCommand"},
    "parallel_gripper_command": {"": "control_msgs/action/ParallelGripperCommand"},
    "franka": {"/move": "franka_msgs/action/Move", "/grasp": "franka_msgs/action/Grasp"},
}
"""Action types for each of ``config.GRIPPER_ACTIONS``, by the suffix appended to ``topics.gripper``."""

_CHANGE = 0.02  # smallest change that sends a goal, as a share of the stroke; changes to an end always do
_RETRY = 1.0  # s; pause after a failed goal
_PERIOD = 0.02  # s
_FRANKA_SPEED = 0.1  # m/s; the action server requires a speed
_SUCCEEDED = 4  # action_msgs/msg/GoalStatus
_STATES = ("unknown", "accepted", "executing", "canceling", "succeeded", "canceled", "aborted")


class GripperGoals:
    """Sends a goal when the target position of the arm's gripper changes, replacing the previous goal.

    Goals are sent on the thread that spins, so that no gripper delays the arm. A failed goal is reported as
    ``gripper_failed`` and sent again after a second if it is still wanted. A gripper that stalls has gripped
    something; its goal has not failed. ``write_failed`` is called, within ``safety.sending()``, with the error of a
    goal that the middleware does not take.
    """

    def __init__(
        self, context: Surroundings, wiring: Wiring, arm: ArmConfig, write_failed: Callable[[WriteError], object]
    ) -> None:
        self._gripper, name = arm.gripper, arm.gripper_topic
        self._context, self._make, self._write_failed = context, wiring.graph, write_failed
        self._clients = {
            end: wiring.action_client(kind, name + end) for end, kind in ACTION_TYPES[self._gripper.output].items()
        }
        self._types = {end: wiring.graph.action(kind) for end, kind in ACTION_TYPES[self._gripper.output].items()}
        self.name = name
        self.is_ready = False
        self._wanted: Command | None = None
        self._sent: float | None = None
        self._number = 0  # of the newest goal; results of older goals are ignored
        self._due = self._not_before = 0.0  # steady clock, s; 0 if no answer is pending
        wiring.timer(_PERIOD, self.look)

    def want(self, fingers: Command | None) -> None:
        """Set the target position, or None to send no goal. Any thread may call it within ``safety.sending()``."""
        self._wanted = fingers

    def look(self) -> None:
        """Send a goal if one is due, and detect goals that got no answer. Runs on the graph thread."""
        now, config = self._context.clock.steady(), self._context.options.current
        self.is_ready = all(client.server_is_ready() for client in self._clients.values())
        if self._due and now > self._due:
            self._fail(self._number, f"no answer within {config.timeouts.gripper:g} s (timeouts.gripper)")
        with self._context.safety.sending() as allowed:
            if not allowed:  # the target is from before the stop
                self._wanted = None
            wanted = self._wanted
            if wanted is None or not self.is_ready or now < self._not_before or not self._is_new(wanted):
                return
            end, goal = self._goal(wanted, config.gripper.goal_speed, config.gripper.goal_effort)
            try:
                answer = self._clients[end].send_goal_async(goal)
            except Exception as error:  # of the middleware
                self._wanted = None  # until the next command
                self._write_failed(WriteError(f"{self.name}{end}: {error}"))
                return
        self._number += 1
        self._sent, self._due = float(wanted.positions[0]), self._due or now + config.timeouts.gripper
        answer.add_done_callback(self._guarded(self._number, self._on_answer))

    def _is_new(self, wanted: Command) -> bool:
        if self._sent is None:
            return True
        position, ends = float(wanted.positions[0]), (self._gripper.closed_position, self._gripper.open_position)
        change = abs(position - self._sent)
        return change > _CHANGE * abs(ends[1] - ends[0]) or (change > 0 and position in ends)

    def _goal(self, fingers: Command, speed: float, effort: float) -> tuple[str, Any]:
        """Return which client to use, and its goal."""
        message, position = self._make.message, float(fingers.positions[0])
        if self._gripper.output == "gripper_command":
            command = message("control_msgs/msg/GripperCommand")(position=position, max_effort=effort)
            return "", self._types[""].Goal(command=command)
        if self._gripper.output == "parallel_gripper_command":
            # parallel_gripper_controller accepts one joint only; the other fingers mimic it.
            command = message("sensor_msgs/msg/JointState")(
                name=[fingers.names[0]],
                position=[position],
                velocity=[speed] if speed else [],
                effort=[effort] if effort else [],
            )
            return "", self._types[""].Goal(command=command)
        width, speed = 2 * position, speed or _FRANKA_SPEED  # the position belongs to one of the two fingers
        if not effort or position != self._gripper.closed_position:
            return "/move", self._types["/move"].Goal(width=width, speed=speed)
        # Whatever is between the fingers counts as grasped.
        epsilon = message("franka_msgs/msg/GraspEpsilon")(inner=1.0, outer=1.0)
        grasp = self._types["/grasp"].Goal(width=width, epsilon=epsilon, speed=speed, force=effort)
        return "/grasp", grasp

    def _guarded(self, number: int, take: Callable[[int, Any], None]) -> Callable[[Any], None]:
        """Return a future's callback that calls ``take`` only while goal ``number`` is the newest."""

        def on_done(future: Any) -> None:
            if number == self._number:
                take(number, future.result())

        return on_done

    def _on_answer(self, number: int, handle: Any) -> None:
        if handle.accepted:
            handle.get_result_async().add_done_callback(self._guarded(number, self._on_result))
        else:
            self._fail(number, "the goal was rejected")

    def _on_result(self, number: int, ended: Any) -> None:
        result = ended.result
        succeeded = ended.status == _SUCCEEDED and getattr(result, "success", True)
        if succeeded or getattr(result, "stalled", False):
            self._due = 0.0
        else:
            error = getattr(result, "error", "")
            self._fail(number, f"the goal {_STATES[max(0, ended.status)]}{error and ': ' + error}")

    def _fail(self, number: int, what: str) -> None:
        text = f"{self.name}: {what}"
        self._context.safety.react(Reason.GRIPPER_FAILED, text)
        self._context.throttled.log("gripper", f"gripper_failed: {text}")
        self._sent, self._due, self._not_before = None, 0.0, self._context.clock.steady() + _RETRY
