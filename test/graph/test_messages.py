import json
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from rosbags.interfaces import Nodetype

from vla_ros.errors import VlaRosError
from vla_ros.graph.messages import message_types, ros_distro

TYPES = sorted(json.loads((Path(__file__).parent.parent / "data" / "cdr" / "cdr.json").read_text()))


@pytest.fixture(scope="module")
def types():
    return message_types("jazzy")


def build(types, name, fields):
    """Message from the fields of cdr.json."""
    definition = dict(types.definition(name))
    values = {}
    for field, value in fields.items():
        kind, argument = definition[field]
        if kind == Nodetype.NAME:
            value = build(types, argument, value)
        elif kind == Nodetype.SEQUENCE and argument[0][0] == Nodetype.NAME:
            value = [build(types, argument[0][1], item) for item in value]
        elif kind == Nodetype.BASE and argument[0] == "byte":
            value = bytes(value)
        values[field] = value
    return types.message(name)(**values)


def padding(types, message, size):
    """Positions that the encoder leaves alone: it fills two buffers, and these bytes keep what was there."""
    encoder = types._store.get_msgdef(message.TYPE).serialize_cdr_le
    buffers = []
    for fill in (b"\0", b"\xff"):
        buffer = bytearray(fill * size)
        encoder(memoryview(buffer)[4:], 0, message, types._store)
        buffer[:4] = b"\0\1\0\0"
        buffers.append(buffer)
    return [index for index, (one, two) in enumerate(zip(*buffers, strict=True)) if one != two]


@pytest.mark.parametrize("name", TYPES)
def test_bytes_equal_rclpys(types, golden, name):
    message = build(types, name, golden[name]["fields"])
    ours = bytearray(types.serialize(message))
    theirs = bytearray(golden[name]["cdr"][: len(ours)])
    # Terminators of strings look like padding to the encoder, and are zero in both.
    skipped = [index for index in padding(types, message, len(ours)) if theirs[index] != 0]
    assert all(ours[index] == 0 for index in skipped)
    for index in skipped:
        theirs[index] = 0
    assert ours == theirs
    assert len(skipped) <= 12, "more than alignment was left out"


@pytest.mark.parametrize("name", TYPES)
def test_type_hash_equals_rosidls(types, golden, name):
    assert types.type_hash(name) == golden[name]["type_hash"]


@pytest.mark.parametrize("name", TYPES)
def test_rclpys_bytes_are_read(types, golden, name):
    message = types.deserialize(golden[name]["cdr"], types.message(name))
    assert message == build(types, name, golden[name]["fields"])
    assert types.deserialize(types.serialize(message), type(message)) == message


@pytest.mark.parametrize("name", TYPES)
def test_every_truncation_is_an_error_that_names_the_type(types, golden, name):
    cls = types.message(name)
    whole = types.serialize(build(types, name, golden[name]["fields"]))
    for size in range(len(whole)):
        with pytest.raises(VlaRosError, match=name):
            types.deserialize(whole[:size], cls)


def test_big_endian_is_read(types):
    cls = types.message("std_msgs/msg/Float64MultiArray")
    body = struct.pack(">IIId", 0, 0, 1, 2.5)
    assert list(
        types.deserialize(b"\0\0\0\0" + body[:8] + struct.pack(">I", 1) + bytes(4) + body[12:], cls).data
    ) == [2.5]


def test_defaults_are_those_of_ros(types):
    joints = types.message("sensor_msgs/msg/JointState")()
    assert (joints.header.stamp.sec, joints.header.frame_id, joints.name) == (0, "", [])
    assert joints.position.dtype == np.float64
    assert joints.position.size == 0
    assert types.message("sensor_msgs/msg/CameraInfo")().k.shape == (9,)
    one, two = types.message("sensor_msgs/msg/JointState")(), types.message("sensor_msgs/msg/JointState")()
    one.name.append("a")
    one.header.frame_id = "base"
    assert (two.name, two.header.frame_id) == ([], "")


def test_assignment_converts_as_rclpy_accepts(types):
    joints = types.message("sensor_msgs/msg/JointState")(position=[1, 2.5], velocity=np.float32([1]))
    joints.effort = (3,)
    assert (joints.position.dtype, joints.velocity.dtype, joints.effort.dtype) == (np.float64,) * 3
    image = types.message("sensor_msgs/msg/Image")(data=b"abc")
    assert image.data.tolist() == [97, 98, 99]
    image.data = memoryview(b"\x01\x02")
    assert image.data.tolist() == [1, 2]


def test_byte_fields_are_bytes_as_in_rclpy(types):
    status = types.message("diagnostic_msgs/msg/DiagnosticStatus")
    assert status.STALE == b"\x03"
    assert status(level=status.WARN).level == b"\x01"
    assert status(level=2).level == b"\x02"
    again = types.deserialize(types.serialize(status(level=b"\xfe")), status)
    assert again.level == b"\xfe"


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("sensor_msgs/msg/JointState", {"positions": [1.0]}, "no field 'positions'; it has header, name, position"),
        ("sensor_msgs/msg/JointState", {"position": ["a"]}, "position: expected float64"),
        ("sensor_msgs/msg/JointState", {"name": "joint1"}, "name: expected a list"),
        ("sensor_msgs/msg/JointState", {"name": [1]}, "name: expected str, found int"),
        ("sensor_msgs/msg/JointState", {"header": 3}, "header: expected std_msgs/msg/Header, found int"),
        ("sensor_msgs/msg/Image", {"data": [256]}, "data: expected values that fit into uint8"),
        ("sensor_msgs/msg/Image", {"data": [0.5]}, "data: expected uint8 values"),
        ("sensor_msgs/msg/Image", {"height": 1.5}, "height"),
        ("sensor_msgs/msg/CameraInfo", {"k": [1.0]}, "k: expected 9 values, found 1"),
        ("std_msgs/msg/String", {"data": b"x"}, "data: expected str, found bytes"),
    ],
)
def test_wrong_values_are_refused_by_name(types, name, fields, said):
    with pytest.raises((TypeError, AttributeError), match=said):
        types.message(name)(**fields)
    message = types.message(name)()
    ((field, value),) = fields.items()
    with pytest.raises((TypeError, AttributeError), match=said):
        setattr(message, field, value)


def test_number_that_does_not_fit_is_refused_when_written(types):
    with pytest.raises(VlaRosError, match="sensor_msgs/msg/Image"):
        types.serialize(types.message("sensor_msgs/msg/Image")(height=-1))


def test_unknown_types_are_named(types):
    with pytest.raises(VlaRosError, match="my_msgs/msg/Thing"):
        types.message("my_msgs/msg/Thing")
    with pytest.raises(VlaRosError, match="my_srvs/srv/Thing"):
        types.service("my_srvs/srv/Thing")


def test_services_have_request_and_response(types):
    service = types.service("std_srvs/srv/SetBool")
    assert service is types.service("std_srvs/srv/SetBool")
    assert service.Request(data=True).data is True
    assert types.serialize(service.Response(success=True, message="on"))[4:] == b"\1\0\0\0\3\0\0\0on\0"
    # rosidl puts one byte into an empty structure.
    assert types.serialize(types.service("std_srvs/srv/Trigger").Request()) == b"\0\1\0\0\0"


@pytest.mark.parametrize(
    ("value", "distro"),
    [("jazzy", "jazzy"), ("Humble", "humble"), ("rolling", "lyrical"), ("", "jazzy"), ("noetic", "jazzy")],
)
def test_distribution_comes_from_the_environment(value, distro):
    assert ros_distro({"ROS_DISTRO": value}) == distro
