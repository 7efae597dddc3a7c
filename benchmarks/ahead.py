"""Measures gaps between the commands of a slow chunk policy at the robot: synchronous, and with inference ahead.

python -m benchmarks.ahead --minutes 10 --sync-minutes 3 --json FILE

The real node and a simulated robot run in separate processes. Two joints of each action encode the time for which
it was computed, so that skipped and repeated steps are visible in the commands.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from tools.faults.driver import ARM, HOME
from tools.faults.node import TURN_SECONDS
from tools.faults.processes import DOMAINS
from tools.faults.records import Record
from tools.faults.rig import Rig
from vla_ros.telemetry.execution import Steadiness

_OPTIONS = {
    "features.action": "[arm.joint_position, arm.gripper]",
    "policy.instruction": "turn",
    "timeouts.inference": "2.0",
    "timeouts.frame_age": "2.0",
    "timeouts.camera": "2.0",
    "timeouts.joint_state": "2.0",
    "timeouts.joint_state_age": "2.0",
    "timeouts.frozen_frames": "30",
}


def measure(schedule: str, minutes: float, given: argparse.Namespace) -> dict[str, Any]:
    options = {"control.rate_hz": str(given.rate), "control.schedule": schedule}
    if given.command_rate and schedule != "sync":
        options["control.command_rate_hz"] = str(given.command_rate)
    words = ("--horizon", str(given.horizon), "--seconds", str(given.delay_ms / 1e3))
    load = os.getloadavg()[0]
    with Rig(random.choice(DOMAINS), _OPTIONS | options, words) as rig:
        rig.ready()
        rig.arm()
        time.sleep(5)
        rig.forget()
        time.sleep(60 * minutes)
        motions, counters = list(rig.motions), dict(rig.status["counters"])
    return {
        "schedule": schedule,
        **_figures(motions, given.rate, as_predicted=schedule in ("sync", "append") and not given.command_rate),
        "counters": counters,
        "load": [load, os.getloadavg()[0]],
    }


def _figures(motions: list[Record], rate: float, *, as_predicted: bool) -> dict[str, Any]:
    at = np.array([motion.time for motion in motions])
    stamps = np.array([motion.stamp for motion in motions])
    columns = [motions[0].names.index(name) for name in (ARM[0], ARM[-1])]
    points = np.array([motion.positions for motion in motions])[:, columns] - np.array(HOME)[[0, len(ARM) - 1]]
    meant = np.unwrap(np.arctan2(points[:, 0], points[:, 1])) / (2 * np.pi) * TURN_SECONDS
    period, gaps, steps, seams = 1 / rate, np.diff(at), np.diff(meant), np.diff(stamps) != 0
    steadiness = Steadiness()
    for each in at:
        steadiness.waited(float(each), period)
    inside = steps[~seams]
    found = {
        "seconds": round(at[-1] - at[0], 1),
        "motions": len(at),
        "stalled_share": round(steadiness.figures()["stalled_share"], 4),
        "gaps_over_1_5_periods": int((gaps > 1.5 * period).sum()),
        "gap_ms": {name: round(1e3 * float(np.percentile(gaps, share)), 1) for name, share in _SHARES.items()},
        "age_ms": {
            name: round(float(np.percentile([(m.ros - m.stamp) / 1e6 for m in motions], share)), 1)
            for name, share in _SHARES.items()
        },
    }
    if as_predicted:  # else the actions are blended
        off = np.abs(inside / period - 1) > 0.1
        found |= {
            "chunks": int(seams.sum()) + 1,
            "skipped_or_repeated_within_chunks": int(off.sum()),
            "meant_step_at_seams_ms": [round(1e3 * float(end(steps[seams])), 1) for end in (np.min, np.max)],
        }
    return found


_SHARES = {"p50": 50, "p99": 99, "max": 100}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the run with inference ahead (default: 10)")
    parser.add_argument(
        "--sync-minutes", type=float, default=3.0, help="of the synchronous run (default: 3; 0: none)"
    )
    parser.add_argument("--schedule", default="append", help="of the run with inference ahead (default: append)")
    parser.add_argument("--delay-ms", type=float, default=300.0, help="of the policy (default: 300)")
    parser.add_argument("--horizon", type=int, default=16, help="steps of a chunk (default: 16)")
    parser.add_argument("--rate", type=float, default=20.0, help="steps a second (default: 20)")
    parser.add_argument("--command-rate", type=float, default=0.0, help="control.command_rate_hz (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    given = parser.parse_args()
    machine = {"processors": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    runs = [("sync", given.sync_minutes), (given.schedule, given.minutes)]
    found = {**machine, "runs": [measure(name, minutes, given) for name, minutes in runs if minutes]}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
