"""Times OpenVLA-OFT from camera messages to its chunk: ``vla-ros bench --model openvla-oft-7b``."""

from __future__ import annotations

import argparse
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from vla_ros.bench.inputs import make_messages, make_prompt
from vla_ros.bench.machine import floor_ms, measure_machine, memory_gb
from vla_ros.bench.models import OPENVLA_7B, random_weights
from vla_ros.policies.oft.build import make_chunk_engine, normalize_state, plain_inference
from vla_ros.policies.oft.inference import Asked, Chunk, ChunkInference
from vla_ros.policies.oft.network import Layout, OFTModel
from vla_ros.policies.oft.processors import OFTResize, prepare
from vla_ros.policies.openvla.actions import ActionStatistics
from vla_ros.policies.openvla.build_engine import fill_quantized
from vla_ros.policies.openvla.choices import choose_device
from vla_ros.policies.openvla.loading import empty, fill
from vla_ros.policies.openvla.tiny import tiny_architecture
from vla_ros.types import RawImage
from vla_ros.vision.decode import decode_image

MODELS = {
    "openvla-oft-7b": (OPENVLA_7B, Layout(2, 8, 7, 8, "l1", False), (256, 256), OFTResize()),
    "openvla-oft-7b-aloha": (OPENVLA_7B, Layout(3, 25, 14, 14, "l1", True), (480, 640), OFTResize(camera_side=256)),
    "tiny-oft": (tiny_architecture(), Layout(2, 8, 7, 8, "l1", False), (256, 256), OFTResize()),
}
"""Name to architecture, variant, (height, width) of the cameras and image processor; weights are random."""


class Step:
    """Messages of all cameras to an un-normalised chunk, as the node does it."""

    def __init__(self, inference: ChunkInference, processor: OFTResize, size: tuple[int, int], prompt: Any) -> None:
        layout = inference.model.layout
        self.inference, self.processor, self.prompt = inference, processor, prompt
        self.cameras = [make_messages(*size, seed=index, grain=8) for index in range(layout.images)]
        self.threads = ThreadPoolExecutor(layout.images)
        ones = np.ones(max(layout.action, layout.state))
        self.statistics = ActionStatistics("random", -ones, ones, ones > 0, 1e-8)
        self.state = np.linspace(-1, 1, layout.state)

    def run(self, index: int) -> tuple[Chunk, dict[str, float]]:
        """One chunk, and milliseconds by stage with ``total``."""
        messages = [message(index) for message in self.cameras]
        began = time.perf_counter()
        decoded = [decode_image(message).image for message in messages]
        received = time.perf_counter()
        if self.inference.runner.graphs:
            raw = [RawImage(image, processor=self.processor) for image in decoded]
            images: Any = prepare(self.inference, raw, self.threads)
        else:
            images = list(self.threads.map(self.processor, decoded))
        state = normalize_state(_first(self.statistics, len(self.state)), self.state)
        processed = time.perf_counter()
        chunk = self.inference.answer(Asked(images, self.prompt, state, None))
        answered = time.perf_counter()
        _first(self.statistics, chunk.normalized.shape[1]).unnormalize(chunk.normalized)
        ended = time.perf_counter()
        return chunk, {
            "total": 1e3 * (ended - began),
            "receive": 1e3 * (received - began),
            "preprocess": 1e3 * (processed - received),
            **chunk.stages_ms,
            "post": 1e3 * (ended - answered),
        }


def bench_oft(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the engine, and plain torch over the same weights beside it; one dictionary for ``--json``."""
    architecture, layout, size, processor = MODELS[arguments.model]
    device = choose_device(arguments.device)
    cuda = device.type == "cuda"
    name = arguments.dtype if arguments.dtype != "auto" else "bfloat16" if cuda else "float32"
    dtype, quantization = getattr(torch, name), arguments.quantization
    steps, warmup = arguments.steps or (200 if cuda else 3), 20 if cuda else 1
    machine, began = measure_machine(device, dtype), time.perf_counter()
    model, decoder = empty(lambda: OFTModel(architecture, layout)), None
    produce = random_weights(model, device, dtype)
    if arguments.no_baseline and quantization != "none":
        decoder = fill_quantized(model, produce, device, dtype, quantization)
    else:
        fill(model, produce, device, dtype)
    engine = make_chunk_engine(model, decoder, quantization=quantization)
    prompt = make_prompt(architecture, arguments.prompt_tokens)
    loaded = time.perf_counter()
    engine.warm_up([len(prompt)])
    step = Step(engine, processor, size, prompt)
    first_chunk, _ = step.run(0)
    engine.wait()
    first = time.perf_counter()
    runs = [step.run(index) for index in range(warmup + steps)][warmup:]
    times = {key: np.array([stages[key] for _, stages in runs]) for key in runs[0][1]}
    base, difference, compared = None, None, 0
    if not arguments.no_baseline:
        compared = min(steps, arguments.baseline_steps or 50)
        plain = Step(plain_inference(model), processor, size, prompt)
        found = [plain.run(index) for index in range(warmup + compared)][warmup:]
        base = float(np.median([stages["total"] for _, stages in found]))
        pairs = zip(runs, found, strict=False)
        difference = max(float(np.abs(a[0].normalized - b[0].normalized).max()) for a, b in pairs)
    total = times.pop("total")
    p50 = float(np.percentile(total, 50))
    sequence = engine.fixed + len(prompt) + layout.slots + 1
    floor = floor_ms(machine, model, engine.weights, sequence, 0) if decoder is None else None
    engine.close()
    return {
        "model": f"{arguments.model} (random weights)", "random_weights": True, "machine": machine.name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "dtype": name, "quantization": quantization, "steps": steps, "frame": [size[1], size[0]],
        "images": layout.images, "chunk": [layout.chunk, layout.action], "sequence": sequence,
        "graphs": "CUDA graphs" if cuda else "no graphs (CPU)", "prompt_tokens": len(prompt),
        "total_ms": {"p50": p50, "p99": float(np.percentile(total, 99))},
        "stages_ms": {key: float(np.median(values)) for key, values in times.items()},
        "in_and_out_ms": float(np.median(sum(times[key] for key in ("preprocess", "upload", "download", "post")))),
        "between_ms": float(np.median(total - sum(times.values()))),
        "actions_per_s": 1e3 * layout.chunk / p50,
        "baseline_ms": base, "baseline_steps": compared, "speedup": None if base is None else base / p50,
        "largest_difference": difference, "spread": float(first_chunk.normalized.std()),
        "floor_ms": floor, "bandwidth_gb_per_s": machine.bytes_per_s / 1e9, "tflops": machine.flops_per_s / 1e12,
        "memory_gb": memory_gb(device), "load_s": loaded - began, "first_action_s": first - began,
    }  # fmt: skip


def render(result: dict[str, Any]) -> str:
    """The table that ``vla-ros bench`` prints."""
    lines = [
        f"{result['model']} on {result['machine']}, {result['dtype']}, quantisation {result['quantization']}, "
        f"{result['images']} images, sequence {result['sequence']}, {result['steps']} steps, {result['graphs']}"
    ]
    rows = {**result["stages_ms"], "between stages": result["between_ms"]}
    rows |= {f"total {name}": value for name, value in result["total_ms"].items()}
    rows["actions per second"] = result["actions_per_s"]
    lines += [f"{name:<20}{value:>10.3f}" for name, value in rows.items()]
    if result["baseline_ms"] is not None:
        lines.append(
            f"eager torch {result['baseline_ms']:.2f} ms, {result['speedup']:.2f} times; chunks differ by at most "
            f"{result['largest_difference']:.2g} (spread {result['spread']:.2g})"
        )
    return "\n".join([*lines, f"memory {result['memory_gb']:.2f} GB, load {result['load_s']:.1f} s"])


def _first(statistics: ActionStatistics, count: int) -> ActionStatistics:
    return ActionStatistics(
        statistics.key, statistics.low[:count], statistics.high[:count], statistics.mask[:count], statistics.margin
    )
