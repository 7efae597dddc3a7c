"""Each benchmark is a file that a user runs."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["collisions", "distilled", "gpus", "shards", "takeover", "tiles"])
def test_a_benchmark_starts_as_a_file_in_any_folder(name, tmp_path) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout[:6]) == (0, "usage:"), done.stderr
