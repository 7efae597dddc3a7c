"""What the node tells its guard: frames of one fixed layout; options are a text after it.

Every packet begins with the same mark, version and kind, and ends with the CRC-32 (zlib) of all bytes before.
Numbers are little-endian. Times are nanoseconds of the monotonic clock, which both processes share; stamps are
nanoseconds of the ROS clock.
"""

import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from vla_ros.control.mode import NOBODY, PERSON, POLICY
from vla_ros.types import FloatArray

MOST_VALUES = 64
"""Joints and fingers of one arm, at most."""

SOURCES = (NOBODY, POLICY, PERSON)
"""Who proposes a motion; a frame has the position in this tuple."""

PUBLISHER_BYTES = 16
_MARK, _VERSION = b"VG", 1
_HEAD = struct.Struct("<2sBB")  # mark, version, kind
_FIELDS = ("arm", "source", "armings", "counter", "time", "lifetime", "duration", "stamp", "joints", "publisher")
_BODY = struct.Struct(f"<BBBxIQqqdqq{PUBLISHER_BYTES}s{8 * MOST_VALUES}s")  # number of values, fields, values
_CRC = struct.Struct("<I")
FRAME_BYTES = _HEAD.size + _BODY.size + _CRC.size
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


@dataclass(frozen=True, eq=False)
class GuardFrame:
    """One packet."""

    kind: Kind
    counter: int = 0  # increases with every packet of a channel
    time: int = 0  # when the command was made; of others, when it was sent
    arm: int = 0  # position in ``Config.arms``
    # Float64 [K], as the kind says; NaN for fingers without a command; empty for KEEPALIVE, STOP and RESET.
    values: FloatArray = field(default_factory=lambda: np.zeros(0))
    lifetime: int = 0  # nanoseconds after ``time`` for which a motion remains in force
    duration: float = 0.0  # seconds that the step takes
    stamp: int = 0  # of the camera frame that led to a motion
    source: int = 0  # who proposed it: position in :data:`SOURCES`
    joints: int = 0  # stamp of the joint state by which the node limited the command; 0 if by none
    publisher: bytes = b""  # of that joint state; empty if unknown, or if several publish the arm's joints
    armings: int = 0  # ``Safety.armings``
    text: str = ""  # options


def packet_of(frame: GuardFrame, **changed: int) -> bytes:
    """Return the packet of a frame with ``changed`` fields.

    Raises ValueError for more than :data:`MOST_VALUES` numbers.
    """
    count = len(frame.values)
    if count > MOST_VALUES:
        raise ValueError(f"found {count} joints and fingers, expected at most {MOST_VALUES}")
    fields = [changed.get(name, getattr(frame, name)) for name in _FIELDS]
    body = _BODY.pack(count, *fields, frame.values.astype("<f8").tobytes())
    content = _HEAD.pack(_MARK, _VERSION, frame.kind) + body + frame.text.encode()
    return content + _CRC.pack(zlib.crc32(content))


def read_packet(packet: bytes) -> GuardFrame:
    """Return what a packet says; raises DamagedError."""
    if not FRAME_BYTES <= len(packet) <= MOST_BYTES:
        raise DamagedError(f"damaged: found {len(packet)} bytes")
    content, seal = packet[: -_CRC.size], packet[-_CRC.size :]
    if _CRC.unpack(seal)[0] != zlib.crc32(content):
        raise DamagedError("damaged: the checksum does not fit")
    mark, version, number = _HEAD.unpack_from(content)
    if (mark, version) != (_MARK, _VERSION):
        raise DamagedError(f"unknown: found version {version}, expected {_VERSION}")
    try:
        return _read(Kind(number), content)
    except ValueError as error:
        raise DamagedError(f"unknown: {error}") from None


def _read(kind: Kind, content: bytes) -> GuardFrame:
    count, *head, values = _BODY.unpack_from(content, _HEAD.size)
    fields = dict(zip(_FIELDS, head, strict=True))
    text = content[_HEAD.size + _BODY.size :].decode()
    if count > MOST_VALUES or any(values[8 * count :]) or (text and kind is not Kind.OPTIONS):
        raise ValueError(f"found {count} numbers and {len(text)} characters of {kind.name}")
    fields["publisher"] = fields["publisher"] if any(fields["publisher"]) else b""
    return GuardFrame(kind, values=np.frombuffer(values, "<f8", count), text=text, **fields)
