"""Deploy, correct, fine-tune, compare: does a policy get better by corrections?

  python -m tools.flywheel FOLDER

Deploys a policy in a place that its demonstrations do not show, because the camera was moved, and records episodes
there that a scripted person corrects with a leader arm, and, where the camera is as in training, as many that it
does alone. ``vla-ros finetune`` trains on both, with an adapter and in full; ``vla-ros eval`` scores each
checkpoint on the same held-out scenes, in the new place and in the known one; ``vla-ros finetune --scores`` judges.

FOLDER gets table.md, table.json and a log of each command; what is complete is not done again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.flywheel.collect import JOURNAL
from vla_ros.config.checkpoints import SHIPPED
from vla_ros.errors import VlaRosError
from vla_ros_lab.training.proof import as_json, paired_scores
from vla_ros_models.checkpoint_files import read_json

_SCENES, _CORRECTED, _ALONE = 1_000_000, 3_000_000, 4_000_000
"""First seeds of the scenes that are scored, and of the recorded ones."""

_LAYERS = r"paligemma_with_expert\.(paligemma|gemma_expert)\..*(_proj|fc[12]|linear)"
"""Layers of a pi0.5: an adapter of the published targets, all behind the images, cannot learn a new view."""

TRAININGS = {
    "lora": ("--adapter", "lora", "--targets", _LAYERS, "--rank", 16, "--alpha", 16, "--learning-rate", 1e-3),
    "full": ("--adapter", "full", "--learning-rate", 4e-4),
}
"""Name of a training to its options of ``vla-ros finetune``."""


@dataclass(frozen=True)
class Job:
    """A command: module and arguments, and what it makes."""

    words: Sequence[str]
    made: Path


class Flywheel:
    """Makes the table in a folder."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._folder: Path = given.folder.resolve()
        self._began = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Make the table, and return what is in table.json."""
        begin = self._given.begin
        jobs = [
            *self._scored("weak", begin),
            self._recorded("corrected", _CORRECTED, f"--place=--camera-turn {self._given.camera_turn:g}"),
            self._recorded("autonomous", _ALONE),
        ]
        for name in TRAININGS:
            trained = self._folder / name
            scores = [self._scores("new", one) for one in ("weak", name)]
            jobs += [self._training(name), *self._scored(name, trained)]
            jobs.append(self._training(name, "--scores", *scores, made=self._folder / "verdicts" / f"{name}.json"))
        self.do(jobs)
        return self._table()

    def _table(self) -> dict[str, Any]:
        given, folder = self._given, self._folder
        rows = {
            place: {
                name: paired_scores(self._scores(place, "weak"), self._scores(place, name)) for name in TRAININGS
            }
            for place in ("new", "known")
        }
        journals = {kind: json.loads((folder / kind / JOURNAL).read_text()) for kind in ("corrected", "autonomous")}
        facts = {
            "options": {name: str(value) for name, value in vars(given).items()},
            "rows": {place: {name: as_json(one) for name, one in each.items()} for place, each in rows.items()},
            "episodes": {
                kind: {name: sum(int(each[name]) for each in one) for name in ("kept", "success", "takeovers")}
                | {"recorded": len(one)}
                for kind, one in journals.items()
            },
            "verdicts": {name: read_json(folder / "verdicts" / f"{name}.json")["verdict"] for name in TRAININGS},
            "seconds": round(time.monotonic() - self._began),
        }
        lines = ["| place | training | before | after | points, 95 % interval | pairs |", "| --- " * 6 + "|"]
        for place, each in rows.items():
            for name, found in each.items():
                [one] = found.differences
                points = f"{100 * (one.new - one.old):+.1f}, {100 * one.low:+.1f} to {100 * one.high:+.1f}"
                lines.append(f"| {place} | {name} | {one.old:.1%} | {one.new:.1%} | {points} | {found.pairs} |")
        text = "\n".join(lines) + "\n"
        (folder / "table.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (folder / "table.md").write_text(text, encoding="utf-8")
        print(text)
        return facts

    # Commands

    def _scores(self, place: str, name: str) -> Path:
        return self._folder / "scores" / f"{place}-{name}.json"

    def _recorded(self, kind: str, seed: int, *place: str) -> Job:
        given, bags = self._given, self._folder / kind
        words = ("--episodes", given.episodes, "--seed", seed, "--processes", given.processes, *place)
        return _job(bags / JOURNAL, "tools.flywheel.collect", kind, given.begin, bags, *words)

    def _training(self, name: str, *more: object, made: Path | None = None) -> Job:
        """Train on the bags; with ``--scores``, judge what was trained."""
        given, trained = self._given, self._folder / name
        bags = [self._folder / kind for kind in ("corrected", "autonomous")]
        words = ("--config", "demo", "--config", "demo_pi", *given.param, "--output", trained, *TRAININGS[name])
        size = ("--steps", given.steps, "--batch", given.batch)
        kept = ("--workers", given.workers, "--no-recompute", "--save-every", 50, "--seed", 0)
        report = made or self._folder / f"{name}.json"
        start = ("vla_ros.cli", "finetune", *bags, "--checkpoint", given.begin)
        return _job(report, *start, *words, *size, *kept, "--json", report, *more)

    def _scored(self, name: str, checkpoint: object) -> list[Job]:
        given, jobs = self._given, []
        for place, turn, count in (("new", given.camera_turn, given.scenes), ("known", 0.0, given.known)):
            file = self._scores(place, name)
            words = ("--sync", "--resume", "--shards", given.processes, "-b", f"camera_turn={turn}", "--json", file)
            seeds = ("--seed", _SCENES, "--episodes", count, *given.param)
            jobs.append(_job(file, "vla_ros.cli", "eval", "table", "--checkpoint", checkpoint, *seeds, *words))
        return jobs

    def do(self, jobs: Sequence[Job]) -> None:
        """Run the commands that are not complete, one after another."""
        for job in jobs:
            name = job.made.relative_to(self._folder).with_suffix("").as_posix().replace("/", "-")
            done, log = (self._folder / folder / name for folder in ("done", "logs"))
            if done.exists():
                continue
            for path in (done, log, job.made):
                path.parent.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            with log.open("w", encoding="utf-8") as stream:
                print(*job.words, file=stream, flush=True)
                command = [sys.executable, "-m", *job.words]
                ended = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT)
            if ended.returncode:
                raise VlaRosError(f"{log}: failed with status {ended.returncode}")
            done.touch()
            now = time.monotonic()
            print(f"{now - self._began:6.1f} s: {name} took {now - began:.1f} s", flush=True)


def _job(made: Path, *words: object) -> Job:
    return Job([str(word) for word in words], made)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.flywheel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path)
    add("--begin", default="demo-pi", metavar="DIR", help="checkpoint to deploy: a pi0.5")
    add("--camera-turn", type=float, default=30.0, metavar="DEG", help="by which the camera was moved")
    add("--episodes", type=int, default=50, metavar="N", help="with corrections, and as many without")
    add("--scenes", type=int, default=400, metavar="N", help="held-out scenes in the new place")
    add("--known", type=int, default=400, metavar="N", help="held-out scenes in the known place")
    add("--steps", type=int, default=400, metavar="N", help="of each training")
    add("--batch", type=int, default=32, metavar="N", help="samples of a step")
    add("--workers", type=int, default=2, metavar="N", help="processes that read samples")
    add("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="simulations at a time")
    add("-p", dest="param", action="append", default=[], metavar="NAME:=VALUE", help="option of the node")
    given = parser.parse_args()
    given.param = [word for one in given.param for word in ("-p", one)]
    if given.begin not in SHIPPED:
        given.begin = str(Path(given.begin).resolve())
    try:
        Flywheel(given).run()
    except VlaRosError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
