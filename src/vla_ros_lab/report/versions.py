"""Software versions and machine of a measurement, so that the measurement can be reproduced."""

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = (
    "vla_ros numpy torch transformers opencv-python-headless simplejpeg Pillow pin mujoco rosbags cyclonedds"
)


def versions() -> dict[str, str]:
    """Return the machine, and the versions of Python and of the installed :data:`_PACKAGES`."""
    installed = {"python": platform.python_version(), "machine": machine()}
    for name in _PACKAGES.split():
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def machine() -> str:
    """Return the processor, the number of usable cores and the kernel version on one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {cores} cores, {platform.system()} {platform.release()}"
