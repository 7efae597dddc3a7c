"""Starts the node as a launch file does, and waits: ``python -m tools.faults.launcher PID_FILE WORD...``."""

import os
import subprocess
import sys
from pathlib import Path

from vla_ros.graph.launcher import launched


def main() -> int:
    file, *words = sys.argv[1:]
    node = subprocess.Popen([sys.executable, "-m", "tools.faults.node", *words], env={**os.environ, **launched()})
    Path(file).write_text(str(node.pid), encoding="utf-8")
    return node.wait()


if __name__ == "__main__":
    sys.exit(main())
