import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

PUSHED = 0.4  # rad
STEP = 0.02 + 1e-6  # rad; by how much a motion of the scripted policy, 5 mm, may turn the first joint
GO = ("-p", "control.armed:=true", "-p", "policy.instruction:=go on", "-p", "timeouts.camera:=0.3")


def nothing(robot: Any, node: Any) -> None:
    robot.send_frame()


def stopped(robot: Any, node: Any) -> None:
    robot.send_frame()
    robot.stop()


def blind(robot: Any, node: Any) -> None:
    robot.send_joints()


def ended(robot: Any, node: Any) -> None:
    robot.send_frame()
    node.signal(signal.SIGTERM)


@pytest.mark.causes("suspended")
@pytest.mark.parametrize("meanwhile", [nothing, stopped, blind, ended])
def test_the_first_command_after_a_suspension_holds_the_arm_where_it_was_pushed(
    robot, start, meanwhile: Callable[[Any, Any], None]
) -> None:
    node = start(*GO)
    robot.until(lambda: len(robot.commands) > 10, robot.send_frame)
    node.signal(signal.SIGSTOP)
    time.sleep(0.1)
    before, began = len(robot.commands), robot.positions[0]
    for step in range(1, 21):
        robot.positions[0] = began + PUSHED * step / 20
        robot.send_joints()
        time.sleep(0.02)
    meanwhile(robot, node)
    slept = robot.now()
    node.signal(signal.SIGCONT)
    each = robot.send_joints if meanwhile is blind else robot.send_frame
    robot.until(lambda: len(robot.commands) > before, each)
    hold = robot.commands[before]
    assert list(hold.position[:7]) == robot.positions
    assert robot.command_stamp(before) > slept, "the hold is older than the end of the suspension"
    robot.until(lambda: "suspended" in robot.reported, each)
    if meanwhile is nothing:
        robot.until(lambda: robot.command_stamp() in robot.sent, each)
    for command in robot.commands[before:]:
        assert abs(command.position[0] - robot.positions[0]) < STEP
