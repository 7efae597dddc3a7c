"""Shared parts of all measurements: the device with its limits, and the figures in every report."""

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.models.machine import Machine, measure_machine, memory_gb
from vla_ros.execution.frame_slots import FrameSlots
from vla_ros.vision.messages import CdrBytes, image_stamp
from vla_ros_lab.bench.times import Stopwatch, Times, percentiles, stage_medians
from vla_ros_models.engine.graph_engine import GraphEngine
from vla_ros_models.network_policy import choose_device

IN_AND_OUT = ("upload", "preprocess", "download", "post")
"""Stages between the message and the network, and between the network and the action."""

ON_DEVICE = ("preprocess", "vision", "prefill", "decode", "flow", "infer")
"""Stages between the upload of images and the end of the last graph."""

COMPILED_UNUSED: dict[str, Any] = {"compiled_ms": None, "compiled_left_out": "not asked for"}


class Arrivals:
    """Leaves camera messages where the receiver leaves them: in memory that the engine's device reads by itself."""

    def __init__(self, engine: GraphEngine[Any, Any], make: Callable[[int], bytes], frames: int) -> None:
        self._make, size = make, len(make(0)) + 1024
        buffers = [engine.runner.page_locked(size) for _ in range(frames)]
        self._slots = FrameSlots([each for each in buffers if each is not None])
        self.milliseconds: list[float] = []  # of each message, on the thread that receives

    def __call__(self, index: int) -> CdrBytes:
        message = self._make(index)
        began = time.perf_counter()
        image_stamp(message)
        kept = self._slots.keep(message)
        self.milliseconds.append(1e3 * (time.perf_counter() - began))
        return kept


@dataclass(frozen=True)
class Setup:
    """Device and length of a measurement."""

    device: torch.device  # where the model runs
    dtype: torch.dtype  # of its weights
    machine: Machine  # measured limits of the device
    quantization: str  # of the decoder
    steps: int  # measured steps
    warmup: int  # steps before them
    began: float  # when loading began, as ``time.perf_counter()``

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def baseline_steps(self, arguments: argparse.Namespace, most: int) -> int:
        """Return the steps of a baseline: as asked for, else up to ``most``; 0 with ``--no-baseline``."""
        return 0 if arguments.no_baseline else min(arguments.baseline_steps or most, self.steps)


def start(arguments: argparse.Namespace, **defaults: int) -> Setup:
    """Measure the machine; ``defaults`` are for arguments that were not given."""
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    device = choose_device(arguments.device)
    cuda = device.type == "cuda"
    name = arguments.dtype if arguments.dtype != "auto" else "bfloat16" if cuda else "float32"
    dtype = getattr(torch, name)
    steps, warmup = arguments.steps or (200 if cuda else 3), 20 if cuda else 1
    machine = measure_machine(device, dtype, arguments.quantization)
    return Setup(device, dtype, machine, arguments.quantization, steps, warmup, time.perf_counter())


def figures(setup: Setup, times: Times, loaded: float, first: float, found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures common to all measurements, in milliseconds and gigabytes, together with ``found``.

    ``loaded`` and ``first``, from ``time.perf_counter()``, are the times after loading and after the first answer.
    ``found`` has ``baseline_ms``, ``compiled_ms`` and ``floor_ms``.
    """
    total = percentiles(times["total"]) or {}

    def speedup(other: float | None) -> float | None:
        return None if other is None else other / total["p50"]

    return {
        "random_weights": True,
        "machine": setup.machine.name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "dtype": setup.dtype_name,
        "quantization": setup.quantization,
        "graphs": "CUDA graphs" if setup.cuda else "no graphs (CPU)",
        "steps": len(times["total"]),
        "rest_ms": 1e3 * Stopwatch.rest,
        "total_ms": total,
        **shares(times),
        "stages_ms": stage_medians(times),
        "in_and_out_ms": median_of(times, *IN_AND_OUT),
        "between_ms": between(times),
        "speedup": speedup(found["baseline_ms"]),
        "compiled_speedup": speedup(found["compiled_ms"]),
        "share_of_floor": None if found["floor_ms"] is None else found["floor_ms"] / total["p50"],
        "bandwidth_gb_per_s": setup.machine.bytes_per_s / 1e9,
        "tflops": setup.machine.flops_per_s / 1e12,
        "memory_gb": memory_gb(setup.device),
        "load_s": loaded - setup.began,
        "first_action_s": first - setup.began,
        **found,
    }


def compiled_baseline(device: torch.device, wanted: bool, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of ``run``, or the reason why there are none."""
    if not wanted:
        return COMPILED_UNUSED
    if device.type != "cuda":
        reason = "left out: there are no CUDA graphs on a CPU, and compiling takes minutes there"
        return {**COMPILED_UNUSED, "compiled_left_out": reason}
    try:
        return {**run(), "compiled_left_out": None}
    except Exception as error:  # torch.compile raises many kinds
        reason = f"torch.compile failed: {type(error).__name__}: {str(error).strip()[:300]}"
        return {**COMPILED_UNUSED, "compiled_left_out": reason}


def shares(times: Times) -> dict[str, Any]:
    """Return the percentiles of a step's time on the device, in the upload of images, and of the host's rest."""
    device = np.sum([times[name] for name in ON_DEVICE if name in times], axis=0)
    parts = {
        "device_ms": device,
        "upload_ms": times["upload"],
        "host_ms": times["total"] - device - times["upload"],
    }
    return {name: percentiles(each) for name, each in parts.items()}


def median_of(times: Times, *stages: str) -> float:
    """Return the median of the sum of some stages; missing stages count as zero."""
    return float(np.median(np.sum([times[name] for name in stages if name in times], axis=0)))


def between(times: Times) -> float:
    """Return the median of a step's time outside its stages, which is the host's work."""
    return float(np.median(2 * times["total"] - np.sum(list(times.values()), axis=0)))
