"""Memory: refused before loading with what would fit, explained when it runs out."""

import logging

import pytest
import torch

from vla_ros.engine.shapes import TIMM_TOWERS, LlmShape
from vla_ros.errors import OutOfMemoryError
from vla_ros.policies import devices
from vla_ros.policies.openvla import memory
from vla_ros.policies.openvla.architecture import Architecture
from vla_ros.policies.openvla.loading import build_empty

GB = 10**9


@pytest.fixture(scope="module")
def seven_billion():
    """The published network: its sizes and the shapes of its weights, without memory for them."""
    llm = LlmShape(32064, 4096, 11008, 32, 32, 32, 128, 1e-6, 10000.0, 2048, 1)
    architecture = Architecture(tuple(TIMM_TOWERS.values()), llm, 32000, 256, 29871, "v0.2")
    model = build_empty(architecture)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, architecture


@pytest.mark.parametrize(
    ("dtype", "quantize", "low", "high"),
    [
        ("bfloat16", "none", 15.0, 16.8),
        ("bfloat16", "int8", 8.0, 10.2),
        ("bfloat16", "int4", 4.8, 7.0),
        ("bfloat16", "nf4", 4.8, 7.0),
        ("float32", "none", 30.0, 33.0),
    ],
)
def test_the_estimate_agrees_with_the_published_figures(seven_billion, dtype, quantize, low, high):
    plan = memory.plan_memory(*seven_billion, dtype, quantize, "cuda:0")
    assert low < plan.total / GB < high
    assert plan.total == plan.weights + plan.cache + plan.working


def test_what_fits_is_said_in_one_line(seven_billion):
    line = memory.check_memory(*seven_billion, "bfloat16", "none", "cpu", lambda device: 24 * GB)
    assert "on cpu, 24.00 GB are free" in line
    assert "weights 15" in line


def test_what_does_not_fit_is_refused_with_the_options_that_would(seven_billion):
    free = {"cuda:0": 8 * GB, "cpu": 20 * GB}
    with pytest.raises(OutOfMemoryError) as caught:
        memory.check_memory(*seven_billion, "bfloat16", "none", "cuda:0", free.__getitem__)
    text = str(caught.value)
    assert "8.00 GB are free" in text
    assert "; policy.device:=cpu policy.dtype:=bfloat16 policy.quantization:=none" in text
    assert "What fits: policy.dtype:=bfloat16 policy.quantization:=int4" in text
    assert "What fits: policy.dtype:=bfloat16 policy.quantization:=int8" not in text


def test_where_nothing_fits_the_smallest_need_is_said(seven_billion):
    with pytest.raises(OutOfMemoryError, match=r"Nothing fits here: the smallest choice \(4 bits\) needs 6\."):
        memory.check_memory(*seven_billion, "float32", "none", "cpu", lambda device: 2 * GB)


def test_unknown_free_memory_stops_nobody(seven_billion):
    assert "not known" in memory.check_memory(*seven_billion, "float32", "none", "cpu", lambda device: None)


def test_free_memory_of_this_machine_is_known():
    free = devices.available_memory("cpu")
    assert free is None or 10**7 < free < 10**14


def test_a_policy_refuses_before_it_reads_weights(tiny, make_policy, monkeypatch):
    monkeypatch.setattr(memory.check_memory, "__defaults__", (lambda device: 1000,))
    monkeypatch.setattr("vla_ros.policies.openvla.network_policy.fill", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(OutOfMemoryError, match="the checkpoint needs"):
        make_policy(tiny).load()


def test_running_out_of_memory_ends_in_the_log_and_with_advice(
    shared_tiny, make_policy, observe, monkeypatch, caplog
):
    policy = make_policy(shared_tiny)
    policy.load()
    whole = type(policy.loaded.model).embed_image
    greedy = True

    def embed(model, pixels):
        if greedy:
            torch.empty(1 << 50, dtype=torch.uint8)  # the real allocator's real error
        return whole(model, pixels)

    monkeypatch.setattr(type(policy.loaded.model), "embed_image", embed)
    with caplog.at_level(logging.ERROR), pytest.raises(OutOfMemoryError, match=r"What fits: policy\.dtype"):
        policy.infer(policy.start_session(), observe())
    assert "process: VmHWM" in caplog.text or "process: VmSize" in caplog.text or "process: unknown" in caplog.text
    greedy = False
    assert policy.infer(policy.start_session(), observe()).tokens.shape == (7,)


def test_other_errors_are_not_taken_for_it():
    with pytest.raises(RuntimeError, match="shapes"), devices.explain_out_of_memory("cpu", lambda: ""):
        raise RuntimeError("shapes do not match")
