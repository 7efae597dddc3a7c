"""OpenVLA-OFT on a GPU: graphs against the CPU's reference path, FP8 against bfloat16."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.models.subject import random_weights
from tools.checkpoints.tiny import tiny_architecture
from vla_ros.types import RawImage
from vla_ros.vision.preprocess import process
from vla_ros_models.engine.shapes import GeometryShape
from vla_ros_models.oft.inference import ChunkRequest, check_chunks, make_chunk_engine, plain_inference
from vla_ros_models.oft.network import Layout, OFTModel
from vla_ros_models.oft.processing import OFTResize
from vla_ros_models.weights import empty, fill

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ARCHITECTURE = tiny_architecture(vocabulary=768, empty_token=500, llm_width=128, llm_layers=3)
LIBERO = Layout(2, 8, 7, 8, "l1", False)
STEPS = 5


def models(layout, dtype=torch.float32):
    """The same random weights on the CPU and on the GPU."""
    here = empty(lambda: OFTModel(ARCHITECTURE, layout))
    fill(here, random_weights(here, torch.device("cpu"), dtype), torch.device("cpu"), dtype)
    there = empty(lambda: OFTModel(ARCHITECTURE, layout))
    weights = dict(here.named_parameters())
    fill(there, lambda names: ((name, weights[name].data) for name in names), torch.device("cuda:0"), dtype)
    return here, there


def ask(layout, seed):
    rng = np.random.default_rng(seed)
    images = list(rng.integers(0, 256, (layout.images, 224, 224, 3), dtype=np.uint8))
    prompt = np.array([1, *rng.integers(3, 400, rng.integers(5, 60)), 500])
    state, noise = rng.uniform(-1, 1, layout.state), rng.normal(size=(layout.chunk, layout.action))
    positions = rng.uniform(-1, 1, (layout.images, 256, 3)).astype(np.float32)
    positions[rng.random(positions.shape[:2]) < 0.3] = np.nan
    return ChunkRequest(images, prompt, state, noise, positions)


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (LIBERO, 200),
        (replace(LIBERO, images=1, state=0), 20),
        (Layout(3, 25, 14, 14, "l1", True), 40),
        (replace(LIBERO, head="diffusion"), 20),
        (replace(LIBERO, geometry=GeometryShape()), 40),
        (Layout(3, 25, 14, 14, "l1", True, GeometryShape()), 20),
    ],
)
def test_graphs_give_the_reference_chunks(layout, count):
    here, there = models(layout)
    plain, engine = plain_inference(here, STEPS), make_chunk_engine(there, steps=STEPS)
    engine.warm_up([20])
    worst = 0.0
    for seed in range(count):
        asked = ask(layout, seed)
        worst = max(worst, np.abs(engine.answer(asked).normalized - plain.answer(asked).normalized).max())
        if seed % 10 == 0:
            assert engine.wait(60)
    several = [ask(layout, seed) for seed in range(3)]
    for together, asked in zip(engine.answer_all(several), several, strict=True):
        worst = max(worst, np.abs(together.normalized - plain.answer(asked).normalized).max())
    # A first denoising step multiplies whatever differs by up to 1 / sqrt(alpha), ten times here.
    assert worst <= (1e-2 if layout.head == "diffusion" else 1e-3)
    engine.close()


def test_graphs_give_the_reference_tokens_without_a_head():
    layout = replace(LIBERO, images=1, state=0, head="none")
    here, there = models(layout)
    plain, engine = plain_inference(here), make_chunk_engine(there)
    for seed in range(20):
        asked = ask(layout, seed)
        check_chunks([engine.answer(asked)], [plain.answer(asked)], torch.float32)
    engine.close()


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_quantised_weights_change_a_chunk_little(quantization):
    _, model = models(LIBERO, torch.bfloat16)
    plain, engine = plain_inference(model), make_chunk_engine(model, quantization=quantization)
    engine.warm_up([20])
    off = [
        np.abs(engine.answer(asked).normalized - plain.answer(asked).normalized).mean()
        for asked in (ask(LIBERO, seed) for seed in range(10))
    ]
    spread = plain.answer(ask(LIBERO, 0)).normalized.std()
    assert max(off) <= {"none": 0.03, "int8": 0.05, "int4": 0.4, "fp8": 0.2}[quantization] * spread
    assert max(off) > 0
    engine.close()


@pytest.mark.parametrize("camera_side", [0, 256])
def test_camera_images_are_processed_as_on_the_host(camera_side):
    _, model = models(LIBERO)
    engine, processor = make_chunk_engine(model), OFTResize(camera_side=camera_side)
    rng, prompt = np.random.default_rng(0), np.array([1, 30, 40, 500])
    for height, width in ((256, 256), (480, 640), (480, 640), (224, 224)):
        pixels = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(2)]
        raw = [RawImage(image, "rotate_180", processor) for image in pixels]
        chunks = [
            engine.answer(ChunkRequest(images, prompt, np.zeros(8)))
            for images in (raw, [process(one) for one in raw])
        ]
        np.testing.assert_array_equal(chunks[0].normalized, chunks[1].normalized)
        assert engine.wait(60)
    engine.close()
