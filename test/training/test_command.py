"""``vla-ros finetune`` on a bag of the demo, up to an inference of what it wrote."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("peft", reason="the library peft is not installed (extra 'train')")
pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

import torch
from PIL import Image
from safetensors.torch import load_file

from vla_ros.cli.main import main
from vla_ros.config import load
from vla_ros.policies.base import create
from vla_ros_models.evidence import sha256
from vla_ros_models.network_policy import Placement
from vla_ros_models.view import add_view, base_digest, write_view

ROOT = Path(__file__).parents[2]
CONFIG = ("--config", str(ROOT / "config" / "demo.yaml"), "--config", str(ROOT / "config" / "demo_pi.yaml"))
BAG = str(ROOT / "test" / "data" / "bags" / "demo_jpeg")
QUICK = ("--steps", "2", "--batch", "2", "--workers", "0", "--device", "cpu")


def finetune(*words):
    return main(["finetune", BAG, "--checkpoint", "demo-pi", *CONFIG, *words])


def actions(checkpoint, folder, *words):
    Image.fromarray(np.full((480, 640, 3), 90, np.uint8)).save(folder / "front.png")
    command = ["infer", "--checkpoint", str(checkpoint), *CONFIG, "--image", str(folder / "front.png"), *words]
    state = "0,0.4,0,1.5,0,0.7,0,0.5"
    told = [
        "--instruction",
        "pick up the green cube",
        "--state",
        state,
        "--seed",
        "1",
        "--json",
        str(folder / "a.json"),
    ]
    assert main([*command, *told]) == 0
    return np.array(json.loads((folder / "a.json").read_text())["actions"])


def test_from_a_bag_to_a_checkpoint_and_its_adapter(tmp_path, capsys):
    out = tmp_path / "out"
    words = ("--output", str(out), "--adapter", "lora", "--learning-rate", "0.05", "--seed", "3")
    assert finetune(*words, *QUICK, "--json", str(tmp_path / "f.json")) == 0
    found = json.loads((tmp_path / "f.json").read_text())
    assert len(found["losses"]) == 2
    assert {"verdict", "peak_gb"} <= found.keys()
    before, after = (actions(checkpoint, tmp_path) for checkpoint in ("demo-pi", out))
    assert np.abs(after - before).max() > 1e-6
    merged = actions(out / "adapter", tmp_path)  # the same weights, but for the rounding of the stored type
    np.testing.assert_allclose(merged, after, atol=0.05 * np.abs(after - before).max() + 1e-3)
    assert "held out" in capsys.readouterr().out


def test_the_statistics_of_the_data_are_trained_on_and_written(tmp_path):
    out, name = tmp_path / "out", "policy_preprocessor_normalizer_processor.safetensors"
    assert finetune("--output", str(out), "--statistics", "data", *QUICK) == 0
    shipped = load_file(ROOT / "src" / "vla_ros_models" / "pi" / "demo_checkpoint" / name)
    written = load_file(out / name)
    assert written.keys() == shipped.keys()
    assert not np.allclose(written["observation.state.q01"], shipped["observation.state.q01"], atol=1e-2)


def test_a_viewpoint_adapter_is_one_small_file(tmp_path):
    out = tmp_path / "out"
    words = ("--output", str(out), "--adapter", "view", "--learning-rate", "0.05", "--hold-out", "0")
    assert finetune(*words, *QUICK, "--json", str(tmp_path / "f.json")) == 0
    assert {path.name for path in out.iterdir()} == {"view.safetensors", "run", "evidence"}
    file = out / "view.safetensors"
    assert file.stat().st_size < 10_000
    digest = sha256(file)
    assert json.loads((out / "evidence" / "evidence.json").read_text())["weights"] == {file.name: digest}
    assert finetune(*words, *QUICK) == 0  # resumes: nothing is left to do
    assert sha256(file) == digest


def test_replay_names_the_viewpoint_adapter(tmp_path):
    config = load([*map(Path, CONFIG[1::2])], ["policy.checkpoint:=demo-pi", "policy.device:=cpu"])
    trainable = create(config).trainable(Placement(torch.device("cpu"), "float32"))
    file = tmp_path / "view.safetensors"
    write_view(file, "view", base_digest(trainable.stored), add_view(trainable, "view"))
    words = ("-p", f"policy.view:={file}")
    outputs = ("--json", str(tmp_path / "r.json"), "--report", str(tmp_path / "r.html"))
    assert main(["replay", BAG, *CONFIG, "-p", "policy.checkpoint:=demo-pi", *words, *outputs]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["policy"]["view"] == sha256(file)
    assert sha256(file) in (tmp_path / "r.html").read_text()


def test_a_viewpoint_adapter_is_trained_without_another(tmp_path, capsys):
    assert finetune("--output", str(tmp_path / "two"), "--adapter", "view", "-p", "policy.view:=x", *QUICK) == 1
    assert "without another one" in capsys.readouterr().err


def test_a_viewpoint_adapter_keeps_the_statistics(tmp_path, capsys):
    words = ("--output", str(tmp_path / "out"), "--adapter", "view", "--statistics", "data")
    assert finetune(*words, *QUICK) == 1
    assert "--statistics checkpoint" in capsys.readouterr().err


def test_without_an_output(capsys):
    assert finetune(*QUICK) == 1
    assert "--output" in capsys.readouterr().err


def test_a_flow_is_distilled_from_observations_alone_and_runs(tmp_path, capsys):
    """The checkpoint's own actions, two steps, then the same command again, an inference, and the way back."""
    out = tmp_path / "out"
    words = ["--observations", BAG, "--checkpoint", "demo-pi", *CONFIG, "--output", str(out), "--steps", "2"]
    words += ["--train-steps", "2", *QUICK[2:], "--flows", "2", "--json", str(tmp_path / "figures.json")]
    assert main(["distill", *words]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["losses"]) == 2
    chunks = np.load(out / "run" / "actions.npy")
    assert chunks.shape[1:] == (16, 8)
    assert np.isfinite(chunks).all()
    assert main(["distill", *words]) == 0  # resumes behind the last step
    assert json.loads((tmp_path / "figures.json").read_text())["losses"] == figures["losses"]
    with pytest.raises(SystemExit):
        main(["distill", *words, "--steps", "3"])
    assert main(["distill", *words, "--steps", "1"]) == 1
    assert "--flow-steps differ" in capsys.readouterr().err
    before, after = (actions(checkpoint, tmp_path) for checkpoint in ("demo-pi", out))
    assert before.shape == after.shape
    assert main(["convert", str(out), "--teacher", "--output", str(tmp_path / "back")]) == 0
    np.testing.assert_array_equal(actions(tmp_path / "back", tmp_path), before)
