import numpy as np
import pytest

from vla_ros.config import Config, load
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.command import message_type
from vla_ros.control.reasons import Refused
from vla_ros.control.robot import RobotController
from vla_ros.errors import ConfigError
from vla_ros.types import ActionChunk

LIBERO = "arm.tip_delta[rotation_vector] + arm.gripper[1..-1]"
ENDS = ("gripper.closed_value:=1.0", "gripper.open_value:=-1.0")
THEIRS = ("gripper.closed_position:=1.0", "gripper.open_position:=-1.0")


def options(*assignments: str) -> Config:
    plain = ("policy.name:=hold", "control.output:=environment", "control.rotation:=rotation_vector")
    return load([], [*plain, *ENDS, *THEIRS, *assignments])


def controller(*assignments: str, action: str = LIBERO, dimension: int = 7) -> RobotController:
    components = parse_components(action, action=True)
    return RobotController(options(*assignments), PolicySpec(action=components, dimension=dimension), {})


def send(robot: RobotController, numbers: np.ndarray) -> np.ndarray:
    (command,) = robot.command(numbers, None, 0, 0.05)
    robot.sent()
    assert command.action is not None
    assert (len(command.positions), command.hold) == (0, False)
    return command.action


def held(robot: RobotController) -> list[float]:
    (command,), refused = robot.hold(None)
    assert command.action is not None
    assert (refused, command.hold) == ((), True)
    return command.action.tolist()


def test_numbers_are_bit_equal_and_a_hold_keeps_the_gripper() -> None:
    robot = controller("control.delta_form:=choose", "control.translation_scale:=0.05")
    assert held(robot) == [0.0] * 6 + [-1.0]  # open
    for row in np.random.default_rng(0).normal(size=(50, 7)):
        np.testing.assert_array_equal(send(robot, row), row)
        assert held(robot) == [0.0] * 6 + [row[6]]
    assert robot.counters == {}


def test_clips_are_those_of_the_options_and_are_counted() -> None:
    numbers = np.array([3.0, 0.0, 4.0, 0.1, 2.0, 0.0, 0.3])
    each = controller("control.clip:=each")
    assert send(each, numbers).tolist() == [1.0, 0.0, 1.0, 0.1, 1.0, 0.0, 0.3]
    assert each.counters == {"action_clipped": 1}
    together = send(controller("control.clip:=together"), numbers)
    np.testing.assert_allclose(together[:3], [0.6, 0.0, 0.8])
    assert np.linalg.norm(together[3:6]) == pytest.approx(1.0)


@pytest.mark.parametrize(("value", "sent"), [(0.0, 1.0), (0.4, 1.0), (0.6, -1.0), (1.0, -1.0), (1.3, -1.0)])
def test_another_convention_of_the_gripper_is_converted(value: float, sent: float) -> None:
    """As OpenVLA-OFT's evaluation does: 0 closed and 1 open become 1 and -1."""
    robot = controller(
        "gripper.closed_value:=0.0", "gripper.open_value:=1.0", action=LIBERO.replace("1..-1", "0..1")
    )
    assert send(robot, np.array([0.0] * 6 + [value]))[6] == sent


def test_an_absolute_motion_is_held_where_it_was_last_sent() -> None:
    robot = controller(action="arm.joint_position + arm.gripper[1..-1] + unused[1]", dimension=9)
    assert np.isnan(held(robot)[:7]).all()
    row = np.arange(9.0) / 10
    np.testing.assert_array_equal(send(robot, row), row)
    assert held(robot) == [*row[:8], 0.0]
    robot.reset()
    assert np.isnan(held(robot)[0])


def test_what_cannot_be_executed_is_refused() -> None:
    robot = controller()
    with pytest.raises(Refused, match="expected 7 finite numbers"):
        send(robot, np.array([np.nan] * 7))
    with pytest.raises(Refused, match=r"control\.max_overshoot"):
        robot.check(ActionChunk(np.full((1, 7), 1e6), 0))
    with pytest.raises(ConfigError, match="an environment takes every gripper number"):
        controller("gripper.mode:=none")
    with pytest.raises(ConfigError, match="which only vla-ros eval can send"):
        message_type("environment")
