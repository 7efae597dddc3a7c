"""Commands compared with the published controllers and clients (``golden.py``)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.conventions.free_arm import (
    GANTRY,
    STAMP,
    gantry_joints,
    kinematics,
    measured,
    options,
    recorded,
    revolute,
    urdf,
)
from test.conventions.golden import entry
from test.conventions.golden import libero as libero_trajectories
from vla_ros.config import Config
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.inputs import Snapshot
from vla_ros.control.reasons import Refused
from vla_ros.control.robot import RobotController
from vla_ros.errors import ConfigError
from vla_ros.execution.source import ActionSource
from vla_ros.kinematics.rotations import (
    Pose,
    euler_xyz_matrix,
    read_rotation,
    rotation_vector,
    rotation_vector_matrix,
)
from vla_ros.node.inference import infer
from vla_ros.node.pipeline import ActionPipeline, build_pipeline
from vla_ros.policies.published import loop_of
from vla_ros.types import FloatArray, JointState
from vla_ros.vision.messages import encode_image

OPEN = PolicySpec((), action=(), dimension=0, takes_any_state=True)
DROID_DT = 1 / 15


def controller(config: Config) -> RobotController:
    """The controller of a preset's action."""
    return build_pipeline(config, OPEN).controller


def sent(control: RobotController, action: Any, joints: JointState, dt: float) -> FloatArray:
    """The positions commanded for an action, which is recorded as sent."""
    [command] = control.command(np.asarray(action, np.float64), joints, STAMP, dt)
    control.sent()
    return command.positions


@pytest.fixture
def seven(tmp_path: Path) -> str:
    return urdf(tmp_path, revolute(7))


@pytest.fixture
def gantry(tmp_path: Path) -> str:
    return urdf(tmp_path, GANTRY)


# DROID


@pytest.mark.parametrize("clip", ["each", "together"])
def test_droid_velocities_move_all_joints_by_the_published_steps(clip: str, seven: str) -> None:
    found = entry("joint_velocity.droid")
    control = controller(
        options(seven, "droid", control__clip=clip, control__output="joint_state", gripper__open_position=1.0)
    )
    expected = 0.2 * np.clip(found["velocity"], -1, 1) if clip == "each" else found["delta"]
    for velocity, delta in zip(found["velocity"], expected, strict=True):
        positions = sent(control, [*velocity, 0.0], measured(np.zeros(7)), DROID_DT)
        np.testing.assert_allclose(positions[:7], delta, atol=1e-9)
    assert not control.counters


def test_droid_joint_targets_start_at_the_measured_joints(seven: str) -> None:
    found = entry("action.droid_robot")
    config = options(
        seven,
        "droid",
        control__clip="together",
        control__output="joint_state",
        gripper__mode="continuous",
        gripper__open_position=0.0,
        gripper__closed_position=1.0,
    )
    control = controller(config)
    for row in range(len(found["action"])):
        joints = measured(found["joints"][row])
        control.assume(joints)  # the published robot does not limit what leads from one row to the next
        positions = sent(control, found["action"][row], joints, DROID_DT)
        np.testing.assert_allclose(positions[:7], found["joint_target"][row], atol=1e-9)
        np.testing.assert_allclose(positions[7], np.clip(found["gripper_target"][row], 0, 1), atol=1e-9)


def test_droid_one_is_three_radians_per_second_and_then_the_robots_own_limit(tmp_path: Path) -> None:
    for velocity, expected in ((1e3, 3.0), (2.0, 2.0)):
        path = urdf(tmp_path, revolute(7), velocity)
        control = controller(options(path, "droid", topics__gripper="/gripper"))
        [command] = control.command(np.array([*[1.0] * 7, 0.0]), measured(np.zeros(7)), STAMP, DROID_DT)
        assert command.velocities is not None
        np.testing.assert_allclose(list(command.velocities.values()), expected, rtol=1e-9)


FRAME = encode_image(np.zeros((48, 64, 3), np.uint8), STAMP, "camera")


def client(
    source: ActionSource, pipeline: ActionPipeline, joints: FloatArray, steps: int, dt: float, images: int
) -> list[FloatArray]:
    """Run a client's loop: infer when no step is left; return the commanded velocities or positions."""
    commands, schedule, control = [], pipeline.schedule, pipeline.controller
    for step in range(steps):
        state = measured(joints[step])
        if schedule.wants_chunk:
            inputs = Snapshot(instruction="go", joints=state, arms={"arm": state})
            schedule.load(infer(source, pipeline, [FRAME] * images, inputs).chunk)
        control.assume(state)
        result = control.make_step(schedule.next(), state, dt)
        assert result.refused is None
        [command] = result.commands
        positions = dict(zip(command.names, command.positions.tolist(), strict=True))
        commands.append(np.array(list((positions | dict(command.velocities or {})).values())))
        schedule.sent()
        control.sent()
    assert not control.counters
    return commands


def openpi(preset: str, horizon: int, family: str = "openpi") -> PolicySpec:
    """The spec of a policy on a server."""
    loop = loop_of(family, preset)
    return PolicySpec((), (), (), 0, horizon, loop.execute_steps, loop.rate_hz, takes_any_state=True)


def test_openpis_droid_client(seven: str) -> None:
    found = entry("client.openpi_droid")
    config = options(
        seven,
        "droid",
        topics__gripper="/gripper",
        gripper__open_position=0.0,
        gripper__closed_position=1.0,
        control__schedule="sync",
    )
    source, pipeline = recorded(config, openpi("droid", found["chunks"].shape[1]), found["chunks"])
    commands = client(source, pipeline, found["joints"], len(found["executed"]), DROID_DT, 2)
    expected = found["executed"] * ([3.0] * 7 + [1.0])
    np.testing.assert_allclose(commands, expected, atol=1e-9)


def test_gr00ts_droid_client(seven: str) -> None:
    found = entry("client.gr00t_droid")
    config = options(
        seven, "gr00t_droid", gripper__open_position=0.0, gripper__closed_position=1.0, control__schedule="sync"
    )
    source, pipeline = recorded(config, openpi("gr00t_droid", found["chunks"].shape[1], "gr00t"), found["chunks"])
    followed = found["executed"][:, :7]  # the recorded joints jump further than any limit allows
    commands = client(source, pipeline, followed, len(followed), DROID_DT, 2)
    np.testing.assert_allclose(commands, found["executed"], atol=1e-9)


def test_droids_gripper_width(seven: str) -> None:
    found = entry("gripper.droid_robot")
    config = options(
        seven,
        "droid",
        control__output="joint_state",
        gripper__mode="continuous",
        gripper__open_position=float(found["max_width"]),
        gripper__closed_position=0.0,
    )
    control = controller(config)
    for command, width in zip(found["command"], found["command_width"], strict=True):
        positions = sent(control, [*[0.0] * 7, command], measured(np.zeros(7)), DROID_DT)
        np.testing.assert_allclose(positions[7], width, atol=1e-9)


def test_droids_cartesian_velocities(gantry: str) -> None:
    """With the published scales, the clip "together" is that of the robot's own code."""
    found = entry("cartesian_velocity.droid")
    scales = {"control__translation_scale": 0.075, "control__rotation_scale": 0.15, "control__clip": "together"}
    scales["control__delta_from"] = "measured"
    control = controller(options(gantry, "", **{"features__action": ["arm.tip_delta", "arm.gripper"]}, **scales))
    where = kinematics(options(gantry, ""))
    for velocity, delta in zip(found["velocity"], found["delta"], strict=True):
        positions = sent(control, [*velocity, 1.0], measured(np.zeros(8)), DROID_DT)
        pose = where.forward(positions[:8])
        np.testing.assert_allclose(pose.position, delta[:3], atol=2e-5)
        np.testing.assert_allclose(pose.rotation, euler_xyz_matrix(delta[3:]), atol=2e-5)


# Bridge


def test_bridge_adds_to_the_previous_target_and_clips_each_number(gantry: str) -> None:
    found = entry("action.bridge_robot")
    box = {
        "limits__workspace_low": found["workspace_low"].tolist(),
        "limits__workspace_high": found["workspace_high"].tolist(),
    }
    config = options(gantry, "bridge", gripper__open_position=1.0, gripper__closed_position=0.0, **box)
    control, where = controller(config), kinematics(config)
    start = gantry_joints(found["start"][:3], euler_xyz_matrix(found["start"][3:6]) @ _gripper_down())
    sent(control, [*[0.0] * 6, found["start"][6]], measured(start), 0.2)  # the first target is the start
    for row, action in enumerate(found["action"]):
        state = measured([*found["measured_position"][row], *start[3:]])
        positions = sent(control, action, state, 0.2)
        pose = where.forward(positions[:8])
        np.testing.assert_allclose(pose.position, found["pose"][row][:3, 3], atol=2e-5)
        np.testing.assert_allclose(pose.rotation, found["pose"][row][:3, :3], atol=2e-5)
        np.testing.assert_allclose(positions[8], found["gripper_continuous"][row], atol=1e-9)


def _gripper_down() -> FloatArray:
    """The orientation from which Bridge's angles count."""
    return np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])


def test_a_thousand_small_steps_leave_no_error_of_inverse_kinematics(gantry: str) -> None:
    config = options(gantry, "bridge")
    control, where, state = controller(config), kinematics(config), measured(np.zeros(8))
    for _ in range(1000):
        positions = sent(control, [0.001, 0.0, 0.0, 0.0, 0.0, 0.001, 1.0], state, 0.2)
        state = measured(positions[:8])
    pose = where.forward(positions[:8])
    np.testing.assert_allclose(pose.position, [1.0, 0.0, 0.0], atol=2e-5)
    np.testing.assert_allclose(pose.rotation, rotation_vector_matrix(np.array([0.0, 0.0, 1.0])), atol=2e-5)


def test_after_a_hold_or_a_reset_a_target_restarts_at_the_measured_position(gantry: str) -> None:
    control = controller(options(gantry, "bridge"))
    here = measured(np.zeros(8))
    step = [0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    for forget in (lambda: control.hold(here), control.reset):
        for count in range(1, 4):
            np.testing.assert_allclose(sent(control, step, here, 0.2)[0], 0.02 * count, atol=2e-5)
        forget()
    np.testing.assert_allclose(sent(control, step, here, 0.2)[0], 0.02, atol=2e-5)


def test_a_target_never_leads_the_measured_arm_by_more_than_the_limit(gantry: str) -> None:
    control = controller(options(gantry, "bridge", limits__following_error_prismatic=0.05))
    here, step = measured(np.zeros(8)), [0.02, 0, 0, 0, 0, 0, 1.0]
    found = [sent(control, step, here, 0.2)[0] for _ in range(3)]
    np.testing.assert_allclose(found, [0.02, 0.04, 0.05], atol=2e-5)
    with pytest.raises(
        Refused, match=r"joint \'j1\' is at 0 and was commanded to be at 0\.05: 0\.05 apart, allowed 0\.05"
    ):
        sent(control, step, here, 0.2)


def test_a_linear_axis_is_held_where_it_was_moved_to_by_more_than_it_gives_way(gantry: str) -> None:
    [arm] = controller(options(gantry, "bridge")).arms
    for axis, moved, kept in ((0, 0.002, True), (0, 0.01, False), (3, 0.012, True), (3, 0.05, False)):
        arm.restart()
        arm.hold(measured(np.zeros(8)))
        held = arm.hold(measured(moved * np.eye(8)[axis])).positions[axis]
        assert held == pytest.approx(0.0 if kept else moved), (axis, moved)


def test_widowxs_fingers(gantry: str) -> None:
    found = entry("gripper.bridge")
    control = controller(options(gantry, "bridge", gripper__open_position=0.035, gripper__closed_position=0.01))
    for command, target in zip(found["command"], found["finger_target"], strict=True):
        if 0 <= command <= 1:  # the published robot clips the number before
            positions = sent(control, [*[0.0] * 6, command], measured(np.zeros(8)), 0.2)
            np.testing.assert_allclose(positions[8], target, atol=1e-9)


# LIBERO


def libero(path: str, form: str, **more: Any) -> Config:
    return options(path, "libero", control__delta_form=form, **more)


def test_goals_of_libero(gantry: str) -> None:
    found = entry("action_goal.libero_osc")
    config = libero(gantry, "goal")
    control, where = controller(config), kinematics(config)
    kept = found["first_goal_orientation"]
    compared = 0
    for row, action in enumerate(found["action"]):
        joints = gantry_joints(found["position"][row], found["orientation"][row])
        turns = action[3:].any()
        expected = found["goal_orientation"][row]
        if turns:
            control.reset()  # goals do not depend on the measured pose of the step before
        elif not row or np.allclose(found["goal_orientation"][row - 1], kept):
            continue  # the goal from before the first action is not known here
        compared += 1
        control.assume(measured(joints))
        positions = sent(control, [*action, 0.0], measured(joints), 0.05)
        pose = where.forward(positions[:8])
        np.testing.assert_allclose(pose.position, found["goal_position"][row], atol=2e-5)
        np.testing.assert_allclose(pose.rotation, expected, atol=2e-5)
    assert compared > 40


def test_only_a_rotation_of_exactly_zero_keeps_the_orientation(gantry: str) -> None:
    """Robosuite compares each number with ``math.isclose``, whose tolerance is relative: none at zero."""
    config = libero(gantry, "goal")
    control, where = controller(config), kinematics(config)
    here, there = (
        gantry_joints(np.zeros(3), rotation_vector_matrix(np.array(turn))) for turn in ([0, 0, 0], [0.2, 0, 0])
    )
    for rotation, expected in ((0.0, here), (1e-9, there)):
        control.reset()
        sent(control, [*[0.0] * 5, 1e-3, 0.0], measured(here), 0.05)  # the goal is where the arm is
        found = where.forward(sent(control, [*[0.0] * 5, rotation, 0.0], measured(there), 0.05)[:8])
        np.testing.assert_allclose(found.rotation, where.forward(expected).rotation, atol=1e-3)


def test_an_arm_that_follows_moves_as_robosuites_controller_does(gantry: str) -> None:
    """Within 10 % along each constant action, in translation and rotation."""
    found = entry("action_motion.libero_osc")
    config = libero(gantry, "motion")
    where = kinematics(config)
    for row, action in enumerate(found["action"]):
        control = controller(config)
        before = Pose(found["position"][row][0], read_rotation(found["quat"][row][0], "quaternion_xyzw"))
        joints = gantry_joints(before.position, before.rotation)
        for _ in range(found["position"].shape[1] - 1):
            joints = sent(control, action, measured(joints), 0.05)[:8]
        after = where.forward(joints)
        end = read_rotation(found["quat"][row][-1], "quaternion_xyzw")
        if action[:3].any() and not action[3:6].any():
            moved = found["position"][row][-1] - before.position
            assert np.linalg.norm(after.position - before.position) == pytest.approx(np.linalg.norm(moved), rel=0.1)
            assert np.linalg.norm(after.position - before.position - moved) < 0.105 * np.linalg.norm(moved)
        if action[3:6].any():
            turned = rotation_vector(end @ before.rotation.T)
            ours = rotation_vector(after.rotation @ before.rotation.T)
            assert np.linalg.norm(ours) == pytest.approx(np.linalg.norm(turned), rel=0.1)


def test_a_policy_in_libero_moves_as_far_as_the_recorded_trajectories(gantry: str) -> None:
    """Varying actions, from the recorded poses and velocities: lengths of the paths of ten steps."""
    config = libero(gantry, "motion")
    where = kinematics(config)
    for suite in libero_trajectories().values():
        lengths = np.zeros((2, 2))
        poses = [
            Pose(position, read_rotation(quat, "quaternion_xyzw"))
            for position, quat in zip(suite["eef_pos"], suite["eef_quat_xyzw"], strict=True)
        ]
        for first in range(0, 140, 14):
            control = controller(config)
            joints = gantry_joints(poses[first].position, poses[first].rotation)
            state = poses[first]
            for step in range(first, first + 14):
                joints = sent(control, suite["action"][step + 1], measured(joints), 0.05)[:8]
                pose = where.forward(joints)
                if step >= first + 4:  # the arm was moving when the window began
                    lengths[0] += _distance(state, pose)
                    lengths[1] += _distance(poses[step], poses[step + 1])
                state = pose
        np.testing.assert_allclose(lengths[0] / lengths[1], [1.0, 1.0], atol=0.12)


def _distance(start: Pose, end: Pose) -> FloatArray:
    return np.array(
        [
            np.linalg.norm(end.position - start.position),
            np.linalg.norm(rotation_vector(end.rotation @ start.rotation.T)),
        ]
    )


def test_preset_libero_refuses_to_start_without_a_choice(gantry: str) -> None:
    with pytest.raises(ConfigError, match=r"control\.delta_form: choose goal or motion.*simulator.*for an arm"):
        controller(options(gantry, "libero"))


@pytest.mark.parametrize("name", ["gripper.libero_oft", "gripper.libero_openvla"])
def test_the_gripper_of_libero(name: str, gantry: str) -> None:
    """OpenVLA and OFT return 0 (closed) to 1 (open); the simulator gets -1 to open, +1 to close, and 0 to keep."""
    found = entry(name)
    more = {
        "gripper__open_value": 1.0,
        "gripper__closed_value": 0.0,
        "gripper__open_position": 1.0,
        "gripper__closed_position": -1.0,
        "features__action": ["arm.tip_delta[rotation_vector]", "arm.gripper[0..1]"],
    }
    control, before = controller(libero(gantry, "goal", **more)), 1.0
    for action, executed in zip(found["action"], found["executed"], strict=True):
        positions = sent(control, np.array([*[0.0] * 6, action[6]]), measured(np.zeros(8)), 0.05)
        before = -executed[6] if executed[6] else before
        assert positions[8] == before


@pytest.mark.parametrize(("name", "family"), [("client.openpi_libero", "openpi"), ("client.oft_libero", "oft")])
def test_libero_clients_execute_the_published_rows(name: str, family: str, gantry: str) -> None:
    found = entry(name)
    waiting = 10
    more: dict[str, Any] = {}
    if family == "oft":
        more = {"gripper__open_value": 1.0, "gripper__closed_value": 0.0}
        more["features__action"] = ["arm.tip_delta[rotation_vector]", "arm.gripper[0..1]"]
    config = libero(
        gantry,
        "goal",
        control__schedule="sync",
        gripper__open_position=1.0,
        gripper__closed_position=-1.0,
        **more,
    )
    source, pipeline = recorded(config, openpi("libero", found["chunks"].shape[1], family), found["chunks"])
    assert pipeline.binding.config.control.rate_hz == 20.0
    expected = found["executed"][waiting:]
    state, gripper = measured(np.zeros(8)), 1.0
    where = kinematics(config)
    for action in expected:
        if pipeline.schedule.wants_chunk:
            inputs = Snapshot(instruction="go", joints=state, arms={"arm": state})
            pipeline.schedule.load(infer(source, pipeline, [FRAME] * 2, inputs).chunk)
        result = pipeline.controller.make_step(pipeline.schedule.next(), state, 0.05)
        pipeline.schedule.sent()
        pipeline.controller.sent()
        np.testing.assert_allclose(result.action[:6], action[:6], atol=1e-9)
        [command] = result.commands
        pose = where.forward(command.positions[:8])
        np.testing.assert_allclose(pose.position, 0.05 * np.clip(action[:3], -1, 1), atol=2e-5)
        gripper = -np.sign(action[6]) if action[6] else gripper
        assert command.positions[8] == gripper


# ALOHA


@pytest.mark.parametrize(
    ("name", "family", "rate"), [("client.oft_aloha", "oft", 25.0), ("client.openpi_aloha_chunks", "openpi", 50.0)]
)
def test_aloha_clients_execute_the_published_rows(name: str, family: str, rate: float, tmp_path: Path) -> None:
    found = entry(name)
    source, pipeline = recorded(
        aloha(urdf(tmp_path, revolute(6))), openpi("aloha", found["chunks"].shape[1], family), found["chunks"]
    )
    assert pipeline.binding.config.control.rate_hz == rate
    for row in found["executed"]:
        joints = {name: measured(row[7 * arm : 7 * arm + 6]) for arm, name in enumerate(("left", "right"))}
        if pipeline.schedule.wants_chunk:
            inputs = Snapshot(instruction="go", arms=joints)
            pipeline.schedule.load(infer(source, pipeline, [FRAME] * 3, inputs).chunk)
        result = pipeline.controller.make_step(pipeline.schedule.next(), joints, 1 / rate)
        pipeline.schedule.sent()
        pipeline.controller.sent()
        np.testing.assert_allclose(result.action, row, atol=1e-9)
        for arm, command in enumerate(result.commands):
            np.testing.assert_allclose(command.positions[:6], row[7 * arm : 7 * arm + 6], atol=1e-9)


@pytest.mark.parametrize("name", ["aloha_robot.oft", "aloha_robot.openpi"])
def test_commands_of_aloha(name: str, tmp_path: Path) -> None:
    """The gripper's number is a share of the range of the gripper's joint."""
    found = entry(name)
    config = aloha(
        urdf(tmp_path, revolute(6)), gripper__open_position=JOINT_OPEN, gripper__closed_position=JOINT_CLOSED
    )
    control = controller(config)
    for row, action in enumerate(found["action"]):
        joints = {name: measured(action[7 * arm : 7 * arm + 6]) for arm, name in enumerate(("left", "right"))}
        commands = control.command(action, joints, STAMP, 0.02)
        for command, side in zip(commands, ("left", "right"), strict=True):
            np.testing.assert_allclose(command.positions[:6], found[f"{side}_arm"][row], atol=1e-9)
            expected = np.clip(found[f"{side}_gripper_joint"][row], JOINT_CLOSED, JOINT_OPEN)
            np.testing.assert_allclose(command.positions[6], expected, atol=1e-9)


JOINT_OPEN, JOINT_CLOSED = 1.4910, -0.6213


def aloha(path: str, **more: Any) -> Config:
    more["gripper__measured_by"] = ""  # this arm measures the joint that it commands
    return options(path, "aloha", control__schedule="sync", **more)


# SO-101


@pytest.mark.parametrize(("name", "form"), [("so101.degrees", "deg"), ("so101.m100_100", "-100..100")])
def test_goals_of_so101(name: str, form: str, tmp_path: Path) -> None:
    """The joints' goals are encoder counts: 4096 a turn, counted from the middle of the calibrated range."""
    found = entry(name)
    low, high = found["range_min"].astype(float), found["range_max"].astype(float)
    middle, turn = (low + high) / 2, 2 * np.pi / 4096 * (4096 / 4095)
    text = Path(urdf(tmp_path, revolute(5))).read_text()
    for joint in range(5):  # the description's limits are the ends of the calibrated range
        half = (high - low)[joint] / 2 * turn
        text = text.replace('lower="-20.0" upper="20.0"', f'lower="{-half}" upper="{half}"', 1)
    path = tmp_path / "so101.urdf"
    path.write_text(text)
    config = options(
        str(path),
        "so101",
        features__joint_form=form,
        gripper__open_position=float(high[5]) / 1000,
        gripper__closed_position=float(low[5]) / 1000,
    )
    control = controller(config)
    for action, goal in zip(found["action"], found["goal_counts"], strict=True):
        within = (goal[:5] >= low[:5]) & (goal[:5] <= high[:5])
        positions = sent(control, action, measured(np.zeros(5), fingers=float(low[5]) / 1000), 1.0)
        control.reset()
        counts = np.append(positions[:5] / turn + middle[:5], positions[5] * 1000)
        assert (np.abs(counts - goal)[np.append(within, True)] <= 1.0 + 1e-6).all()  # counts are truncated


@pytest.mark.parametrize("form", ["", "rad"])
def test_so101_asks_for_the_unit_of_the_joints(form: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"features\.joint_form: .*expected one of deg, -100\.\.100.*LeRobot"):
        controller(options(urdf(tmp_path, revolute(5)), "so101", features__joint_form=form))
