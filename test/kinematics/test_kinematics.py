"""Kinematics compared with products of transforms, calculation by hand and finite differences."""

import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_ros.errors import ConfigError
from vla_ros.kinematics import urdf
from vla_ros.kinematics.rotations import (
    Pose,
    euler_xyz_matrix,
    rotation_angle,
    rotation_vector,
    rotation_vector_matrix,
)
from vla_ros.kinematics.solver import Kinematics

HOME = np.array([0.0, 0.5, 0.0, 1.2, 0.0, 0.8, 0.0])


def chain_of_transforms(path: Path, tip: str, positions: dict[str, float]) -> np.ndarray:
    """The pose of the tip [4, 4] in the root frame, multiplied joint by joint from the XML."""
    robot = ElementTree.parse(path).getroot()
    above = {joint.find("child").get("link"): joint for joint in robot.findall("joint")}  # type: ignore[union-attr]
    pose, link = np.eye(4), tip
    while link in above:
        joint = above[link]
        step = np.eye(4)
        origin = joint.find("origin")
        if origin is not None:
            step[:3, 3] = [float(value) for value in origin.get("xyz", "0 0 0").split()]
            step[:3, :3] = euler_xyz_matrix(np.array([float(v) for v in origin.get("rpy", "0 0 0").split()]))
        axis = joint.find("axis")
        move = np.eye(4)
        if axis is not None:
            direction = np.array([float(value) for value in axis.get("xyz", "1 0 0").split()])
            amount = positions.get(joint.get("name", ""), 0.0)
            if joint.get("type") == "prismatic":
                move[:3, 3] = direction * amount
            else:
                move[:3, :3] = rotation_vector_matrix(direction * amount)
        pose = step @ move @ pose
        link = joint.find("parent").get("link")  # type: ignore[union-attr,assignment]
    return pose


def unit(values: tuple[float, ...], arm: Kinematics) -> np.ndarray:
    """Positions within the joint limits, from numbers in [0, 1]."""
    return arm.position_low + np.array(values) * (arm.position_high - arm.position_low)


seven = st.tuples(*[st.floats(0.0, 1.0)] * 7)


def test_the_demo_arm_has_its_chain_tool_and_limits(arm: Kinematics) -> None:
    assert arm.joint_names == tuple(f"joint_{number}" for number in range(1, 8))
    assert (arm.base_frame, arm.tip_frame) == ("base_link", "tool")
    assert arm.position_low[3] == pytest.approx(0.05)
    assert np.all(arm.velocity_limits > 0)


@settings(max_examples=50)
@given(seven)
def test_forward_is_the_product_of_the_urdfs_transforms(arm: Kinematics, values: tuple[float, ...]) -> None:
    q = unit(values, arm)
    expected = chain_of_transforms(urdf.resolve("demo"), "tool", dict(zip(arm.joint_names, q, strict=True)))
    pose = arm.forward(q)
    np.testing.assert_allclose(pose.position, expected[:3, 3], atol=1e-12)
    np.testing.assert_allclose(pose.rotation, expected[:3, :3], atol=1e-12)


@settings(max_examples=30)
@given(seven)
def test_the_jacobian_agrees_with_finite_differences(arm: Kinematics, values: tuple[float, ...]) -> None:
    q, step = unit(values, arm), 1e-6
    jacobian = arm.jacobian(q)
    for joint in range(7):
        shift = np.zeros(7)
        shift[joint] = step
        ahead, behind = arm.forward(q + shift), arm.forward(q - shift)
        linear = (ahead.position - behind.position) / (2 * step)
        angular = rotation_vector(ahead.rotation @ behind.rotation.T) / (2 * step)
        np.testing.assert_allclose(jacobian[:, joint], np.concatenate((linear, angular)), atol=1e-7)


def test_a_planar_arm_agrees_with_calculation_by_hand(planar_urdf: Path) -> None:
    arm = Kinematics.from_urdf(str(planar_urdf), base_frame="base")
    assert arm.joint_names == ("shoulder", "elbow", "slide")
    assert arm.velocity_limits.tolist() == [np.inf, 1.5, 0.5], "velocity 0 in a URDF says nothing"
    shoulder, elbow, slide = 4.0, -0.7, 0.05  # the continuous joint is past half a turn
    pose = arm.forward(np.array([shoulder, elbow, slide]))
    reach = 0.2 + slide
    expected = [
        0.3 * np.cos(shoulder) + reach * np.cos(shoulder + elbow),
        0.3 * np.sin(shoulder) + reach * np.sin(shoulder + elbow),
        0.0,
    ]
    np.testing.assert_allclose(pose.position, expected, atol=1e-12)
    in_world = Kinematics.from_urdf(str(planar_urdf)).forward(np.array([shoulder, elbow, slide]))
    np.testing.assert_allclose(in_world.position, [1 - expected[1], 2 + expected[0], 3], atol=1e-12)


def test_the_jacobian_is_in_the_base_frames_axes(planar_urdf: Path) -> None:
    arm = Kinematics.from_urdf(str(planar_urdf), base_frame="base")
    np.testing.assert_allclose(arm.jacobian(np.zeros(3))[:, 2], [1, 0, 0, 0, 0, 0], atol=1e-12)


def test_joints_have_the_requested_order(planar_urdf: Path) -> None:
    plain = Kinematics.from_urdf(str(planar_urdf))
    turned = Kinematics.from_urdf(str(planar_urdf), joint_names=("slide", "shoulder", "elbow"))
    q = np.array([0.4, -0.9, 0.03])
    other = q[[2, 0, 1]]
    np.testing.assert_allclose(turned.forward(other).position, plain.forward(q).position)
    np.testing.assert_allclose(turned.jacobian(other), plain.jacobian(q)[:, [2, 0, 1]])
    assert turned.position_high.tolist() == plain.position_high[[2, 0, 1]].tolist()


@settings(max_examples=60)
@given(
    move=st.tuples(*[st.floats(-0.03, 0.03)] * 3),
    turn=st.tuples(*[st.floats(-0.2, 0.2)] * 3),
    shift=st.tuples(*[st.floats(-0.4, 0.4)] * 7),
)
def test_a_reachable_pose_is_reached(
    arm: Kinematics, move: tuple[float, ...], turn: tuple[float, ...], shift: tuple[float, ...]
) -> None:
    q = np.clip(HOME + shift, arm.position_low, arm.position_high)
    pose = arm.forward(q)
    target = Pose(pose.position + move, euler_xyz_matrix(np.array(turn)) @ pose.rotation)
    found = arm.forward(arm.solve(q, target))
    assert np.linalg.norm(found.position - target.position) < 1e-4
    assert rotation_angle(found.rotation @ target.rotation.T) < 1e-3


def test_a_pose_that_is_already_reached_moves_no_joint(arm: Kinematics) -> None:
    q = HOME + 0.1
    np.testing.assert_array_equal(arm.solve(q, arm.forward(q), posture=HOME), q)


@settings(max_examples=100)
@given(
    values=seven,
    position=st.tuples(*[st.floats(-50.0, 50.0)] * 3),
    turn=st.tuples(*[st.floats(-3.1, 3.1)] * 3),
)
def test_whatever_the_target_no_joint_passes_its_limit(
    arm: Kinematics, values: tuple[float, ...], position: tuple[float, ...], turn: tuple[float, ...]
) -> None:
    q = unit(values, arm)
    found = arm.solve(q, Pose(np.array(position), euler_xyz_matrix(np.array(turn))), posture=HOME)
    assert np.isfinite(found).all()
    assert np.all(found >= arm.position_low)
    assert np.all(found <= arm.position_high)
    assert np.abs(found - q).max() <= 3.0 + 1e-9


@pytest.mark.parametrize(
    "singular",
    [
        [0, 0, 0, 0.05, 0, 0, 0],  # stretched upwards, every axis in one plane
        [0, 1.2, 0, 0.05, 0, 0.0, 0],  # stretched forwards
        [0, 0.5, 0, 1.2, 0, 0.0, 0],  # wrist axes in line
    ],
)
@pytest.mark.parametrize("direction", [[0, 0, 1], [1, 0, 0], [0, 1, 0]])
def test_near_a_singularity_a_small_step_stays_small(
    arm: Kinematics, singular: list[float], direction: list[float]
) -> None:
    q = np.array(singular)
    pose = arm.forward(q)
    found = arm.solve(q, Pose(pose.position + 0.005 * np.array(direction), pose.rotation), iterations=1)
    assert np.abs(found - q).max() <= 0.005 / 0.05 + 1e-9


def test_out_of_reach_the_arm_settles_and_does_not_swing(arm: Kinematics) -> None:
    """With the same target out of reach, positions must converge, not oscillate."""
    q = HOME.copy()
    far = Pose(np.array([2.0, 0.0, 0.5]), arm.forward(HOME).rotation)
    way = []
    for _ in range(60):
        found = arm.solve(q, far, iterations=2)
        way.append(float(np.abs(found - q).max()))
        q = found
    assert max(way[-5:]) < 0.05
    assert arm.forward(q).position[0] > arm.forward(HOME).position[0]


def test_redundant_joints_drift_towards_the_posture(arm: Kinematics) -> None:
    q = HOME + np.array([0.5, 0.2, -0.5, 0.1, 0.6, -0.2, 0.3])
    start = arm.forward(q)
    before = np.linalg.norm(q - HOME)
    for number in range(100):
        wanted = start.position + np.array([0, 0, 0.001 * (-1) ** number])
        q = arm.solve(q, Pose(wanted, start.rotation), posture=HOME, posture_gain=0.3)
    assert np.linalg.norm(q - HOME) < before - 0.1
    assert np.linalg.norm(arm.forward(q).position - start.position) < 0.002


def test_tighter_limits_than_the_urdfs_are_kept(arm: Kinematics) -> None:
    low, high = HOME - 0.05, HOME + 0.05
    pose = arm.forward(HOME)
    found = arm.solve(HOME, Pose(pose.position + np.array([0.3, 0.1, 0]), pose.rotation), low=low, high=high)
    assert np.all((found >= low) & (found <= high))


def test_a_step_of_a_policy_is_solved_within_a_millisecond(arm: Kinematics) -> None:
    pose = arm.forward(HOME)
    target = Pose(
        pose.position + np.array([0.01, -0.01, 0.01]),
        rotation_vector_matrix(np.array([0, 0, 0.05])) @ pose.rotation,
    )
    samples = []
    for _ in range(100):
        began = time.thread_time_ns()
        arm.solve(HOME, target)
        samples.append(time.thread_time_ns() - began)
    # The fastest of a hundred is the arithmetic; the rest is what else the machine does.
    assert min(samples) < 1_000_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urdf": "/nowhere/arm.urdf"}, r"robot.urdf: /nowhere/arm.urdf cannot be read"),
        ({"urdf": "/dev/zero"}, r"robot.urdf: /dev/zero cannot be read \(a pipe, socket or device"),
        ({"urdf": "demo", "joint_names": ["joint_1", "joint_9"]}, r"'joint_9'.*it has \['joint_1'"),
        ({"urdf": "demo", "tip_frame": "tol"}, r"robot.tip_frame: found 'tol'.*did you mean 'tool'"),
        ({"urdf": "demo", "base_frame": "xyz"}, r"robot.base_frame: found 'xyz'.*it has \["),
        (
            {"urdf": "demo", "joint_names": ["joint_1", "joint_2"], "tip_frame": "tool"},
            r"expected the movable joints",
        ),
        ({"urdf": "demo", "base_frame": "tool", "tip_frame": "base_link"}, r"is not connected to"),
    ],
)
def test_wrong_names_are_reported_with_the_nearest_ones(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Kinematics.from_urdf(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not XML"),
        ("<robot", "is not XML"),
        ("<sdf/>", "contains <sdf>"),
        ('<robot name="x"><link name="a"/><joint name="j" type="fixed"/></robot>', "joint 'j'.*has no parent"),
        ('<robot xmlns:xacro="http://www.ros.org/wiki/xacro"><xacro:macro name="m"/></robot>', "xacro file.*run"),
        (
            '<robot name="x"><link name="a"/><link name="b"/><joint name="j" type="revolute"><parent link="a"/>'
            '<child link="b"/></joint></robot>',
            "Pinocchio cannot read",
        ),
    ],
)
def test_a_damaged_file_is_reported(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "arm.urdf"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Kinematics.from_urdf(str(path))


TURNED = 'quat_xyzw="0 0 -2 -2"'  # 90 degrees about z, of another length and sign


@pytest.mark.parametrize("version", ["1.1", "1.2"])
def test_quaternions_of_newer_urdfs_turn_the_arm(tmp_path: Path, planar_urdf: Path, version: str) -> None:
    text = planar_urdf.read_text()
    path = tmp_path / "newer.urdf"
    path.write_text(
        text.replace('rpy="0 0 1.5707963267948966"', TURNED).replace("<robot", f'<robot version="{version}"')
    )
    poses = [Kinematics.from_urdf(str(each)).forward(np.array([0.3, 0.4, 0.05])) for each in (planar_urdf, path)]
    np.testing.assert_allclose(poses[1].position, poses[0].position, atol=1e-12)
    np.testing.assert_allclose(poses[1].rotation, poses[0].rotation, atol=1e-12)


@pytest.mark.parametrize(
    ("version", "origin", "message"),
    [
        ("1.0", TURNED, 'ROS ignores in version 1.0; expected <robot version="1.1">'),
        ("1.1", f'{TURNED} rpy="0 0 0"', "expected one of the two"),
        ("1.1", 'quat_xyzw="0 0 0 0"', "is no rotation"),
        ("1.1", 'quat_xyzw="0 0 1"', "is no rotation"),
        ("1.1", 'quat_xyzw="0 0 nan 1"', "is no rotation"),
    ],
)
def test_a_doubtful_quaternion_is_refused(
    tmp_path: Path, planar_urdf: Path, version: str, origin: str, message: str
) -> None:
    text = planar_urdf.read_text().replace('rpy="0 0 1.5707963267948966"', origin)
    path = tmp_path / "arm.urdf"
    path.write_text(text.replace("<robot", f'<robot version="{version}"'))
    with pytest.raises(ConfigError, match=message):
        Kinematics.from_urdf(str(path))


def test_several_ends_need_a_tip_frame(tmp_path: Path, planar_urdf: Path) -> None:
    ends = '<link name="camera"/><link name="tcp"/>' + "".join(
        f'<joint name="{name}_fixed" type="fixed"><parent link="hand"/><child link="{name}"/></joint>'
        for name in ("camera", "tcp")
    )
    path = tmp_path / "ends.urdf"
    path.write_text(planar_urdf.read_text().replace("</robot>", ends + "</robot>"))
    with pytest.raises(ConfigError, match=r"robot.tip_frame.*\['camera', 'tcp'\]"):
        Kinematics.from_urdf(str(path))
    assert Kinematics.from_urdf(str(path), tip_frame="tcp").tip_frame == "tcp"


def test_a_joint_may_have_the_name_of_a_link(tmp_path: Path) -> None:
    def joint(name: str, kind: str, parent: str, child: str) -> str:
        limit = '<limit lower="-1" upper="1" velocity="1" effort="1"/>' if kind == "revolute" else ""
        ends = f'<parent link="{parent}"/><child link="{child}"/>'
        return f'<link name="{child}"/><joint name="{name}" type="{kind}">{ends}<axis xyz="0 0 1"/>{limit}</joint>'

    path = tmp_path / "arm.urdf"
    arm = '<link name="a"/>' + joint("j", "revolute", "a", "b") + joint("hand", "fixed", "b", "hand")
    path.write_text(f'<robot name="r">{arm}</robot>')
    assert Kinematics.from_urdf(str(path), (), "a", "hand").joint_names == ("j",)
    arm += joint("grip", "fixed", "hand", "site") + joint("k", "revolute", "hand", "c")
    path.write_text(f'<robot name="r">{arm}</robot>')
    assert Kinematics.from_urdf(str(path), ("j",), "a", "site").joint_names == ("j",)
