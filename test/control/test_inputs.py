import dataclasses

import numpy as np

from vla_ros.control.clock import SimulatedClock
from vla_ros.control.inputs import Inputs
from vla_ros.types import JointState

JOINTS = JointState(("a",), np.array([0.5]), 10)


def test_joints_are_fresh_for_the_timeout_and_no_longer() -> None:
    clock = SimulatedClock()
    inputs = Inputs(clock, "go")
    assert not inputs.fresh_joints(1.0)
    inputs.set_joints(JOINTS)
    clock.sleep(1.0)
    assert inputs.fresh_joints(1.0) == {"arm": JOINTS}
    clock.sleep(0.01)
    assert not inputs.fresh_joints(1.0)
    assert inputs.snapshot.joints is JOINTS, "a hold may still use it"
    inputs.set_instruction("stay")
    assert not inputs.fresh_joints(1.0), "another instruction is no measurement"
    inputs.set_joints(JOINTS)
    assert inputs.fresh_joints(1.0) == {"arm": JOINTS}
    inputs.forget_measurements()
    assert not inputs.fresh_joints(1.0)


def test_the_joint_state_nearest_to_a_stamp_is_found() -> None:
    inputs = Inputs(SimulatedClock())
    assert not inputs.joints_at(0)
    for stamp in range(0, 10**9, 10**7):
        inputs.set_joints(dataclasses.replace(JOINTS, stamp=stamp))
    found = inputs.joints_at(123_456_789)["arm"]
    assert found.stamp == 120_000_000
    assert not inputs.joints_at(5 * 10**9)


def test_an_instruction_of_blanks_is_empty() -> None:
    assert Inputs(SimulatedClock(), "  \n").snapshot.instruction == ""


def test_only_a_different_instruction_begins_a_new_epoch() -> None:
    inputs = Inputs(SimulatedClock(), "a")
    assert not inputs.set_instruction("a")
    assert inputs.snapshot.epoch == 0
    assert inputs.set_instruction("b")
    assert inputs.snapshot.epoch == 1
