"""``vla-ros`` as a user runs it, in a process of its own."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from tools import forks

VLA_ROS = (sys.executable, "-m", "vla_ros.cli")


def vla_ros(*words: str, status: int = 0, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command, which must end with ``status``."""
    with TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = forks.Fork(forks.vla_ros, words, output, errors, env)
        try:
            found = process.wait(200)
        finally:
            process.kill()
        done = subprocess.CompletedProcess(words, found, output.read_text(), errors.read_text())
    assert done.returncode == status, done.stdout + done.stderr
    return done
