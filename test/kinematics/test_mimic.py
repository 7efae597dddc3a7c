"""Joints that mimic another one, compared with Pinocchio's model of the whole robot and with finite differences."""

from pathlib import Path

import numpy as np
import pinocchio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_ros.errors import ConfigError
from vla_ros.kinematics.rotations import Pose, rotation_angle
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray

LIMIT = 'lower="-3" upper="3"'


def joint(name: str, parent: str, child: str, axis: str, xyz: str, mimic: str = "", limit: str = LIMIT) -> str:
    follows = f"<mimic {mimic}/>" if mimic else ""
    return (
        f'<link name="{child}"/><joint name="{name}" type="revolute"><parent link="{parent}"/>'
        f'<child link="{child}"/><origin xyz="{xyz}" rpy="0.1 0 -0.2"/><axis xyz="{axis}"/>'
        f'<limit {limit} effort="9" velocity="2"/>{follows}</joint>'
    )


def palletiser(level: str = 'joint="shoulder" multiplier="-1" offset="0.3"', limit: str = LIMIT) -> str:
    """An arm on a rail, whose forearm follows its shoulder, and whose wrist follows the forearm."""
    return (
        '<robot name="p"><link name="world"/>'
        + joint("rail", "world", "base", "0 0 1", "0.5 0 1")
        + joint("turn", "base", "column", "0 0 1", "0 0 0.1")
        + joint("level", "upper", "fore", "0 1 0", "0 0 0.3", level, limit)
        + joint("shoulder", "column", "upper", "0 1 0", "0 0 0.2")
        + joint("wrist", "fore", "hand", "1 0 0", "0.2 0 0", 'joint="level" multiplier="0.5" offset="-0.1"')
        + joint("roll", "hand", "tool", "0.6 0 0.8", "0.1 0.02 0")
        + "</robot>"
    )


@pytest.fixture
def urdf(tmp_path: Path) -> Path:
    path = tmp_path / "palletiser.urdf"
    path.write_text(palletiser())
    return path


def positions(q: FloatArray) -> dict[str, float]:
    """Where every joint is, by hand from the text above, for turn, shoulder and roll."""
    level = -q[1] + 0.3
    return {"turn": q[0], "shoulder": q[1], "level": level, "wrist": 0.5 * level - 0.1, "roll": q[2], "rail": 0.7}


def reference(urdf: Path, q: FloatArray) -> pinocchio.SE3:
    """The tool in the base frame by Pinocchio's model of all six joints."""
    model = pinocchio.buildModelFromUrdf(str(urdf))
    data, full = model.createData(), np.zeros(model.nq)
    for name, position in positions(q).items():
        full[model.joints[model.getJointId(name)].idx_q] = position
    pinocchio.framesForwardKinematics(model, data, full)
    base, tool = (data.oMf[model.getFrameId(name, pinocchio.BODY)] for name in ("base", "tool"))
    return base.actInv(tool)


@pytest.mark.parametrize("names", [(), ("turn", "shoulder", "roll"), ("roll", "turn", "shoulder")])
def test_the_pose_of_a_chain_with_mimic_joints_is_that_of_the_whole_robot(
    urdf: Path, names: tuple[str, ...]
) -> None:
    arm, random = Kinematics.from_urdf(str(urdf), names, "base", "tool"), np.random.default_rng(3)
    assert arm.joint_names == (names or ("turn", "shoulder", "roll"))
    for _ in range(20):
        q = random.uniform(-1.5, 1.5, 3)
        expected = reference(urdf, q)
        pose = arm.forward(
            np.array([dict(zip(("turn", "shoulder", "roll"), q, strict=True))[n] for n in arm.joint_names])
        )
        np.testing.assert_allclose(pose.position, expected.translation, atol=1e-12)
        np.testing.assert_allclose(pose.rotation, expected.rotation, atol=1e-12)


@settings(max_examples=30)
@given(numbers=st.tuples(*[st.floats(-1.5, 1.5)] * 3))
def test_the_jacobian_has_a_column_for_each_joint_that_is_driven(
    tmp_path_factory: pytest.TempPathFactory, numbers: tuple[float, ...]
) -> None:
    path = tmp_path_factory.getbasetemp() / "palletiser.urdf"
    path.write_text(palletiser())
    arm, q, step = Kinematics.from_urdf(str(path), (), "base", "tool"), np.array(numbers), 1e-6
    jacobian = arm.jacobian(q)
    assert jacobian.shape == (6, 3)
    here = reference(path, q)
    for column in range(3):
        moved = reference(path, q + step * np.eye(3)[column])
        linear = (moved.translation - here.translation) / step
        angular = pinocchio.log3(moved.rotation @ here.rotation.T) / step
        np.testing.assert_allclose(jacobian[:, column], np.concatenate((linear, angular)), atol=1e-5)


def test_inverse_kinematics_moves_the_driven_joints_only(urdf: Path) -> None:
    arm, random = Kinematics.from_urdf(str(urdf), (), "base", "tool"), np.random.default_rng(4)
    for _ in range(20):
        q = random.uniform(-0.8, 0.8, 3)
        goal = reference(urdf, q)
        start = q + random.uniform(-0.1, 0.1, 3)
        found = arm.solve(start, Pose(goal.translation, goal.rotation), iterations=50)
        reached = reference(urdf, found)
        np.testing.assert_allclose(reached.translation, goal.translation, atol=1e-4)
        assert rotation_angle(reached.rotation @ goal.rotation.T) < 1e-3
    speeds = arm.resolve(np.zeros((1, 3)), np.array([0.0, 0, 0.1, 0, 0, 0]), np.array([0.01]))
    assert speeds.shape == (1, 3)


def test_limits_of_a_joint_that_follows_are_limits_of_its_leader(tmp_path: Path) -> None:
    """The shoulder may be where ``level = 0.3 - 2 shoulder`` is within 0 to 1, and half as fast."""
    path = tmp_path / "arm.urdf"
    path.write_text(palletiser('joint="shoulder" multiplier="-2" offset="0.3"', 'lower="0" upper="1"'))
    arm = Kinematics.from_urdf(str(path), (), "base", "tool")
    assert (arm.position_low[1], arm.position_high[1]) == pytest.approx((-0.35, 0.15))
    assert arm.velocity_limits.tolist() == [2.0, 1.0, 2.0]
    path.write_text(palletiser('joint="shoulder" multiplier="-2" offset="0.3"', 'lower="0" upper="0"'))
    arm = Kinematics.from_urdf(str(path), (), "base", "tool")
    assert arm.position_low[1] == pytest.approx(-2.95), "of the wrist: a range of nothing is no range"
    assert arm.position_high[1] == 3.0


@pytest.mark.parametrize(
    ("text", "names", "ends", "message"),
    [
        (
            palletiser(),
            ("turn", "level", "roll"),
            ("base", "tool"),
            "'level', which mimics 'shoulder'.*leave it out",
        ),
        (
            palletiser(),
            ("turn", "roll"),
            ("base", "tool"),
            r"expected the movable joints.*'turn', 'shoulder', 'roll'",
        ),
        (palletiser(), (), ("upper", "tool"), "joint 'level' mimics 'shoulder', which is not between them"),
        (
            palletiser('joint="sholder"'),
            (),
            ("base", "tool"),
            "mimics 'sholder', which is not.*did you mean 'shoulder'",
        ),
        (palletiser('joint="wrist"'), (), ("base", "tool"), "'level' mimics '.*', which mimics another joint"),
        (palletiser('joint="level"'), (), ("base", "tool"), "'level' mimics 'level', which mimics"),
        (palletiser('multiplier="2"'), (), ("base", "tool"), "joint 'level' mimics no joint"),
        (
            palletiser('joint="turn" multiplier="x"'),
            (),
            ("base", "tool"),
            'mimic multiplier="x", expected a finite',
        ),
        (
            palletiser('joint="shoulder" offset="9"', 'lower="0" upper="1"'),
            (),
            ("base", "tool"),
            "within the limits of 'shoulder' it is never within its own",
        ),
    ],
)
def test_a_joint_that_cannot_follow_is_named(
    tmp_path: Path, text: str, names: tuple[str, ...], ends: tuple[str, str], message: str
) -> None:
    path = tmp_path / "arm.urdf"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Kinematics.from_urdf(str(path), names, *ends)
