"""Images of the kind, size and origin that people committed, compared with OpenCV; see ``data/corpus.json``."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import zstandard
from mcap.writer import Writer
from PIL import Image

from test.corpus import entries
from vla_ros.errors import ImageError
from vla_ros.types import UInt8Array
from vla_ros.vision.decode import decode_compressed, decode_image
from vla_ros.vision.messages import encode_compressed, encode_image
from vla_ros_lab.replay.bag import Bag


def scene(height: int, width: int) -> UInt8Array:
    """Slopes with noise [H, W, 3], as a webcam's image has."""
    rows, columns = np.mgrid[:height, :width]
    slopes = np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 256], axis=-1)
    noise = np.random.default_rng(5).integers(-9, 10, slopes.shape)
    return np.clip(slopes + noise, 0, 255).astype(np.uint8)


def stored(facts: dict[str, Any], image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    options = {"quality": facts["quality"], "comment": facts["comment"]} if facts["file"] == "JPEG" else {}
    image.save(buffer, facts["file"], **options)
    return buffer.getvalue()


FILES = [one for one in entries("cameras") if "file" in one.values[0]]


@pytest.mark.parametrize("facts", [one for one in FILES if one.values[0]["mode"] == "RGB"])
def test_a_colour_image_that_people_committed_is_opencvs(facts: dict[str, Any]) -> None:
    data = stored(facts, Image.fromarray(scene(*facts["size"])))
    kind = facts["file"].lower()
    expected = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    yuyv = cv2.cvtColor(expected, cv2.COLOR_RGB2YUV_YUY2)
    seen = [
        decode_compressed(encode_compressed(data, 1, "cam", stated)).image
        for stated in (kind, f"bgr8; {kind} compressed bgr8")
    ]
    seen += [decode_image(encode_image(expected, 1, "cam", "rgb8")).image]
    seen += [decode_image(encode_image(np.ascontiguousarray(expected[..., ::-1]), 1, "cam", "bgr8")).image]
    for image in seen:
        np.testing.assert_array_equal(image, expected)
    image = decode_image(encode_image(yuyv, 1, "cam", "yuv422_yuy2")).image
    np.testing.assert_array_equal(image, cv2.cvtColor(yuyv, cv2.COLOR_YUV2RGB_YUY2))


@pytest.mark.parametrize("facts", [one for one in FILES if one.values[0]["mode"] == "I;16"])
def test_a_depth_image_that_people_committed_is_refused_in_every_form(
    facts: dict[str, Any], serialize: Callable[..., bytes]
) -> None:
    height, width = facts["size"]
    depth = (np.arange(height * width).reshape(height, width) % facts["largest"]).astype(np.uint16)
    data = stored(facts, Image.fromarray(depth))
    for told, start in (
        ("16UC1; png compressed ", b""),
        ("png", b""),
        ("16UC1; compressedDepth png", bytes(12)),
        ("16UC1; compressedDepth", bytes(12)),
    ):
        with pytest.raises(ImageError, match=r"depth.*colour|16 bits a channel"):
            decode_compressed(encode_compressed(start + data, 1, "cam", told))
    for encoding in ("16UC1", "mono16"):
        fields = {"height": height, "width": width, "encoding": encoding, "is_bigendian": 0, "step": 2 * width}
        with pytest.raises(ImageError, match="depth or has more than 8 bits"):
            decode_image(serialize("Image", **fields, data=depth.tobytes()))


@pytest.mark.parametrize("facts", [one for one in entries("cameras") if "each" in one.values[0]])
def test_images_that_people_recorded_and_compressed_one_by_one(facts: dict[str, Any], tmp_path: Path) -> None:
    """The MCAP file names no compression: rosbag2's mode ``message`` is in metadata.yaml, which was not copied."""
    images, path = [scene(*facts["size"]) + number for number in range(facts["messages"])], tmp_path / "a.mcap"
    with path.open("wb") as stream:
        writer = Writer(stream)
        writer.start("ros2")
        schema = writer.register_schema(facts["type"], "ros2msg", b"")
        channel = writer.register_channel("/camera/image_raw", "cdr", schema)
        for number, image in enumerate(images):
            data = zstandard.compress(encode_image(image, number, "cam", facts["encoding"]))
            writer.add_message(channel, number, data, number)
        writer.finish()
    with Bag(path) as bag:
        assert bag.topics == {"/camera/image_raw": "sensor_msgs/msg/Image"}
        seen = [decode_image(one.data).image for one in bag.records(bag.topics)]
    np.testing.assert_array_equal(seen, images)
