"""Number and size of camera messages, the input of every profile."""

from __future__ import annotations

from dataclasses import dataclass

from vla_ros.config.tree import Config
from vla_ros.errors import ConfigError

PAGE = 4096
IN_FLIGHT = 8
"""Frames of one camera that may exist at once: 5 in the driver's history (SensorDataQoS), one being written, and
one in each of two readers."""


@dataclass(frozen=True)
class Frames:
    """Number and size of the camera frames."""

    width: int = 1920  # pixels in a row
    height: int = 1080  # rows
    cameras: int = 1  # number of cameras with frames of that size
    bytes_per_pixel: int = 3  # 3 for rgb8 and bgr8, 4 with alpha, 2 for yuv422 and 16 bit depth

    def __post_init__(self) -> None:
        for name, high in (("width", 16384), ("height", 16384), ("cameras", 64), ("bytes_per_pixel", 16)):
            value = getattr(self, name)
            if not 1 <= value <= high:
                raise ConfigError(f"{name}: found {value}, expected an integer from 1 to {high}")

    @classmethod
    def of(cls, config: Config) -> Frames:
        """Return the frames of a configuration, all with the greatest width and height of its cameras."""
        camera = config.camera
        return cls(max(camera.width), max(camera.height), len(camera.topics))

    @property
    def image_bytes(self) -> int:
        return self.width * self.height * self.bytes_per_pixel

    @property
    def message_bytes(self) -> int:
        """Bytes of one serialised ``sensor_msgs/Image``: the pixels, and one page for header and row padding."""
        return round_up(self.image_bytes + PAGE, PAGE)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of all messages that may exist at once."""
        return self.message_bytes * self.cameras * IN_FLIGHT

    def __str__(self) -> str:
        cameras = "1 camera" if self.cameras == 1 else f"{self.cameras} cameras"
        return f"{cameras} of {self.width}x{self.height} ({self.image_bytes / 1e6:.1f} MB a frame)"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
