"""Switches to a Python that has the required libraries, and ends a process cleanly."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path

NEEDED = ("numpy", "yaml", "rich", "PIL", "simplejpeg", "cv2", "pinocchio")


def use_environment(module: str) -> None:
    """Run ``module`` with the active virtual environment's Python if this Python lacks a library.

    The programs that ``colcon build --symlink-install`` installs run under colcon's Python, which may lack the
    libraries (Ubuntu's does).

    Raises:
        SystemExit: Libraries are missing and no virtual environment is active; the message names the libraries.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return
    active = os.environ.get("VIRTUAL_ENV", "")
    python = Path(active) / "bin" / "python"
    if active and Path(sys.prefix).resolve() != Path(active).resolve() and python.exists():
        os.execv(python, [str(python), "-m", module, *sys.argv[1:]])
    sys.exit(
        f"vla_ros: {sys.executable} has no {', '.join(missing)}; activate the virtual environment that has them "
        "(such as: . ~/vla/bin/activate)"
    )


def end_process(status: int) -> int:
    """Return ``status``, or exit with it at once if an abandoned inference is still running.

    If native code, such as torch's, returns to a thread while the interpreter shuts down, the process aborts.
    """
    if any(thread.name in ("vla_control", "vla_inference") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
