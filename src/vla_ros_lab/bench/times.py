"""Camera messages of a measurement; milliseconds of many steps by stage, their figures, and the rows of a table."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vla_ros.types import FloatArray
from vla_ros.vision.messages import encode_image
from vla_ros.vision.processors import resize_bicubic

Times = Mapping[str, FloatArray]
"""Milliseconds [N] of N steps: ``total``, and each stage in order."""


class Stopwatch:
    """Times the stages of one step; the first stage begins when it is created."""

    rest = 0.0  # seconds before a step, as on a robot that executes the previous one

    def __init__(self) -> None:
        time.sleep(self.rest)
        self._began = self._last = time.perf_counter()
        self._stages: dict[str, float] = {}

    def lap(self, name: str, stages: Mapping[str, float] | None = None) -> None:
        """End a stage; ``stages``, the milliseconds of its own stages, replace it."""
        now = time.perf_counter()
        self._stages |= {name: 1e3 * (now - self._last)} if stages is None else stages
        self._last = now

    @property
    def milliseconds(self) -> dict[str, float]:
        return {"total": 1e3 * (self._last - self._began), **self._stages}


def collect(steps: Sequence[Mapping[str, float]]) -> Times:
    """Return one array of milliseconds per stage from the stage times of each step."""
    names = dict.fromkeys(["total", *(name for step in steps for name in step)])
    return {name: np.array([step[name] for step in steps if name in step]) for name in names}


def percentiles(milliseconds: FloatArray) -> dict[str, float] | None:
    """Return ``p50`` and ``p99``, or None if there are no steps."""
    if not milliseconds.size:
        return None
    return {f"p{share}": float(np.percentile(milliseconds, share)) for share in (50, 99)}


def stage_medians(times: Times) -> dict[str, float]:
    return {name: float(np.median(each)) for name, each in times.items() if name != "total" and each.size}


def row(name: str, *values: float | str | None) -> str:
    """Return a row of the printed table with up to two figures; "-" stands for a missing one."""
    cells = ["-" if one is None else one if isinstance(one, str) else f"{one:.3f}" for one in values]
    return f"{name:<18}" + "".join(f"{cell:>{size}}" for cell, size in zip(cells, (10, 16), strict=False))


_SHIFT = 7  # pixels from one frame to the next; more than one pixel of the network covers at 1280x720


def make_messages(height: int, width: int, seed: int = 0, grain: int = 1) -> Callable[[int], bytes]:
    """Return a function that makes the ``sensor_msgs/Image`` message of an index.

    The messages are shifts of one random frame, because zeros run faster than real data. The first ``height * width
    / 7`` messages differ. With a coarser ``grain`` in pixels, compression takes as long as for a real image.
    """
    small = np.random.default_rng(seed).integers(
        0, 256, (-(-height // grain), -(-width // grain), 3), dtype=np.uint8
    )
    base = resize_bicubic(small, (height, width)).reshape(-1, 3) if grain > 1 else small.reshape(-1, 3)

    def make(index: int) -> bytes:
        pixels = np.roll(base, _SHIFT * index, axis=0).reshape(height, width, 3)
        return encode_image(pixels, index, "camera")

    return make
