import json
from pathlib import Path

import pytest

from vla_ros.cli.main import main

from .conftest import MODELS

BAG = Path(__file__).parents[2] / "data" / "bags" / "mcap_jpeg"


@pytest.mark.parametrize("kind", MODELS)
def test_replay_runs_pi(tmp_path, folders, kind):
    folder = folders[kind, "lerobot"]
    options = ["policy.name:=pi", f"policy.checkpoint:={folder}", "features.state:=['state = unused[8]']"]
    options += ["features.images:=['image = image']", "features.action:=['arm.tip_delta', 'arm.gripper']"]
    command = ["replay", str(BAG), "--json", str(tmp_path / "out.json")]
    for option in options:
        command += ["-p", option]
    main([*command, "--no-trials"])  # the status says what is wrong with actions of random weights
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["frames"]["used"] == 30
