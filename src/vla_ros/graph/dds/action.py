"""Clients of actions. On the wire an action is three services and two topics; goal and result suffice here."""

from __future__ import annotations

import uuid
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_ros.graph.dds.node import DdsNode


class DdsGoalHandle:
    """What a server said to a goal (``rclpy.action.client.ClientGoalHandle``)."""

    def __init__(self, client: DdsActionClient, goal_id: Any, accepted: bool) -> None:
        self._client, self._goal_id, self.accepted = client, goal_id, accepted

    def get_result_async(self) -> Future[Any]:
        """Ask for the result; the future has an object with ``status`` and ``result`` when the goal has ended."""
        return self._client.ask(self._goal_id)


class DdsActionClient:
    """The subset of ``rclpy.action.ActionClient`` that this package uses. Futures end on the thread that spins."""

    def __init__(self, node: DdsNode, action_type: Any, name: str) -> None:
        self._node, self._type = node, action_type
        self._goals = node.create_client(action_type.SendGoal, f"{name}/_action/send_goal")
        self._results = node.create_client(action_type.GetResult, f"{name}/_action/get_result")

    def server_is_ready(self) -> bool:
        """Whether a server takes goals."""
        return self._goals.service_is_ready() and self._results.service_is_ready()

    def send_goal_async(self, goal: Any) -> Future[DdsGoalHandle]:
        """Send a goal; the future has a handle when the server has accepted or rejected it."""
        request = self._type.SendGoal.Request(goal=goal)
        request.goal_id.uuid = uuid.uuid4().bytes
        answered: Future[DdsGoalHandle] = Future()

        def on_answer(done: Future[Any]) -> None:
            answered.set_result(DdsGoalHandle(self, request.goal_id, done.result().accepted))

        self._goals.call_async(request).add_done_callback(on_answer)
        return answered

    def ask(self, goal_id: Any) -> Future[Any]:
        """Status and result of a goal."""
        return self._results.call_async(self._type.GetResult.Request(goal_id=goal_id))

    def destroy(self) -> None:
        """Leave the graph. Safe to call twice."""
        for client in (self._goals, self._results):
            self._node.destroy_client(client)
