"""Conversion of messages to numbers."""

from typing import Any

import pytest

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from vla_ros.config.sections import STATE_TOPIC_TYPES
from vla_ros.contract.binding import read_state_message, state_message_type
from vla_ros.graph.messages import message_types


def fill(kind: str) -> tuple[Any, list[float]]:
    """A filled message, and its numbers in order."""
    message = message_types().message(state_message_type(kind))()
    if kind == "JointState":
        message.name, message.position = ["b", "a"], [0.0, 1.0]
        return message, [0.0, 1.0]
    if kind == "Float64MultiArray":
        message.data = [0.0, 1.0, 2.0]
        return message, [0.0, 1.0, 2.0]
    names = ("position", "orientation") if kind == "PoseStamped" else ("force", "torque")
    whole = message.pose if kind == "PoseStamped" else message.wrench
    places = [
        (getattr(whole, name), axis) for name in names for axis in "xyzw" if hasattr(getattr(whole, name), axis)
    ]
    for number, place in enumerate(places):
        setattr(*place, float(number))
    return message, [float(number) for number in range(len(places))]


@pytest.mark.parametrize("kind", STATE_TOPIC_TYPES)
def test_every_state_message_type_is_converted_with_its_stamp(kind: str) -> None:
    message, numbers = fill(kind)
    found = read_state_message(message, now=7)
    assert found.positions.tolist() == numbers
    assert len(found.names) == len(numbers)
    assert found.stamp == 7, "measured when it came, where it has no stamp"
    if hasattr(message, "header"):
        message.header.stamp.sec, message.header.stamp.nanosec = 2, 5
        assert read_state_message(message, now=7).stamp == 2_000_000_005
