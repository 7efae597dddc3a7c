"""A gripper's action server and a client of ``~/run_policy``, on the embedded participant."""

from concurrent.futures import Future
from functools import partial
from typing import Any

from vla_ros.execution.gripper_goals import ACTION_TYPES
from vla_ros.graph.node import Graph

NAME = "/hand"
"""Name of the gripper's action."""

_SUCCEEDED, _ABORTED = 4, 6  # action_msgs/msg/GoalStatus


class Hand:
    """An action server for each action of a gripper.

    Args:
        output: A value of ``gripper.output``.
        answer: Result of every goal: ``done``, ``stalled``, ``aborted``, ``rejected`` or ``late`` (no result).

    Attributes:
        goals: Goals received, each after the suffix of its action's name.
        succeeded: Number of results that reported success.
    """

    def __init__(self, graph: Graph, output: str = "gripper_command", answer: str = "done") -> None:
        self.goals: list[tuple[str, Any]] = []
        self.answer = answer
        self.succeeded = 0
        self._node = graph.create_node("hand")
        for end, kind in ACTION_TYPES[output].items():
            action = graph.action(kind)
            name = f"{NAME}{end}/_action"
            self._node.create_service(action.SendGoal, f"{name}/send_goal", partial(self._on_goal, end))
            self._node.create_service(action.GetResult, f"{name}/get_result", self._on_result)

    def _on_goal(self, end: str, request: Any, response: Any) -> Any:
        self.goals.append((end, request.goal))
        response.accepted = self.answer != "rejected"
        return response

    def _on_result(self, request: Any, response: Any) -> Any:
        if self.answer == "late":
            return Future()
        response.status = _SUCCEEDED if self.answer == "done" else _ABORTED
        self.succeeded += self.answer == "done"
        if hasattr(response.result, "success"):
            response.result.success = self.answer == "done"
        else:
            response.result.stalled = self.answer == "stalled"
        return response

    def close(self) -> None:
        self._node.destroy_node()


class Tree:
    """A client of ``~/run_policy`` that leaves the graph as soon as its goal is accepted."""

    def __init__(self, graph: Graph) -> None:
        self._node = graph.create_node("tree")
        self._type = graph.action("rosetta_interfaces/action/RunPolicy")
        self._client = graph.create_action_client(self._node, self._type, "/vla_policy/run_policy")

    def run(self, prompt: str) -> None:
        answer = self._client.send_goal_async(self._type.Goal(prompt=prompt))
        answer.add_done_callback(lambda _: self._node.destroy_node())
