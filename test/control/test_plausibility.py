from typing import Any

import numpy as np
import pytest
from demo_arm import ARM, HOME, configure

from vla_ros.contract.components import QUANTITIES, parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.robot import RobotController
from vla_ros.types import ActionChunk

POSE = ARM.forward(HOME)
GOOD: dict[str, Any] = {  # an action of each kind, and how far a policy may overshoot it
    "arm.joint_position[rad]": (HOME, 6.0),
    "arm.joint_position[deg]": (np.degrees(HOME), 360.0),
    "arm.joint_position[-100..100]": (np.zeros(7), 400.0),
    "arm.joint_velocity[rad/s]": (np.ones(7), 6.0),
    "arm.joint_velocity[deg/s]": (np.full(7, 60.0), 360.0),
    "arm.joint_velocity[1]": (np.ones(7), 3.0),
    "arm.joint_delta[rad]": (np.full(7, 0.1), 3.0),
    "arm.joint_delta[deg]": (np.full(7, 5.0), 180.0),
    "arm.tip_delta": (np.full(6, 0.05), 3.0),
    "arm.tip_position + arm.tip_rotation[rotation_vector]": (np.r_[POSE.position, 0.0, 3.1, 0.0], 3.1),
    "arm.tip_position + arm.tip_rotation[rot6d]": (np.r_[POSE.position, POSE.rotation[:2].ravel()], 3.0),
    "arm.tip_position + arm.tip_rotation[quaternion_xyzw]": (np.r_[POSE.position, 1.0, 0.0, 0.0, 0.0], 3.0),
}
ABSURD = [1e30, -1e30, 2.0**62, -(2.0**62), 1e6]


def controller(text: str, **sections: Any) -> RobotController:
    parts = parse_components(text, action=True)
    spec = PolicySpec(action=parts, dimension=sum(part.size(7) for part in parts), horizon=4)
    return RobotController(configure(**sections), spec, {"arm": ARM})


def test_every_quantity_of_an_action_is_tried() -> None:
    tried = {part.quantity for text in GOOD for part in parse_components(text, action=True)}
    assert tried | {"gripper"} == {name for name, quantity in QUANTITIES.items() if quantity.action}


@pytest.mark.parametrize("text", GOOD)
def test_an_absurd_number_is_invalid_wherever_it_stands_and_overshoot_is_not(text: str) -> None:
    numbers, overshoot = GOOD[text]
    robot = controller(f"{text} + arm.gripper + unused[1]")
    good = np.r_[numbers, 1.0, 1e30][None].repeat(3, 0)
    robot.check(ActionChunk(good, 0))
    for sign in (-1, 1):
        robot.check(ActionChunk(good + sign * np.r_[np.full(len(numbers), overshoot), 3.0, 0.0], 0))
    for column in range(len(numbers) + 1):
        for absurd in ABSURD:
            bad = good.copy()
            bad[1, column] = absurd
            with pytest.raises(
                Refused, match=rf"number {column} of step 1 \(.*expected .* to .*max_overshoot"
            ) as why:
                robot.check(ActionChunk(bad, 0))
            assert why.value.reason is Reason.ACTION_INVALID


@pytest.mark.parametrize(("opened", "closed"), [(1.0, 0.0), (-1.0, 1.0), (0.0, 100.0), (1.49, -0.62)])
def test_a_gripper_may_overshoot_its_range(opened: float, closed: float) -> None:
    robot = controller("arm.tip_delta + arm.gripper", gripper={"open_value": opened, "closed_value": closed})
    width = abs(opened - closed)
    for value in (opened, closed, max(opened, closed) + width, min(opened, closed) - width):
        robot.check(ActionChunk(np.r_[np.zeros(6), value][None], 0))


def test_the_range_follows_the_scale_of_a_delta() -> None:
    robot = controller("arm.tip_delta", control={"translation_scale": 0.001})
    robot.check(ActionChunk(np.full((1, 6), 30.0), 0))  # 3 cm
    with pytest.raises(Refused):
        robot.check(ActionChunk(np.r_[20_000.0, np.zeros(5)][None], 0))  # 20 m


def test_a_factor_of_zero_accepts_any_finite_number() -> None:
    robot = controller("arm.tip_delta", control={"max_overshoot": 0.0})
    robot.check(ActionChunk(np.full((1, 6), 1e30), 0, normalized=np.full((1, 6), 1e30)))
    robot.configure(configure(control={"max_overshoot": 10.0}))
    with pytest.raises(Refused):
        robot.check(ActionChunk(np.full((1, 6), 1e30), 0))


def test_the_statistics_bound_what_a_local_policy_returns() -> None:
    """A checkpoint with q01 = -0.01 and q99 = 0.03 for every number but the last, which has no statistics."""
    robot = controller("arm.joint_delta[rad]")

    def chunk(normalized: float) -> ActionChunk:
        numbers = np.full((2, 7), normalized)
        actions = 0.5 * (numbers + 1) * 0.04 - 0.01
        actions[:, 6] = numbers[:, 6] = 2.0
        return ActionChunk(actions, 0, normalized=numbers)

    for sigmas in (0.0, 2.0, 3.0):
        robot.check(chunk(1.0 + sigmas))
        robot.check(chunk(-1.0 - sigmas))
    with pytest.raises(
        Refused, match=r"is 0.23, 11 times the range of the checkpoint's statistics, expected up to 10"
    ):
        robot.check(chunk(11.0))
