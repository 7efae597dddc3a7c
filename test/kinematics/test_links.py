"""Poses of links by a URDF and joint states, against Pinocchio's forward kinematics of the whole robot."""

import math
from pathlib import Path

import numpy as np
import pinocchio
import pytest

from test.kinematics.conftest import PLANAR
from test.kinematics.test_mimic import palletiser
from test.kinematics.test_transform_buffer import HERE, SECOND, at_x
from vla_ros.kinematics.links import Links
from vla_ros.kinematics.transforms import TransformBuffer, TransformError
from vla_ros.kinematics.urdf import read_urdf
from vla_ros.types import JointState


def measured(positions: dict[str, float], stamp: int) -> JointState:
    return JointState(tuple(positions), np.array(list(positions.values())), stamp)


def planar(tmp_path: Path, text: str = PLANAR) -> TransformBuffer:
    path = tmp_path / "arm.urdf"
    path.write_text(text)
    return TransformBuffer(links=Links(read_urdf(str(path))))


@pytest.mark.parametrize("robot", ["demo", "demo_two_arms", "planar", "palletiser"])
def test_every_link_is_where_pinocchio_has_it(robot: str, tmp_path: Path) -> None:
    path = tmp_path / "arm.urdf"
    path.write_text({"planar": PLANAR, "palletiser": palletiser()}.get(robot, ""))
    urdf = read_urdf(robot if robot.startswith("demo") else str(path))
    model, rng, made = (
        pinocchio.buildModelFromXML(urdf.text),
        np.random.default_rng(0),
        TransformBuffer(links=Links(urdf)),
    )
    data, driven = model.createData(), [joint.name for joint in urdf.joints if joint.is_movable and not joint.mimic]
    for stamp in range(1, 6):
        found = dict(zip(driven, rng.uniform(-1, 1, len(driven)).tolist(), strict=True))
        made.measure(measured(found, stamp * SECOND))
        full = {
            joint.name: joint.mimic.scale * found[joint.mimic.leader] + joint.mimic.offset
            for joint in urdf.joints
            if joint.mimic
        } | found
        pinocchio.forwardKinematics(model, data, np.array([full[name] for name in list(model.names)[1:]]))
        pinocchio.updateFramePlacements(model, data)
        for one, other in ((urdf.root, link) for link in urdf.links):
            at = [data.oMf[model.getFrameId(link)].homogeneous for link in (one, other)]
            np.testing.assert_allclose(
                made.at(one, other, stamp * SECOND), np.linalg.inv(at[0]) @ at[1], atol=1e-12
            )
            np.testing.assert_allclose(
                made.at(other, one, stamp * SECOND), np.linalg.inv(at[1]) @ at[0], atol=1e-12
            )


def test_a_position_is_interpolated_and_never_taken_from_another_time(tmp_path: Path) -> None:
    made = planar(tmp_path)
    with pytest.raises(TransformError, match="there is no position of joint 'shoulder', which moves 'upper' yet"):
        made.at("base", "upper", SECOND)
    for stamp, angle in ((1, 3.0), (2, 0.2 + math.pi - 2 * math.pi)):  # a driver that wraps continuous joints
        made.measure(
            measured({"shoulder": angle, "elbow": 0.0, "elsewhere": 1.0, "slide": math.nan}, stamp * SECOND)
        )
    between = made.at("base", "upper", 3 * SECOND // 2)
    assert math.atan2(between[1, 0], between[0, 0]) == pytest.approx((3.0 + math.pi + 0.2) / 2 - 2 * math.pi)
    with pytest.raises(TransformError, match=r"newest position of joint 'shoulder', .* is 1 s older"):
        made.at("base", "upper", 3 * SECOND)
    with pytest.raises(TransformError, match="there is no position of joint 'slide', which moves 'hand' yet"):
        made.at("base", "hand", SECOND)
    with pytest.raises(TransformError, match=r"do not connect 'eye' with 'base'; found none; nor does robot\.urdf"):
        made.at("base", "eye", SECOND)
    made.forget()
    with pytest.raises(TransformError, match="there is no position of joint 'shoulder'"):
        made.at("base", "upper", SECOND)


def test_tf_counts_more_than_the_urdf_and_both_may_be_in_one_chain(tmp_path: Path) -> None:
    made = planar(tmp_path)
    made.measure(measured({"shoulder": 0.0, "elbow": 0.0}, SECOND))
    made.add("fore", "eye", 0, at_x(0.05), static=True)  # a driver's own, of a camera on a link
    assert made.at("base", "eye", SECOND)[0, 3] == pytest.approx(0.35)
    assert made.used == {"eye": "/tf_static", "fore": "robot.urdf", "upper": "robot.urdf"}
    made.add("base", "upper", SECOND, at_x(1.0), static=False)
    assert made.at("base", "eye", SECOND)[0, 3] == pytest.approx(1.35)
    assert made.used["upper"] == "/tf"
    made.measure(measured({"shoulder": 0.0, "elbow": 0.0}, 2 * SECOND))
    with pytest.raises(TransformError, match="newest transform of 'upper' is 1 s older"):  # not the URDF again
        made.at("base", "eye", 2 * SECOND)
    assert not made.jumps
    made.forget()
    with pytest.raises(TransformError, match="there is no transform of 'upper' yet"):
        made.at("base", "upper", SECOND)
    made.add("world", "base", SECOND, HERE, static=True)
    assert made.at("world", "base", SECOND)[0, 3] == 0
    made.add("world", "fore", SECOND, at_x(7.0), static=False)  # not below "upper", as in the URDF
    assert made.at("world", "eye", SECOND)[0, 3] == pytest.approx(7.05)


def test_a_static_transform_that_contradicts_the_urdf_is_a_jump_if_the_urdf_was_used(tmp_path: Path) -> None:
    """It may also come first; then the node never acted on the other pose."""
    for used, x in ((False, 5.0), (True, 1.0), (True, 5.0)):
        made = planar(tmp_path)
        if used:
            assert made.at("world", "base", SECOND)[0, 3] == 1
        turned = (0.0, 0.0, math.sin(math.pi / 4), math.cos(math.pi / 4))
        made.add("world", "base", 0, (x, 2.0, 3.0, *turned), static=True)
        if (used, x) != (True, 5.0):
            assert made.at("world", "base", SECOND)[0, 3] == x
            continue
        with pytest.raises(TransformError, match=r"'base' was where robot\.urdf has it") as error:
            made.at("world", "base", SECOND)
        assert error.value.jumped
        made.accept()
        assert made.at("world", "base", SECOND)[0, 3] == x


def test_links_below_a_joint_of_several_degrees_of_freedom_are_nowhere(tmp_path: Path) -> None:
    made = planar(tmp_path, PLANAR.replace('type="continuous"', 'type="floating"'))
    with pytest.raises(TransformError, match="do not connect 'upper' with 'base'"):
        made.at("base", "upper", SECOND)
    assert made.at("world", "base", SECOND)[2, 3] == 3
