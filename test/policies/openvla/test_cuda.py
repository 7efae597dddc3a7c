"""On a GPU: the CPU's tokens in float32, quantised weights on the device, errors with the allocator's table."""

import logging
import re
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.models.subject import OPENVLA_7B
from tools.checkpoints.tiny import tiny_architecture, write_tiny
from vla_ros.errors import OutOfMemoryError
from vla_ros.types import Observation, RawImage
from vla_ros.vision.processors import ResizeNaive
from vla_ros_models.memory import MemoryCheck
from vla_ros_models.openvla.loading import OPENVLA_CHOICES, build_empty, plan_memory
from vla_ros_models.weights import parameter_shapes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda")
    write_tiny(path, architecture=tiny_architecture(vocabulary=768, empty_token=500, llm_width=128))
    return path


def test_float32_tokens_equal_the_cpus(folder, make_policy, observe):
    policies = [make_policy(folder, device=device, dtype="float32") for device in ("cpu", "cuda")]
    for policy in policies:
        policy.load()
    for seed in range(20):
        here, there = (policy.infer(policy.start_session(), observe(seed)) for policy in policies)
        np.testing.assert_array_equal(there.tokens, here.tokens)
        assert all(value > 0 for value in there.stages_ms.values())


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_auto_is_bfloat16_on_the_device(folder, load_policy, observe, quantization):
    policy = load_policy(folder, device="auto", quantization=quantization)
    model = policy.loaded.model
    assert model.dtype == torch.bfloat16
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cuda"}
    assert policy.infer(policy.start_session(), observe()).tokens.shape == (7,)


def test_closing_frees_the_memory(folder, load_policy):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    policy = load_policy(folder, device="cuda")
    assert torch.cuda.memory_allocated() > before
    policy.close()
    # cuBLAS keeps a workspace of 32 MiB for each stream: the default one, the engine's three, and beside each that
    # of the second vision tower.
    assert torch.cuda.memory_allocated() <= before + 8 * (32 << 20)


def test_running_out_of_memory_logs_the_allocators_table(folder, load_policy, observe, monkeypatch, caplog):
    policy = load_policy(folder, device="cuda", engine="reference")

    def embed(model, pixels):
        return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(type(policy.loaded.model), "embed_image", embed)
    with caplog.at_level(logging.ERROR), pytest.raises(OutOfMemoryError, match="Options that fit"):
        policy.infer(policy.start_session(), observe())
    assert "PyTorch CUDA memory summary" in caplog.text


@pytest.mark.parametrize("gigabytes", [8, 12, 16, 24])
def test_what_fits_a_smaller_card_is_known_before_loading(gigabytes):
    """The published sizes, with an allocator that has no more memory than a smaller card."""
    plan = partial(plan_memory, parameter_shapes(build_empty(OPENVLA_7B)), OPENVLA_7B)
    check = MemoryCheck(plan, OPENVLA_CHOICES, "cuda:0")
    total, wanted = torch.cuda.get_device_properties(0).total_memory, gigabytes * 10**9
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((wanted + torch.cuda.memory_allocated()) / total)
    try:
        fitting = [line for line in check.table("bfloat16", "none").splitlines() if line.endswith(", fits")]
        assert fitting
        assert ("quantization:=none" in "".join(fitting)) == (gigabytes == 24)
        for line in fitting:  # the allocator must have that much
            needed = int(1e9 * float(re.search(r": ([\d.]+) GB", line)[1]))
            torch.empty(needed - 2**28, dtype=torch.uint8, device="cuda")
            torch.cuda.empty_cache()
        if gigabytes < 24:
            with pytest.raises(OutOfMemoryError, match="Options that fit: policy"):
                check.require("bfloat16", "none")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_engine_recovers_from_running_out_of_memory(folder, load_policy, observe):
    policy = load_policy(folder, device="cuda", engine="graph")
    expected = policy.infer(policy.start_session(), observe()).tokens
    huge = RawImage(np.zeros((6000, 8000, 3), dtype=np.uint8), processor=ResizeNaive())  # 144 MB on the device
    large = Observation({}, "pick up the red cube", 7, raw_images={"image": huge})
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() + (16 << 20)
    torch.cuda.set_per_process_memory_fraction(held / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(OutOfMemoryError, match="out of memory on cuda"):
            policy.infer(policy.start_session(), large)
        np.testing.assert_array_equal(policy.infer(policy.start_session(), observe()).tokens, expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert policy.infer(policy.start_session(), large).tokens.shape == (7,)
    policy.close()
