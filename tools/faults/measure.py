"""Measures stopping, overload and endurance of the real node, as the robot sees them.

``python -m tools.faults.measure stop|overload|soak`` also prints the machine's load, which affects every
percentile.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.faults.processes import DOMAINS
from tools.faults.rig import Rig
from vla_ros.telemetry.resources import process_resources

_CAMERAS = {
    "camera.topics": "[/camera/image_raw, /camera_2/image_raw, /camera_3/image_raw, /camera_4/image_raw]",
    "camera.keys": "[front, left, right, wrist]",
    "timeouts.camera": "2.0",
    "timeouts.inference": "2.0",
    "timeouts.frame_age": "2.0",
    "timeouts.joint_state": "1.0",
    "timeouts.joint_state_age": "1.0",
}
_SECONDS = 0.2  # duration of an inference
_CHUNKS = ("--horizon", "16", "--seconds", str(_SECONDS))


def stopping(domain: int, count: int, rate: float, command_rate: float = 0.0) -> Mapping[str, Any]:
    """Measure the time from an operator's stop to the last motion and to the hold, as received.

    Args:
        domain: DDS domain.
        count: Number of stops.
        rate: Motions per second.
        command_rate: If not 0, chunks are executed at 20 Hz, with commands between steps at this rate.
    """
    last, hold = [], []
    options = {"control.rate_hz": "20.0", "control.command_rate_hz": str(command_rate)} if command_rate else {}
    robot = () if command_rate else ("--rate", str(rate))
    with Rig(domain, options, _CHUNKS if command_rate else (), robot) as rig:
        rig.ready()
        for _ in range(count):
            rig.arm()
            time.sleep(random.uniform(0.05, 0.2) + (0.2 if command_rate else 0.0))
            rig.robot.order(do="stop")
            rig.wait(lambda: rig.status.get("state") == "stopped", "stop")
            time.sleep(0.15)
            said = next(r.time for r in reversed(rig.records) if r.kind == "mark" and '"stop"' in r.name)
            last.append(max(0.0, rig.motions[-1].time - said))
            held = [r.time for r in rig.records if r.kind == "command" and r.time > said and r not in rig.motions]
            hold += [held[0] - said] if held else []  # none if the arm was holding already
            rig.reset()
            rig.forget()
            rig.ready()
    return {
        "stops": count,
        "motions_per_second": command_rate or rate,
        "last_motion_ms": _spread(np.array(last) * 1e3),
        "hold_ms": _spread(np.array(hold) * 1e3),
    }


def overload(domain: int, seconds: float, size: Sequence[int]) -> Mapping[str, Any]:
    """Measure the age of commands with four cameras, at half and at ten times the policy's rate.

    ``seconds`` is the duration of each run; ``size`` is the width and height of the images in pixels.
    """
    ages: dict[str, Any] = {}
    for name, factor in (("unloaded", 0.5), ("overloaded", 10.0)):
        words = ("--cameras", "4", "--rate", str(factor / _SECONDS), "--size", *map(str, size))
        with Rig(domain, _CAMERAS, ("--seconds", str(_SECONDS)), words) as rig:
            rig.ready()
            rig.arm()
            rig.forget()
            time.sleep(seconds)
            motions, frames = list(rig.motions), sum(r.kind == "frame" for r in list(rig.records))
            ages[name] = {
                "frames_per_second": round(frames / seconds, 1),
                "commands_per_second": round(len(motions) / seconds, 2),
                "age_ms": _spread(np.array([motion.ros - motion.stamp for motion in motions]) / 1e6),
                "frames": rig.status["frames"],
            }
    ratio = ages["overloaded"]["age_ms"]["p99"] / ages["unloaded"]["age_ms"]["p99"]
    return {"policy_seconds": _SECONDS, "size": list(size), **ages, "p99_ratio": round(ratio, 3)}


def soak(domain: int, minutes: float, every: float = 5.0) -> Mapping[str, Any]:
    """Run at 30 Hz with a stop, a reset and a new instruction twice a minute; return resource usage.

    ``every`` is the time between two measurements in seconds.
    """
    looks: list[dict[str, float]] = []
    with Rig(domain, {"timeouts.frozen_frames": "30"}) as rig:
        rig.ready()
        rig.arm()
        began = time.monotonic()
        spoken = began
        while time.monotonic() - began < 60 * minutes:
            time.sleep(every)
            ages = np.array([motion.ros - motion.stamp for motion in list(rig.motions)]) / 1e6
            looks.append(
                {
                    "seconds": round(time.monotonic() - began, 1),
                    **process_resources(rig.node.process.pid),
                    "motions": len(ages),
                    "age_p99_ms": round(float(np.percentile(ages, 99)), 2) if len(ages) else float("nan"),
                }
            )
            rig.forget()
            if time.monotonic() - spoken >= 30:
                spoken = time.monotonic()
                _interrupt(rig)
    return {"minutes": minutes, "first": _middle(looks[1:]), "last": _middle(looks[::-1]), "looks": looks}


def _interrupt(rig: Rig) -> None:
    rig.robot.order(do="instruct", text=f"wave {time.monotonic():.0f}")
    rig.robot.order(do="stop")
    rig.wait(lambda: rig.status.get("state") == "stopped", "stop")
    rig.reset()
    rig.ready()
    rig.arm()


def _middle(looks: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Return the medians of the first third of ``looks``."""
    some = looks[: max(1, len(looks) // 3)]
    return {key: float(np.nanmedian([look[key] for look in some])) for key in some[0] if key != "seconds"}


def _spread(values: Any) -> Mapping[str, float]:
    at = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {name: round(float(np.percentile(values, share)), 2) for name, share in at.items()} | {"n": len(values)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.measure", description=__doc__)
    parser.add_argument("what", choices=("stop", "overload", "soak"))
    parser.add_argument("--count", type=int, default=200, help="stops (default: 200)")
    parser.add_argument(
        "--rate", type=float, default=100.0, help="motions per second while stopping (default: 100)"
    )
    parser.add_argument(
        "--command-rate", type=float, default=0.0, help="commands per second between steps while stopping"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of each run of overload (default: 60)"
    )
    parser.add_argument("--size", type=int, nargs=2, default=(320, 240), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--minutes", type=float, default=60.0, help="duration of the soak (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    given = parser.parse_args(arguments)
    domain = random.choice(DOMAINS)
    before = os.getloadavg()
    if given.what == "stop":
        figures = stopping(domain, given.count, given.rate, given.command_rate)
    elif given.what == "overload":
        figures = overload(domain, given.seconds, given.size)
    else:
        figures = soak(domain, given.minutes)
    machine = {"processors": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    figures = {**figures, **machine, "load_before": before, "load_after": os.getloadavg()}
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in figures.items() if key != "looks"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
