"""CDR of the image messages: equal to rosbags' in both byte orders; wrong lengths are refused."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_ros.errors import ImageError
from vla_ros.vision import messages
from vla_ros.vision.messages import (
    encode_compressed,
    encode_image,
    image_header,
    image_stamp,
    read_compressed,
    read_image,
    with_stamp,
)

STAMP = 1790000000_999999999


@pytest.fixture(scope="module")
def rclpy_cdr(data_folder):
    return json.loads((data_folder / "vision" / "cdr.json").read_text())


def test_reads_the_image_that_rclpy_wrote(rclpy_cdr):
    answer = rclpy_cdr["sensor_msgs/msg/Image"]
    cdr = base64.b64decode(answer["cdr_base64"])
    header, data, stamp = read_image(cdr)
    assert bytes(data) == bytes(answer["fields"]["data"])
    assert (header.height, header.width, header.step) == (2, 3, 10)
    assert (header.encoding, header.is_bigendian) == ("rgb8", False)
    assert (header.frame_id, stamp) == ("camera_color_optical_frame", STAMP)
    assert image_header(cdr) == header
    assert image_stamp(cdr) == STAMP


def test_reads_the_compressed_image_that_rclpy_wrote(rclpy_cdr):
    header, data = read_compressed(base64.b64decode(rclpy_cdr["sensor_msgs/msg/CompressedImage"]["cdr_base64"]))
    assert (header.stamp, header.frame_id, header.format) == (0, "c", "jpeg")
    assert bytes(data) == b"\xff\xd8\xff\xd9"


@pytest.mark.parametrize("frame_id", ["", "a", "ab", "abc", "abcd", "caméra"])
@pytest.mark.parametrize("encoding", ["rgb8", "bgra8", "mono8"])
def test_writes_what_rosbags_writes(serialize, frame_id, encoding):
    channels = {"rgb8": 3, "bgra8": 4, "mono8": 1}[encoding]
    image = np.arange(2 * 5 * channels, dtype=np.uint8).reshape(2, 5, channels)
    expected = serialize(
        "Image",
        STAMP,
        frame_id,
        height=2,
        width=5,
        encoding=encoding,
        is_bigendian=0,
        step=5 * channels,
        data=image,
    )
    assert encode_image(image, STAMP, frame_id, encoding) == expected


def test_writes_compressed_as_rosbags_does(serialize):
    expected = serialize("CompressedImage", STAMP, "cam", format="png", data=b"12345")
    assert encode_compressed(b"12345", STAMP, "cam", "png") == expected


def test_big_endian_messages_are_read(serialize):
    fields = {"height": 2, "width": 3, "encoding": "mono8", "is_bigendian": 1, "step": 3, "data": b"abcdef"}
    big = serialize("Image", STAMP, "cam", little_endian=False, **fields)
    little = serialize("Image", STAMP, "cam", **fields)
    assert big != little
    assert image_header(big) == image_header(little)
    assert image_header(big).is_bigendian
    assert image_stamp(big) == STAMP
    assert bytes(read_image(big)[1]) == b"abcdef"
    compressed = serialize("CompressedImage", STAMP, "cam", little_endian=False, format="jpeg", data=b"xyz")
    assert read_compressed(compressed)[0].format == "jpeg"


@pytest.mark.parametrize("view", [bytes, bytearray, memoryview])
def test_a_message_with_another_stamp_is_otherwise_the_same(view):
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    message = encode_image(image, 0, "camera")
    assert with_stamp(view(message), STAMP) == encode_image(image, STAMP, "camera")
    big = b"\0\0\0\0" + bytes(8) + message[12:]
    assert image_stamp(with_stamp(big, STAMP)) == STAMP
    with pytest.raises(ImageError):
        with_stamp(b"\0\1\0\0", STAMP)


def test_pixels_are_not_copied():
    cdr = bytearray(encode_image(np.zeros((2, 2, 3), np.uint8), 0, "cam"))
    data = read_image(cdr)[1]
    cdr[-1] = 77
    assert data[-1] == 77


@pytest.mark.parametrize(
    ("cdr", "text"),
    [
        (b"", "needs 4 bytes at offset 0, but the message has 0"),
        (b"\0\1\0", "the message has 3"),
        (b"\0\3\0\0" + bytes(60), "found encapsulation 0x00 0x03, expected plain CDR"),
        (b"\0\1\0\0" + bytes(4), "header.stamp.nanosec needs 4 bytes"),
        (b"\0\1\0\0" + b"\xff" * 4 + bytes(60), "header.stamp with sec 4294967295"),
        (b"\0\1\0\0" + bytes(4) + b"\0\xca\x9a\x3b" + bytes(60), "nanosec 1000000000"),
        (b"\0\1\0\0" + bytes(8) + b"\xff\xff\xff\xff" + bytes(60), "header.frame_id needs 4294967295 bytes"),
        (b"\0\1\0\0" + bytes(8) + b"\2\0\0\0ab" + bytes(60), "does not end in a zero byte"),
        (memoryview(np.zeros((9, 9), np.uint8)[:, ::2]), "contiguous"),
    ],
)
def test_damage_is_named(cdr, text):
    with pytest.raises(ImageError, match=text):
        read_image(cdr)


def test_frame_id_in_another_character_set_keeps_the_image():
    cdr = bytearray(encode_image(np.zeros((1, 1, 3), np.uint8), 5, "cam"))
    cdr[16] = 0xE9
    assert image_header(cdr).frame_id == "�am"


@pytest.mark.parametrize(
    ("image", "arguments", "text"),
    [
        (np.zeros((2, 2, 3), np.float32), (0, ""), "type float32"),
        (np.zeros(4, np.uint8), (0, ""), "shape"),
        (np.zeros((2, 2, 3), np.uint8), (-1, ""), "stamp of -1"),
        (np.zeros((2, 2, 3), np.uint8), (0, "", "rgb8", 5), "found step 5, expected at least the 6"),
    ],
)
def test_encode_refuses_invalid_arguments(image, arguments, text):
    with pytest.raises(ImageError, match=text):
        encode_image(image, *arguments)


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 255)), max_size=4))
def test_a_message_is_read_as_if_none_had_been_read_before(edits):
    message = encode_image(np.arange(96, dtype=np.uint8).reshape(4, 8, 3), STAMP, "camera")
    read_image(message)
    damaged = bytearray(message)
    for position, value in edits:
        damaged[position] = value

    def outcome():
        try:
            header, data, stamp = read_image(damaged)
        except ImageError as error:
            return str(error)
        return header, bytes(data), stamp

    seen = outcome()
    messages._heads.clear()
    assert seen == outcome()


def test_cameras_whose_messages_are_equally_long_keep_their_headers():
    image = np.zeros((2, 3, 3), np.uint8)
    cameras = [encode_image(image, 1, name) for name in ("a" * 40 + "left", "a" * 40 + "rear")] * 3
    assert [image_header(each).frame_id[40:] for each in cameras] == ["left", "rear"] * 3
