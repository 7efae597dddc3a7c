"""The engine's vision encoder against the reference path, in torch; Triton is in test_kernels.py and on a GPU."""

import importlib.util
import logging
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch

from tools.checkpoints.tiny import random_weights, tiny_architecture
from vla_ros_models.engine.device_errors import EngineMismatchError
from vla_ros_models.engine.runner import CudaRunner
from vla_ros_models.engine.tower_ops import TowerOps
from vla_ros_models.openvla import network
from vla_ros_models.openvla.loading import build_empty
from vla_ros_models.openvla.network import VisionEncoder, check_vision, checked_encoder


def make_model(towers: int = 2) -> torch.nn.Module:
    base = tiny_architecture(vision_width=48, vocabulary=768, empty_token=500)
    model = build_empty(replace(base, towers=tuple(replace(t, image_size=42) for t in base.towers[:towers])))
    model.load_state_dict(random_weights(model.architecture), assign=True)
    return model


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def samples():
    return list(np.random.default_rng(3).integers(0, 256, (2, 42, 42, 3), dtype=np.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("towers", [1, 2])
@torch.inference_mode()
def test_the_steps_in_torch_equal_the_reference_path_to_the_bit(towers, dtype, samples):
    model = make_model(towers).to(dtype)
    for sample in samples:
        images = torch.from_numpy(sample)[None]
        assert torch.equal(VisionEncoder(model)(images), model.embed_image(model.normalize(images)))


class Forgetful(TowerOps):
    """Leaves the layer scale out."""

    def add_norm(self, tokens, branch, scale, norm, film=None):
        return super().add_norm(tokens, branch, None, norm, film)


def test_a_step_that_differs_is_refused(model, samples):
    check_vision(VisionEncoder(model), samples)
    with pytest.raises(EngineMismatchError, match="vision towers differ"):
        check_vision(VisionEncoder(model, Forgetful()), samples)


class Broken(TowerOps):
    def patchify(self, images, table, patch):
        raise RuntimeError("no C compiler")


@pytest.mark.parametrize("ops", [Forgetful(), Broken()])
def test_auto_falls_back_to_torch_with_a_warning(model, samples, ops, monkeypatch, caplog):
    monkeypatch.setattr(network, "make_tower_ops", lambda device: ops)
    with pytest.raises((EngineMismatchError, RuntimeError)):
        checked_encoder(model, samples, strict=True)
    with caplog.at_level(logging.WARNING):
        found = checked_encoder(model, samples, strict=False)
    assert "torch runs the vision towers" in caplog.text
    assert type(found.ops) is TowerOps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_captured_encoder_equals_the_reference_path(model, dtype, samples):
    device = torch.device("cuda")
    there = make_model().to(device, dtype)
    images, out = torch.zeros(1, 42, 42, 3, dtype=torch.uint8, device=device), []
    see, runner = VisionEncoder(there), CudaRunner(device)
    with runner.stream():
        replay = runner.capture(lambda: out.append(see(images)))
        for sample in samples:
            images.copy_(torch.from_numpy(sample)[None])
            replay()
            expected = there.embed_image(there.normalize(images)).float()
            error = ((out[-1].float() - expected).norm() / expected.norm()).item()
            assert error < (1e-5 if dtype == torch.float32 else 2e-2)
    torch.cuda.synchronize()
