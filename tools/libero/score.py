"""Scores a checkpoint on the five tasks: sync, in real time with several latencies, and with controls.

Every cell is one ``vla-ros eval`` with a result of its own in a folder; a cell that is complete is not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from tools.libero.expert import TASKS
from tools.libero.scene import SUITE

DELAYS = (0, 50, 100, 200)
SCHEDULES = {"sync": "sync", "ahead": "append", "rtc": "rtc"}
CONTROLS = {
    "image not rotated": ["-p", 'camera.orientation:=["rotate_180"]'],
    "rotation vector wrapped": ["-b", "quat_no_antipodal=false"],
    "gripper inverted": ["-p", "gripper.closed_position:=-1.0", "-p", "gripper.open_position:=1.0"],
    "1 step of each chunk": ["-p", "control.execute_steps:=1"],
}
NODE = ["-p", "preset:=libero", "-p", 'features.images:=["image = agent","wrist_image = wrist"]']
SERVED = ["-p", "policy.jpeg_quality:=0", "-p", "timeouts.inference:=60"]  # the clock is simulated


def cells() -> Iterator[tuple[str, list[str]]]:
    """Return each cell's name and the options of ``vla-ros eval``."""
    yield "sync", []
    for name, schedule in SCHEDULES.items():
        for delay in DELAYS:
            yield f"live {name} {delay} ms", ["--live", "20", "--delay-ms", str(delay), "--schedule", schedule]
    yield from CONTROLS.items()


def score(checkpoint: str, folder: Path, python: str, episodes: int, shards: int, only: str) -> None:
    """Run what is missing of the cells that match ``only``, and print the table."""
    policy = ["--policy", "pi", "--checkpoint", checkpoint]
    if checkpoint.startswith("ws"):
        policy = ["--policy", "remote", "-p", f"policy.server:={checkpoint}", *SERVED]
    folder.mkdir(parents=True, exist_ok=True)
    for name, options in cells():
        if fnmatchcase(name, only):
            path = folder / f"{name.replace(' ', '_')}.json"
            command = [sys.executable, "-m", "vla_ros.cli", "eval", SUITE, "--python", python, *policy, *NODE]
            command += ["--tasks", ",".join(map(str, TASKS)), "--json", str(path), "--step-timeout", "300"]
            command += ["--episodes", str(episodes), "--shards", str(shards), "--resume", *options]
            subprocess.run(command, check=False)  # a cell that fails has no result in the table
    print(table(folder))


def table(folder: Path) -> str:
    """Return the results in ``folder`` as Markdown."""
    lines = ["| | succeeded | 95 % interval | errors |", "| --- | --- | --- | --- |"]
    for name, _ in cells():
        path = folder / f"{name.replace(' ', '_')}.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            count, errors = found["episodes"], found["errors"]
            done = round(found["success_rate"] * (count - errors)) if count > errors else 0
            low, high = found["low"], found["high"]
            lines.append(f"| {name} | {done} of {count - errors} | {low:.0%} to {high:.0%} | {errors} |")
    return "\n".join(lines)
