"""Corrupts messages between a driver and the node, reproducibly from a seed. Pure logic.

Messages are CDR bytes that begin with a ``std_msgs/Header``, whose stamp is in bytes 4 to 12.
"""

import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vla_ros.vision.messages import read_image, with_stamp

SECOND = 1_000_000_000
_STAMP = slice(4, 12)

Sent = list[tuple[float, bytes]]
"""Messages to send, each with its delay in seconds."""


@dataclass(frozen=True)
class Fault:
    """A fault of a channel."""

    kind: str  # a key of :data:`KINDS`
    amount: float = 1.0  # strength, in the unit given in :data:`KINDS`


@dataclass
class Channel:
    """Forwards messages as the current fault changes them; ``rng`` makes all random choices."""

    rng: random.Random
    fault: Fault | None = None
    _kept: list[bytes] = field(default_factory=list)

    def set(self, fault: Fault | None) -> Sent:
        """Set the fault (None ends it); return the messages that the previous fault held back."""
        kept = [(0.0, message) for message in self._kept] if self.fault and self.fault.kind in _GIVES_BACK else []
        self._kept.clear()
        self.fault = fault
        return kept

    def push(self, message: bytes) -> Sent:
        if self.fault is None:
            return [(0.0, message)]
        return KINDS[self.fault.kind](self, message, self.fault.amount)


def read_stamp(message: bytes) -> int:
    seconds, nanoseconds = struct.unpack("<iI", message[_STAMP])
    return int(seconds) * SECOND + int(nanoseconds)


def _drop(channel: Channel, message: bytes, share: float) -> Sent:
    return [] if channel.rng.random() < share else [(0.0, message)]


def _delay(channel: Channel, message: bytes, seconds: float) -> Sent:
    return [(seconds, message)]


def _jitter(channel: Channel, message: bytes, seconds: float) -> Sent:
    return [(channel.rng.uniform(0, seconds), message)]


def _duplicate(channel: Channel, message: bytes, copies: float) -> Sent:
    return [(0.0, message)] * (1 + int(copies))


def _reorder(channel: Channel, message: bytes, length: float) -> Sent:
    channel._kept.append(message)
    if len(channel._kept) < length:
        return []
    mixed = channel._kept[:]
    channel._kept.clear()
    channel.rng.shuffle(mixed)
    return [(0.002 * index, each) for index, each in enumerate(mixed)]


def _burst(channel: Channel, message: bytes, length: float) -> Sent:
    channel._kept.append(message)
    if len(channel._kept) < length:
        return []
    kept = channel._kept[:]
    channel._kept.clear()
    return [(0.0, each) for each in kept]


def _freeze(channel: Channel, message: bytes, _: float) -> Sent:
    if not channel._kept:
        channel._kept.append(message)
    return [(0.0, with_stamp(channel._kept[0], read_stamp(message)))]


def _repeat(channel: Channel, message: bytes, _: float) -> Sent:
    if not channel._kept:
        channel._kept.append(message)
    return [(0.0, channel._kept[0])]


def _shift(channel: Channel, message: bytes, seconds: float) -> Sent:
    return [(0.0, with_stamp(message, read_stamp(message) + int(seconds * SECOND)))]


def _corrupt(channel: Channel, message: bytes, count: float) -> Sent:
    """Flip random bits, half of them in the first 64 bytes, which contain lengths, stamps and names."""
    spoiled = bytearray(message)
    for _ in range(int(count)):
        end = min(64, len(spoiled)) if channel.rng.random() < 0.5 else len(spoiled)
        spoiled[channel.rng.randrange(end)] ^= 1 << channel.rng.randrange(8)
    return [(0.0, bytes(spoiled))]


def _rebuilt(message: bytes, **changes: Any) -> bytes:
    """Return a ``sensor_msgs/Image`` with changed fields in valid CDR; Cyclone rejects invalid CDR."""
    header, pixels, _stamp = read_image(message)
    found: dict[str, Any] = {
        "height": header.height,
        "width": header.width,
        "encoding": b"rgb8",
        "step": header.step,
        "data": pixels,
    }
    found |= changes
    head: bytes = message[:12] + struct.pack("<I", 1) + bytes(4)
    head += struct.pack("<III", found["height"], found["width"], len(found["encoding"]) + 1)
    head += found["encoding"] + bytes(2)
    head += bytes(-len(head) % 4)
    return head + struct.pack("<II", found["step"], len(found["data"])) + bytes(found["data"])


def _short(channel: Channel, message: bytes, _: float) -> Sent:
    _header, pixels, _stamp = read_image(message)
    return [(0.0, _rebuilt(message, data=pixels[: channel.rng.randrange(len(pixels))]))]


def _garbage(channel: Channel, message: bytes, _: float) -> Sent:
    rng = channel.rng
    changes: dict[str, Any] = {
        name: rng.choice((0, 1, rng.randrange(2**32))) for name in ("height", "width", "step")
    }
    changes["encoding"] = bytes(rng.choices(range(32, 127), k=rng.randrange(12)))
    changes["data"] = rng.randbytes(rng.randrange(4096))
    return [(0.0, _rebuilt(message, **changes))]


def _encoding(channel: Channel, message: bytes, _: float) -> Sent:
    wrong = channel.rng.choice((b"hsv8", b"16UC9", b"", b"rgb", b"RGB8", b"jpeg"))
    return [(0.0, _rebuilt(message, encoding=wrong))]


def _huge(channel: Channel, message: bytes, _: float) -> Sent:
    return [(0.0, _rebuilt(message, height=2**31 - 1, width=2**31 - 1))]


def _empty(channel: Channel, message: bytes, _: float) -> Sent:
    return [(0.0, _rebuilt(message, height=0, width=0, step=0, data=b""))]


KINDS: Mapping[str, Callable[[Channel, bytes, float], Sent]] = {
    "drop": _drop,  # amount: share of messages
    "delay": _delay,  # amount: seconds
    "jitter": _jitter,  # random delays, so that messages overtake each other; amount: longest delay, seconds
    "duplicate": _duplicate,  # amount: further copies
    "reorder": _reorder,  # amount: messages that are shuffled together
    "burst": _burst,  # amount: messages that are sent together
    "freeze": _freeze,  # the first content with new stamps
    "repeat": _repeat,  # the first message with its stamp
    "shift": _shift,  # wrong stamps; amount: seconds
    "corrupt": _corrupt,  # flipped bits; amount: their number
    "short": _short,  # pixels are missing at the end
    "garbage": _garbage,  # random size, encoding and pixels
    "encoding": _encoding,  # an unknown encoding
    "huge": _huge,  # a size of terabytes
    "empty": _empty,  # no pixels
}
"""The kinds of faults."""

_GIVES_BACK = frozenset({"reorder", "burst"})
"""Kinds that hold messages back; the messages are sent when the fault ends."""


def spoil_joints(
    kind: str, names: list[str], positions: list[float], rng: random.Random
) -> tuple[list[str], list[float]]:
    """Return the names and positions of a joint state, with an error.

    ``kind`` is ``nan``, ``infinite``, ``missing`` (a joint), ``short`` (fewer positions than names), ``outside``
    (beyond the URDF's limits), ``renamed``, ``none`` (no joints) or ``zero`` (every joint). ``rng`` chooses one of
    the first seven joints.
    """
    names, positions = list(names), list(positions)
    index = rng.randrange(7)
    if kind in ("nan", "infinite", "outside"):
        positions[index] = {"nan": float("nan"), "infinite": float("inf"), "outside": positions[index] + 10.0}[kind]
    elif kind == "missing":
        del names[index], positions[index]
    elif kind == "short":
        del positions[index]
    elif kind == "renamed":
        names[index] = "elbow"
    elif kind == "none":
        names, positions = [], []
    elif kind == "zero":
        positions = [0.0] * len(positions)
    else:
        raise ValueError(f"unknown fault of joint states: '{kind}'")
    return names, positions
