import time
from typing import Any

import pytest

from tools.faults.hand import NAME, Hand
from vla_ros.config import load
from vla_ros.errors import ConfigError
from vla_ros.execution.gripper_goals import ACTION_TYPES


def options(output: str = "gripper_command", *more: str) -> tuple[str, ...]:
    fingers = "robot.gripper_joint_names:=[finger_left, finger_right]"
    return f"topics.gripper:={NAME}", f"gripper.output:={output}", fingers, "timeouts.driver:=0.3", *more


def position(goal: Any) -> float:
    command = getattr(goal, "command", None)
    if command is None:
        return float(goal.width) / 2
    return float(command.position[0] if hasattr(command, "velocity") else command.position)


@pytest.mark.parametrize("output", ACTION_TYPES)
def test_a_goal_is_sent_when_the_wanted_position_changes(robot, inside, output: str) -> None:
    hand = Hand(robot.graph, output)
    inside(*options(output, "gripper.goal_effort:=7.0", "gripper.goal_speed:=0.2"))
    robot.until(lambda: len(robot.commands) > 20 and hand.goals, robot.send_frame)
    assert [position(goal) for _, goal in hand.goals] == [0.04]
    assert all(list(command.name) == list(robot.names) for command in robot.commands)
    robot.instruct("close it")
    robot.until(lambda: len(hand.goals) > 1, robot.send_frame)
    count = len(robot.commands)
    robot.until(lambda: len(robot.commands) > count + 20, robot.send_frame)
    assert [position(goal) for _, goal in hand.goals] == [0.04, 0.0]
    goal = hand.goals[1][1]
    if output == "franka":
        assert [each for each, _ in hand.goals] == ["/move", "/grasp"]
        assert (goal.force, goal.speed) == (7.0, 0.2)
    elif output == "gripper_command":
        assert goal.command.max_effort == 7.0
    else:
        assert (list(goal.command.effort), list(goal.command.velocity)) == ([7.0], [0.2])
    assert "gripper_failed" not in robot.reported


FAILURES = {
    "rejected": "/hand: the goal was rejected",
    "aborted": "/hand: the goal aborted",
    "late": "/hand: no answer within 0.3 s (timeouts.gripper)",
}


@pytest.mark.causes("gripper_failed")
def test_a_goal_that_fails_is_named_and_sent_again_while_the_arm_goes_on(robot, inside, caplog) -> None:
    hand = Hand(robot.graph, answer="rejected")
    inside(*options("gripper_command", "timeouts.gripper:=0.3"))
    for hand.answer, said in FAILURES.items():
        begun, goals, sent = time.monotonic(), len(hand.goals), len(robot.commands)
        robot.until(lambda goals=goals: len(hand.goals) > goals + 2, robot.send_frame)
        assert time.monotonic() - begun > 1.5, "it is not sent again with every step"
        assert len(robot.commands) - sent > 15, "the arm does not wait"
        robot.until(lambda said=said: f"gripper_failed: {said}" in caplog.text, robot.send_frame)
    robot.until(lambda: "gripper_failed" in robot.reported, robot.send_frame)
    hand.answer = "done"
    robot.until(lambda: hand.succeeded, robot.send_frame)  # maybe the late result of a goal that is sent once more
    sent, count = len(robot.commands), len(hand.goals)
    robot.until(lambda: len(robot.commands) > sent + 80, robot.send_frame)
    assert len(hand.goals) <= count + 1


def test_a_gripped_object_is_no_failure(robot, inside) -> None:
    """gripper_controllers abort a goal whose fingers stall, unless told otherwise."""
    hand = Hand(robot.graph, answer="stalled")
    inside(*options())
    robot.until(lambda: len(robot.commands) > 40 and hand.goals, robot.send_frame)
    assert len(hand.goals) == 1
    assert "gripper_failed" not in robot.reported


def test_the_arm_waits_for_the_action_server_and_stops_if_it_leaves(robot, inside) -> None:
    inside(*options())
    robot.until(lambda: "driver_missing" in robot.status.get("holds", ()), robot.send_frame)
    assert NAME in robot.status["holds"]["driver_missing"]
    assert not any(robot.command_stamp(index) in robot.sent for index in range(len(robot.commands)))
    hand = Hand(robot.graph, answer="late")
    robot.until(lambda: hand.goals and len(robot.commands) > 10, robot.send_frame)
    hand.close()  # within a goal
    robot.until(lambda: robot.status["stopped_by"] == "driver_gone", robot.send_frame)
    assert NAME in robot.status["detail"]


def test_no_goal_follows_a_stop(robot, inside) -> None:
    hand = Hand(robot.graph)
    inside(*options())
    robot.until(lambda: hand.goals, robot.send_frame)
    robot.stop()
    robot.instruct("close it")
    robot.until(lambda: robot.status["stopped_by"] == "operator_stop", robot.send_frame)
    seen = len(robot.actions)
    robot.until(lambda: len(robot.actions) > seen + 10, robot.send_frame)
    assert len(hand.goals) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("topics.gripper:=''",), "topics.gripper: found no value, expected the name of the action"),
        (("gripper.max_speed:=0.1",), "set gripper.goal_speed instead"),
    ],
)
def test_options_that_do_not_go_with_an_action_are_refused(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load([], options("gripper_command", *given))
