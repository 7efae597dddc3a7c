import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from vla_ros.config.control import OUTPUTS
from vla_ros.control.command import Command, message_type, split, to_message
from vla_ros.graph.messages import MESSAGES, message_types

Make = Callable[[str], Any]
STORE = get_typestore(Stores.ROS2_JAZZY)
STORE.register({name: kind for each in MESSAGES for name, kind in get_types_from_msg(MESSAGES[each], each).items()})
STAMP = 1_700_000_000_250_000_000
COMMAND = Command(
    names=("joint_1", "joint_2"),
    positions=np.array([0.25, -1.5]),
    stamp=STAMP,
    duration=0.2,
    frame_id="base_link",
    twist=(np.array([0.1, 0.0, -0.2]), np.array([0.0, 0.5, 0.0])),
    velocities={"joint_1": 0.5, "joint_2": -0.1},
)


def rclpy_class(name: str) -> Any:
    package, _, kind = name.split("/")
    try:
        module = importlib.import_module(f"{package}.msg")
    except ImportError as error:  # also a ROS 2 of another Python
        pytest.skip(f"needs a sourced ROS 2 installation: {error}")
    return getattr(module, kind)


@pytest.fixture(params=["rosbags", pytest.param("rclpy", marks=pytest.mark.ros)])
def make(request: pytest.FixtureRequest) -> Make:
    return rclpy_class if request.param == "rclpy" else STORE.types.__getitem__


def values(sequence: Any) -> list[float]:
    return [float(value) for value in sequence]


def nanoseconds(time: Any) -> int:
    return int(time.sec) * 1_000_000_000 + int(time.nanosec)


def test_a_joint_state_has_the_frames_stamp_names_and_positions(make: Make) -> None:
    message = to_message(COMMAND, "joint_state", make)
    assert nanoseconds(message.header.stamp) == STAMP
    assert list(message.name) == ["joint_1", "joint_2"]
    assert values(message.position) == [0.25, -1.5]
    assert values(message.velocity) == values(message.effort) == []


def test_a_float64_multi_array_has_the_positions(make: Make) -> None:
    message = to_message(COMMAND, "float64_multi_array", make)
    assert values(message.data) == [0.25, -1.5]
    assert (list(message.layout.dim), message.layout.data_offset) == ([], 0)


@pytest.mark.parametrize(
    ("changes", "now", "lasts_ms"),
    [
        ({}, STAMP + 150_000_000, 350),  # it does not end in the past
        ({}, None, 200),
        ({}, STAMP - 5, 200),
        ({}, STAMP - 900_000_000, 200),  # a frame stamped ahead of the clock: it does not begin in the future
        ({"hold": True, "duration": 0.0}, STAMP - 300_000_000, 100),
        ({"stamp": 0}, STAMP, 200),  # it begins when it arrives
        ({"hold": True, "duration": 0.4}, STAMP, 400),  # as long as the way back
        # joint_trajectory_controller refuses one that has ended, and the arm would go on to its last target.
        ({"hold": True, "duration": 0.0}, STAMP + 40_000_000, 140),
    ],
)
def test_a_trajectory_has_one_point_and_lasts_from_its_stamp(
    make: Make, changes: dict[str, Any], now: int | None, lasts_ms: int
) -> None:
    command = replace(COMMAND, **changes)
    message = to_message(command, "joint_trajectory", make, now)
    assert nanoseconds(message.header.stamp) == (command.stamp if now is None else min(command.stamp, now))
    assert list(message.joint_names) == ["joint_1", "joint_2"]
    (point,) = message.points
    assert values(point.positions) == [0.25, -1.5]
    assert nanoseconds(point.time_from_start) == lasts_ms * 1_000_000


def test_a_twist_has_its_frame_and_both_parts(make: Make) -> None:
    message = to_message(COMMAND, "twist_stamped", make)
    assert (message.header.frame_id, nanoseconds(message.header.stamp)) == ("base_link", STAMP)
    linear, angular = message.twist.linear, message.twist.angular
    assert (linear.x, linear.y, linear.z) == (0.1, 0.0, -0.2)
    assert (angular.x, angular.y, angular.z) == (0.0, 0.5, 0.0)


def test_zero_velocity_is_stamped_with_the_current_time(make: Make) -> None:
    """MoveIt Servo ignores messages older than its timeout, and zero velocity is always safe."""
    still = replace(COMMAND, hold=True, twist=(np.zeros(3), np.zeros(3)))
    assert nanoseconds(to_message(still, "twist_stamped", make, STAMP + 7).header.stamp) == STAMP + 7
    assert nanoseconds(to_message(COMMAND, "twist_stamped", make, STAMP + 7).header.stamp) == STAMP


def test_a_command_is_split_for_a_gripper_with_its_own_topic() -> None:
    command = replace(COMMAND, names=("joint_1", "finger"), velocities={"joint_1": 0.5})
    arm, fingers = split(command, ("finger",))
    assert (arm.names, values(arm.positions), arm.velocities) == (("joint_1",), [0.25], {"joint_1": 0.5})
    assert (fingers.names, values(fingers.positions), fingers.velocities) == (("finger",), [-1.5], None)
    assert (arm.twist, fingers.twist) == (COMMAND.twist, None)
    assert arm.stamp == fingers.stamp == STAMP
    assert split(command, ()) == (command, None)
    assert split(COMMAND, ("finger",)) == (COMMAND, None)


def test_joint_velocities_are_sent_without_positions_and_stop_as_zeros(make: Make) -> None:
    moving = replace(COMMAND, twist=None, velocities={"joint_1": 0.5, "joint_2": -0.1})
    assert values(to_message(moving, "joint_velocity", make).data) == [0.5, -0.1]
    state = to_message(moving, "joint_velocity_state", make)
    assert (list(state.name), values(state.velocity)) == (["joint_1", "joint_2"], [0.5, -0.1])
    assert values(state.position) == values(state.effort) == []
    assert values(to_message(moving, "joint_state", make).velocity) == []
    assert moving.moves_on
    assert not moving.stopped().moves_on
    stopped = to_message(moving.stopped(), "joint_velocity_state", make, STAMP + 7)
    assert values(stopped.velocity) == [0.0, 0.0]
    assert nanoseconds(stopped.header.stamp) == STAMP + 7, "to stand still is right whenever it is heard"


@pytest.mark.parametrize("output", ["twist_stamped", "joint_velocity", "joint_velocity_state"])
def test_a_command_without_a_velocity_cannot_be_sent_as_one(make: Make, output: str) -> None:
    with pytest.raises(ValueError, match="without a velocity"):
        to_message(Command(("j",), np.zeros(1), 0), output, make)


@pytest.mark.parametrize("output", OUTPUTS)
def test_rosbags_serialises_the_message_and_reads_the_same_back(output: str) -> None:
    message = to_message(COMMAND, output, STORE.types.__getitem__, STAMP)
    kind = message_type(output)
    data = STORE.serialize_cdr(message, kind)
    assert bytes(STORE.serialize_cdr(STORE.deserialize_cdr(data, kind), kind)) == bytes(data)


@pytest.mark.ros
@pytest.mark.parametrize("output", OUTPUTS)
def test_what_rclpy_serialises_is_the_same_message_to_rosbags(output: str) -> None:
    serialization = pytest.importorskip("rclpy.serialization", reason="needs a sourced ROS 2 installation")
    ours = to_message(COMMAND, output, rclpy_class, STAMP)
    data = serialization.serialize_message(ours)
    message = to_message(COMMAND, output, STORE.types.__getitem__, STAMP)
    kind = message_type(output)
    types = message_types("jazzy")
    # Not byte for byte: Fast CDR leaves in the padding, and behind the message, what was in memory.
    read = types.deserialize(data, types.message(kind))
    assert bytes(STORE.serialize_cdr(read, kind)) == bytes(STORE.serialize_cdr(message, kind))
