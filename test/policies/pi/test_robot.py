"""The tiny golden models beyond the policy's own calls: over a recorded bag, and on a GPU."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_ros.cli.main import main
from vla_ros.policies.pi.checkpoint import read_checkpoint
from vla_ros.policies.pi.inference import load_model
from vla_ros.policies.pi.robots import find_robot

from .conftest import CASES, MODELS

BAG = Path(__file__).parents[2] / "data" / "bags" / "mcap_jpeg"


@pytest.mark.parametrize("kind", MODELS)
def test_replay_takes_it_as_any_other(tmp_path, folders, kind):
    folder = folders[kind, "lerobot"]
    options = ["policy.name:=pi", f"policy.checkpoint:={folder}", "features.state:=['state = unused[8]']"]
    options += ["features.images:=['image = image']", "features.action:=['arm.tip_delta', 'arm.gripper']"]
    command = ["replay", str(BAG), "--json", str(tmp_path / "out.json")]
    for option in options:
        command += ["-p", option]
    main(command)  # the status says what it thinks of actions of random weights
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["frames"]["used"] == 30


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_gpu_gives_the_published_chunks(folders, kind, dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch sees none here")
    for case in CASES[kind]:
        checkpoint = read_checkpoint(folders[kind, "openpi"], find_robot(case.text("robot")))
        model = load_model(checkpoint, "cuda", dtype)
        arguments = (case.images, case["state"], case.text("prompt"))
        eager = model.infer(*arguments, case["noise"]).normalized  # its graphs are captured meanwhile
        assert model.engine.wait(120)
        graph = model.infer(*arguments, case["noise"]).normalized
        np.testing.assert_array_equal(graph, eager)
        error = np.abs(graph - case["actions_normalized"])
        own = np.abs(case["actions_normalized_bf16"] - case["actions_normalized"])
        assert error.max() < (2e-5 if dtype == "float32" else 1.5 * own.max())
        assert dtype == "float32" or error.mean() < own.mean()
        seeds = [model.infer(*arguments, seed).normalized for seed in (3, 4, 3)]
        np.testing.assert_array_equal(seeds[0], seeds[2])
        assert not np.array_equal(seeds[0], seeds[1])
        model.engine.close()
