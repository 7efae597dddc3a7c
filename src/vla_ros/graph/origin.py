"""Where a message comes from, as the middleware says, and its stamp."""

from typing import Any, NamedTuple


class Origin(NamedTuple):
    """Where a message comes from.

    ``publisher`` is its publisher's ``endpoint_gid`` if the middleware provides it, else another number that
    differs between publishers (Cyclone DDS under rclpy), or b"" if it provides neither. ``published`` is the
    middleware's source timestamp: nanoseconds of the publisher's system clock, or 0 if there is none.
    """

    publisher: bytes = b""
    published: int = 0


def stamp_of(message: Any) -> int:
    """Return the stamp of a message's header in nanoseconds."""
    return int(message.header.stamp.sec) * 1_000_000_000 + int(message.header.stamp.nanosec)
