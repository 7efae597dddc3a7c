import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.config import LimitsConfig
from vla_ros.control.joints import JointStateMerger, MergedJointState
from vla_ros.types import FloatArray, JointState

ARM = ("j1", "j2")
SECOND = 1_000_000_000


def say(
    states: JointStateMerger, joints: dict[str, float], at: float, stamped: bool = True
) -> MergedJointState | None:
    stamp = round(at * SECOND)
    message = JointState(tuple(joints), np.array(list(joints.values())), stamp)
    return states.add(message, stamp if stamped else 0, stamp, timeout=0.5)


def test_a_complete_joint_state_is_passed_on() -> None:
    states = JointStateMerger(ARM)
    whole = say(states, {"j1": 1.0, "j2": 2.0, "finger": 0.04}, 1.0)
    assert whole.joints.select(("finger", "j2", "j1")).tolist() == [0.04, 2.0, 1.0]
    assert whole.stamp == whole.joints.stamp == SECOND


def test_a_joint_state_of_the_other_arm_says_nothing_of_this_one() -> None:
    """At the start, and after a clock that jumped: no joints are missing, none has been measured yet."""
    states = JointStateMerger(ARM, own=ARM)
    for at in (1.0, 3.0):
        states.forget()
        assert say(states, {"k1": 0.1, "k2": 0.2}, at) is None
        assert say(states, {"j1": 1.0, "j2": 2.0}, at + 0.01) is not None
    assert say(states, {"j1": 1.0}, 5.0) is not None, "a joint is missing, and is named"


def test_joint_states_of_two_drivers_are_merged() -> None:
    states = JointStateMerger(ARM)
    assert say(states, {"j1": 1.0, "j2": 2.0}, 1.0) is not None
    assert say(states, {"finger": 0.03}, 1.01) is None, "it tells nothing new of the arm"
    whole = say(states, {"j1": 1.1, "j2": 2.1}, 1.02)
    assert whole.joints.select(("j1", "j2", "finger")).tolist() == [1.1, 2.1, 0.03]
    assert whole.stamp == round(1.02 * SECOND)


def test_a_merged_joint_state_has_the_oldest_stamp() -> None:
    states = JointStateMerger(ARM)
    first = say(states, {"j1": 1.0}, 1.0)
    with pytest.raises(KeyError, match="j2"):
        first.joints.select(ARM)
    both = say(states, {"j2": 2.0}, 1.1)
    assert both.joints.select(ARM).tolist() == [1.0, 2.0]
    assert both.stamp == SECOND


def test_joints_of_a_silent_driver_are_missing() -> None:
    states = JointStateMerger(ARM)
    say(states, {"j1": 1.0}, 1.0)
    say(states, {"j2": 2.0}, 1.0)
    late = say(states, {"j1": 1.0}, 1.6)
    with pytest.raises(KeyError, match=r"lacks \['j2'\]"):
        late.joints.select(ARM)


def test_unknown_joint_names_are_reported() -> None:
    whole = say(JointStateMerger(ARM), {"shoulder": 1.0, "elbow": 2.0}, 1.0)
    with pytest.raises(KeyError, match=r"lacks \['j1', 'j2'\]; it has \['shoulder', 'elbow'\]"):
        whole.joints.select(ARM)


def test_silent_fingers_are_left_out() -> None:
    states = JointStateMerger(ARM)
    say(states, {"finger": 0.03}, 1.0)
    whole = say(states, {"j1": 1.0, "j2": 2.0}, 1.6)
    assert whole.joints.names == ARM


def test_an_older_message_changes_no_joint() -> None:
    states = JointStateMerger(ARM)
    say(states, {"j1": 1.0, "j2": 1.0}, 1.0)
    stamp = round(0.9 * SECOND)
    whole = states.add(JointState(("j1", "j2"), np.array([0.5, 0.5]), stamp), stamp, SECOND, 0.5)
    assert whole.joints.select(ARM).tolist() == [1.0, 1.0]
    states.forget()
    whole = states.add(JointState(("j1", "j2"), np.array([0.5, 0.5]), stamp), stamp, SECOND, 0.5)
    assert whole.joints.select(ARM).tolist() == [0.5, 0.5]


def test_the_age_is_unknown_without_stamps() -> None:
    states = JointStateMerger(ARM)
    say(states, {"j1": 1.0}, 1.0, stamped=False)
    whole = say(states, {"j2": 1.0}, 1.1)
    assert (whole.stamp, whole.joints.stamp) == (0, SECOND)


def test_a_message_with_fewer_positions_than_names_is_returned_unchanged() -> None:
    states = JointStateMerger(ARM)
    broken = JointState(ARM, np.array([1.0]), 5)
    whole = states.add(broken, 5, 5, 0.5)
    assert whole.joints is broken
    # A driver of something else that gives names alone is none of our business.
    say(states, {"j1": 1.0, "j2": 2.0}, 1.0)
    assert states.add(JointState(("wheel",), np.array([]), SECOND), SECOND, SECOND, 0.5) is None


def test_without_needed_joints_every_message_is_passed_on() -> None:
    message = JointState(("anything",), np.array([1.0]), 5)
    whole = JointStateMerger(()).add(message, 0, 7, 0.5)
    assert (whole.joints, whole.stamp) == (message, 0)


def test_a_second_publisher_of_a_joint_is_ignored_and_named() -> None:
    states = JointStateMerger(ARM)
    robot, leftover = JointState(ARM, np.array([1.0, 2.0]), 1), JointState(ARM, np.array([0.0, 0.0]), 1)
    for step in range(10):
        at = step * SECOND // 50
        whole = states.add(robot, 0, at, 0.5, b"robot")
        assert whole.joints.select(ARM).tolist() == [1.0, 2.0]
        assert states.add(leftover, 0, at + 1, 0.5, b"leftover") is None
    found = states.competing(at)
    assert {found.first.publisher, found.second.publisher} == {b"robot", b"leftover"}


def test_publishers_of_different_joints_do_not_contest() -> None:
    states = JointStateMerger(("j1", "j2", "j3"))
    for step in range(50):
        at = step * SECOND // 50
        states.add(JointState(("j1", "j2", "wheel"), np.array([1.0, 2.0, 0.0]), 1), 0, at, 0.5, b"arm")
        states.add(JointState(("j3", "wheel"), np.array([3.0, 9.0]), 1), 0, at + 1, 0.5, b"wrist")
    assert states.competing(at) is None, "the wheel is nothing to this arm"
    whole = states.add(JointState(("j1",), np.array([1.5]), 1), 0, at + 2, 0.5, b"arm")
    assert whole.joints.select(("j1", "j2", "j3")).tolist() == [1.5, 2.0, 3.0]


def test_a_publisher_that_alternates_between_two_positions_is_named() -> None:
    states = JointStateMerger(("j1",), {"j1": 2.0})
    for step in range(12):
        position = (0.0, 1.0)[step % 2]
        whole = states.add(JointState(("j1",), np.array([position]), 1), 0, step * SECOND // 50, 0.5, b"relay")
        assert (whole is None) == bool(step % 2)
        assert whole is None or whole.joints.positions.tolist() == [0.0]
    assert states.competing(12 * SECOND // 50) is not None


def test_a_message_that_names_a_joint_twice_is_returned_unchanged() -> None:
    states = JointStateMerger(ARM, {"j1": 2.0, "j2": 2.0})
    assert say(states, {"j1": 0.0, "j2": 0.1}, 1.0) is not None
    twice = JointState(("j2", "j2"), np.array([0.05, 0.1]), 2)
    assert states.add(twice, 2, 2 * SECOND, 0.5).joints is twice
    assert say(states, {"j1": 0.0}, 1.02).joints.select(ARM).tolist() == [0.0, 0.1], "and nothing of it is kept"


@given(
    speed=st.sampled_from([0.05, 2.6, 10.0]),
    rate=st.sampled_from([10, 30, 100, 500]),
    batch=st.integers(1, 20),
    stamped=st.booleans(),
    ways=st.lists(st.floats(-1, 1), min_size=5, max_size=40),
    delays=st.lists(st.floats(0, 0.05), min_size=40, max_size=40),
)
def test_every_message_of_a_joint_within_its_velocity_limit_is_used(
    speed: float, rate: int, batch: int, stamped: bool, ways: list[float], delays: list[float]
) -> None:
    """At any rate, with messages that are late by up to 0.05 s or arrive in batches."""
    batch = min(batch, max(1, rate // 20))
    states = JointStateMerger(("j1",), {"j1": speed})
    positions, arrived = itertools.accumulate(way * speed / rate for way in ways), 0
    for index, position in enumerate(positions):
        measured = 1 + index / rate
        sent = 1 + (index // batch + 1) * batch / rate
        arrived = max(arrived, round((sent + delays[index]) * SECOND))
        message = JointState(("j1",), np.array([position]), round(measured * SECOND) if stamped else arrived)
        whole = states.add(message, message.stamp if stamped else 0, arrived, 0.5)
        assert whole.joints.positions.tolist() == [position]


ZEROS = {"j1": 0.0, "j2": 0.0}


@pytest.mark.parametrize("stamped", [True, False])
def test_nothing_of_a_joint_state_is_used_if_one_joint_cannot_be_there(stamped: bool) -> None:
    states = JointStateMerger(ARM, dict.fromkeys(ARM, 12.6))
    for step in range(20):
        whole = say(states, {"j1": 0.2, "j2": 1.8, "finger": 0.04}, 1 + step / 100, stamped)
        assert whole.joints.select(("j1", "j2", "finger")).tolist() == [0.2, 1.8, 0.04]
        assert states.unbelieved == ""
        if step % 3 == 2:  # a driver's all-zero joint states
            assert say(states, ZEROS | {"finger": 0.0}, 1 + (step + 0.5) / 100, stamped) is None
            assert re.match(r"joint 'j2' jumps to 0, from 1.8, faster than it can move", states.unbelieved)


def test_damaged_joint_states_in_a_row_are_not_used() -> None:
    """Each differs from the one before: the second must not count as the continuation of anything."""
    states = JointStateMerger(ARM, dict.fromkeys(ARM, 2.0))
    assert say(states, {"j1": 0.2, "j2": 1.8}, 1.0) is not None
    for step in range(1, 40):
        assert say(states, {"j1": 1.5 * (-1) ** step, "j2": 0.9 + step}, 1 + step / 50) is None
    assert say(states, {"j1": 0.25, "j2": 1.85}, 1.8).joints.select(ARM).tolist() == [0.25, 1.85]


def test_a_robot_that_is_elsewhere_for_good_is_followed() -> None:
    """A simulator that was reset, or a driver that was restarted: not at once, but soon."""
    states = JointStateMerger(ARM, dict.fromkeys(ARM, 2.0))
    say(states, {"j1": 0.2, "j2": 1.8}, 1.0)
    used = [say(states, {"j1": -1.0, "j2": 0.5}, 1.02 + step / 50) is not None for step in range(10)]
    assert used[0] is False
    assert used[:6] == sorted(used[:6])
    assert all(used[6:])
    assert states.unbelieved == ""


def restarted(driver: bytes, at: float, joints: dict[str, float], states: JointStateMerger) -> FloatArray | None:
    """What is used of a joint state of a driver."""
    stamp = round(at * SECOND)
    message = JointState(tuple(joints), np.array(list(joints.values())), stamp)
    whole = states.add(message, stamp, stamp, 0.5, driver)
    return None if whole is None else whole.joints.select(ARM)


@pytest.mark.parametrize("armed", [False, True])
@pytest.mark.parametrize("driver", [b"old", b"new"])
def test_a_first_joint_state_after_a_silence_is_used_only_if_it_agrees(driver: bytes, armed: bool) -> None:
    """A driver that was restarted, or has lost its robot, begins with one of zeros, or with many."""
    states, there = JointStateMerger(ARM, dict.fromkeys(ARM, 2.0)), {"j1": 0.2, "j2": 1.8}
    states.keep_trajectory(False)
    for step in range(10):
        restarted(b"old", 1 + step / 50, there, states)
    states.keep_trajectory(armed)
    assert restarted(driver, 3.0, ZEROS, states) is None
    assert states.unbelieved.startswith("joint 'j2' jumps to 0, from 1.8")
    used = [restarted(driver, 3.02 + step / 50, there, states) for step in range(10)]
    assert used[0 if driver == b"new" else 6] is not None, "where it was: at once, or soon"
    assert states.unbelieved == ""
    used = [restarted(driver, 6 + step / 50, ZEROS, states) for step in range(20)]
    assert all(each is None for each in used[:5])
    assert (used[-1] is None) == armed, "until a person disarms"


def test_the_first_joint_state_of_an_armed_robot_needs_others_that_agree() -> None:
    states, there = JointStateMerger(ARM, dict.fromkeys(ARM, 2.0)), {"j1": 0.2, "j2": 1.8}
    states.keep_trajectory(True)
    assert restarted(b"", 1.0, ZEROS, states) is None
    used = [restarted(b"", 1.02 + step / 50, there, states) for step in range(10)]
    assert used[0] is None
    assert all(each is None or each.tolist() == [0.2, 1.8] for each in used)
    assert used[-1] is not None


@pytest.mark.parametrize("split", [False, True])
def test_a_true_motion_at_ten_radians_a_second_is_followed(split: bool) -> None:
    """With the velocity that is assumed where none is stated."""
    states = JointStateMerger(ARM, dict.fromkeys(ARM, LimitsConfig().assumed_joint_velocity[0]))
    for step in range(100):
        at = {"j1": 10.0 * step / 50, "j2": -10.0 * step / 50}
        for part in [{name: at[name]} for name in at] if split else [at]:
            whole = say(states, part, 1 + step / 50)
            assert whole is not None
    assert whole.joints.select(ARM).tolist() == [19.8, -19.8]


@given(
    rate=st.sampled_from([10, 50, 500]), wrong=st.floats(-4, 4), way=st.floats(-1, 1), damaged=st.integers(1, 20)
)
def test_a_damaged_position_is_used_only_where_the_joint_can_be_and_not_for_long(
    rate: int, wrong: float, way: float, damaged: int
) -> None:
    speed, used = 2.6, 0.0
    states = JointStateMerger(("j1",), {"j1": speed})
    for index in range(40):
        position = way * speed * index / rate
        stamp = SECOND + round(index * SECOND / rate)
        told = wrong if index == damaged else position
        whole = states.add(JointState(("j1",), np.array([told]), stamp), stamp, stamp, 0.5)
        before, used = used, used if whole is None else float(whole.joints.positions[0])
        assert index != damaged or abs(used - before) <= 0.02 + 1.25 * speed * (1 / rate + 0.02)
        assert abs(used - position) <= 0.02 + 1.25 * speed * (0.1 + 2 / rate + 0.02)
