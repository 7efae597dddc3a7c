from typing import Any

import numpy as np
import pytest
from demo_arm import ARM, DT, HOME, STAMP, configure, several, state

from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.reasons import Level, Reason, Refused
from vla_ros.control.robot import RobotController
from vla_ros.types import JointState

ACTION = "arm_0.joint_delta + arm_0.gripper + arm_1.tip_position + arm_1.tip_rotation[rot6d] + unused[2]"


def robot(outputs: tuple[str, str] = ("joint_state", "joint_state"), **options: Any) -> RobotController:
    """Two arms with options by section and an output each."""
    config = several(configure(**{"topics": {"gripper": "/gripper"}, **options}), list(outputs))
    parts = parse_components(ACTION, action=True)
    spec = PolicySpec(action=parts, dimension=sum(part.size(7) for part in parts))
    return RobotController(config, spec, {"arm_0": ARM, "arm_1": ARM})


def action() -> np.ndarray:
    """The first arm moves by 0.01 rad, the second one 1 cm up."""
    pose = ARM.forward(HOME)
    up = pose.position + np.array([0, 0, 0.01])
    return np.concatenate([np.full(7, 0.01), [1.0], up, pose.rotation[:2].ravel(), [9.0, -9.0]])


def test_each_arm_takes_its_own_numbers() -> None:
    joints = state()
    first, second = robot().command(action(), {"arm_0": joints, "arm_1": joints}, STAMP, DT)
    assert (first.arm, second.arm, first.stamp, second.stamp) == ("arm_0", "arm_1", STAMP, STAMP)
    np.testing.assert_allclose(first.positions[:7], joints.positions[:7] + 0.01)
    assert (len(first.positions), len(second.positions)) == (9, 7), "the second has no gripper in the action"
    moved = ARM.forward(second.positions).position - ARM.forward(joints.positions[:7]).position
    np.testing.assert_allclose(moved, [0, 0, 0.01], atol=1e-4)


def without(joints: JointState, name: str) -> JointState:
    kept = [index for index, known in enumerate(joints.names) if known != name]
    return JointState(tuple(joints.names[index] for index in kept), joints.positions[kept], joints.stamp)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(None, Reason.JOINT_STATE_STALE), ("joint_3", Reason.JOINT_STATE_INVALID), (0, Reason.ACTION_INVALID)],
)
def test_a_refusal_of_one_arm_refuses_all_and_names_it(broken, reason: Reason) -> None:
    numbers = action()
    joints = {"arm_0": state(), "arm_1": state()}
    if broken == 0:
        numbers[11:17] = 0.0
    elif broken is None:
        del joints["arm_1"]
    else:
        joints["arm_1"] = without(state(), broken)
    with pytest.raises(Refused, match="arm_1: ") as refused:
        robot().command(numbers, joints, STAMP, DT)
    assert refused.value.reason is reason
    alone = robot(control={"arms_hold_alone": True})
    alone.command(np.where(np.arange(len(numbers)) < 7, 0.0, action()), both(state()), STAMP, DT)
    alone.sent()
    first, second = alone.command(numbers, joints, STAMP, DT)
    assert (first.hold, second.hold) == (False, True)
    assert second.refused is not None
    assert second.refused.reason is reason
    np.testing.assert_array_equal(second.positions[:7], state().positions[:7])
    alone.sent()
    (again,) = alone.command(numbers, joints, STAMP, DT)
    assert again.arm == "arm_0", "the other one holds already"
    with pytest.raises(Refused):
        alone.command(numbers, {}, STAMP, DT)


def both(joints: JointState) -> dict[str, JointState]:
    return {"arm_0": joints, "arm_1": joints}


def test_a_limit_stops_all_arms_even_if_arms_hold_alone() -> None:
    alone = robot(control={"arms_hold_alone": True}, limits={"on_violation": "stop", "max_translation_step": 0.001})
    with pytest.raises(Refused, match="arm_0: ") as refused:
        alone.command(action(), both(state()), STAMP, DT)
    assert refused.value.reason.level is Level.STOP


def test_an_arm_that_cannot_hold_does_not_prevent_others() -> None:
    (held,), (refused,) = robot().hold({"arm_1": state()})
    assert (held.arm, held.hold) == ("arm_1", True)
    assert refused.detail.startswith("arm_0: ")
    velocities, refusals = robot(("joint_velocity", "twist_stamped")).hold({})
    assert [command.arm for command in velocities] == ["arm_0", "arm_1"], "zero needs no measurement"
    assert not refusals
    assert set((velocities[0].velocities or {}).values()) == {0.0}


def test_commands_start_at_the_last_command_that_was_sent() -> None:
    controller = robot(control={"delta_from": "commanded"})
    for sent in (False, True, True):
        first, _ = controller.command(action(), both(state()), STAMP, DT)
        if sent:
            controller.sent()
    np.testing.assert_allclose(first.positions[:7], state().positions[:7] + 0.02)
    controller.reset()
    first, _ = controller.command(action(), both(state()), STAMP, DT)
    np.testing.assert_allclose(first.positions[:7], state().positions[:7] + 0.01)
