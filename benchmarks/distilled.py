"""Compares distilled checkpoints with their teacher on the simulated table, paired by seed, and prints a table.

Runs of `vla-ros demo` in simulated time: `sync` without delay, and live (`rtc`) at each delay. Every block of seeds
runs in all cells before the next one; run again, it continues where it stopped.

    python benchmarks/distilled.py demo-pi ONE TWO --json FILE [--episodes 400] [--delays 0 100 200] [--processes 8]
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from benchmarks.schedules import CAMERA_HZ, markdown_table
from tools.train.evaluate import run_demo
from vla_ros.files import save_text
from vla_ros_lab.eval.intervals import paired

BLOCK = 20  # seeds of one run


def main() -> int:
    """Make the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="the teacher, then what was distilled from it")
    parser.add_argument("--episodes", type=int, default=400, help="of each cell")
    parser.add_argument("--seed", type=int, default=10_000, help="of the first episode")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 100, 200], help="milliseconds, live")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path, required=True, help="the figures; kept and continued")
    parser.add_argument("-p", dest="param", action="append", default=[], metavar="NAME:=VALUE", help="of the node")
    arguments = parser.parse_args()
    param = [word for each in arguments.param for word in ("-p", each)]
    known: dict[str, dict[str, bool]] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    cells = [("sync", 0.0), *(("rtc", delay) for delay in arguments.delays)]

    def run(cell: tuple[str, float], checkpoint: str, first: int) -> tuple[str, dict[str, bool]]:
        schedule, delay = cell
        words = ["--checkpoint", checkpoint, "--simulated-time", "--schedule", schedule, "--seed", str(first)]
        words += ["--delay-ms", str(delay), "--episodes", str(BLOCK), "--camera-hz", str(CAMERA_HZ)]
        result = run_demo(*words, *param)
        return name_of(cell, checkpoint), {str(one["seed"]): bool(one["success"]) for one in result["episodes"]}

    seeds = range(arguments.seed, arguments.seed + arguments.episodes, BLOCK)
    missing = [
        (cell, checkpoint, first)
        for first, cell, checkpoint in product(seeds, cells, arguments.checkpoints)
        if str(first) not in known.get(name_of(cell, checkpoint), {})
    ]
    with ThreadPoolExecutor(arguments.processes) as pool:
        runs = [pool.submit(run, *each) for each in missing]
        for done in as_completed(runs):
            name, found = done.result()
            known.setdefault(name, {}).update(found)
            save_text(arguments.json, json.dumps(known, indent=1) + "\n")
    print(table(known, cells, arguments.checkpoints))
    return 0


def name_of(cell: tuple[str, float], checkpoint: str) -> str:
    """Return the key of a cell's figures."""
    return f"{checkpoint} {cell[0]} {cell[1]:g}"


def table(known: dict[str, dict[str, bool]], cells: list[tuple[str, float]], checkpoints: list[str]) -> str:
    lines = [("schedule", "checkpoint", "success", "lost and won against the first", "difference, 95 %")]
    for schedule, delay in cells:
        scores = [known[name_of((schedule, delay), one)] for one in checkpoints]
        teacher = scores[0]
        for checkpoint, score in zip(checkpoints, scores, strict=True):
            seeds = teacher.keys() & score.keys()
            lost, won = (
                sum(a[seed] and not b[seed] for seed in seeds) for a, b in ((teacher, score), (score, teacher))
            )
            low, high = paired(lost, won, len(seeds))
            compared = (f"{lost} and {won}", f"{100 * low:+.1f} to {100 * high:+.1f} points")
            cell = "sync" if schedule == "sync" else f"live, {delay:g} ms"
            shown = compared if score is not teacher else ("", "")
            lines.append((cell, checkpoint, f"{sum(score.values())} of {len(score)}", *shown))
    return markdown_table(lines)


if __name__ == "__main__":
    sys.exit(main())
