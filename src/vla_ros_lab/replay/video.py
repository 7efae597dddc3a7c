"""Decodes recorded video (``foxglove_msgs/CompressedVideo`` with H.264) to images.

The message's definition (github.com/foxglove/schemas, ros2/CompressedVideo.msg) asks for Annex B, one frame a
message, no B frames, and parameter sets with each key frame (IDR). FFmpeg replaces what a lost message had by what
it guesses, so losses are found here: ``frame_num`` counts the frames that others refer to (ITU-T H.264, 7.4.3).
"""

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vla_ros.errors import ImageError, MissingDependencyError
from vla_ros.types import UInt8Array
from vla_ros.vision.decode import MAX_PIXELS
from vla_ros.vision.messages import encode_image, read_video

VIDEO = "foxglove_msgs/msg/CompressedVideo"

_SLICE, _KEY, _SEQUENCE, _PICTURE = 1, 5, 7, 8  # kinds of NAL units
_START = re.compile(rb"\x00\x00\x01")
_CHROMA = frozenset((100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135))  # profiles that state it
_HEAD = 64  # bytes of a slice that have its frame_num
_MOST = 4096  # bytes of a parameter set


class _Bits:
    """Reads the fields of a NAL unit (ITU-T H.264, 9.1); raises ImageError at its end."""

    def __init__(self, unit: bytes) -> None:
        content = unit[1:].replace(b"\0\0\3", b"\0\0")
        self._bits, self._left = int.from_bytes(content, "big"), 8 * len(content)

    def take(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise ImageError("a parameter set or slice is cut off")
        return self._bits >> self._left & ((1 << count) - 1)

    def golomb(self) -> int:
        zeros = 0
        while not self.take(1):
            zeros += 1
            if zeros > 32:
                raise ImageError("a parameter set or slice is damaged")
        return (1 << zeros) - 1 + self.take(zeros)

    def signed(self) -> int:
        code = self.golomb()
        return (code + 1) // 2 if code % 2 else -(code // 2)


@dataclass(frozen=True)
class _Frame:
    """What the first slice of a message says."""

    number: int  # its ``frame_num``
    is_key: bool
    is_reference: bool


class _Numbers:
    """Reads ``frame_num``, whose size is in the sequence's parameters."""

    def __init__(self) -> None:
        self._sequences: dict[int, tuple[int, bool]] = {}  # bits of frame_num, and whether planes are separate
        self._pictures: dict[int, int] = {}  # parameter set of the picture to that of the sequence

    def read(self, data: bytes) -> _Frame:
        """Take the parameter sets; returns the frame. Raises ImageError if there is none."""
        for unit in _units(data):
            kind, bits = unit[0] & 31, _Bits(unit[: _MOST if unit[0] & 31 == _SEQUENCE else _HEAD])
            if kind == _SEQUENCE:
                self._take_sequence(bits)
            elif kind == _PICTURE:
                picture = bits.golomb()
                self._pictures[picture] = bits.golomb()
            elif kind in (_SLICE, _KEY):
                bits.golomb(), bits.golomb()  # first macroblock, type of the slice
                size, separate = self._sequences.get(self._pictures.get(bits.golomb(), -1), (0, False))
                if not size:
                    raise ImageError("its parameter sets are missing, which come with a key frame")
                bits.take(2 * separate)
                return _Frame(bits.take(size), kind == _KEY, bool(unit[0] & 0x60))
        raise ImageError("found no frame of H.264 with start codes (Annex B)")

    def modulus(self) -> int:
        return 1 << max((size for size, _ in self._sequences.values()), default=4)

    def _take_sequence(self, bits: _Bits) -> None:
        profile = bits.take(8)
        bits.take(16)  # constraints and level
        number, chroma, separate = bits.golomb(), 1, False
        if profile in _CHROMA:
            chroma = bits.golomb()
            separate = bool(chroma == 3 and bits.take(1))
            bits.golomb(), bits.golomb(), bits.take(1)  # depths, bypass
            if bits.take(1):
                for index in range(12 if chroma == 3 else 8):
                    _skip_scaling(bits, 16 if index < 6 else 64)
        self._sequences[number] = bits.golomb() + 4, separate


def _skip_scaling(bits: _Bits, size: int) -> None:
    """Skip a scaling list, if there is one (7.3.2.1.1.1)."""
    if not bits.take(1):
        return
    scale = 8
    for _ in range(size):
        scale = (scale + bits.signed()) % 256
        if not scale:
            return


def _units(data: bytes) -> Iterator[bytes]:
    starts = [found.end() for found in _START.finditer(data)]
    for begin, after in zip(starts, [*starts[1:], len(data) + 3], strict=False):
        if begin < (end := after - 3):
            yield data[begin:end]


def is_key(cdr: bytes | memoryview) -> bool:
    """Return whether decoding can begin with a message."""
    try:
        return any(unit[0] & 31 == _KEY for unit in _units(bytes(read_video(cdr)[1])))
    except ImageError:
        return False


class VideoDecoder:
    """Decodes one topic's messages, which must come in their order."""

    def __init__(self) -> None:
        self._context: Any = None  # None before a key frame and after a loss
        self._numbers = _Numbers()
        self._reference = self._count = 0  # frame_num of the last reference, and messages since the key frame
        self._last: tuple[bytes, UInt8Array] | None = None

    def decode(self, cdr: bytes | memoryview) -> bytes | None:
        """Return the CDR of a ``sensor_msgs/Image`` (rgb8), or None for a frame between a loss and a key frame.

        Raises ImageError, once, at a loss, or where the first frame is no key frame.
        """
        begun = self._context is not None or not self._count
        try:
            header, data = read_video(cdr)
            if header.format.strip().lower() != "h264":
                raise ImageError(f"found video in {header.format[:20]!r}, expected h264; convert the bag")
            packet = bytes(data)
            if self._last is None or packet != self._last[0]:  # two recorders may have written the same message
                self._last = packet, self._frame(packet)
            return encode_image(self._last[1], header.stamp, header.frame_id)
        except ImageError as error:
            self._context, self._count, self._last = None, self._count + 1, None
            if begun:
                raise ImageError(f"{error}; frames are lost until the next key frame") from None
            return None

    def _frame(self, packet: bytes) -> UInt8Array:
        frame = self._numbers.read(packet)
        if frame.is_key:
            self._context, self._count = _open(), 0
        elif self._context is None:
            raise ImageError("a frame before the first key frame")
        elif frame.number != (self._reference + 1) % self._numbers.modulus():
            raise ImageError("a frame is missing")
        if frame.is_reference:
            self._reference = frame.number
        self._count += 1
        return _decode(self._context, packet, self._count)


def _open() -> Any:
    av = _av()
    context = av.CodecContext.create("h264", "r")
    context.thread_count = 1  # several threads delay the frames
    context.flags |= av.codec.context.Flags.low_delay
    context.options = {"err_detect": "explode", "max_pixels": str(MAX_PIXELS)}
    return context


def _decode(context: Any, data: bytes, count: int) -> UInt8Array:
    av = _av()
    packet = av.Packet(data)
    packet.pts = packet.dts = count
    try:
        frames = context.decode(packet)
    except (av.error.FFmpegError, ValueError) as error:
        raise ImageError(f"a frame is damaged ({error})") from None
    if len(frames) != 1 or frames[0].pts != count:
        raise ImageError("a message has no whole frame, or frames are in another order (B frames)")
    image: UInt8Array = frames[0].to_ndarray(format="rgb24")
    return image


def _av() -> Any:
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise MissingDependencyError(f"recorded video needs PyAV ({error}); run `pip install av`") from None
