"""Times OpenVLA-OFT from camera messages to its chunk: ``python -m benchmarks.models openvla-oft-7b``."""

import argparse
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.models.machine import floor_ms, openvla_stages
from benchmarks.models.report import footing, heading, stage_rows
from benchmarks.models.setup import COMPILED_UNUSED, Arrivals, figures, start
from benchmarks.models.subject import OPENVLA_7B, make_prompt, random_weights
from tools.checkpoints.tiny import tiny_architecture
from vla_ros.types import RawImage
from vla_ros.vision.decode import decode_image
from vla_ros.vision.preprocess import process
from vla_ros_lab.bench.times import Stopwatch, collect, make_messages, percentiles, row
from vla_ros_models.engine.shapes import GeometryShape
from vla_ros_models.oft.inference import Chunk, ChunkInference, ChunkRequest, make_chunk_engine, plain_inference
from vla_ros_models.oft.network import Layout, OFTModel
from vla_ros_models.oft.processing import OFTResize
from vla_ros_models.openvla.loading import fill_quantized
from vla_ros_models.openvla.processing import ActionStatistics
from vla_ros_models.weights import empty, fill

LIBERO = Layout(2, 8, 7, 8, "l1", False)
MODELS = {
    "openvla-oft-7b": (OPENVLA_7B, LIBERO, (256, 256), OFTResize()),
    "openvla-oft-7b-points": (OPENVLA_7B, replace(LIBERO, geometry=GeometryShape()), (256, 256), OFTResize()),
    "openvla-oft-7b-aloha": (OPENVLA_7B, Layout(3, 25, 14, 14, "l1", True), (480, 640), OFTResize(camera_side=256)),
    "tiny-oft": (tiny_architecture(), LIBERO, (256, 256), OFTResize()),
}
"""Name to architecture, variant, (height, width) of the cameras and image processor; weights are random."""


class Step:
    """Runs the messages of all cameras to an un-normalised chunk, as the node does."""

    def __init__(self, inference: ChunkInference, processor: OFTResize, size: tuple[int, int], prompt: Any) -> None:
        layout = inference.model.layout
        self.inference, self.processor, self.prompt = inference, processor, prompt
        makes = [make_messages(*size, seed=index, grain=8) for index in range(layout.images)]
        self.cameras = [Arrivals(inference, make, 4) for make in makes]
        self.state = np.linspace(-1, 1, layout.state)

    def run(self, index: int) -> tuple[Chunk, dict[str, float]]:
        """Compute one chunk; also return milliseconds by stage with ``total``."""
        messages = [message(index) for message in self.cameras]
        watch = Stopwatch()
        decoded = [decode_image(message).image for message in messages]
        watch.lap("receive")
        images: Any = [RawImage(image, processor=self.processor) for image in decoded]
        if not self.inference.runner.graphs:
            images = list(map(process, images))
        state = _statistics(len(self.state)).normalize(self.state)
        watch.lap("preprocess")
        chunk = self.inference.answer(ChunkRequest(images, self.prompt, state, None))
        watch.lap("infer", chunk.stages_ms)
        _statistics(chunk.normalized.shape[1]).unnormalize(chunk.normalized)
        watch.lap("post")
        return chunk, watch.milliseconds


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    architecture, layout, size, processor = MODELS[arguments.model]
    setup = start(arguments)
    model, decoder = empty(lambda: OFTModel(architecture, layout)), None
    produce = random_weights(model, setup.device, setup.dtype)
    if arguments.no_baseline and setup.quantization != "none":
        decoder = fill_quantized(model, produce, setup.device, setup.dtype, setup.quantization)
    else:
        fill(model, produce, setup.device, setup.dtype)
    engine = make_chunk_engine(model, decoder, quantization=setup.quantization)
    prompt = make_prompt(architecture, arguments.prompt_tokens)
    loaded = time.perf_counter()
    engine.warm_up([len(prompt)])
    step = Step(engine, processor, size, prompt)
    first_chunk, _ = step.run(0)
    engine.wait()
    first = time.perf_counter()
    runs = [step.run(index) for index in range(setup.warmup + setup.steps)][setup.warmup :]
    base, difference, compared = None, None, setup.baseline_steps(arguments, 50)
    if compared:
        plain = Step(plain_inference(model), processor, size, prompt)
        found = [plain.run(index) for index in range(setup.warmup + compared)][setup.warmup :]
        base = float(np.median([stages["total"] for _, stages in found]))
        pairs = zip(runs, found, strict=False)
        difference = max(float(np.abs(a[0].normalized - b[0].normalized).max()) for a, b in pairs)
    sequence = engine.fixed + len(prompt) + layout.slots + 1
    stages = openvla_stages(model, engine.weights, sequence, 0, layout.images)
    engine.close()
    details = {
        "model": f"{arguments.model} (random weights)", "frame": [size[1], size[0]], "images": layout.images,
        "chunk": [layout.chunk, layout.action], "sequence": sequence, "prompt_tokens": len(prompt),
        "baseline_ms": base, "baseline_steps": compared, **COMPILED_UNUSED,
        "largest_difference": difference, "spread": float(first_chunk.normalized.std()),
        "floor_ms": floor_ms(setup.machine, stages),
        "slot_ms": percentiles(np.array([each for one in step.cameras for each in one.milliseconds])),
    }  # fmt: skip
    result = figures(setup, collect([stages for _, stages in runs]), loaded, first, details)
    return result | {"actions_per_s": 1e3 * layout.chunk / result["total_ms"]["p50"]}


def render(result: dict[str, Any]) -> str:
    lines = [
        heading(result, f"{result['images']} images", f"sequence {result['sequence']}"),
        *stage_rows(result),
        row("actions per second", result["actions_per_s"]),
    ]
    if result["baseline_ms"] is not None:
        lines.append(
            f"eager torch {result['baseline_ms']:.2f} ms, {result['speedup']:.2f} times; chunks differ by at most "
            f"{result['largest_difference']:.2g} (spread {result['spread']:.2g})"
        )
    return "\n".join([*lines, footing(result)])


def _statistics(count: int) -> ActionStatistics:
    ones = np.ones(count)
    return ActionStatistics("random", -ones, ones, ones > 0, 1e-8)
