"""Injects every fault of the table into the real node and prints the outcome: ``python -m tools.faults``."""

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType

from tools.faults.director import Director, Outcome
from tools.faults.processes import DOMAINS, reserved
from tools.faults.row import Row
from tools.faults.rows import ROWS, runnable


def run_rows(
    rows: Sequence[Row],
    repeat: int,
    seed: int,
    jobs: int,
    records: Path | None = None,
    backend: str = "dds",
    more: Mapping[str, str] = MappingProxyType({}),
) -> list[Outcome]:
    """Run each row in its own DDS domain, ``jobs`` at a time, and print its outcome when it ends.

    ``repeat`` is the number of injections per row; ``records`` is a folder for the records of rows with violations;
    ``backend`` is that of the node and the robot; ``more`` has options of the node in every row.
    """
    free = SimpleQueue[int]()
    for domain in random.Random(seed).sample(DOMAINS, len(DOMAINS)):
        free.put(domain)

    def one(number: int) -> Outcome:
        with reserved(free) as domain:
            director = Director(rows[number], seed + number, domain, more, backend)
            outcome = director.run(repeat)
        print(line(outcome), flush=True)
        if outcome.violations and records is not None:
            print(f"    records: {director.write_records(records)}", flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, range(len(rows))))


def line(outcome: Outcome) -> str:
    row = outcome.row
    text = (
        f"| {row.name:<26} | {row.reaction.value:<8} | {len(outcome.injections):>10} | {outcome.motions:>7} "
        f"| {len(outcome.violations):>10} | {outcome.seed:>6} | {outcome.seconds:>6.0f} |"
    )
    shown = [f"    {violation}" for violation in outcome.violations[:5]]
    if outcome.interrupted:
        corrected = ", ".join(f"{seconds:.3f}" for seconds in outcome.interrupted)
        shown.append(
            f"    sending when it was suspended: {len(outcome.interrupted)}, corrected after {corrected} s"
        )
    return "\n".join([text, *shown])


HEADER = (
    "| fault                      | the node | injections | motions | violations |   seed | seconds |\n"
    "|---|---|---:|---:|---:|---:|---:|"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__)
    parser.add_argument("--repeat", type=int, default=50, metavar="N", help="injections per row (default: 50)")
    parser.add_argument(
        "--row", action="append", default=[], metavar="TEXT", help="only rows whose name contains TEXT"
    )
    parser.add_argument("--seed", type=int, default=None, help="seed of all randomness; printed with each row")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="rows at a time (default: 1)")
    parser.add_argument(
        "--records", type=Path, metavar="DIR", help="write the robot's records of rows with violations"
    )
    parser.add_argument(
        "--backend",
        choices=("dds", "rclpy"),
        default="dds",
        help="how node and robot join the graph: by the embedded participant (default), or with the ROS 2 that is "
        "sourced, over RMW_IMPLEMENTATION",
    )
    parser.add_argument("--guard", action="store_true", help="the node has a guard (guard.process)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes as JSON")
    given = parser.parse_args(arguments)
    rows = [row for row in ROWS if not given.row or any(text in row.name for text in given.row)]
    left_out = [row.name for row in rows if row not in runnable(rows, given.backend)]
    if left_out:
        print(f"not run through this middleware: {', '.join(left_out)}")
    rows = runnable(rows, given.backend)
    if not rows:
        parser.error(f"no row's name contains any of {given.row}; there are: {', '.join(row.name for row in ROWS)}")
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**5)
    print(f"{len(rows)} rows, {given.repeat} injections each, seed {seed}\n\n{HEADER}", flush=True)
    began = time.monotonic()
    more = {"guard.process": "true"} if given.guard else {}
    outcomes = run_rows(rows, given.repeat, seed, given.jobs, given.records, given.backend, more)
    injections = sum(len(outcome.injections) for outcome in outcomes)
    violations = sum(len(outcome.violations) for outcome in outcomes)
    interrupted = sum(len(outcome.interrupted) for outcome in outcomes)
    print(
        f"\n{injections} injections, {violations} violations, {interrupted} interrupted while sending, "
        f"{time.monotonic() - began:.0f} s"
    )
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1, default=str))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
