"""``vla-ros`` as a user runs it, in a process of its own."""

import subprocess
import sys
from typing import Any

VLA_ROS = (sys.executable, "-m", "vla_ros.cli")


def vla_ros(*words: str, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command, which must end with ``status``; ``options`` are those of ``subprocess.run``."""
    done = subprocess.run([*VLA_ROS, *words], capture_output=True, text=True, timeout=200, check=False, **options)
    assert done.returncode == status, done.stdout + done.stderr
    return done
