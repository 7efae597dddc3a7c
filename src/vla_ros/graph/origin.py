"""Where a message comes from, as the middleware says."""

from typing import NamedTuple


class Origin(NamedTuple):
    """Where a message comes from.

    ``publisher`` is its publisher's ``endpoint_gid`` if the middleware provides it, else another number that
    differs between publishers (Cyclone DDS under rclpy), or b"" if it provides neither. ``published`` is the
    middleware's source timestamp: nanoseconds of the publisher's system clock, or 0 if there is none.
    """

    publisher: bytes = b""
    published: int = 0
