"""What the node tells its guard: frames of one fixed layout; options are a text after it.

Every packet begins with the same mark, version and kind, and ends with the CRC-32 (zlib) of all bytes before.
Numbers are little-endian. Times are nanoseconds of the monotonic clock, which both processes share; stamps are
nanoseconds of the ROS clock.
"""

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from vla_ros.control.mode import NOBODY, PERSON, POLICY
from vla_ros.types import FloatArray

MOST_VALUES = 64
"""Joints and fingers of one arm, at most."""

SOURCES = (NOBODY, POLICY, PERSON)
"""Who proposes a motion; a frame has the position in this tuple."""

PUBLISHER_BYTES = 16
_MARK, _VERSION = b"VG", 2
# Mark, version, number of values; the fields of GuardFrame in their order.
_BODY = struct.Struct(f"<2sBBBQqBqdqBq{PUBLISHER_BYTES}sI{8 * MOST_VALUES}s")
_CRC = struct.Struct("<I")
_NOTHING = np.zeros(0)
FRAME_BYTES = _BODY.size + _CRC.size
MOST_BYTES = 1 << 16


class Kind(IntEnum):
    """What a packet asks for."""

    POSITIONS = 1  # move: positions of the arm's joints, then of the fingers
    VELOCITIES = 2  # move: velocities of the joints, then positions of the fingers
    TWIST = 3  # move: linear and angular velocity of the tip, then positions of the fingers
    HOLD = 4  # keep these positions, or zero velocity
    KEEPALIVE = 5  # the positions that were sent last remain in force; nothing is sent
    STOP = 6  # nothing moves until RESET
    RESET = 7  # a person has reset the node
    OPTIONS = 8  # JSON of options by flat name, which apply to the frames that follow


class DamagedError(ValueError):
    """A packet is none that a node sends."""


class GuardFrame(NamedTuple):
    """One packet. A tuple, because a frame is on the way of every command."""

    kind: Kind
    counter: int = 0  # increases with every packet of a channel
    time: int = 0  # when the command was made; of others, when it was sent
    arm: int = 0  # position in ``Config.arms``
    lifetime: int = 0  # nanoseconds after ``time`` for which a motion remains in force
    duration: float = 0.0  # seconds that the step takes
    stamp: int = 0  # of the camera frame that led to a motion
    source: int = 0  # who proposed it: position in :data:`SOURCES`
    joints: int = 0  # stamp of the joint state by which the node limited the command; 0 if by none
    publisher: bytes = b""  # of that joint state; empty if unknown, or if several publish the arm's joints
    armings: int = 0  # ``Safety.armings``
    values: FloatArray = _NOTHING  # [K], as the kind says; NaN for fingers without a command
    text: str = ""  # options


def packet_of(frame: GuardFrame) -> bytes:
    """Return the packet of a frame; raises ValueError for more than :data:`MOST_VALUES` numbers."""
    *fields, values, text = frame
    if len(values) > MOST_VALUES:
        raise ValueError(f"found {len(values)} joints and fingers, expected at most {MOST_VALUES}")
    body = _BODY.pack(_MARK, _VERSION, len(values), *fields, values.astype("<f8").tobytes())
    content = body + text.encode()
    return content + _CRC.pack(zlib.crc32(content))


def read_packet(packet: bytes) -> GuardFrame:
    """Return what a packet says; raises DamagedError."""
    if not FRAME_BYTES <= len(packet) <= MOST_BYTES:
        raise DamagedError(f"damaged: found {len(packet)} bytes")
    content, seal = packet[: -_CRC.size], packet[-_CRC.size :]
    if _CRC.unpack(seal)[0] != zlib.crc32(content):
        raise DamagedError("damaged: the checksum does not fit")
    mark, version, count, number, *fields, publisher, armings, values = _BODY.unpack_from(content)
    if (mark, version) != (_MARK, _VERSION):
        raise DamagedError(f"unknown: found version {version}, expected {_VERSION}")
    try:
        kind, text = Kind(number), content[_BODY.size :].decode()
    except ValueError as error:
        raise DamagedError(f"unknown: {error}") from None
    if count > MOST_VALUES or values[8 * count :].strip(b"\0") or (text and kind is not Kind.OPTIONS):
        raise DamagedError(f"unknown: found {count} numbers and {len(text)} characters of {kind.name}")
    known = publisher if publisher.strip(b"\0") else b""
    return GuardFrame._make([kind, *fields, known, armings, np.frombuffer(values, "<f8", count), text])
