"""Reads the images of a recorded camera by their number, and finds out how many it sends per second."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_ros.config.sections import CameraConfig
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.errors import ImageError
from vla_ros.types import IntArray, UInt8Array
from vla_ros.vision.depth import DEPTH_ENCODINGS, decode_compressed_depth, decode_depth
from vla_ros.vision.messages import IMAGE_TYPES, image_header, image_stamp, read_compressed
from vla_ros.vision.preprocess import TURNS, Preprocessor, process
from vla_ros_lab.export.dataset import ExportError
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.storage import Record, at_one_time

Decode = Callable[[bytes | memoryview], NDArray[Any]]
"""Turns a camera's message into its processed image, or its depth in millimetres; raises ImageError."""

_MOST_APART = 2.0  # factor between a camera's two rates, above which neither is believed
_NOTICED = 1.25  # factor that is worth a remark


class DamagedImagesError(Exception):
    """Some images cannot be used.

    Attributes:
        ticks: Which of the requested images, bool [T].
        reasons: What is wrong with them, and how often.
    """

    def __init__(self, ticks: NDArray[np.bool_], reasons: Counter[str]) -> None:
        super().__init__(ticks, reasons)
        self.ticks, self.reasons = ticks, reasons


class RecordedCamera:
    """The images of one topic of a bag.

    An image is known by its number in the recording, because many may have the same receive time, and stamps may be
    in another order.

    Attributes:
        topic: Name of the topic.
        received: Times at which the recorder received the images, int64 [N], ascending.
        stamps: Their header stamps, int64 [N]; 0 where there is none.
        is_depth: True if its images are depth, uint16 [H, W] in millimetres, 0 where unknown.
        times: Times on the chosen clock, int64 [F], ascending. Images without a stamp have none on the clock
            of stamps.
    """

    def __init__(
        self,
        bag: Bag,
        topic: str,
        frames: Sequence[Sequence[int]],
        decode: Decode,
        *,
        stamped: bool,
        is_depth: bool = False,
    ) -> None:
        self._bag, self.topic, self._decode, self.is_depth = bag, topic, decode, is_depth
        self.received, self.stamps = (np.array(column, np.int64) for column in frames)
        clock = self.stamps if stamped else self.received
        order = np.argsort(clock, kind="stable")
        self._numbers = order[clock[order] > 0] if stamped else order
        self.times: IntArray = clock[self._numbers]
        self._problem = ""  # of the first damaged image: each has another size

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the first image that can be decoded; raises ExportError if none can."""
        problem = "it has none"
        for record in self._bag.records([self.topic]):
            try:
                height, width = self._decode(record.data).shape[:2]
                return height, width
            except ImageError as error:  # noqa: PERF203 - a damaged image costs more than the handler
                problem = str(error)
        raise ExportError(f"{self._bag.path}: no image of {self.topic} can be used: {problem}")

    def numbers(self, rows: IntArray) -> IntArray:
        """Return the numbers in the recording of the images at ``rows``, indices of ``times``."""
        return self._numbers[rows]

    def read(self, rows: IntArray, size: tuple[int, int]) -> Iterator[NDArray[Any]]:
        """Yield the images at ``rows``, ascending indices of ``times``, uint8 [H, W, 3] or uint16 [H, W].

        An image that is damaged or not of ``size`` is replaced; at the end, DamagedImagesError tells which.
        """
        wanted = self.numbers(rows)
        image, held, at = np.zeros(size, np.uint16) if self.is_depth else np.zeros((*size, 3), np.uint8), -1, -1
        records: Iterator[Record] = iter(())
        damaged, reasons = set[int](), Counter[str]()
        for number in wanted.tolist():
            if number != held:
                if at < 0 or number < at:  # stamps are in another order
                    time = int(self.received[number])
                    at = int(np.searchsorted(self.received, time))
                    records = self._bag.records([self.topic], time)
                record, at, held = next(islice(records, number - at, None), None), number + 1, number
                if record is None or record.time != self.received[number]:
                    raise ExportError(f"{self._bag.path}: {self.topic} has other images when it is read again")
                try:
                    found = self._decode(record.data)
                    if found.shape[:2] != size:
                        shown = " instead of ".join(f"{each[1]}x{each[0]}" for each in (found.shape, size))
                        raise ImageError(f"{self.topic}: {shown}")
                    image = found
                except ImageError as error:
                    damaged.add(number)
                    self._problem = self._problem or f"damaged images: {error}"
                    reasons[self._problem] += 1
            yield image
        if damaged:
            raise DamagedImagesError(np.isin(wanted, list(damaged)), reasons)

    def rate(self, gap: float, advice: str) -> tuple[float, str]:
        """Return the images per second, and a remark if many are missing.

        It comes from the (lower) median of the stamps' distances, or of the receive times' without stamps. The
        number of images and their duration, without pauses of more than ``gap`` seconds, must agree within a factor
        of two; else raises ExportError, which ends with ``advice``.
        """
        stamps = np.unique(self.stamps[self.stamps > 0])
        stamped = 2 * len(stamps) >= len(self.times)
        own = stamps if stamped else np.unique(self.times)
        steps, waits = (each[each <= gap * 1e9] for each in map(np.diff, (own, self.times)))
        if not len(steps) or not waits.sum():
            return 1.0, ""
        nominal = 1e9 / float(np.quantile(steps, 0.5, method="lower"))
        counted = 1e9 * len(waits) / float(waits.sum()) * (len(stamps) / len(self.stamps) if stamped else 1)
        clock = "stamps" if stamped else "receive times"
        apart = f"{clock} are {1 / nominal:.4g} s apart, {nominal:.3g} per second"
        both = f"{self.topic}: {len(self.times)} images are {counted:.3g} per second, but their {apart}"
        factor = max(nominal, counted) / min(nominal, counted)
        if factor > _MOST_APART:
            raise ExportError(f"{self._bag.path}: {both}; {advice}")
        return nominal, f"{both}, which was used; --fps sets another rate" if factor > _NOTICED else ""


def read_cameras(
    bag: Bag, topics: Sequence[str], camera: CameraConfig, *, stamped: bool
) -> tuple[list[RecordedCamera], int]:
    """Return the cameras of a bag, and how many of their images have no stamp and are left out for that.

    Raises ExportError if a camera has no images or no times.
    """
    preprocessor = Preprocessor(camera, PolicySpec(images=tuple(ImageFeature(key) for key in camera.keys)))
    frames = {topic: (array("q"), array("q")) for topic in topics}
    depths = dict[str, bool]()
    for record in bag.records(topics):
        if record.topic not in depths:
            depths[record.topic] = _is_depth(record.data, bag.topics[record.topic])
        try:
            stamp = image_stamp(record.data)
        except ImageError:  # it cannot be decoded either, which counts when it is needed
            stamp = 0
        for column, time in zip(frames[record.topic], (record.time, stamp), strict=True):
            column.append(time)
    cameras = []
    for index, topic in enumerate(topics):
        received, stamps = frames[topic]
        if not received:
            raise ExportError(f"{bag.path}: at least one of {', '.join(topics)} has no images")
        if not stamped and len(received) > 1 and received[0] == received[-1]:
            problem = at_one_time(f"{len(received)} images of {topic}", received[0])
            raise ExportError(f"{bag.path}: {problem}; use the images' own times with --clock stamp")
        if stamped and not any(stamps):
            raise ExportError(f"{bag.path}: no image of {topic} has a stamp; use --clock received")
        decode: Decode = partial(_decoded, preprocessor, index)
        if depths[topic]:
            decode = partial(_millimetres, bag.topics[topic], TURNS[camera.each[index].orientation])
        one = RecordedCamera(bag, topic, (received, stamps), decode, stamped=stamped, is_depth=depths[topic])
        cameras.append(one)
    return cameras, sum(len(one.received) - len(one.times) for one in cameras)


def _decoded(preprocessor: Preprocessor, camera: int, cdr: bytes | memoryview) -> UInt8Array:
    return process(preprocessor(cdr, camera))


def _is_depth(cdr: bytes | memoryview, kind: str) -> bool:
    try:
        if kind == IMAGE_TYPES["raw"]:
            return image_header(cdr).encoding in DEPTH_ENCODINGS
        return "compressedDepth" in read_compressed(cdr)[0].format
    except ImageError:
        return False


def _millimetres(kind: str, turn: Callable[[Any], Any], cdr: bytes | memoryview) -> NDArray[Any]:
    depth = (decode_depth if kind == IMAGE_TYPES["raw"] else decode_compressed_depth)(cdr).depth
    found: NDArray[Any] = np.rint(1000 * np.nan_to_num(turn(depth))).clip(0, 65535).astype(np.uint16)
    return found
