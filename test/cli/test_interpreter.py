import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return str(folder / "bin" / "python")


def run(python: str, environment: str, module: str = "vla_ros.cli") -> subprocess.CompletedProcess[str]:
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), "VIRTUAL_ENV": environment}
    words = [python, "-m", module, "--version"]
    return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", ["vla_ros.cli", "vla_ros.node.lifecycle_main"])
def test_without_an_environment_one_line_says_what_to_do(bare: str, module: str) -> None:
    answer = run(bare, "", module)
    assert answer.returncode == 1
    assert answer.stderr.count("\n") == 1
    assert "activate the virtual environment that has them" in answer.stderr


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="this Python is of no virtual environment")
def test_the_active_environment_is_used(bare: str) -> None:
    assert run(bare, sys.prefix).stdout.startswith("vla_ros ")


def test_an_abandoned_inference_does_not_abort_the_process() -> None:
    script = """
import sys, threading, torch
from vla_ros.cli.main import main

begun, numbers = threading.Event(), torch.rand(1000, 1000)

def infer():
    while True:
        torch.mm(numbers, numbers)
        begun.set()

threading.Thread(target=infer, name="vla_inference", daemon=True).start()
assert begun.wait(60)
sys.argv = ["vla-ros", "config"]
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "camera_skew" in ended.stdout
