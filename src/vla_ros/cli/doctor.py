"""Show what is installed, what is wrong and the command that fixes it; the status is 1 if something is wrong.

Changes nothing, loads neither torch nor a model, and opens no socket.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vla_ros.errors import ConfigError
from vla_ros.graph.names import rcl_reach
from vla_ros_models.engine import tile_store

GIB = 1024**3
_OK, NOTE, WRONG = "ok", "note", "wrong"
_WIDE = 400  # characters; no line breaks in a file or pipe
FULL_HD = 1920 * 1080 * 3  # bytes of a 1080p rgb8 frame, which a socket buffer should hold


@dataclass(frozen=True)
class Finding:
    """The result of one check: a row of the printed table."""

    name: str  # what was checked
    found: str
    level: str = _OK  # ``ok``, ``note`` or ``wrong``
    fix: str = ""  # what to do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them is ``wrong``."""
    findings = list(examine())
    status = int(any(finding.level == WRONG for finding in findings))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return status
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = {_OK: "green", NOTE: "yellow", WRONG: "red"}
    table = Table(box=None, header_style="dim")
    for title in ("", "what", "found", "to fix it"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        # Plain text, because rich would interpret the [dds] in a pip command as a style.
        cells = (finding.name, finding.found, finding.fix)
        table.add_row(Text(finding.level, style[finding.level]), *map(Text, cells))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)
    return status


def examine() -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()}, {platform.machine()}, {sys.executable}")
    yield from _graph()
    for name, package, level, fix in LIBRARIES:
        found = _version(package)
        yield Finding(name, found) if found else Finding(name, "not installed", level, fix)
    yield from _gpu()
    yield from _receive_buffer()
    yield _shared_memory()
    yield _egl()
    yield from _memory()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _graph() -> Iterator[Finding]:
    distro, dds = os.environ.get("ROS_DISTRO", ""), _version("cyclonedds")
    rclpy = importlib.util.find_spec("rclpy") is not None
    if rclpy:
        yield _rclpy(distro or "unknown distribution")
    elif distro:
        found = f"{distro} is sourced but rclpy does not import in this Python"
        fix = f"use the distribution's Python: python3 -m venv --system-site-packages, not {sys.executable}"
        yield Finding("ROS 2", found, WRONG, fix)
    else:
        yield Finding("ROS 2", "not sourced; the embedded DDS participant is used", NOTE)
    if dds:
        yield Finding("embedded DDS", f"cyclonedds {dds}")
    elif rclpy:
        yield Finding("embedded DDS", "not installed; not needed beside rclpy")
    elif sys.version_info >= (3, 14) or platform.machine() != "x86_64":
        found = "cyclonedds has no wheel for this Python or processor"
        yield Finding("embedded DDS", found, WRONG, "use ROS 2 (rclpy), or Python 3.10 to 3.13 on x86-64")
    else:
        yield Finding("embedded DDS", "not installed", WRONG, "pip install 'vla_ros[dds]'")
    domain = os.environ.get("ROS_DOMAIN_ID", "0")
    reach = os.environ.get("ROS_AUTOMATIC_DISCOVERY_RANGE", "not set")
    shown = f"discovery range {rcl_reach(os.environ)}" if rclpy else f"ROS_AUTOMATIC_DISCOVERY_RANGE {reach}"
    yield Finding("ROS domain", f"{domain}, {shown}")


def _rclpy(distro: str) -> Finding:
    """Load rclpy in another process, because rclpy exits if its RMW is not installed."""
    question = "import rclpy; print(rclpy.get_rmw_implementation_identifier())"
    try:
        command = [sys.executable, "-c", question]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        rmw = os.environ.get("RMW_IMPLEMENTATION")
        why = f"with RMW_IMPLEMENTATION {rmw}" if rmw else str(error)
        fix = f"sudo apt-get install ros-{distro}-{rmw.replace('_', '-')}" if rmw else ""
        return Finding("ROS 2", f"{distro}, rclpy does not load {why}", WRONG, fix)
    return Finding("ROS 2", f"{distro}, rclpy imports, {answer.stdout.strip()}")


LIBRARIES = (
    ("numpy", "numpy", WRONG, "pip install numpy"),
    ("torch", "torch", NOTE, "pip install 'vla_ros[openvla]' (needed by OpenVLA policies)"),
    ("tokenizers", "tokenizers", NOTE, "pip install 'vla_ros[openvla]' (needed by OpenVLA policies)"),
    ("Pinocchio", "pin", WRONG, "pip install pin (needed for deltas of the tip)"),
    ("MuJoCo", "mujoco", NOTE, "pip install 'vla_ros[sim]' (needed by the demo)"),
    ("rosbags", "rosbags", NOTE, "pip install 'vla_ros[replay]' (needed by replay and by the embedded DDS)"),
    ("mcap", "mcap", NOTE, "pip install 'vla_ros[replay]' (needed by replay, record and export)"),
)


def _gpu() -> Iterator[Finding]:
    command = shutil.which("nvidia-smi")
    if command is None:
        yield Finding("GPU", "no nvidia-smi: policies run on the CPU", NOTE)
        return
    query = ["--query-gpu=name,memory.free,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run([command, *query], capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        yield Finding("GPU", f"nvidia-smi failed: {error}", WRONG, "check the driver: nvidia-smi")
        return
    yield Finding("GPU", "; ".join(answer.stdout.strip().splitlines()))
    yield _engine()
    for name in dict.fromkeys(line.split(",")[0].strip() for line in answer.stdout.strip().splitlines()):
        yield _tiles(name)


def _engine() -> Finding:
    triton = _version("triton")
    if triton is None:
        fix = "pip install triton, or a torch for CUDA, which includes it"
        return Finding("engine", "Triton is not installed: OpenVLA runs without its engine", NOTE, fix)
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
        return Finding("engine", f"Triton {triton} finds no C compiler", NOTE, "sudo apt-get install gcc")
    return Finding("engine", f"Triton {triton} and a C compiler")


def _tiles(gpu: str) -> Finding:
    try:
        found = tile_store.read_tiles(gpu)
    except ConfigError as error:
        return Finding("tiles", str(error), WRONG, "vla-ros tune --checkpoint DIR")
    if not found:
        return Finding("tiles", f"built in; none were measured on {gpu}", _OK, "vla-ros tune --checkpoint DIR")
    return Finding("tiles", f"{len(found)} measured on {gpu}: {tile_store.path_of(gpu)}")


def _receive_buffer() -> Iterator[Finding]:
    path = Path("/proc/sys/net/core/rmem_max")
    if path.exists():
        size = int(path.read_text())
        found = f"net.core.rmem_max {size:,} B"
        lost = f"{found}: raw images above about {max(1, size // 1024)} KiB may be lost over UDP"
        fix = "sudo sysctl -w net.core.rmem_max=33554432"
        yield Finding("socket buffer", found) if size >= FULL_HD else Finding("socket buffer", lost, NOTE, fix)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.exists():
        return Finding("shared memory", "/dev/shm does not exist", NOTE)
    free = shutil.disk_usage(path).free
    fix = "docker run --shm-size=1g, or remount /dev/shm larger" if free < GIB / 4 else ""
    return Finding("shared memory", f"/dev/shm has {free / GIB:.1f} GiB free", NOTE if fix else _OK, fix)


def _egl() -> Finding:
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        fix, level = "sudo apt-get install libegl1 libgl1-mesa-dri", WRONG if _version("mujoco") else NOTE
        return Finding("EGL", "libEGL.so.1 does not load: the simulation cannot render", level, fix)
    return Finding("EGL", "libEGL.so.1 loads")


def _memory() -> Iterator[Finding]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    free, total = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    fix = "close other programs" if free < 4 * GIB else ""
    yield Finding("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB available", NOTE if fix else _OK, fix)
