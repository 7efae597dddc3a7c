"""Versions and machine behind a measurement, so that a figure can be reproduced."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = "vla_ros numpy torch transformers opencv-python-headless simplejpeg Pillow pin mujoco rosbags cyclonedds"


def versions() -> dict[str, str]:
    """Return the versions of Python, the machine and every installed package that matters here."""
    found = {"python": platform.python_version(), "machine": machine()}
    for name in PACKAGES.split():
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> str:
    """Return the processor, number of usable cores and kernel, in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {cores} cores, {platform.system()} {platform.release()}"
