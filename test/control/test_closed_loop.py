"""Over many steps, an arm that follows its commands stays on the path that the deltas describe."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from demo_arm import ARM, DT, HOME, control, state

from vla_ros.control.arm import ArmController
from vla_ros.kinematics.rotations import rotation_angle


def drive(
    controller: ArmController, start: np.ndarray, action: list[float], steps: int, follow: float = 1.0
) -> list[np.ndarray]:
    """Joint positions [7] after each step of an arm that moves by the share ``follow`` towards each command."""
    q, way = start.copy(), []
    for _ in range(steps):
        command = controller.command(np.array([*action, 1.0]), state(q), 0, DT)
        controller.sent()
        q = q + follow * (command.positions[:7] - q)
        way.append(q)
    return way


@pytest.mark.parametrize("home", [[], HOME.tolist()], ids=["free", "with a home posture"])
def test_thirty_steps_of_a_centimetre_are_a_straight_line(home: list[float]) -> None:
    controller = control(robot={"home": home})
    start = ARM.forward(HOME)
    way = [ARM.forward(q) for q in drive(controller, HOME, [0, 0.01, 0, 0, 0, 0], 30)]
    for number, pose in enumerate(way, start=1):
        np.testing.assert_allclose(pose.position, start.position + np.array([0, 0.01 * number, 0]), atol=2e-4)
        assert rotation_angle(pose.rotation @ start.rotation.T) < 2e-3
    assert controller.counters == {}


def test_turning_on_the_spot_leaves_the_tip_where_it_is() -> None:
    controller = control()
    start = ARM.forward(HOME)
    pose = ARM.forward(drive(controller, HOME, [0, 0, 0, 0, 0, 0.05], 20)[-1])
    np.testing.assert_allclose(pose.position, start.position, atol=1e-3)
    assert rotation_angle(pose.rotation @ start.rotation.T) == pytest.approx(1.0, abs=5e-3)


@pytest.mark.parametrize("delta_from", ["measured", "commanded"])
def test_at_the_wall_of_the_box_the_tip_slides_and_comes_back_at_once(delta_from: str) -> None:
    start = ARM.forward(HOME).position
    box = {"workspace_low": [0.0, -0.5, 0.0], "workspace_high": [float(start[0]) + 0.03, 0.5, 1.2]}
    controller = control(limits=box, control={"delta_from": delta_from})
    way = drive(controller, HOME, [0.01, 0.005, 0, 0, 0, 0], 20)
    tips = np.array([ARM.forward(q).position for q in way])
    assert tips[:, 0].max() <= start[0] + 0.03 + 1e-6
    assert tips[-1, 1] - start[1] > 0.08, "it slides along the wall"
    back = drive(controller, way[-1], [-0.01, 0, 0, 0, 0, 0], 1)[-1]
    assert ARM.forward(back).position[0] < tips[-1, 0] - 0.009, "no debt was run up behind the wall"


@pytest.mark.parametrize("output", ["twist_stamped", "joint_velocity"])
@pytest.mark.parametrize("delta_from", ["measured", "commanded"])
def test_until_a_velocity_expires_the_tip_stays_in_the_box(output: str, delta_from: str) -> None:
    """3 cm are left to the box, and the last command before the policy hangs is executed until it expires."""
    start = ARM.forward(HOME).position
    box = {"workspace_low": [0.0, -0.5, 0.0], "workspace_high": [float(start[0]) + 0.03, 0.5, 1.2]}
    own = {"control": {"delta_from": delta_from, "output": output}, "topics": {"gripper": "/gripper"}}
    controller = control(limits=box, timeouts={"velocity": 0.25}, **own)
    q, tips = HOME.copy(), []
    for _ in range(6):
        command = controller.command(np.array([0.02, 0.005, 0, 0, 0, 0, 1.0]), state(q), 0, DT)
        controller.sent()
        # The servo moves the tip along a straight line, the joints' driver each joint at its speed.
        for share in np.linspace(0.0, 0.25, 11):
            if command.twist is not None:
                tips.append(ARM.forward(q).position + command.twist[0] * share)
            else:
                assert command.velocities is not None
                tips.append(ARM.forward(q + np.array(list(command.velocities.values())) * share).position)
        q = q + 0.5 * (command.positions[:7] - q)  # the arm lags
    assert np.max(tips, axis=0)[0] - start[0] <= 0.03 + 1e-6
    assert np.max(tips, axis=0)[0] - start[0] > 0.02


def test_pushed_out_of_reach_for_long_the_arm_comes_to_rest_and_obeys_again() -> None:
    controller = control()
    way = drive(controller, HOME, [0.05, 0, 0, 0, 0, 0], 80)
    late = np.array(way[-20:])
    assert np.abs(np.diff(late, axis=0)).max() < 0.1, "it thrashes"
    assert controller.counters["not_reached"] > 0
    tip = ARM.forward(way[-1]).position
    back = drive(controller, way[-1], [-0.02, 0, 0, 0, 0, 0], 10)[-1]
    assert ARM.forward(back).position[0] < tip[0] - 0.1


def test_an_arm_that_lags_goes_on_and_never_beyond_what_was_asked() -> None:
    controller = control()
    start = ARM.forward(HOME).position
    way = drive(controller, HOME, [0.01, 0, 0, 0, 0, 0], 15, follow=0.5)
    gone = ARM.forward(way[-1]).position - start
    assert 0.06 < gone[0] < 0.15


def test_control_loads_neither_torch_nor_pinocchio_nor_ros() -> None:
    code = (
        "import sys, vla_ros.control.robot, vla_ros.control.watchdog, vla_ros.control.safety, "
        "vla_ros.control.schedule, vla_ros.control.mailbox\n"
        "heavy = {'torch', 'pinocchio', 'rclpy', 'cyclonedds', 'mujoco', 'transformers'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
