"""Arms with the joints of URDFs that people committed, compared with Pinocchio; see ``data/corpus.json``."""

from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import numpy as np
import pinocchio
import pytest

from test.corpus import entries
from vla_ros.errors import ConfigError
from vla_ros.kinematics.solver import Kinematics

XACRO = (
    '<robot name="a" xmlns:xacro="http://wiki.ros.org/xacro"><xacro:property name="r" value="1"/>'
    '<link name="l"/></robot>'
)
SPARE = {"effort": 0.0, "velocity": 0.0}  # the parser of ROS requires them


def joined(numbers: list[float]) -> str:
    return " ".join(map(repr, numbers))


def element(tag: str, values: dict[str, object]) -> str:
    return f"<{tag} {' '.join(f'{key}={quoteattr(str(value))}' for key, value in values.items())}/>"


def text(joints: list[Any], spare: bool) -> str:
    """A URDF with these joints; ``spare`` adds the attributes that the file lacks and Pinocchio requires."""
    links = dict.fromkeys(name for joint in joints for name in joint[2:4])
    lines = [f'<link name="{name}"/>' for name in links]
    for name, kind, parent, child, xyz, rpy, axis, limit, *mimic in joints:
        place, axes = {"xyz": joined(xyz), "rpy": joined(rpy)}, {"xyz": joined(axis)}
        parts = [("parent", {"link": parent}), ("child", {"link": child}), ("origin", place), ("axis", axes)]
        parts += [] if limit is None else [("limit", (SPARE if spare else {}) | limit)]
        parts += [("mimic", each) for each in mimic]
        inside = "".join(element(tag, values) for tag, values in parts)
        lines += [f'<joint name="{name}" type="{kind}">{inside}</joint>']
    return f'<robot name="arm">{"".join(lines)}</robot>'


@pytest.mark.parametrize("facts", entries("robots"))
def test_an_arm_that_people_committed_moves_as_pinocchio_says(facts: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "arm.urdf"
    if facts.get("xacro"):
        path.write_text(XACRO)
        with pytest.raises(ConfigError, match="is a xacro file, expected a URDF"):
            Kinematics.from_urdf(str(path))
        return
    path.write_text(text(facts["joints"], spare=False))
    tip = facts.get("tip", "")
    if tip:
        with pytest.raises(ConfigError, match=rf"several links at the end of the arm: .*'{tip}'.*name the link"):
            Kinematics.from_urdf(str(path))
    arm = Kinematics.from_urdf(str(path), tip_frame=tip)
    assert list(arm.joint_names) == facts["chain"]
    model = pinocchio.buildModelFromXML(text(facts["joints"], spare=True))
    data, rng = model.createData(), np.random.default_rng(7)
    joints = [model.joints[model.getJointId(name)] for name in arm.joint_names]
    for _ in range(5):
        q, full = rng.uniform(-1, 1, len(joints)), pinocchio.neutral(model)
        for joint, value in zip(joints, q, strict=True):
            full[joint.idx_q : joint.idx_q + joint.nq] = (
                [value] if joint.nq == 1 else [np.cos(value), np.sin(value)]
            )
        pinocchio.framesForwardKinematics(model, data, full)
        base, end = (data.oMf[model.getFrameId(name)] for name in (arm.base_frame, arm.tip_frame))
        expected, found = base.actInv(end), arm.forward(q)
        np.testing.assert_allclose(found.position, expected.translation, atol=1e-12)
        np.testing.assert_allclose(found.rotation, expected.rotation, atol=1e-12)
    for index, joint in enumerate(joints):
        if joint.nq == 1:
            low, high = model.lowerPositionLimit[joint.idx_q], model.upperPositionLimit[joint.idx_q]
            assert (arm.position_low[index], arm.position_high[index]) == pytest.approx((low, high))
        speed = model.velocityLimit[joint.idx_v]
        assert arm.velocity_limits[index] == pytest.approx(speed if 0 < speed < 1e300 else np.inf)
