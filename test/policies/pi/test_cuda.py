from dataclasses import replace

import numpy as np
import pytest

from test.policies.golden import GPU, eager_and_graphs
from vla_ros.config import load
from vla_ros.policies.base import create
from vla_ros.types import Observation, PreviousChunk, RawImage
from vla_ros.vision.processors import ResizeWithPad
from vla_ros_models.pi.checkpoint import read_checkpoint
from vla_ros_models.pi.inference import load_model
from vla_ros_models.pi.processing import find_robot

from .conftest import CASES, MODELS, infer

pytestmark = GPU


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_chunks_equal_the_published_ones(folders, kind, dtype):
    for case in CASES[kind]:
        checkpoint = read_checkpoint(folders[kind, "openpi"], find_robot(case.text("robot")))
        model = load_model(checkpoint, "cuda", dtype)
        arguments = (case.images, case["state"], case.text("prompt"))
        graph = eager_and_graphs(model, model.request(*arguments, case["noise"]))
        error = np.abs(graph - case["actions_normalized"])
        own = np.abs(case["actions_normalized_bf16"] - case["actions_normalized"])
        assert error.max() < (2e-5 if dtype == "float32" else 1.5 * own.max())
        assert dtype == "float32" or error.mean() < own.mean()
        seeds = [infer(model, *arguments, seed).normalized for seed in (3, 4, 3)]
        np.testing.assert_array_equal(seeds[0], seeds[2])
        assert not np.array_equal(seeds[0], seeds[1])
        model.engine.close()


@pytest.mark.parametrize("mode", ["guided", "jacobian"])
def test_continued_chunks_equal_the_cpus(folders, mode):
    case, checkpoint = CASES["pi05_lerobot"][1], read_checkpoint(folders["pi05", "lerobot"])
    arguments = (case.images, case["state"], case.text("prompt"), case["noise"], replace(case.rtc, mode=mode))
    chunks = []
    for device in ("cpu", "cuda"):
        model = load_model(checkpoint, device, "float32", jacobian=mode == "jacobian")
        chunks.append(eager_and_graphs(model, model.request(*arguments)))
        model.engine.close()
    np.testing.assert_allclose(chunks[1], chunks[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_the_policy_answers_from_camera_images(folders, caplog, quantization):
    """Raw images are resized on the device; FP8's products of these small models may not fit and fall back."""
    chunks = {}
    for device in ("cpu", "cuda"):
        options = ["policy.name:=pi", f"policy.checkpoint:={folders['pi05', 'openpi']}", "preset:=libero"]
        options += [
            f"policy.device:={device}",
            f"policy.quantization:={quantization if device == 'cuda' else 'none'}",
        ]
        policy = create(load((), options))
        policy.load()
        draw = np.random.default_rng(1)
        raw = {
            key: RawImage(draw.integers(0, 256, (48, 64, 3), dtype=np.uint8), processor=ResizeWithPad((224, 224)))
            for key in policy.spec.image_keys
        }
        images = {key: one.processor(one.pixels) for key, one in raw.items()}
        asked = Observation(
            images,
            "pick up the red cube",
            5,
            {"observation/state": np.full(8, 0.3)},
            raw,
            noise=draw.normal(size=(10, 32)),
        )
        sessions = [policy.start_session() for _ in range(2)]
        first = policy.infer(sessions[0], asked)
        both = policy.infer_batch([(session, asked) for session in sessions])
        np.testing.assert_allclose(both[1].normalized, first.normalized, rtol=0, atol=0.1)
        rest = PreviousChunk(first.actions[2:] + 0.1, 3)
        chunks[device] = first.normalized, policy.infer(sessions[0], replace(asked, previous=rest)).normalized
        policy.close()
    assert not [record for record in caplog.records if "instead of the engine's kernels" in record.getMessage()]
    for ours, theirs in zip(chunks["cuda"], chunks["cpu"], strict=True):
        assert np.abs(ours - theirs).mean() < (0.05 if quantization == "none" else 0.3)
