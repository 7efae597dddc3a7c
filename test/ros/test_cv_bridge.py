import sys

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")
try:
    from cv_bridge import CvBridge
except ImportError as error:  # also for another NumPy
    pytest.skip(f"cv_bridge does not import: {error}", allow_module_level=True)
from rclpy.serialization import serialize_message
from sensor_msgs.msg import Image

from vla_ros.vision.decode import ENCODINGS, decode_image

pytestmark = pytest.mark.ros

UNKNOWN_TO_CV_BRIDGE = {"uyvy", "yuyv"}  # newer names of yuv422 and yuv422_yuy2, whose layouts they share


@pytest.mark.parametrize("encoding", sorted(ENCODINGS.keys() - UNKNOWN_TO_CV_BRIDGE))
@pytest.mark.parametrize("padding", [0, 2])  # pixels: cv_bridge shears rows that end within one
def test_the_same_rgb_as_cv_bridge(encoding: str, padding: int) -> None:
    height, width = 48, 64
    step = (width + padding) * ENCODINGS[encoding].pixel_bytes
    data = np.random.default_rng(5).integers(0, 256, height * step, np.uint8)
    message = Image(height=height, width=width, encoding=encoding, step=step, data=data.tobytes())
    message.is_bigendian = int(sys.byteorder == "big")
    expected = CvBridge().imgmsg_to_cv2(message, "rgb8")
    np.testing.assert_array_equal(decode_image(serialize_message(message)).image, expected)
