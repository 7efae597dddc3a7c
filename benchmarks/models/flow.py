"""Measures a flow-matching policy: camera messages to un-normalised chunks, alone, with RTC and in batches."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.models.machine import Stage, floor_ms, memory_gb
from benchmarks.models.report import footing, heading, stage_rows
from benchmarks.models.setup import COMPILED_UNUSED, Arrivals, Setup, figures
from vla_ros.types import FloatArray, ImageProcessor, RawImage
from vla_ros.vision.decode import decode_image
from vla_ros.vision.messages import CdrBytes
from vla_ros_lab.bench.times import Stopwatch, Times, collect, make_messages, percentiles, row

BATCHES = (2, 4, 8)
DEFAULT_FRAME = (480, 640)
MOST_BASELINE = 50


@dataclass(frozen=True)
class Subject:
    """A model with random weights, and what its measurement needs."""

    engine: Any  # what computes chunks
    processor: ImageProcessor  # of the camera images
    request: Callable[[list[RawImage], int, Any], Any]  # images, seed of the noise and continuation to the engine's
    finish: Callable[[FloatArray], object]  # un-normalises a chunk [H, A]
    warm_up: Callable[[], None]  # captures the graphs
    continuation: Any  # of measurements with RTC
    stages: list[Stage]  # of one chunk, for the lower bound
    # Figures of so many steps of plain PyTorch over the same weights; ``baseline`` is its name.
    time_baseline: Callable[["Measurement", int], dict[str, Any]]
    baseline: str
    details: dict[str, Any]  # further figures


@dataclass(frozen=True)
class Measurement:
    """Runs camera messages to a chunk, as the node does."""

    subject: Subject
    message: Callable[[int], CdrBytes]  # index to ``sensor_msgs/Image``
    cameras: int  # messages of one observation

    def messages(self, index: int) -> list[CdrBytes]:
        return [self.message(index * self.cameras + camera) for camera in range(self.cameras)]

    def _images(self, messages: Sequence[CdrBytes]) -> list[RawImage]:
        processor = self.subject.processor
        return [RawImage(decode_image(message).image, processor=processor) for message in messages]

    def step(self, index: int, batch: int, continuation: Any) -> dict[str, float]:
        """Compute a chunk for one observation of each robot; return milliseconds by stage with ``total``."""
        robots = [self.messages(index * batch + robot) for robot in range(batch)]
        watch = Stopwatch()
        requests = [self.subject.request(self._images(messages), index, continuation) for messages in robots]
        watch.lap("receive")
        answers = self.subject.engine.answer(requests)
        watch.lap("infer", getattr(answers[0], "stages_ms", {}))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            self.subject.finish(answer.actions)
        watch.lap("post")
        return watch.milliseconds

    def run(self, steps: int, warmup: int, batch: int = 1, continuation: Any = None) -> Times:
        """Time ``steps`` observations after ``warmup`` unmeasured ones."""
        taken = [self.step(index, batch, continuation) for index in range(warmup + steps)]
        return collect(taken[warmup:])


def measure(arguments: argparse.Namespace, setup: Setup, subject: Subject) -> dict[str, Any]:
    """Measure the engine, alone, with RTC and in batches, and the baseline."""
    loaded, engine, steps, warmup = time.perf_counter(), subject.engine, setup.steps, setup.warmup
    height, width = arguments.frame or DEFAULT_FRAME
    arrivals = Arrivals(engine, make_messages(height, width), 2 * arguments.images * BATCHES[-1])
    measurement = Measurement(subject, arrivals, arguments.images)
    subject.warm_up()
    measurement.run(1, 0)
    first = time.perf_counter()
    engine.wait()
    times = measurement.run(steps, warmup)
    rtc = measurement.run(steps, warmup, continuation=subject.continuation)
    rates: dict[str, dict[str, float]] = {}
    for batch in BATCHES if setup.cuda else ():
        measurement.run(1, 2, batch)
        engine.wait()
        rates[str(batch)] = percentiles(measurement.run(max(1, steps // 4), warmup, batch)["total"]) or {}
    memory, compared = memory_gb(setup.device), setup.baseline_steps(arguments, MOST_BASELINE)
    details: dict[str, Any] = {
        "model": arguments.model,
        "sizes": "published" if setup.cuda else "tiny",
        "images": arguments.images,
        "prompt_tokens": arguments.prompt_tokens,
        "horizon": engine.model.horizon,
        "flow_steps": arguments.flow_steps,
        "frame": [width, height],
        "slot_ms": percentiles(np.array(arrivals.milliseconds)),
        "rtc_ms": percentiles(rtc["total"]),
        "batch_ms": rates,
        "floor_ms": floor_ms(setup.machine, subject.stages),
        "memory_gb": memory,
        "baseline": subject.baseline,
        "baseline_ms": None,
        "baseline_steps": compared,
        "baseline_difference": None,
        **COMPILED_UNUSED,
        **subject.details,
        **(subject.time_baseline(measurement, compared) if compared else {}),
    }
    engine.close()
    result = figures(setup, times, loaded, first, details)
    each = {"1": result["total_ms"], **rates}
    speeds = {batch: 1e3 * int(batch) * engine.model.horizon / times["p50"] for batch, times in each.items()}
    return result | {"actions_per_s": speeds}


def render(result: dict[str, Any]) -> str:
    width, height = result["frame"]
    words = [f"{result['images']} images of {width}x{height}", f"{result['prompt_tokens']} prompt tokens"]
    words += [f"sequence {result['sequence']}"] if "sequence" in result else []
    words += [f"horizon {result['horizon']}", f"{result['flow_steps']} flow steps", result["kernels"]]
    rates = ", ".join(f"{each}: {rate:.0f}" for each, rate in result["actions_per_s"].items())
    lines = [
        heading(result, *words),
        "stage (p50, ms)",
        *stage_rows(result),
        row("with RTC p50", result["rtc_ms"]["p50"]),
        *(row(f"{batch} robots p50", each["p50"]) for batch, each in result["batch_ms"].items()),
        row("lower bound", result["floor_ms"]),
        row(result["baseline"], result["baseline_ms"]),
        row("compiled PyTorch", result["compiled_ms"]),
        f"actions per second: {rates}",
        footing(result),
    ]
    if result["compiled_left_out"] not in (None, COMPILED_UNUSED["compiled_left_out"]):
        lines.append(f"compiled PyTorch: {result['compiled_left_out']}")
    return "\n".join(lines)
