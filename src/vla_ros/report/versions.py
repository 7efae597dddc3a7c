"""What ran a measurement: versions and machine, so that a figure can be traced and got again."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "vla_ros",
    "numpy",
    "torch",
    "transformers",
    "opencv-python-headless",
    "simplejpeg",
    "Pillow",
    "pin",
    "mujoco",
    "rosbags",
    "cyclonedds",
)


def versions() -> dict[str, str]:
    """Name to version of Python, the machine and every package that matters here and is installed."""
    found = {"python": platform.python_version(), "machine": machine()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> str:
    """Processor, number of usable cores and kernel, in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {cores} cores, {platform.system()} {platform.release()}"
