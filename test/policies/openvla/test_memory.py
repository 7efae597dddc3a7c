"""Memory is checked before loading, and running out of memory is explained."""

import logging
import re
from functools import partial

import pytest
import torch

from benchmarks.models.subject import OPENVLA_7B
from vla_ros.errors import OutOfMemoryError
from vla_ros_models.memory import MemoryCheck, available_memory
from vla_ros_models.openvla.loading import OPENVLA_CHOICES, build_empty, plan_memory
from vla_ros_models.weights import parameter_shapes

GB = 10**9


@pytest.fixture(scope="module")
def seven_billion():
    """Plans the published network's memory."""
    return partial(plan_memory, parameter_shapes(build_empty(OPENVLA_7B)), OPENVLA_7B)


@pytest.mark.parametrize(
    ("dtype", "quantize", "low", "high"),
    [
        ("bfloat16", "none", 15.0, 16.8),
        ("bfloat16", "int8", 8.0, 10.2),
        ("bfloat16", "int4", 4.8, 7.0),
        ("float32", "none", 30.0, 33.0),
    ],
)
def test_estimates_agree_with_the_published_figures(seven_billion, dtype, quantize, low, high):
    plan = seven_billion(dtype, quantize, "cuda:0")
    assert low < plan.total / GB < high
    assert plan.total == plan.weights + plan.cache + plan.working


@pytest.mark.parametrize(
    ("free", "words"), [(24 * GB, r"weights 15.* on cpu, 24\.00 GB are free"), (None, "the free memory is unknown")]
)
def test_memory_that_suffices_or_is_unknown_is_reported(seven_billion, free, words):
    line = MemoryCheck(seven_billion, OPENVLA_CHOICES, "cpu", lambda device: free).require("bfloat16", "none")
    assert re.search(words, line)


@pytest.mark.parametrize(
    ("device", "free", "words"),
    [
        (
            "cuda:0",
            {"cuda:0": 8 * GB, "cpu": 20 * GB},
            r"8\.00 GB are free\. Options that fit: policy\.dtype:=bfloat16 policy\.quantization:=int4 .*; "
            r"policy\.device:=cpu policy\.dtype:=bfloat16 policy\.quantization:=none",
        ),
        ("cpu", {"cpu": 2 * GB}, r"No options fit: the smallest choice needs 6\."),
    ],
)
def test_options_that_would_fit_are_named(seven_billion, device, free, words):
    check = MemoryCheck(seven_billion, OPENVLA_CHOICES, device, free.__getitem__, lambda _: False)
    with pytest.raises(OutOfMemoryError, match=words):
        check.require("bfloat16", "none")


@pytest.mark.parametrize(
    ("free", "fitting"),
    [(7.5, {"int4"}), (11.4, {"int8", "int4"}), (15.4, {"int8", "int4"}), (23.0, {"none", "int8", "int4"})],
)
def test_formats_that_fit_cards_of_8_to_24_gb_are_shown_before_loading(seven_billion, free, fitting):
    check = MemoryCheck(seven_billion, OPENVLA_CHOICES, "cpu", lambda device: int(free * GB))
    first, *lines = check.table("bfloat16", "none").splitlines()
    assert first == f"memory of cpu: {free:.2f} GB free"
    assert "policy.quantization:=none (chosen): " in lines[0]
    assert all(line.endswith((", fits", ", does not fit")) for line in lines)
    found = {re.findall(r"quantization:=(\w+)", line)[0] for line in lines if line.endswith(", fits")}
    assert found == fitting


def test_unified_memory_is_not_offered_twice(seven_billion):
    """On a Jetson the host's memory is the GPU's: moving to the CPU frees nothing."""
    check = MemoryCheck(seven_billion, OPENVLA_CHOICES, "cuda:0", lambda device: 8 * GB, lambda device: True)
    assert check.table("bfloat16", "none").startswith("memory of cuda:0: 8.00 GB free, shared with the host\n")
    with pytest.raises(OutOfMemoryError) as refused:
        check.require("bfloat16", "none")
    assert "policy.device:=cpu" not in str(refused.value)


def test_a_checkpoints_memory_is_described_without_loading_it(shared_tiny, make_policy):
    lines = make_policy(shared_tiny).describe_memory().splitlines()
    assert re.fullmatch(r"memory of cpu: (unknown|[\d.]+ GB) free", lines[0])
    assert "policy.dtype:=float32 policy.quantization:=none (chosen): 0." in lines[1]
    assert len(lines) == 1 + len(OPENVLA_CHOICES)


def test_free_memory_of_this_machine_is_known():
    free = available_memory("cpu")
    assert free is None or 10**7 < free < 10**14


def test_memory_is_checked_before_weights_are_read(tiny, make_policy, monkeypatch):
    monkeypatch.setattr(MemoryCheck.__init__, "__defaults__", (lambda device: 1000, lambda device: False))
    monkeypatch.setattr("vla_ros_models.openvla.policy.fill", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(OutOfMemoryError, match="the checkpoint needs"):
        make_policy(tiny).load()


def test_running_out_of_memory_is_logged_with_advice(shared_tiny, load_policy, observe, monkeypatch, caplog):
    policy = load_policy(shared_tiny)
    whole = type(policy.loaded.model).embed_image
    greedy = True

    def embed(model, pixels):
        if greedy:
            torch.empty(1 << 50, dtype=torch.uint8)  # the real allocator's real error
        return whole(model, pixels)

    monkeypatch.setattr(type(policy.loaded.model), "embed_image", embed)
    with caplog.at_level(logging.ERROR), pytest.raises(OutOfMemoryError, match=r"Options that fit: policy\.dtype"):
        policy.infer(policy.start_session(), observe())
    assert "process: VmHWM" in caplog.text or "process: VmSize" in caplog.text or "process: unknown" in caplog.text
    greedy = False
    assert policy.infer(policy.start_session(), observe()).tokens.shape == (7,)


def test_other_errors_are_raised_unchanged(seven_billion):
    check = MemoryCheck(seven_billion, OPENVLA_CHOICES, "cpu")
    with pytest.raises(RuntimeError, match="shapes"), check.explained():
        raise RuntimeError("shapes do not match")
