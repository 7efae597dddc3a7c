import xml.etree.ElementTree as ElementTree

import mujoco
import numpy as np
import pinocchio
import pytest

from vla_ros.kinematics import urdf
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.arm import TWO_ARMS as TWO
from vla_ros_lab.sim.world import TableTop, WorldOptions

URDF, MJCF = urdf.resolve(urdf.DEMO), arm.ASSETS / "table_top.xml"


@pytest.fixture(scope="module")
def model() -> pinocchio.Model:
    return pinocchio.buildModelFromUrdf(str(URDF))


@pytest.fixture(scope="module")
def world() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(str(MJCF))


def test_forward_kinematics_agree_between_pinocchio_mujoco_and_numpy(model, world):
    assert list(model.names)[1:] == [*arm.JOINT_NAMES, *arm.FINGER_NAMES]
    data, state, tool = model.createData(), mujoco.MjData(world), model.getFrameId("tool")
    random = np.random.default_rng(1)
    for configuration in random.uniform(model.lowerPositionLimit, model.upperPositionLimit, (100, 9)):
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


def test_two_arms_stand_where_their_urdf_says():
    """The model that MuJoCo composes and the URDF of `robot.urdf: demo_two_arms`."""
    description = urdf.read_urdf(urdf.DEMO_TWO_ARMS)
    model = pinocchio.buildModelFromXML(description.text)
    assert description.root == "table"
    data, random = model.createData(), np.random.default_rng(2)
    with TableTop(WorldOptions(arms=2)) as world:
        assert world.joint_names == tuple(model.names)[1:] == (*TWO[0].joint_names, *TWO[1].joint_names)
        for _ in range(5):
            world.reset(int(random.integers(1000)))
            pinocchio.framesForwardKinematics(model, data, world.joint_positions())
            for index, mount in enumerate(TWO):
                frame = data.oMf[model.getFrameId(f"{mount.prefix}tool")]
                np.testing.assert_allclose(world.tool_position(index), frame.translation, atol=1e-6)
                np.testing.assert_allclose(world.tool_rotation(index), frame.rotation, atol=1e-6)


def test_limits_masses_and_inertias_agree(model, world):
    np.testing.assert_allclose(world.jnt_range[:9].T, (model.lowerPositionLimit, model.upperPositionLimit))
    np.testing.assert_allclose(world.jnt_range[:7], [joint.limits for joint in arm.CHAIN])
    np.testing.assert_allclose(world.actuator_ctrlrange, world.jnt_range[:9])
    np.testing.assert_allclose(world.actuator_forcerange[:, 1], model.effortLimit)
    assert world.jnt_range[7, 1] == arm.FINGER_TRAVEL
    assert np.all(model.velocityLimit > 0)
    for index, inertia in enumerate(list(model.inertias)[1:]):
        body = world.body(world.jnt_bodyid[index])
        assert body.mass[0] == pytest.approx(inertia.mass)
        np.testing.assert_allclose(body.ipos, inertia.lever, atol=1e-12)
        np.testing.assert_allclose(np.sort(body.inertia), np.sort(np.linalg.eigvalsh(inertia.inertia)), rtol=1e-6)
        # A real body: each principal moment is at most the sum of the others.
        small, middle, large = np.sort(body.inertia)
        assert small > 0
        assert large <= small + middle + 1e-12


def test_links_look_alike_in_urdf_and_mjcf():
    """Position and colour of each solid; URDF has no capsule and adds two spheres to a cylinder instead."""
    urdf, mjcf = ElementTree.parse(URDF), ElementTree.parse(MJCF)
    links = [link for link in urdf.iterfind("link") if link.find("visual") is not None]
    assert len(links) == 10
    for link in links:
        solids = [solid for solid in link.iterfind("visual") if solid.find("geometry/sphere") is None]
        shown = [(solid.find("origin").get("xyz"), solid.find("material").get("name")) for solid in solids]
        geoms = mjcf.findall(f".//body[@name='{link.get('name')}']/geom")
        assert shown == [(geom.get("pos"), geom.get("material")) for geom in geoms]


def test_inverse_reaches_the_whole_table_within_limits_and_points_down():
    limits = np.array([joint.limits for joint in arm.CHAIN])
    for x in (0.36, 0.5, 0.64):
        for y in (-0.22, 0.0, 0.22):
            for z in (0.02, 0.3):
                joints = arm.inverse(np.array([x, y, z]))
                pose = arm.forward(joints)
                np.testing.assert_allclose(pose[:3, 3], (x, y, z), atol=1e-3)
                np.testing.assert_allclose(pose[:3, :3], arm.TOOL_DOWN, atol=1e-3)
                assert np.all((joints > limits[:, 0]) & (joints < limits[:, 1]))


def test_inverse_refuses_a_position_out_of_reach():
    with pytest.raises(ValueError, match="out of the arm's reach"):
        arm.inverse(np.array([1.5, 0.0, 0.1]))
