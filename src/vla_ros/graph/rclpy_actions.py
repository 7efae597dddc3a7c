"""An action server on rclpy: the node ends the goals explicitly, and goals occupy no thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.task import Future

from vla_ros.graph.node import ABORTED, CANCELED, SUCCEEDED

_LAST_WORDS = 1.0  # s to send results before the server is destroyed
_ROUNDS = 10


class RclpyServedGoal:
    """See :class:`vla_ros.graph.node.ServedGoal`."""

    def __init__(self, handle: Any) -> None:
        self._handle, self.goal = handle, handle.request
        self.ended = Future()

    def publish_feedback(self, feedback: Any) -> None:
        self._handle.publish_feedback(feedback)

    def end(self, status: int, result: Any) -> None:
        handle = self._handle
        {SUCCEEDED: handle.succeed, ABORTED: handle.abort, CANCELED: handle.canceled}[status]()
        self.ended.set_result(result)


class RclpyActionServer:
    """An action server that sends all results before it is destroyed."""

    def __init__(self, node: Any, server: ActionServer, goals: Mapping[bytes, RclpyServedGoal]) -> None:
        self._node, self._server, self._goals = node, server, goals

    def destroy(self) -> None:
        """Destroy the server; the results of ended goals are sent first, unless another thread is spinning."""
        deadline, rounds = time.monotonic() + _LAST_WORDS, _ROUNDS
        ended = [goal for goal in self._goals.values() if goal.ended.done()]
        while ended and rounds and time.monotonic() < deadline:
            rounds -= not self._goals  # the result is sent by a task that runs later
            try:
                self._node.executor.spin_once(timeout_sec=0.01)
            except Exception:  # within a callback, or after a shutdown
                break
        self._server.destroy()


def create_action_server(
    node: Any,
    action_type: Any,
    name: str,
    accept: Callable[[Any], bool],
    start: Callable[[Any], None],
    cancel: Callable[[Any], None],
) -> RclpyActionServer:
    """See :attr:`vla_ros.graph.node.Backend.create_action_server`."""
    goals: dict[bytes, RclpyServedGoal] = {}

    async def execute(handle: Any) -> Any:
        key = bytes(handle.goal_id.uuid)
        goal = goals[key] = RclpyServedGoal(handle)
        start(goal)
        try:
            return await goal.ended
        finally:
            del goals[key]

    def on_cancel(handle: Any) -> CancelResponse:
        goal = goals.get(bytes(handle.goal_id.uuid))
        if goal is None:
            return CancelResponse.REJECT
        # The goal becomes CANCELING only after this function returns.
        node.executor.create_task(cancel, goal)
        return CancelResponse.ACCEPT

    server = ActionServer(
        node,
        action_type,
        name,
        execute,
        goal_callback=lambda goal: GoalResponse.ACCEPT if accept(goal) else GoalResponse.REJECT,
        cancel_callback=on_cancel,
    )
    return RclpyActionServer(node, server, goals)
