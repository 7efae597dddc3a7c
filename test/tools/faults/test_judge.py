"""The judge finds every kind of violation, and none in a good run.

Each test takes a good run and spoils one thing in it: a harness that finds nothing proves nothing.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from tools.faults.driver import ARM, FINGERS, HOME, TWIST
from tools.faults.judge import GRACE, Judge, Permission
from tools.faults.records import Record
from tools.faults.setups import OPTIONS
from vla_ros.config import load
from vla_ros.control.robot import make_kinematics

MS = 1_000_000
NAMES = ARM + FINGERS
CONFIG = load((), [f"{name}:={value}" for name, value in OPTIONS.items()])
KINEMATICS = make_kinematics(CONFIG)["arm"]
PERIOD = 0.1
PERMISSIONS = [Permission(0.5, True)]


def found(records: list[Record], permissions: list[Permission] | None = None, **options: object) -> set[str]:
    judge = Judge(CONFIG, KINEMATICS, PERIOD, **options)
    return {violation.name for violation in judge.check(records, permissions or PERMISSIONS)}


def at(seconds: float) -> int:
    """Nanoseconds of the ROS clock, which equals the steady clock here."""
    return int(seconds * 1000) * MS


def good() -> list[Record]:
    """Joint states at 50 Hz, frames at 10 Hz from 1 s on, a motion 20 ms after each frame."""
    records = [
        Record("joints", index / 50, 2 * (at(index / 50) // 2), at(index / 50), HOME, NAMES) for index in range(100)
    ]
    for index in range(10, 20):
        sent, came = index / 10, index / 10 + 0.02
        moved = (HOME[0] + 0.01, *HOME[1:])
        records.append(Record("frame", sent, at(sent) | 1, at(sent)))
        records.append(Record("command", came, at(sent) | 1, at(came), moved, NAMES))
    return records


def spoiled(**changes: object) -> list[Record]:
    """The good run with a changed last command."""
    records = good()
    return [*records[:-1], replace(records[-1], **changes)]


def joint(index: int, value: float) -> tuple[float, ...]:
    return (*HOME[:index], value, *HOME[index + 1 :])


def test_a_good_run_has_no_violation() -> None:
    assert found(good()) == set()


def test_a_command_counts_from_when_it_was_sent_not_from_when_a_busy_robot_reads_it() -> None:
    stopped = [*PERMISSIONS, Permission(1.75, False, 0.1, "stop")]
    assert found(spoiled(time=2.2, ros=at(2.2)), stopped) == {"forbidden"}
    assert found(spoiled(time=2.2, ros=at(2.2), delay=0.4), stopped) == set()


def test_no_motion_is_sent_after_the_node_has_said_that_it_stopped() -> None:
    status = Record("status", 1.93, text=json.dumps({"state": "stopped", "stamp": at(1.91)}))
    stopped = [*PERMISSIONS, Permission(1.9, False, 60.0, "stop")]
    assert found([*good(), status], stopped) == {"stopped"}
    assert found([*spoiled(delay=0.015), status], stopped) == set()
    armed = [*stopped, Permission(1.915, True, armed=True)]
    assert found([*good(), status], armed) == {"stopped"}, "the status came after the arming, and so did the motion"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"positions": joint(2, float("nan"))}, "finite"),
        ({"positions": HOME[:-1], "names": NAMES[:-1]}, "shape"),
        ({"names": NAMES[::-1]}, "shape"),
        ({"stamp": 12345}, "stamp"),
        ({"positions": joint(3, 2.62)}, "following"),
        ({"positions": joint(0, HOME[0] + 0.3)}, "velocity"),
        ({"positions": joint(0, HOME[0] + 0.09)}, "translation"),
        ({"positions": joint(8, 0.05)}, "gripper"),
        ({"ros": at(1.92) + at(1.0)}, "age"),
    ],
)
def test_a_command_that_breaks_one_rule_is_named(changes: dict[str, object], name: str) -> None:
    assert found(spoiled(**changes)) == {name}


def test_a_tip_that_leaves_the_box_is_named() -> None:
    config = load((), [f"{n}:={v}" for n, v in OPTIONS.items()] + ["limits.workspace_high:=[0.8, 0.0, 0.6]"])
    judge = Judge(config, KINEMATICS, PERIOD)
    assert {violation.name for violation in judge.check(good(), PERMISSIONS)} == {"workspace"}


def test_a_tip_that_turns_too_far_is_named() -> None:
    assert found(spoiled(positions=joint(6, 0.1))) == set()
    config = load((), [f"{n}:={v}" for n, v in OPTIONS.items()] + ["limits.max_rotation_step:=0.05"])
    violations = Judge(config, KINEMATICS, PERIOD).check(spoiled(positions=joint(6, 0.1)), PERMISSIONS)
    assert {violation.name for violation in violations} == {"rotation"}


def test_limits_are_relative_to_a_joint_state_that_the_node_may_know() -> None:
    records = [
        replace(record, positions=joint(0, 1.0)) if record.kind == "joints" and record.time < 1.0 else record
        for record in good()
    ]
    assert found(records) == set()
    late = [*records[:-1], replace(records[-1], positions=joint(0, 1.0))]
    assert found(late) == {"following"}


def test_a_position_beyond_a_limit_is_named() -> None:
    config = load((), [f"{n}:={v}" for n, v in OPTIONS.items()] + ["limits.following_error:=6.0"])
    violations = Judge(config, KINEMATICS, PERIOD).check(spoiled(positions=joint(3, 2.62)), PERMISSIONS)
    assert {violation.name for violation in violations} == {"position"}


def test_a_step_begins_at_the_last_command_and_may_lead_the_arm() -> None:
    """The arm stays where it is, and 16 steps of 0.02 rad lead it by 0.32 rad."""
    records = [record for record in good() if record.kind != "command"]
    for index in range(16):
        came, stamp = 1.02 + index / 20, at(1.0 + index // 2 / 10) | 1
        records.append(Record("command", came, stamp, at(came), joint(0, HOME[0] + 0.02 * (index + 1)), NAMES))
    assert found(records) == set()
    config = load((), [f"{n}:={v}" for n, v in OPTIONS.items()] + ["limits.following_error:=0.3"])
    judge = Judge(config, KINEMATICS, PERIOD)
    assert {violation.name for violation in judge.check(records, PERMISSIONS)} == {"following"}


def test_no_command_may_be_based_on_an_impossible_joint_state() -> None:
    wild = joint(0, 5.0)
    records = [replace(record, positions=wild) if record.kind == "joints" else record for record in good()]
    records = [replace(record, positions=wild) if record.kind == "command" else record for record in records]
    assert found(records) == {"blind"}


SUSPENDED = [(1.95, 2.95)]
HOLD = Record("command", 3.1, at(3.08), at(3.1), HOME, NAMES)


@pytest.mark.parametrize(
    ("sent", "hold", "names"),
    [
        (2.96, HOLD, {"age", "blind"}),  # after the node resumed, from what it knew before
        (1.94, HOLD, set()),  # before it was suspended: the middleware was sending
        (1.94, None, {"corrected"}),
        (1.94, replace(HOLD, time=4.0), {"corrected"}),
    ],
)
def test_only_what_was_being_sent_may_arrive_after_a_suspension(
    sent: float, hold: Record | None, names: set[str]
) -> None:
    came = 2.97
    records = [each for each in good() if each.time < SUSPENDED[0][0]]
    records += [Record("joints", t, at(t), at(t), HOME, NAMES) for t in (3.0, 3.04, 3.08)]
    records.append(Record("command", came, at(1.9) | 1, at(came), HOME, NAMES, delay=came - sent))
    records += [hold] if hold else []
    assert found(records, suspensions=SUSPENDED) == names


def test_motion_before_arming_and_after_it_was_forbidden_is_named() -> None:
    assert found(good(), [Permission(1.5, True)]) == {"disarmed"}
    stopped = [Permission(0.5, True), Permission(1.5, False, why="stop")]
    assert found(good(), stopped) == {"forbidden"}
    assert found(good(), [*stopped, Permission(1.5 + GRACE, True)]) == set()


def test_a_motion_on_a_frame_from_before_arming_is_named() -> None:
    assert found(good(), [Permission(0.5, True, armed=True)]) == set()
    records = [replace(r, time=1.2) if r.kind == "command" and r.time < 1.1 else r for r in good()]
    assert found(records, [*PERMISSIONS, Permission(1.01 + GRACE, True, armed=True)]) == {"before"}
    assert found(records, [*PERMISSIONS, Permission(1.01 + GRACE, True)]) == set(), "a hold that ends is no arming"


def test_a_motion_on_a_frame_from_before_the_task_changed_is_named() -> None:
    late = [replace(r, time=1.5) if r.kind == "command" and r.time < 1.1 else r for r in good()]
    for records, names in ((late, {"task"}), (good(), set())):
        assert found(records, [*PERMISSIONS, Permission(1.01 + GRACE, True, renewed=True)]) == names
        assert found(records, PERMISSIONS) == set()


def test_a_command_between_steps_that_goes_too_far_is_named() -> None:
    options = {**OPTIONS, "control.rate_hz": "20.0", "control.command_rate_hz": "250.0"}
    judge = Judge(load((), [f"{name}:={value}" for name, value in options.items()]), KINEMATICS, 0.05)
    last = good()[-1]
    for after, names in ((0.002, {"between"}), (0.04, set())):
        same = replace(last, time=last.time + after)
        again = replace(last, time=last.time + 2 * after, positions=joint(0, HOME[0] - 0.02))
        assert {each.name for each in judge.check([*good(), same, again], PERMISSIONS)} == names


def test_a_hold_has_the_position_measured_at_its_stamp() -> None:
    records = good()
    stamp = next(record.stamp for record in records if record.kind == "joints" and record.time == 1.9)
    hold = Record("command", 1.95, stamp, at(1.95), HOME, NAMES)
    assert found([*records, hold]) == set()
    assert found([*records, replace(hold, positions=(0.0,) * 9)]) == {"hold"}
    assert found([*records, hold], [Permission(1.96, True)]) == {"disarmed"}
    old = next(record.stamp for record in records if record.kind == "joints" and record.time == 0.2)
    assert found([*records, replace(hold, stamp=old)]) == {"hold"}
    assert found([*records, replace(hold, stamp=old, delay=1.5)]) == set(), "it was new when it was sent"
    assert found([*records, replace(hold, stamp=old, delay=0.5)]) == {"hold"}


def test_with_simulated_time_a_frame_ages_on_the_steady_clock() -> None:
    jumped = [replace(record, ros=record.ros + 10**10) if record.kind == "command" else record for record in good()]
    assert found(jumped) == {"age"}
    assert found(jumped, simulated=True) == set()
    assert "age" in found([*jumped[:-1], replace(jumped[-1], time=3.2)], simulated=True)


def test_a_hold_may_differ_by_what_an_arm_may_sag() -> None:
    records = good()
    stamp = next(record.stamp for record in records if record.kind == "joints" and record.time == 1.9)
    sagged = np.array(HOME)
    sagged[:7] += 0.019
    assert found([*records, Record("command", 1.95, stamp, at(1.95), tuple(sagged), NAMES)]) == set()
    sagged[0] += 0.002
    assert found([*records, Record("command", 1.95, stamp, at(1.95), tuple(sagged), NAMES)]) == {"hold"}


def test_merged_joint_states_still_limit_a_motion() -> None:
    records = []
    for index, record in enumerate(good()):
        if record.kind == "joints":
            left_out = index % 7
            names = NAMES[:left_out] + NAMES[left_out + 1 :]
            record = replace(record, names=names, positions=HOME[:left_out] + HOME[left_out + 1 :])
        records.append(record)
    assert found(records) == {"blind"}
    assert found(records, pieces=True) == set()
    far = [*records[:-1], replace(records[-1], positions=joint(0, HOME[0] + 0.4))]
    assert found(far, pieces=True) == {"velocity"}


def configured(**options: str) -> Judge:
    values = {**OPTIONS, **{name.replace("__", "."): value for name, value in options.items()}}
    return Judge(load((), [f"{n}:={v}" for n, v in values.items()]), KINEMATICS, 0.1)


def velocities(names: tuple[str, ...]) -> list[Record]:
    """A frame and a velocity every tenth of a second from 1 s on, and zero at the end."""
    speed = (0.1, *[0.0] * (len(names) - 1))
    records = []
    for index in range(10, 20):
        sent, came = index / 10, index / 10 + 0.02
        records.append(Record("frame", sent, at(sent) | 1, at(sent)))
        records.append(Record("command", came, at(sent) | 1, at(came), speed, names))
    zero = Record("command", 2.02, at(2.02), at(2.02), (0.0,) * len(names), names)
    return [*records, zero, Record("frame", 9.0, 1, 1)]


@pytest.mark.parametrize(("output", "joints"), [("twist_stamped", TWIST), ("joint_velocity_state", ARM)])
def test_a_velocity_that_lasts_too_long_is_named(output: str, joints: tuple[str, ...]) -> None:
    judge = configured(control__output=output, control__rate_hz="10.0", robot__gripper_joint_names="[]")

    def names(records: list[Record], permissions: list[Permission] = PERMISSIONS) -> set[str]:
        return {violation.name for violation in judge.check(records, permissions)}

    good_ones, (*moving, last, zero, end) = velocities(joints), velocities(joints)
    assert names(good_ones) == set()
    assert names([*moving, last, end]) == {"stands"}
    assert names([*moving, last, replace(zero, time=2.3), end]) == {"stands"}
    assert names([*moving, replace(last, positions=(2.5, *last.positions[1:])), zero, end]) == {"step"}
    assert names([*moving, replace(last, stamp=12345), zero, end]) == {"stamp"}
    assert names([*moving, replace(last, positions=(float("nan"),) * len(joints)), zero, end]) == {"shape"}
    assert names(good_ones, [Permission(0.5, True), Permission(1.5, False)]) == {"forbidden"}
    assert names(good_ones, [Permission(2.5, True)]) == {"disarmed"}
    if joints == ARM:
        passed = Record("joints", 1.5, 2 * at(0.75), at(1.5), (9.0, *HOME[1:]), NAMES)
        assert names([*good_ones, passed]) == {"position"}


def test_a_gripper_with_its_own_driver_is_checked() -> None:
    judge = configured(topics__gripper="/gripper/command")
    parts = []
    for record in good():
        if record.kind == "command":
            parts.append(replace(record, names=FINGERS, positions=record.positions[7:]))
            record = replace(record, names=ARM, positions=record.positions[:7])
        parts.append(record)
    slower = [
        replace(r, positions=joint(0, HOME[0] + 0.005)[: len(r.names)]) if r.names == ARM else r for r in parts
    ]
    assert {violation.name for violation in judge.check(slower, PERMISSIONS)} == set()
    wide = [replace(r, positions=(0.04, 0.05)) if r.names == FINGERS else r for r in slower]
    assert {violation.name for violation in judge.check(wide, PERMISSIONS)} == {"gripper"}
    stopped = [Permission(0.5, True), Permission(1.5, False, why="stop")]
    late = [r for r in slower if r.names != ARM or r.time < 1.5]
    assert {violation.name for violation in judge.check(late, stopped)} == {"forbidden"}
