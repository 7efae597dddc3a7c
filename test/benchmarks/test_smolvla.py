import json

import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from benchmarks.models.__main__ import main
from benchmarks.models.smolvla import published
from test.benchmarks.test_pi import KEYS
from vla_ros.cli.main import main as command


def test_every_key_is_there_and_plain_pytorch_computes_the_same_chunk(tmp_path, capsys):
    command = ["smolvla", "--images", "2", "--prompt-tokens", "20", "--horizon", "10", "--flow-steps", "4"]
    command += ["--device", "cpu", "--steps", "1", "--frame", "160x120"]
    assert main([*command, "--json", str(tmp_path / "smolvla.json")]) == 0
    found = json.loads((tmp_path / "smolvla.json").read_text())
    assert found.keys() >= KEYS
    assert found["stages_ms"].keys() >= {"receive", "upload", "preprocess", "vision", "prefill", "flow", "download"}
    assert found["baseline_ms"] > 0
    assert found["baseline_difference"] < 1e-4
    assert "horizon 10, 4 flow steps" in capsys.readouterr().out


def test_the_published_sizes():
    sizes = published()
    assert (sizes.vision.blocks, sizes.prefix.layers, sizes.expert.layers, sizes.expert.heads) == (12, 16, 16, 15)
    assert (sizes.prefix.hidden_size, sizes.expert.hidden_size, sizes.image_tokens) == (960, 720, 64)


def test_the_command_runs_it_in_a_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "figures.json"
    words = [
        "--device",
        "cpu",
        "--steps",
        "1",
        "--no-baseline",
        "--horizon",
        "4",
        "--flow-steps",
        "1",
        "--images",
        "1",
    ]
    assert command(["bench", "--json", str(file), "--model", "smolvla", *words]) == 0
    assert json.loads(file.read_text())["model"] == "smolvla"
    assert "horizon 4, 1 flow steps" in capsys.readouterr().out
