import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch

from benchmarks.models import plain_pi
from benchmarks.models.__main__ import main
from benchmarks.models.pi import MODELS, TINY, make_processing, random_network
from vla_ros.engine.flow_engine import FlowRequest
from vla_ros.policies.pi.architecture import PROMPT_TOKENS, PUBLISHED
from vla_ros.policies.pi.inference import make_engine

KEYS = {
    *("total_ms", "stages_ms", "between_ms", "in_and_out_ms", "baseline_ms", "baseline_steps", "speedup"),
    *("compiled_ms", "compiled_speedup", "compiled_left_out", "floor_ms", "memory_gb", "rtc_ms", "actions_per_s"),
}


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_every_key_is_there(tmp_path, quantization, capsys):
    command = ["pi05", "--images", "2", "--prompt-tokens", "20", "--horizon", "10"]
    command += ["--flow-steps", "10", "--quantization", quantization, "--device", "cpu", "--steps", "1"]
    assert main([*command, "--json", str(tmp_path / "pi.json")]) == 0
    found = json.loads((tmp_path / "pi.json").read_text())
    assert found.keys() >= KEYS
    assert found["stages_ms"].keys() >= {"receive", "upload", "preprocess", "vision", "prefill", "flow", "download"}
    assert found["baseline_ms"] > 0
    assert found["baseline_difference"] < (1e-4 if quantization == "none" else 0.1)
    assert "horizon 10, 10 flow steps" in capsys.readouterr().out


@pytest.mark.parametrize("kind", MODELS)
def test_plain_pytorch_computes_the_same_chunk(kind):
    """Code that masks and pads as published, and computes modulations in every step; no pass is shared."""
    network = random_network(replace(PUBLISHED[kind], horizon=6, **TINY), torch.device("cpu"), torch.float32)
    draw = np.random.default_rng(3)
    request = FlowRequest(
        images=list(draw.integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)),
        tokens=draw.integers(3, 900, 11),
        state=draw.normal(size=32).astype(np.float32),
        noise=draw.normal(size=(6, 32)).astype(np.float32),
    )
    [answer] = make_engine(network, make_processing(2), 10).answer([request])
    inputs = plain_pi.Inputs(PROMPT_TOKENS[kind])

    def make(wrap):
        return plain_pi.PlainPi(network, 10, wrap)

    answers = (
        plain_pi.eager(make, inputs, network.device),
        plain_pi.compiled(make, inputs, request, network.device, backend="eager"),
    )
    for plain in answers:
        np.testing.assert_allclose(plain(request), answer.actions, rtol=0, atol=1e-5)
