"""Measures every schedule of chunks at several delays, and prints one table.

Each row is a run of `vla-ros demo --checkpoint demo-pi` in simulated time: the delay is that of the whole
inference, whatever the machine's speed and load. With `--real-time` the delay is added to the inference; each of
the `--jobs` then needs a core and a half to itself.

    python benchmarks/schedules.py [--real-time] [--episodes 100] [--jobs 1] [--json FILE] [-- OPTIONS OF THE DEMO]
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from tools.train.evaluate import run_demo
from vla_ros.errors import VlaRosError

SCHEDULES = ("sync", "append", "blend", "ensemble", "rtc")
FIRST_DOMAIN = 20
CAMERA_HZ = 30  # not the rate of the steps: a frame is 0 to 33 ms old when its inference begins
HEADINGS = ("delay", "schedule", "success", "time to success", "stalled", "longest gap", "seam ratio", "frame age")


def main() -> int:
    """Make all runs and print the table; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real-time", action="store_true", help="each run with its own policy node and ROS domain")
    parser.add_argument("--episodes", type=int, default=100, help="of each row")
    parser.add_argument("--seed", type=int, default=10_000, help="of the first episode, in every row")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 100, 200, 300], help="milliseconds")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--json", type=Path, help="write the figures; rows that it has already are kept")
    parser.add_argument("options", nargs="*", help="further options of the demo, after --")
    arguments = parser.parse_args()
    known: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        known = json.loads(arguments.json.read_text(encoding="utf-8"))
        known = {name: found for name, found in known.items() if same(found, arguments)}
    # The longest runs first, so that no long run remains for the end.
    cells = [
        (delay, schedule) for delay in sorted(arguments.delays, reverse=True) for schedule in arguments.schedules
    ]
    missing = [cell for cell in cells if name_of(*cell) not in known]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = {
            pool.submit(measure, delay, schedule, FIRST_DOMAIN + index, arguments): name_of(delay, schedule)
            for index, (delay, schedule) in enumerate(missing)
        }
        for run in as_completed(runs):
            if (found := run.result()) is None:
                continue
            known[runs[run]] = found
            if arguments.json is not None:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(markdown([known[name_of(*cell)] for cell in sorted(cells, key=cells_order) if name_of(*cell) in known]))
    return 0 if all(name_of(*cell) in known for cell in cells) else 1


def same(found: dict[str, Any], arguments: argparse.Namespace) -> bool:
    mode = "real_time" if arguments.real_time else "simulated_time"
    wanted = mode, arguments.seed, arguments.episodes
    return (found["mode"], found["seed"], len(found["episodes"])) == wanted


def name_of(delay: float, schedule: str) -> str:
    return f"{schedule} {delay:g} ms"


def cells_order(cell: tuple[float, str]) -> tuple[float, int]:
    """Return the sort key of a cell: its delay, then its place in :data:`SCHEDULES`."""
    return cell[0], SCHEDULES.index(cell[1])


def measure(delay: float, schedule: str, domain: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Run the demo for one row; print the error and return None if it fails."""
    began = time.monotonic()
    words = ["--checkpoint", "demo-pi", "--real-time" if arguments.real_time else "--simulated-time"]
    words += ["--camera-hz", str(CAMERA_HZ), "--delay-ms", str(delay), "--schedule", schedule]
    words += ["--episodes", str(arguments.episodes), "--seed", str(arguments.seed), *arguments.options]
    try:
        result = run_demo(*words, ROS_DOMAIN_ID=str(domain))
    except VlaRosError as error:
        print(f"{name_of(delay, schedule)}: {error}", file=sys.stderr, flush=True)
        return None
    print(f"{name_of(delay, schedule)}: {result['success_rate']:.0%}, {time.monotonic() - began:.0f} s", flush=True)
    return result


def markdown(rows: list[dict[str, Any]]) -> str:
    return markdown_table([HEADINGS, *map(row, rows)])


def markdown_table(lines: Sequence[tuple[str, ...]]) -> str:
    """Return lines of cells, the headings first, as Markdown."""
    ruled = [lines[0], ("---",) * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)


def row(result: dict[str, Any]) -> tuple[str, ...]:
    def shown(key: str, form: str) -> str:
        return "" if result[key] is None else form.format(result[key])

    age = result["latency_ms"].get("frame_age", {})
    won = sum(episode["success"] for episode in result["episodes"])
    return (
        f"{result['delay_ms']:g} ms",
        result["schedule"],
        f"{won} of {len(result['episodes'])}",
        shown("seconds_to_success", "{:.2f} s"),
        shown("stalled_share", "{:.1%}"),
        shown("longest_gap_ms", "{:.0f} ms"),
        shown("seam_ratio", "{:.2f}"),
        f"{age['p50']:.0f} ms" if age else "",
    )


if __name__ == "__main__":
    sys.exit(main())
