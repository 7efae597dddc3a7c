"""The first motion of a new robot: joints one after the other, grippers last."""

from typing import Any

import numpy as np
import pytest

from vla_ros.config import Config, build
from vla_ros.policies.wiggle import WigglePolicy
from vla_ros.types import FloatArray, Observation

SECONDS, JOINTS = 2.0, 3


def options(**more: Any) -> Config:
    values = {
        "policy.name": "wiggle",
        "policy.seconds": SECONDS,
        "robot.joint_names": ["a", "b", "c"],
        "robot.gripper_joint_names": ["finger"],
        "gripper.open_value": -1.0,
        "gripper.closed_value": 1.0,
    }
    return build(values | more)


def motion(config: Config, opening: float) -> list[tuple[float, FloatArray]]:
    """Slots since the beginning, and the action, of a robot that follows at once."""
    policy = WigglePolicy(config)
    session, [state] = policy.start_session(), policy.spec.state
    has_gripper = any(part.quantity == "gripper" for part in policy.spec.action)
    assert len(state.components) == 1 + has_gripper, "the gripper's opening is measured"
    said = []
    for step in range(int(20 * SECONDS * (JOINTS + 1) * 2)):
        measured = np.array([0.1, 0.2, 0.3, *([opening] if has_gripper else [])])
        stamp = 1_000_000_000 + step * 50_000_000
        observation = Observation({}, "go", stamp, {state.key: measured})
        [action] = policy.infer(session, observation).actions
        said.append((step * 0.05 / SECONDS, action))
    return said


@pytest.mark.parametrize("opening", [0.0, 0.3, 0.7, 1.0])
def test_a_gripper_stays_as_it_is_until_all_joints_have_moved(opening: float) -> None:
    home = 1.0 - 2.0 * opening  # in the convention of the options: -1 is open
    other = -1.0 if opening < 0.5 else 1.0  # the end that is further away
    for turn, action in motion(options(), opening):
        slot = turn % (JOINTS + 1)
        expected = home if slot < JOINTS else other if slot < JOINTS + 0.5 else -other
        assert action[-1] == pytest.approx(expected), turn
        still = [joint for joint in range(JOINTS) if not joint <= slot < joint + 1]
        np.testing.assert_allclose(action[still], np.array([0.1, 0.2, 0.3])[still], atol=1e-12)


def test_without_a_gripper_only_the_joints_move() -> None:
    said = motion(options(**{"gripper.mode": "none"}), 0.0)
    assert {len(action) for _, action in said} == {JOINTS}
    assert max(float(np.abs(action - [0.1, 0.2, 0.3]).max()) for _, action in said) == pytest.approx(0.05, rel=0.01)
