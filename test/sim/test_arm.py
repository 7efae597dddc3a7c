"""The arm's table, its URDF and its MJCF are one and the same arm."""

import mujoco
import numpy as np
import pinocchio
import pytest

from vla_ros.sim import arm
from vla_ros.sim.description import mjcf, urdf


def random_configurations(count: int) -> np.ndarray:
    limits = np.array([link.limits for link in arm.LINKS if link.joint])
    return np.random.default_rng(1).uniform(limits[:, 0], limits[:, 1], (count, 9))


def test_the_urdf_that_ships_is_the_one_that_the_table_writes():
    assert arm.URDF_PATH.read_text(encoding="utf-8") == urdf()


def test_forward_kinematics_agree_between_pinocchio_mujoco_and_the_table():
    model = pinocchio.buildModelFromUrdf(str(arm.URDF_PATH))
    data = model.createData()
    assert list(model.names)[1:] == [*arm.JOINT_NAMES, *arm.FINGER_NAMES]
    world = mujoco.MjModel.from_xml_string(mjcf())
    state = mujoco.MjData(world)
    tool = model.getFrameId("tool")
    for configuration in random_configurations(100):
        state.qpos[:9] = configuration
        mujoco.mj_forward(world, state)
        pinocchio.framesForwardKinematics(model, data, configuration)
        site, frame = state.site("tool"), data.oMf[tool]
        pose = arm.forward(configuration[:7])
        np.testing.assert_allclose(site.xpos, frame.translation, atol=1e-6)
        np.testing.assert_allclose(site.xmat.reshape(3, 3), frame.rotation, atol=1e-6)
        np.testing.assert_allclose(pose[:3, 3], frame.translation, atol=1e-9)
        np.testing.assert_allclose(pose[:3, :3], frame.rotation, atol=1e-9)
        for side in ("left", "right"):
            finger = data.oMf[model.getFrameId(f"{side}_finger")]
            np.testing.assert_allclose(state.body(f"{side}_finger").xpos, finger.translation, atol=1e-6)


def test_limits_masses_and_inertias_agree_between_urdf_and_mjcf():
    model = pinocchio.buildModelFromUrdf(str(arm.URDF_PATH))
    world = mujoco.MjModel.from_xml_string(mjcf())
    np.testing.assert_allclose(world.jnt_range[:9, 0], model.lowerPositionLimit)
    np.testing.assert_allclose(world.jnt_range[:9, 1], model.upperPositionLimit)
    assert np.all(model.velocityLimit > 0)
    for index, link in enumerate(link for link in arm.LINKS if link.joint):
        body = world.body(link.name)
        inertia = model.inertias[index + 1]
        assert body.mass[0] == pytest.approx(inertia.mass)
        np.testing.assert_allclose(body.ipos, inertia.lever, atol=1e-12)
        np.testing.assert_allclose(np.sort(body.inertia), np.sort(np.linalg.eigvalsh(inertia.inertia)), rtol=1e-6)
        # A real body: each principal moment is at most the sum of the others.
        small, middle, large = np.sort(body.inertia)
        assert small > 0
        assert large <= small + middle + 1e-12


def test_inverse_reaches_the_whole_table_within_the_limits_pointing_down():
    limits = np.array([link.limits for link in arm.CHAIN])
    for x in (0.36, 0.5, 0.64):
        for y in (-0.22, 0.0, 0.22):
            for z in (0.02, 0.3):
                joints = arm.inverse(np.array([x, y, z]))
                pose = arm.forward(joints)
                np.testing.assert_allclose(pose[:3, 3], (x, y, z), atol=1e-3)
                np.testing.assert_allclose(pose[:3, :3], arm.TOOL_DOWN, atol=1e-3)
                assert np.all((joints > limits[:, 0]) & (joints < limits[:, 1]))


def test_inverse_says_when_a_place_is_out_of_reach():
    with pytest.raises(ValueError, match="out of the arm's reach"):
        arm.inverse(np.array([1.5, 0.0, 0.1]))


def test_rotation_vector_inverts_rodrigues():
    for vector in np.random.default_rng(2).normal(size=(20, 3)):
        vector *= 2.5 / max(2.5, np.linalg.norm(vector))
        np.testing.assert_allclose(arm.rotation_vector(pinocchio.exp3(vector)), vector, atol=1e-9)
    np.testing.assert_allclose(arm.rotation_vector(np.eye(3)), 0.0)
