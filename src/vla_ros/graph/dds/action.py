"""Actions, which are three services and two topics on the wire. The client implements only goals and results."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from vla_ros.graph.node import CANCELING, EXECUTING
from vla_ros.graph.qos import PROFILES

if TYPE_CHECKING:
    from vla_ros.graph.dds.node import DdsNode

_REMEMBERED = 20  # goals whose result can still be requested
_UNKNOWN, _TERMINATED = 2, 3  # action_msgs/srv/CancelGoal


class DdsGoalHandle:
    """A server's response to a goal (``rclpy.action.client.ClientGoalHandle``)."""

    def __init__(self, client: DdsActionClient, goal_id: Any, accepted: bool) -> None:
        self._client, self._goal_id, self.accepted = client, goal_id, accepted

    def get_result_async(self) -> Future[Any]:
        return self._client.ask(self._goal_id)


class DdsActionClient:
    """The subset of ``rclpy.action.ActionClient`` used here. Futures complete on the thread that spins."""

    def __init__(self, node: DdsNode, action_type: Any, name: str) -> None:
        self._node, self._type = node, action_type
        self._goals = node.create_client(action_type.SendGoal, f"{name}/_action/send_goal")
        self._results = node.create_client(action_type.GetResult, f"{name}/_action/get_result")

    def server_is_ready(self) -> bool:
        return self._goals.service_is_ready() and self._results.service_is_ready()

    def send_goal_async(self, goal: Any) -> Future[DdsGoalHandle]:
        """Send a goal; the future yields a handle when the server has accepted or rejected it."""
        request = self._type.SendGoal.Request(goal=goal)
        request.goal_id.uuid = uuid.uuid4().bytes
        answered: Future[DdsGoalHandle] = Future()

        def on_answer(done: Future[Any]) -> None:
            answered.set_result(DdsGoalHandle(self, request.goal_id, done.result().accepted))

        self._goals.call_async(request).add_done_callback(on_answer)
        return answered

    def ask(self, goal_id: Any) -> Future[Any]:
        return self._results.call_async(self._type.GetResult.Request(goal_id=goal_id))

    def destroy(self) -> None:
        for client in (self._goals, self._results):
            self._node.destroy_client(client)


class DdsServedGoal:
    """An accepted goal; see :class:`vla_ros.graph.node.ServedGoal`."""

    def __init__(self, server: DdsActionServer, goal_id: Any, goal: Any) -> None:
        self._server, self.goal_id, self.goal = server, goal_id, goal
        self.status = EXECUTING
        self.result: Future[Any] = Future()

    def publish_feedback(self, feedback: Any) -> None:
        self._server.publish_feedback(self.goal_id, feedback)

    def end(self, status: int, result: Any) -> None:
        """End the goal with a final status and send the result to the clients that requested it."""
        self.status = status
        self._server.publish_status()
        self.result.set_result((status, result))


class DdsActionServer:
    """Serves an action; see :attr:`vla_ros.graph.node.Backend.create_action_server`."""

    def __init__(
        self,
        node: DdsNode,
        action_type: Any,
        name: str,
        accept: Callable[[Any], bool],
        start: Callable[[Any], None],
        cancel: Callable[[Any], None],
    ) -> None:
        self._type, self._types = action_type, node.types
        self._accept, self._start, self._cancel = accept, start, cancel
        self._goals: dict[bytes, DdsServedGoal] = {}
        base = f"{name}/_action"
        services = (
            (action_type.SendGoal, "send_goal", self._on_goal),
            (action_type.GetResult, "get_result", self._on_result),
            (node.types.service("action_msgs/srv/CancelGoal"), "cancel_goal", self._on_cancel),
        )
        created = [node.create_service(kind, f"{base}/{end}", take) for kind, end, take in services]
        self._destroy = [partial(node.destroy_service, each) for each in created]
        status = node.types.message("action_msgs/msg/GoalStatusArray")
        self._status = node.create_publisher(status, f"{base}/status", PROFILES["instruction"])
        self._feedback = node.create_publisher(action_type.FeedbackMessage, f"{base}/feedback", PROFILES["default"])
        self._destroy += [partial(node.destroy_publisher, each) for each in (self._status, self._feedback)]

    def publish_feedback(self, goal_id: Any, feedback: Any) -> None:
        """Send feedback and the states again: a client misses states published before its goal was accepted."""
        self.publish_status()
        self._feedback.publish(self._type.FeedbackMessage(goal_id=goal_id, feedback=feedback))

    def publish_status(self) -> None:
        make = self._types.message
        states = [
            make("action_msgs/msg/GoalStatus")(
                goal_info=make("action_msgs/msg/GoalInfo")(goal_id=goal.goal_id), status=goal.status
            )
            for goal in self._goals.values()
        ]
        self._status.publish(make("action_msgs/msg/GoalStatusArray")(status_list=states))

    def destroy(self) -> None:
        for destroy in self._destroy:
            destroy()

    def _on_goal(self, request: Any, response: Any) -> Any:
        key = bytes(request.goal_id.uuid)
        response.accepted = key not in self._goals and self._accept(request.goal)
        if response.accepted:
            goal = self._goals[key] = DdsServedGoal(self, request.goal_id, request.goal)
            while len(self._goals) > _REMEMBERED:
                self._goals.pop(next(iter(self._goals)))
            self.publish_status()
            self._start(goal)
        return response

    def _on_result(self, request: Any, response: Any) -> Any:
        goal = self._goals.get(bytes(request.goal_id.uuid))
        if goal is None:
            return response  # with status unknown
        answer: Future[Any] = Future()

        def on_end(done: Future[Any]) -> None:
            status, result = done.result()
            answer.set_result(self._type.GetResult.Response(status=status, result=result))

        goal.result.add_done_callback(on_end)
        return answer

    def _on_cancel(self, request: Any, response: Any) -> Any:
        """Cancel a goal, or all goals if the id is zero."""
        key, running = (
            bytes(request.goal_info.goal_id.uuid),
            [g for g in self._goals.values() if g.status == EXECUTING],
        )
        chosen = [goal for goal in running if not any(key) or bytes(goal.goal_id.uuid) == key]
        exists = key in self._goals or not any(key)
        response.return_code = 0 if chosen else _TERMINATED if exists else _UNKNOWN
        response.goals_canceling = [type(request.goal_info)(goal_id=goal.goal_id) for goal in chosen]
        for goal in chosen:
            goal.status = CANCELING
            self._cancel(goal)
        return response
