"""A slice of ``fuzz/commands.py``: damaged files end in a message that names the file, within time and memory."""

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz" / "commands.py"


@pytest.mark.timeout(300)
def test_commands_accept_or_refuse_damaged_files() -> None:
    command = [sys.executable, str(FUZZ), "openvla", "bag", "urdf", "robot", "--count", "16", "--seed", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    accepted, refused = (int(done.stdout.split(word)[0].split()[-1]) for word in (" accepted", " refused"))
    assert accepted + refused == 16
    assert refused > 4  # the damage reaches the readers
