from collections.abc import Callable
from typing import Any

import pytest

from vla_ros.graph.node import ABORTED, CANCELED, SUCCEEDED

NO_INSTRUCTION = "policy.instruction:=''"
NAME = "/vla_policy/run_policy"


class Caller:
    """A behaviour tree: sends goals and notes what comes back."""

    def __init__(self, robot: Any) -> None:
        graph = robot.graph
        self._robot, self._type = robot, graph.action("rosetta_interfaces/action/RunPolicy")
        self._node = graph.create_node("tree")
        self._client = graph.create_action_client(self._node, self._type, NAME)
        cancel = graph.service("action_msgs/srv/CancelGoal")
        self._cancels = self._node.create_client(cancel, f"{NAME}/_action/cancel_goal")
        self._request = cancel.Request
        self._success = self._node.create_publisher(
            graph.message("std_msgs/msg/Bool"), "/vla_policy/success", graph.qos("command")
        )
        self.feedback: list[Any] = []
        self.meanwhile: Callable[[], Any] | None = robot.send_frame
        self._node.create_subscription(
            self._type.FeedbackMessage, f"{NAME}/_action/feedback", self.feedback.append, graph.qos("default")
        )

    def send(self, prompt: str) -> Any:
        """The handle of a goal, once it was answered."""
        self._robot.until(self._client.server_is_ready, self.meanwhile)
        answer = self._client.send_goal_async(self._type.Goal(prompt=prompt))
        self._robot.until(answer.done, self.meanwhile)
        return answer.result()

    def end_of(self, handle: Any) -> tuple[int, bool, str]:
        """Status, success and message, once the goal has ended."""
        future = handle.get_result_async()
        self._robot.until(future.done, self.meanwhile)
        ended = future.result()
        return ended.status, ended.result.success, ended.result.message

    def cancel(self) -> int:
        """Cancel every goal; how many are ending."""
        answer = self._cancels.call_async(self._request())
        self._robot.until(answer.done, self.meanwhile)
        return len(answer.result().goals_canceling)

    def succeed(self) -> None:
        self._robot.until(self._success.get_subscription_count, self.meanwhile)
        self._success.publish(self._robot.graph.message("std_msgs/msg/Bool")(data=True))


@pytest.fixture
def caller(robot: Any) -> Caller:
    return Caller(robot)


def moving(robot: Any) -> None:
    """Wait for five more motions."""
    sent = len(robot.commands)
    robot.until(lambda: len(robot.commands) > sent + 5 and robot.command_stamp() in robot.sent, robot.send_frame)


def holding(robot: Any) -> None:
    """Wait until the node holds for want of an instruction; nothing moves then."""
    robot.until(lambda: "no_instruction" in robot.status["holds"], robot.send_frame)
    sent, seen = len(robot.commands), robot.now()
    robot.until(lambda: robot.now() > seen + 300_000_000, robot.send_frame)
    assert len(robot.commands) <= sent + 1


def test_ten_consecutive_goals_succeed(robot, inside, caller: Caller) -> None:
    inside(NO_INSTRUCTION)
    for number in range(10):
        handle = caller.send(f"task {number}")
        assert handle.accepted
        moving(robot)
        if number == 0:
            robot.until(
                lambda: any(
                    each.feedback.status == "executing" and each.feedback.published_actions > 0
                    for each in caller.feedback
                ),
                robot.send_frame,
            )
        caller.succeed()
        assert caller.end_of(handle) == (SUCCEEDED, True, "true on ~/success")
    holding(robot)


def test_a_goal_moves_though_no_frame_arrived_since_the_last_one_ended(robot, inside, caller: Caller) -> None:
    inside(NO_INSTRUCTION)
    first = caller.send("first")
    moving(robot)
    caller.meanwhile = None
    caller.succeed()
    assert caller.end_of(first)[0] == SUCCEEDED
    assert caller.send("second").accepted
    moving(robot)


def test_a_cancel_is_a_hold(robot, inside, caller: Caller) -> None:
    inside(NO_INSTRUCTION)
    handle = caller.send("go on")
    moving(robot)
    assert caller.cancel() == 1
    assert caller.end_of(handle) == (CANCELED, False, "canceled")
    holding(robot)
    assert caller.cancel() == 0
    assert caller.send("go on again").accepted
    moving(robot)


def test_a_goal_ends_after_its_time(robot, inside, caller: Caller) -> None:
    inside(NO_INSTRUCTION, "timeouts.run:=1.0")
    assert caller.end_of(caller.send("go on")) == (ABORTED, False, "not done within 1 s (timeouts.run)")
    holding(robot)


def test_a_stop_ends_a_goal_with_its_reason(robot, inside, caller: Caller) -> None:
    inside(NO_INSTRUCTION)
    handle = caller.send("go on")
    moving(robot)
    robot.stop()
    status, success, message = caller.end_of(handle)
    assert (status, success) == (ABORTED, False)
    assert message.startswith("stopped by operator_stop (true on the stop topic)")


def test_a_hold_is_reported_as_feedback_and_does_not_end_the_goal(robot, inside, caller: Caller) -> None:
    inside(NO_INSTRUCTION)
    handle = caller.send("nan")
    robot.until(lambda: any("action_invalid" in each.feedback.status for each in caller.feedback), robot.send_frame)
    caller.succeed()
    assert caller.end_of(handle)[0] == SUCCEEDED


def test_a_goal_does_not_arm(robot, inside, caller: Caller) -> None:
    node = inside(NO_INSTRUCTION, "control.armed:=false")
    handle = caller.send("go on")
    status, success, message = caller.end_of(handle)
    assert (status, success) == (ABORTED, False)
    assert message.startswith("not started: disarmed")
    assert node.enable(True)[0]
    robot.until(lambda: robot.status["state"] == "holding", robot.send_frame)
    assert not robot.commands or robot.command_stamp() not in robot.sent
    assert caller.send("go on").accepted
    moving(robot)


def test_one_goal_at_a_time_and_another_instruction_ends_it(robot, inside, caller: Caller) -> None:
    inside(NO_INSTRUCTION)
    handle = caller.send("first")
    assert not caller.send("second").accepted
    robot.instruct("do something else")
    assert caller.end_of(handle) == (ABORTED, False, "another instruction was given")
    moving(robot)
    robot.until(lambda: robot.status["instruction"] == "do something else", robot.send_frame)


@pytest.mark.parametrize(("prompt", "said"), [(" ", "the prompt is empty"), ("x" * 9000, "characters refused")])
def test_a_prompt_that_is_no_instruction_is_refused(robot, inside, caller: Caller, prompt: str, said: str) -> None:
    inside(NO_INSTRUCTION)
    status, _, message = caller.end_of(caller.send(prompt))
    assert status == ABORTED
    assert said in message
