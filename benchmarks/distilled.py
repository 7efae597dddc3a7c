"""Compares distilled checkpoints with their teacher, paired by episode, and prints a table.

On the simulated table, or with --libero on tasks of libero_spatial, whose initial states 0 to 19 are run with as
many seeds as --episodes needs. In simulated time: `sync` without delay, and live at each delay, with `rtc` on the
table and `sync` on LIBERO. Every block of 20 episodes runs in all cells before the next; run again, it continues
where it stopped. With --libero, it also compares a fine-tuned checkpoint with the one it comes from.

    python benchmarks/distilled.py demo-pi ONE TWO --json FILE [--episodes 400] [--delays 0 100 200] [--processes 8]
    python benchmarks/distilled.py checkpoints/libero ONE TWO --json FILE --libero PY [--episodes 100] [--tasks 0 1]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from benchmarks.schedules import CAMERA_HZ, markdown_table
from tools.libero.expert import TASKS
from tools.libero.scene import SUITE
from tools.libero.score import NODE
from tools.train.evaluate import run_command, run_demo
from vla_ros.errors import VlaRosError
from vla_ros.files import save_text
from vla_ros_lab.eval.intervals import paired

BLOCK = 20  # episodes of one run

Block = tuple[int, int]
"""Seed and task of a run."""

Cell = tuple[str, float]
"""Schedule and delay in milliseconds; ``sync`` is in lockstep, ``live`` is not."""


class Place(Protocol):
    """Where checkpoints are compared."""

    def blocks(self) -> Sequence[Block]: ...

    def first(self, block: Block) -> str:
        """Return the key of a block's first episode."""

    def run(self, cell: Cell, checkpoint: str, block: Block) -> dict[str, bool]:
        """Return whether each episode of a block succeeded, by its key; without those that ended in an error."""


@dataclass(frozen=True)
class Table:
    """The simulated table; a key is the seed of the scene."""

    seed: int
    episodes: int
    param: Sequence[str]

    def blocks(self) -> Sequence[Block]:
        return [(first, 0) for first in range(self.seed, self.seed + self.episodes, BLOCK)]

    def first(self, block: Block) -> str:
        return str(block[0])

    def run(self, cell: Cell, checkpoint: str, block: Block) -> dict[str, bool]:
        schedule = "rtc" if cell[0] == "live" else "sync"
        words = ["--checkpoint", checkpoint, "--simulated-time", "--schedule", schedule, "--seed", str(block[0])]
        words += ["--delay-ms", str(cell[1]), "--episodes", str(BLOCK), "--camera-hz", str(CAMERA_HZ)]
        result = run_demo(*words, *self.param)
        return {str(one["seed"]): bool(one["success"]) for one in result["episodes"]}


@dataclass(frozen=True)
class Libero:
    """Tasks of LIBERO; a key is task, seed and initial state."""

    seed: int
    episodes: int  # of each task
    param: Sequence[str]
    python: str  # that has LIBERO and vla-eval
    tasks: Sequence[int]

    def blocks(self) -> Sequence[Block]:
        return list(product(range(self.seed, self.seed + -(-self.episodes // BLOCK)), self.tasks))

    def first(self, block: Block) -> str:
        return f"{block[1]} {block[0]} 0"

    def run(self, cell: Cell, checkpoint: str, block: Block) -> dict[str, bool]:
        seed, task = block
        words = [SUITE, "--python", self.python, "--policy", "pi", "--checkpoint", checkpoint, *NODE]
        words += ["--tasks", str(task), "--episodes", str(BLOCK), "--seed", str(seed), "-p", f"policy.seed:={seed}"]
        if cell[0] == "live":
            words += ["--live", "20", "--delay-ms", str(cell[1]), "--schedule", "sync"]
        [found] = run_command("eval", *words, *self.param)["tasks"]
        good = [one for one in found["episodes"] if not one.get("failure_reason")]
        return {f"{task} {seed} {one['episode_id']}": bool(one["metrics"]["success"]) for one in good}


def main() -> int:
    """Make the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="the teacher, then what was distilled from it")
    text = "of each cell (default 400), with --libero of each of its tasks (default 100)"
    parser.add_argument("--episodes", type=int, default=0, help=text)
    parser.add_argument("--seed", type=int, default=10_000, help="of the first episode")
    parser.add_argument("--delays", type=float, nargs="*", default=[0, 100, 200], help="milliseconds, live")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path, required=True, help="the figures; kept and continued")
    parser.add_argument("--libero", metavar="PY", help="on LIBERO, with the Python that has it and vla-eval")
    parser.add_argument("--tasks", type=int, nargs="+", default=TASKS, metavar="T", help="of libero_spatial")
    parser.add_argument("-p", dest="param", action="append", default=[], metavar="NAME:=VALUE", help="of the node")
    arguments = parser.parse_args()
    param = [word for each in arguments.param for word in ("-p", each)]
    known: dict[str, dict[str, bool]] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    cells: list[Cell] = [("sync", 0.0), *(("live", delay) for delay in arguments.delays)]
    place: Place = Table(arguments.seed, arguments.episodes or 400, param)
    if arguments.libero:
        place = Libero(arguments.seed, arguments.episodes or 100, param, arguments.libero, arguments.tasks)
    missing = [
        (cell, checkpoint, block)
        for block, cell, checkpoint in product(place.blocks(), cells, arguments.checkpoints)
        if place.first(block) not in known.get(name_of(cell, checkpoint), {})
    ]
    failed = 0
    with ThreadPoolExecutor(arguments.processes) as pool:
        runs = {pool.submit(place.run, *each): name_of(*each[:2]) for each in missing}
        for done in as_completed(runs):
            try:
                known.setdefault(runs[done], {}).update(done.result())
            except VlaRosError as error:
                failed += 1
                print(f"{runs[done]}: {error}", file=sys.stderr)
            save_text(arguments.json, json.dumps(known, indent=1) + "\n")
    print(table(known, cells, arguments.checkpoints))
    return 1 if failed else 0


def name_of(cell: Cell, checkpoint: str) -> str:
    """Return the key of a cell's figures."""
    return f"{checkpoint} {cell[0]} {cell[1]:g}"


def table(known: dict[str, dict[str, bool]], cells: Sequence[Cell], checkpoints: Sequence[str]) -> str:
    lines = [("schedule", "checkpoint", "success", "lost and won against the first", "difference, 95 %")]
    for cell in cells:
        scores = [known.get(name_of(cell, one), {}) for one in checkpoints]
        teacher = scores[0]
        for checkpoint, score in zip(checkpoints, scores, strict=True):
            shown = compared(teacher, score) if score is not teacher else ("", "")
            name = "sync" if cell[0] == "sync" else f"live, {cell[1]:g} ms"
            lines.append((name, checkpoint, f"{sum(score.values())} of {len(score)}", *shown))
    return markdown_table(lines)


def compared(first: dict[str, bool], second: dict[str, bool]) -> tuple[str, str]:
    """Return what the second lost and won on the same episodes, and the interval of the difference."""
    both = first.keys() & second.keys()
    lost, won = (sum(a[key] and not b[key] for key in both) for a, b in ((first, second), (second, first)))
    low, high = paired(lost, won, len(both))
    return f"{lost} and {won}", f"{100 * low:+.1f} to {100 * high:+.1f} points"


if __name__ == "__main__":
    sys.exit(main())
