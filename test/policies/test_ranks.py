"""``policy.gpus``: two processes with a shard each answer as one does, and end together.

Regressions pinned: a rank that was lost and leaves an inference waiting for ever, a process that outlives its node,
a shard that is quantised with scales of its own.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from test.policies.oft.conftest import cases, make_policy, observe
from tools.checkpoints.tiny import tiny_architecture, write_tiny
from vla_ros.config import Config, TimeoutsConfig, load
from vla_ros.control.reasons import Reason, reason_of
from vla_ros.errors import ConfigError, DeviceLostError
from vla_ros.types import Observation
from vla_ros_models.engine.weights import dequantize, quantize
from vla_ros_models.openvla.options import OpenVLAOptions
from vla_ros_models.openvla.policy import OpenVLAPolicy
from vla_ros_models.splitting import check_split

TIMEOUT = 8.0  # s; several times as long as these inferences take on a busy machine


def openvla(folder, gpus=2, timeout=TIMEOUT, **options):
    options = {"device": "cpu", "gpus": gpus, "engine": "graph", **options}
    config = Config(OpenVLAOptions(checkpoint=str(folder), **options), timeouts=TimeoutsConfig(inference=timeout))
    return OpenVLAPolicy(config)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, architecture=tiny_architecture(vocabulary=768, empty_token=500))
    return folder


@pytest.fixture(scope="module")
def pair(tiny):
    """The same checkpoint in one process and in two."""
    both = openvla(tiny, 1), openvla(tiny)
    for policy in both:
        policy.load()
    yield both
    for policy in both:
        policy.close()


@pytest.fixture
def split(tiny):
    """Two processes, with a time-out that a busy machine keeps and a test can wait for."""
    policy = openvla(tiny, timeout=4.0)
    policy.load()
    yield policy
    policy.close()


def scene(seed, words="pick up the red cube"):
    image = np.random.default_rng(seed).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    return Observation({"image": image}, words, 7)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def test_two_processes_give_the_published_codes_chunks():
    policy = make_policy("libero_l1", gpus=2)
    policy.load()
    pids = policy.ranks
    assert len(pids) == 1
    assert all(map(is_alive, pids))
    for case in cases("libero_l1"):
        chunk = policy.infer(policy.start_session(), observe(policy, "libero_l1", case))
        np.testing.assert_allclose(chunk.normalized, case["normalized"], atol=1e-4)
        np.testing.assert_allclose(chunk.actions, case["action"], atol=2e-4)
    policy.close()
    assert gone(pids)


def test_two_processes_decode_the_tokens_of_one_with_drafts_and_without(pair):
    sessions = [policy.start_session() for policy in pair]
    for seed in (1, 1, 2, 3, 3):  # a repeated image makes a right draft
        answers = [policy.infer(session, scene(seed)) for policy, session in zip(pair, sessions, strict=True)]
        np.testing.assert_array_equal(answers[1].tokens, answers[0].tokens)
        margins = [answer.info["logit_margins"] for answer in answers]
        np.testing.assert_allclose(*margins, atol=2e-4)
        assert answers[0].info["decoder_passes"] == answers[1].info["decoder_passes"]


def test_a_batch_and_a_long_instruction(pair):
    one, two = pair
    assert two.prepare(2)
    requests = [scene(4), scene(5, "put the green block into the drawer " * 6)]
    expected = [one.infer(one.start_session(), each).tokens for each in requests]
    found = two.infer_batch([(two.start_session(), each) for each in requests])
    np.testing.assert_array_equal([answer.tokens for answer in found], expected)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_shards_of_inputs_are_quantised_as_the_whole_weight(kind):
    weight = torch.randn(32, 512, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, 512)
    whole = dequantize(quantize(weight, kind, "down_proj"), torch.float32)
    halves = weight.split(256, dim=1)
    largest = torch.stack([half.abs().amax(1) for half in halves]).amax(0)

    def of_all(own):
        return largest.view(own.shape)

    shards = [dequantize(quantize(half, kind, "down_proj", of_all), torch.float32) for half in halves]
    torch.testing.assert_close(torch.cat(shards, dim=1), whole, rtol=0, atol=0)


def test_quantised_shards_decode_the_tokens_of_one_process(tmp_path):
    sizes = tiny_architecture(vocabulary=768, empty_token=500, llm_width=256, llm_heads=4)
    write_tiny(tmp_path, architecture=sizes)
    both = openvla(tmp_path, 1, quantization="int4"), openvla(tmp_path, quantization="int4")
    for policy in both:
        policy.load()
    for seed in range(3):
        one, two = (policy.infer(policy.start_session(), scene(seed)) for policy in both)
        differing = np.flatnonzero(one.tokens != two.tokens)
        assert not differing.size or one.info["logit_margins"][differing[0]] < 0.1
    for policy in both:
        policy.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("during", [True, False])
def test_a_lost_rank_stops_the_arm_and_leaves_no_process(split, number, during):
    session, pids = split.start_session(), split.ranks
    split.infer(session, scene(0))
    if during:
        threading.Timer(0.2, os.kill, (pids[0], number)).start()
    else:
        os.kill(pids[0], number)
    began = time.monotonic()

    def work():
        while time.monotonic() < began + 30:
            split.infer(session, scene(1))

    with pytest.raises(DeviceLostError, match=rf"rank 1 \(process {pids[0]}, cpu\)") as found:
        work()
    assert time.monotonic() < began + 0.2 + 4.0  # timeouts.inference
    assert reason_of(found.value) is Reason.DEVICE_ERROR
    assert ("SIGKILL" if number == signal.SIGKILL else "did not answer") in str(found.value)
    assert gone(pids)
    with pytest.raises(DeviceLostError, match="rank 1"):  # until it is loaded again
        split.infer(session, scene(1))


def connections(pid):
    """The TCP connections of a process: this process has them, too, so that they outlive it."""
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("socket:"):
                copied = libc.syscall(438, pidfd, int(link.name), 0)  # pidfd_getfd
                if copied < 0:
                    pytest.skip(f"a process may not take another's connections: {os.strerror(ctypes.get_errno())}")
                one = socket.socket(fileno=copied)
                if one.family == socket.AF_INET:
                    yield one
                else:
                    one.close()
    os.close(pidfd)


def test_a_rank_whose_connections_outlive_it_is_lost_all_the_same(split):
    session, pids = split.start_session(), split.ranks
    split.infer(session, scene(0))
    with contextlib.ExitStack() as kept:
        assert [kept.enter_context(each) for each in connections(pids[0])]
        os.kill(pids[0], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(DeviceLostError, match=rf"rank 1 \(process {pids[0]}, cpu\) was ended by SIGKILL"):
            split.infer(session, scene(1))
        assert time.monotonic() < began + 4.0


def test_a_policy_that_lost_a_rank_can_be_loaded_again(split):
    expected = split.infer(split.start_session(), scene(1)).tokens
    os.kill(split.ranks[0], signal.SIGKILL)
    with pytest.raises(DeviceLostError):
        split.infer(split.start_session(), scene(1))
    split.load()
    np.testing.assert_array_equal(split.infer(split.start_session(), scene(1)).tokens, expected)


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_end_with_the_node_whatever_ends_it(tiny, stopped):
    program = f"""
        import time
        from vla_ros.config import Config
        from vla_ros_models.openvla.options import OpenVLAOptions
        from vla_ros_models.openvla.policy import OpenVLAPolicy
        options = OpenVLAOptions(checkpoint={str(tiny)!r}, device="cpu", gpus=2, self_test=False)
        policy = OpenVLAPolicy(Config(options))
        policy.load()
        print(*policy.ranks, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        pids = list(map(int, node.stdout.readline().split()))
        assert len(pids) == 1
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
        node.kill()
    assert gone(pids)


def test_a_rank_that_cannot_start_ends_the_load(tiny, monkeypatch):
    policy = openvla(tiny)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DeviceLostError, match=r"rank 1 .* exited with status 1"):
        policy.load()


def test_sizes_that_do_not_divide_are_refused_with_those_that_do(tiny):
    with pytest.raises(ConfigError, match=r"3 GPUs .* 4 attention heads .* set policy.gpus to 2 or 4, or to 1"):
        openvla(tiny, 3).load()
    with pytest.raises(ConfigError, match=r"groups of 128 4-bit weights; set policy.gpus to 1"):
        openvla(tiny, quantization="int4").load()
    published = replace(tiny_architecture().llm, heads=32, kv_heads=32, head_dim=128, intermediate_size=11008)
    for count, kind in ((2, "int4"), (2, "int8"), (4, "fp8"), (4, "none")):
        check_split(published, count, kind)
    with pytest.raises(ConfigError, match=r"set policy.gpus to 2, or to 1"):
        check_split(published, 4, "int4")


def test_other_requests_for_several_gpus_are_refused(tiny, monkeypatch):
    with pytest.raises(ConfigError, match=r"policy.engine reference, which runs on one device"):
        openvla(tiny, engine="reference").load()
    with pytest.raises(ConfigError, match="FiLM"):
        make_policy("aloha_film", gpus=2).load()
    with pytest.raises(ConfigError, match=r"policy.gpus"):
        load([], ["policy.name:=pi", "policy.gpus:=2"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"2 from cuda:0 on, but torch sees 1 CUDA devices; set policy.gpus to 1"):
        openvla(tiny, device="cuda:0").load()


def test_the_memory_plan_is_one_per_gpu(tiny):
    whole, parts = openvla(tiny, 1).describe_memory(), openvla(tiny).describe_memory()
    assert whole.count("memory of cpu") == 1
    assert parts.count("memory of cpu") == 2
