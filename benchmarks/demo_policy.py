"""Runs the shipped checkpoint through `vla-ros demo` with every control, and prints one table.

Each row runs the simulation and the policy node as separate processes connected over DDS, as a user would. `python
-m tools.train evaluate` runs many episodes in less time.

    python benchmarks/demo_policy.py [--checkpoint DIR] [--episodes 100] [--only plain,bump] [--json FILE]

`--real-time` adds a row with physics in real time and a camera at 10 Hz.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.train.controls import Control, chosen, markdown
from tools.train.evaluate import machine
from tools.train.recipe import DATASET
from vla_ros.policies.shipped import SHIPPED

REAL_TIME = Control("real_time", "in real time, camera at 10 Hz", ("--real-time",), at_least=0.9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="demo", help="its folder, or demo or demo-pi")
    parser.add_argument("--episodes", type=int, default=100, help="per control")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode")
    parser.add_argument("--only", default="", help="controls, separated by commas")
    parser.add_argument("--real-time", action="store_true", help="add a row in real time")
    parser.add_argument("--threads", type=int, default=2, help="threads of the policy")
    parser.add_argument("--device", default="cpu", help="device of the policy")
    parser.add_argument("--json", type=Path, help="write the figures; rows that it has already are kept")
    arguments = parser.parse_args()
    controls = (*chosen(arguments.only), *((REAL_TIME,) if arguments.real_time else ()))
    rows: list[dict[str, Any]] = []
    if arguments.json is not None and arguments.json.exists():
        rows = json.loads(arguments.json.read_text(encoding="utf-8"))
    for control in controls:
        if any(row["name"] == control.name and row["episodes"] == arguments.episodes for row in rows):
            continue
        rows = [row for row in rows if row["name"] != control.name]
        rows.append(measure(control, arguments))
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(markdown(rows))
    for row in rows:
        stages = ", ".join(f"{stage} {times['p50']:.1f}" for stage, times in row["latency_ms"].items())
        print(f"{row['name']}: p50 in ms: {stages}; frames {row['frames']}; load {row['load']:.1f}")
    return 0 if all(row["met"] for row in rows) else 1


def measure(control: Control, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "demo.json"
        command = [sys.executable, "-m", "vla_ros.cli", "demo"]
        command += ["--checkpoint", arguments.checkpoint, "--json", str(figures)]
        command += ["--episodes", str(arguments.episodes), "--seed", str(arguments.seed)]
        own = () if SHIPPED.get(arguments.checkpoint) else (f"policy.unnorm_key:={DATASET}",)
        for option in (*own, f"policy.device:={arguments.device}", f"policy.threads:={arguments.threads}"):
            command += ["-p", option]
        subprocess.run([*command, *control.options], check=True)
        result = json.loads(figures.read_text(encoding="utf-8"))
    won = [episode["steps"] for episode in result["episodes"] if episode["success"]]
    return {
        "name": control.name,
        "title": control.title,
        "machine": machine(arguments.device),
        "options": list(control.options),
        "episodes": len(result["episodes"]),
        "first_seed": arguments.seed,
        "success_rate": result["success_rate"],
        "wrong_object_rate": result["wrong_object_rate"],
        "steps": round(sum(won) / len(won), 1) if won else None,
        "expected": [control.at_least, control.at_most],
        "met": control.met(result["success_rate"]),
        "failed_seeds": [episode["seed"] for episode in result["episodes"] if not episode["success"]][:20],
        "latency_ms": result["latency_ms"],
        "frames": result["frames"],
        "wall_s": result["wall_s"],
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
