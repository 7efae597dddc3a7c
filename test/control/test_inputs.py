"""What was measured too long ago is not built upon."""

from __future__ import annotations

import time

import numpy as np

from vla_ros.control.inputs import Inputs
from vla_ros.types import JointState

JOINTS = JointState(("a",), np.array([0.5]), 7)


def test_joints_are_fresh_for_the_timeout_and_no_longer() -> None:
    inputs = Inputs("go")
    assert inputs.fresh_joints(1.0) is None
    inputs.set_joints(JOINTS)
    assert inputs.fresh_joints(60.0) is JOINTS
    time.sleep(0.02)
    assert inputs.fresh_joints(0.01) is None
    assert inputs.snapshot.joints is JOINTS, "a hold may still use it"
    inputs.set_instruction("stay")
    assert inputs.fresh_joints(0.01) is None, "another instruction makes no measurement"
    inputs.set_joints(JOINTS)
    assert inputs.fresh_joints(60.0) is JOINTS


def test_measurements_that_were_forgotten_are_not_fresh() -> None:
    inputs = Inputs("go")
    inputs.set_joints(JOINTS)
    inputs.forget_measurements()
    assert inputs.fresh_joints(60.0) is None
