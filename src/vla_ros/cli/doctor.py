"""Show what is installed, what is wrong and the command that fixes it; the status is 1 if something is wrong.

Each house reports what it needs (:class:`vla_ros.houses.House`).
Changes nothing, loads neither torch nor a model, and opens no socket.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from vla_ros.errors import install
from vla_ros.graph.names import rcl_reach
from vla_ros.houses import GOOD, NOTE, WRONG, Finding, check_library, houses, installed

GIB = 1024**3
_WIDE = 400  # characters; no line breaks in a file or pipe
FULL_HD = 1920 * 1080 * 3  # bytes of a 1080p rgb8 frame, which a socket buffer should hold


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them is ``wrong``."""
    findings = [finding for house in houses() for finding in house.examine()]
    status = int(any(finding.level == WRONG for finding in findings))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return status
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = {GOOD: "green", NOTE: "yellow", WRONG: "red"}
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
    """Yield what concerns the robot's house: Python, the graph, the libraries of every node, memory."""
    yield Finding("Python", f"{platform.python_version()}, {platform.machine()}, {sys.executable}")
    yield from _graph()
    yield check_library("numpy", "numpy", WRONG, "pip install numpy")
    yield check_library("Pinocchio", "pin", WRONG, "pip install pin (needed for deltas of the tip)")
    yield check_library("mcap", "mcap", NOTE, f"{install('replay')} (for replay, record and export)")
    yield check_library("rosbags", "rosbags", NOTE, f"{install('dds')} (for the embedded DDS, bags)")
    yield from _receive_buffer()
    yield _shared_memory()
    yield from _memory()


def _graph() -> Iterator[Finding]:
    distro, dds = os.environ.get("ROS_DISTRO", ""), installed("cyclonedds")
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
        yield Finding("embedded DDS", "not installed", WRONG, install("dds"))
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
    return Finding("shared memory", f"/dev/shm has {free / GIB:.1f} GiB free", NOTE if fix else GOOD, fix)


def _memory() -> Iterator[Finding]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    free, total = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    fix = "close other programs" if free < 4 * GIB else ""
    yield Finding("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB available", NOTE if fix else GOOD, fix)
