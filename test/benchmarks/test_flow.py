"""``python -m benchmarks.models`` with flow-matching policies, on a CPU."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch

from benchmarks.models import groot, plain_pi, smolvla
from benchmarks.models.__main__ import main
from benchmarks.models.pi import MODELS, TINY, make_processing, random_network
from vla_ros_models.engine.flow_engine import FlowRequest
from vla_ros_models.pi.architecture import PROMPT_TOKENS, PUBLISHED
from vla_ros_models.pi.inference import make_engine

KEYS = {
    *("total_ms", "stages_ms", "between_ms", "in_and_out_ms", "baseline_ms", "baseline_steps", "speedup"),
    *("compiled_ms", "compiled_speedup", "compiled_left_out", "floor_ms", "memory_gb", "rtc_ms", "actions_per_s"),
    *("device_ms", "upload_ms", "host_ms", "slot_ms"),
}


@pytest.mark.parametrize(
    ("words", "difference", "shown"),
    [
        ("pi05 --prompt-tokens 20 --horizon 10 --flow-steps 10", 1e-4, "horizon 10, 10 flow steps"),
        ("pi05 --prompt-tokens 20 --horizon 10 --quantization fp8", 0.1, "horizon 10, 10 flow steps"),
        ("smolvla --horizon 10 --flow-steps 4 --frame 160x120", 1e-4, "horizon 10, 4 flow steps"),
        # The same passes, without graphs. 256x256 pixels, patches of 16, four of them for one token.
        ("groot-n1.7 --horizon 16", 1e-4, f"sequence {2 * 64 + 22}, horizon 16, 4 flow steps"),
        ("groot-n1.7 --horizon 16 --quantization fp8", 1e-4, "horizon 16, 4 flow steps"),
    ],
)
def test_every_key_is_there_and_plain_pytorch_computes_the_same_chunk(tmp_path, words, difference, shown, capsys):
    command = [*words.split(), "--images", "2", "--device", "cpu", "--steps", "1"]
    assert main([*command, "--json", str(tmp_path / "figures.json")]) == 0
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found.keys() >= KEYS
    assert found["stages_ms"].keys() >= {"receive", "upload", "preprocess", "vision", "prefill", "flow"}
    parts = [found[f"{part}_ms"]["p50"] for part in ("device", "upload", "host", "total")]
    assert min(parts) > 0
    assert sum(parts[:3]) == pytest.approx(parts[3], abs=1e-3)  # of one step
    assert found["baseline_ms"] > 0
    assert found["baseline_difference"] < difference
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("kind", MODELS)
def test_plain_pytorch_computes_the_same_chunk(kind):
    """Code that masks and pads as published, and computes modulations in every step; no pass is shared."""
    network = random_network(replace(PUBLISHED[kind], horizon=6, **TINY), torch.device("cpu"), torch.float32)
    draw = np.random.default_rng(3)
    state = draw.normal(size=32).astype(np.float32)
    request = FlowRequest(
        images=list(draw.integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)),
        tokens=draw.integers(3, 900, 11),
        make_state=lambda: state,
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


def test_the_published_sizes():
    sizes = groot.published(tiny=False, horizon=40)
    assert (sizes.vision.blocks.layers, sizes.text.layers, sizes.head.layers) == (24, 16, 32)
    assert (sizes.text.hidden_size, sizes.head.hidden_size, sizes.horizon) == (2048, 1536, 40)
    small = smolvla.published()
    assert (small.vision.blocks, small.prefix.layers, small.expert.layers, small.expert.heads) == (12, 16, 16, 15)
    assert (small.prefix.hidden_size, small.expert.hidden_size, small.image_tokens) == (960, 720, 64)


def test_the_command_times_one_flow_step(tmp_path, capsys):
    file = tmp_path / "figures.json"
    words = "smolvla --device cpu --steps 1 --no-baseline --horizon 4 --flow-steps 1 --images 1 --json"
    assert main([*words.split(), str(file)]) == 0
    assert json.loads(file.read_text())["model"] == "smolvla"
    assert "horizon 4, 1 flow steps" in capsys.readouterr().out
