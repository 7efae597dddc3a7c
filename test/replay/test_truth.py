import dataclasses

import numpy as np
import pytest

from vla_ros.config import build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.kinematics.rotations import euler_xyz_matrix
from vla_ros.kinematics.solver import Kinematics
from vla_ros_lab.replay import truth
from vla_ros_lab.replay.series import Recording, Table, TopicSeries
from vla_ros_lab.replay.topics import ARRAY, JOINTS, TRAJECTORY, TWIST, TopicSelection, select_topics

MS = 1_000_000
IMAGE = "sensor_msgs/msg/Image"
HOME = np.array([0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0])
SPEC = PolicySpec()


def table(times_ms, values, names=None, stamps_ms=None):
    values = np.asarray(values, float)
    names = names or tuple(f"[{i}]" for i in range(values.shape[1]))
    stamps = np.zeros(len(values), np.int64) if stamps_ms is None else np.array(stamps_ms, np.int64) * MS
    return Table(tuple(names), np.array(times_ms, np.int64) * MS, stamps, values)


def selection(kind, topic="/truth"):
    return TopicSelection(("/camera",), "raw", ("/joint_states",), None, (topic,) if topic else (), kind)


def at(times_ms):
    return np.array(times_ms, np.int64) * MS


def test_the_first_message_before_the_next_frame_belongs_to_a_frame():
    recorded = table([30, 35, 140, 200, 480], [[0], [1], [2], [3], [4]])
    rows, rule = truth.pair(at([0, 100, 200, 300, 400]), at([1, 2, 3, 4, 5]), recorded, 60 * MS)
    assert rule == "after"
    # 30 is the first after frame 0; 140 belongs to 100; 200 to 200 and not to 100; none after 300; 480 is too late.
    assert rows.tolist() == [0, 2, 3, -1, -1]


def test_equal_stamps_win_over_time():
    recorded = table([500, 510, 520], [[0], [1], [2]], stamps_ms=[7, 8, 9])
    rows, rule = truth.pair(at([0, 100, 200]), at([8, 9, 10]), recorded, 60 * MS)
    assert rule == "stamp"
    assert rows.tolist() == [1, 2, -1]


def test_nothing_recorded():
    empty = Table(("a",), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 1)))
    assert truth.pair(at([0]), at([0]), empty, MS)[0].tolist() == [-1]


ARM = {"robot.urdf": "demo", "robot.tip_frame": "tool"}


def align(kind, recorded, joints=None, spec=SPEC, options=None, topic="/truth", frames=(0, 100)):
    recording = Recording(*(TopicSeries((item,)) if item else None for item in (joints, recorded)))
    return truth.align(
        at(frames),
        at([1 + f for f in frames]),
        recording,
        selection(kind, topic),
        spec,
        build(options or {}),
        60 * MS,
        100 * MS,
    )


def test_recorded_actions_are_taken_as_they_are():
    found = align(ARRAY, table([10, 110], np.arange(14).reshape(2, 7)))
    assert found.actions.tolist() == np.arange(14.0).reshape(2, 7).tolist()
    assert "has 3 values" in align(ARRAY, table([10, 110], np.zeros((2, 3)))).problem


def test_twists_become_displacements_of_one_period():
    options = {"control.translation_scale": 0.05, "control.rotation_scale": 0.5}
    found = align(TWIST, table([10, 110], [[0.1, 0, -0.2, 0, 0, 1.0], [0] * 6]), options=options)
    assert found.actions[0, :6] == pytest.approx([0.2, 0, -0.4, 0, 0, 0.2])
    assert np.isnan(found.actions[:, 6]).all()


def test_commands_of_arms_on_topics_of_their_own_are_paired_each():
    robot = {"robot.arms": ["left", "right"], "left.joint_names": ["a"], "right.joint_names": ["b"]}
    robot |= {"left.command": "/left", "right.command": "/right"}
    config = build(robot)
    found = select_topics({"/camera/image_raw": IMAGE, "/left": JOINTS, "/right": JOINTS}, config, {})
    assert (found.truth, found.truth_type) == (("/left", "/right"), JOINTS)
    spec = PolicySpec(
        action=parse_components("left.joint_position + right.joint_position", action=True), dimension=2
    )
    left, right = table([10, 110, 210], [[1.0], [2.0], [3.0]], ["a"]), table([30, 230], [[-1.0], [-3.0]], ["b"])
    recording = Recording(None, TopicSeries((left, right)))
    frames = at([0, 100, 200])
    actions = truth.align(frames, frames + 1, recording, found, spec, config, 60 * MS, 100 * MS).actions
    assert np.nan_to_num(actions).tolist() == [[1.0, -1.0], [0.0, 0.0], [3.0, -3.0]]


@pytest.fixture(scope="module")
def arm():
    return Kinematics.from_urdf("demo", (), "", "tool")


@pytest.mark.parametrize("frame", ["base", "tip"])
@pytest.mark.parametrize("kind", [JOINTS, TRAJECTORY])
def test_joint_commands_become_the_motion_of_the_tip(arm, kind, frame):
    options = ARM | {
        "control.delta_frame": frame,
        "robot.gripper_joint_names": ["finger"],
        "gripper.open_value": -1.0,
        "gripper.closed_value": 1.0,
    }
    moved = HOME + np.array([0.02, -0.01, 0.03, 0.01, 0, 0.02, -0.05])
    names = (*arm.joint_names, "finger")
    joints = table([0, 50, 100, 150], np.tile([*HOME, 0.04], (4, 1)), names)
    commands = table([10, 110], [[*moved, 0.04], [*HOME, 0.0]], names)
    found = align(kind, commands, joints, options=options).actions
    start, goal = arm.forward(HOME), arm.forward(moved)
    turned = euler_xyz_matrix(found[0, 3:6])
    if frame == "base":
        assert start.position + found[0, :3] == pytest.approx(goal.position)
        assert turned @ start.rotation == pytest.approx(goal.rotation)
    else:
        assert start.position + start.rotation @ found[0, :3] == pytest.approx(goal.position)
        assert start.rotation @ turned == pytest.approx(goal.rotation)
    assert found[:, 6].tolist() == [-1.0, 1.0]
    assert found[1, :6] == pytest.approx(np.zeros(6), abs=1e-9)


def test_joint_states_are_differenced_over_one_period(arm):
    times = np.arange(0, 310, 10)
    path = HOME + np.outer(times * 1e-3, [0.2, 0, 0.1, 0, 0, 0, 0])
    joints = table(times, path, arm.joint_names)
    found = align(JOINTS, None, joints, options=ARM, topic=None, frames=(5, 105, 205, 255))
    assert found.rule == "difference"
    start, goal = (arm.forward(HOME + np.array([0.2, 0, 0.1, 0, 0, 0, 0]) * t) for t in (0.005, 0.105))
    assert found.actions[0, :3] == pytest.approx(goal.position - start.position, abs=1e-9)
    assert np.isnan(found.actions[3]).all()  # a period later nothing was measured any more


def test_joint_policies_compare_in_joints():
    spec = PolicySpec(action=parse_components("arm.joint_position", action=True), dimension=3)
    names = ("a", "b", "c")
    joints = table([0, 100], [[0, 0, 0], [1, 1, 1]], names)
    commands = table([10, 110], [[1, 2, 3], [4, 5, 6]], ("b", "a", "c"))
    options = {"robot.joint_names": list(names)}
    assert align(JOINTS, commands, joints, spec, options).actions.tolist() == [[2, 1, 3], [5, 4, 6]]
    delta = dataclasses.replace(spec, action=parse_components("arm.joint_delta", action=True))
    assert align(JOINTS, commands, joints, delta, options).actions.tolist() == [[2, 1, 3], [4, 3, 5]]


@pytest.mark.parametrize(
    ("action", "dimension", "expected"),
    [
        ("arm.joint_position[deg]", 7, np.rad2deg(HOME + 0.1)),
        ("arm.joint_velocity + arm.gripper[0..100]", 8, [*[1.0] * 7, 50]),
        ("arm.gripper + unused[1] + arm.joint_delta", 9, [0.5, 0, *[0.1] * 7]),
    ],
)
def test_commands_become_whatever_the_policy_answers(arm, action, dimension, expected):
    spec = PolicySpec(action=parse_components(action, action=True), dimension=dimension)
    names = (*arm.joint_names, "finger")
    joints = table([0, 50, 100, 150], np.tile([*HOME, 0.04], (4, 1)), names)
    commands = table([10, 110], np.tile([*(HOME + 0.1), 0.02], (2, 1)), names)
    found = align(JOINTS, commands, joints, spec, ARM | {"robot.gripper_joint_names": ["finger"]})
    assert found.actions == pytest.approx(np.tile(expected, (2, 1)))
    wrong = dataclasses.replace(spec, dimension=5)
    problem = align(JOINTS, commands, joints, wrong, ARM | {"robot.gripper_joint_names": ["finger"]}).problem
    assert problem.startswith("the actions have 5 values")


def test_the_reason_is_given_if_nothing_can_be_compared(arm):
    names = arm.joint_names
    commands = table([10, 110], np.tile(HOME, (2, 1)), names)
    joints = table([0, 100], np.tile(HOME, (2, 1)), names)
    assert "robot.urdf: not set" in align(JOINTS, commands, joints).problem
    assert "no joint states" in align(JOINTS, commands, None, options=ARM).problem
    assert "lack the joints" in align(JOINTS, table([10], [[0]], ["x"]), joints, options=ARM).problem
    assert "no message of /truth was received within" in align(ARRAY, table([900], np.zeros((1, 7)))).problem
    assert "neither actions" in align("", None).problem
