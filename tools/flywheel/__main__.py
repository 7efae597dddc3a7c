"""Deploy, correct, export, fine-tune, deploy: does a policy get better by corrections?

  python -m tools.flywheel FOLDER

Trains a policy on each of a few amounts of demonstrations, takes the one whose success is nearest to 60 %, and
records it on the simulated table: 50 episodes that a scripted person corrects with a leader arm, 50 that the person
demonstrates, and 50 in which it succeeds alone. Each set is exported to LeRobot's format and continues the
training; a fourth training continues without any. All are measured on the same held-out scenes.

FOLDER gets table.md, table.json and a log of each command; what is complete is not done again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.flywheel.collect import JOURNAL, KINDS
from tools.flywheel.table import compare, markdown
from vla_ros.errors import VlaRosError
from vla_ros.policies.checkpoint_files import read_json

_CHOICE, _SCENES = 2_000_000, 1_000_000  # first seeds of the scenes that choose the weak policy, and of the table
_WANTED = 0.6
_UNSEEN = ("--location-weight", 0, "--kind-weight", 0)  # recordings do not say where an object is
_SHARES = {"corrected": 0.5, "demonstrated": 0.15, "autonomous": 0.35}  # of the processes
_ACTION = "arm.tip_delta + arm.gripper"
NAMES = {
    "none": "trained as much longer, no new data",
    "autonomous": "+ {0} autonomous episodes that succeeded",
    "demonstrated": "+ {0} demonstrated episodes",
    "corrected": "+ {0} corrected episodes",
}


@dataclass(frozen=True)
class Job:
    """A command: module and arguments, and what it makes."""

    words: Sequence[str]
    made: Path


class Flywheel:
    """Makes the table in a folder."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._folder = given, given.folder.resolve()
        self._began = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Make the table, and return what is in table.json."""
        given, folder = self._given, self._folder
        runs = {amount: folder / f"weak-{amount}" for amount in given.amounts}
        choice = {amount: folder / "choice" / f"{amount}.json" for amount in given.amounts}
        self._do([
            [
                self._demonstrations(_data(runs[amount]), amount),
                self._fit(runs[amount], given.steps, given.span),
                self._export(runs[amount]),
                self._measurement(runs[amount], choice[amount], _CHOICE, given.choice),
            ]
            for amount in given.amounts
        ])  # fmt: skip
        rates = {amount: _rate(choice[amount]) for amount in given.amounts}
        amount = min(rates, key=lambda each: abs(rates[each] - _WANTED))
        print(f"success by demonstrations: {rates}; chosen: {amount}", flush=True)
        weak = runs[amount]
        scenes = {name: folder / "scenes" / f"{name}.json" for name in ("weak", *NAMES)}
        self._do([
            [self._measurement(weak, scenes["weak"], _SCENES, given.scenes)],
            *([
                *(self._recordings(kind, weak) if kind in KINDS else ()),
                self._continued(kind, weak),
                self._fit(folder / kind, given.steps + given.more_steps, given.span + given.more_span, *_UNSEEN),
                self._export(folder / kind),
                self._measurement(folder / kind, scenes[kind], _SCENES, given.scenes),
            ] for kind in NAMES),
        ])  # fmt: skip
        return self._table(amount, rates)

    def _table(self, amount: int, rates: dict[int, float]) -> dict[str, Any]:
        given, folder = self._given, self._folder
        won = {name: _read(folder / "scenes" / f"{name}.json") for name in ("weak", *NAMES)}
        names = {"weak": f"weak: {amount} demonstrations"} | NAMES
        rows = {names[name].format(given.episodes): compare(won["weak"], won[name]) for name in won}
        frames = {
            name: json.loads((_data(folder / name) / "frames.json").read_text(encoding="utf-8")) for name in NAMES
        }
        journals = {
            kind: json.loads((folder / "bags" / kind / JOURNAL).read_text(encoding="utf-8")) for kind in KINDS
        }
        facts = {
            "options": {name: str(value) for name, value in vars(given).items()},
            "success_by_demonstrations": rates,
            "rows": rows,
            "frames": frames,
            "episodes": {
                kind: {name: sum(int(each[name]) for each in one) for name in ("kept", "success", "takeovers")}
                | {"recorded": len(one)}
                for kind, one in journals.items()
            },
            "seconds": round(time.monotonic() - self._began),
            "scenes": won,
        }
        text = markdown(rows)
        (folder / "table.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (folder / "table.md").write_text(text, encoding="utf-8")
        print(text)
        return facts

    # Commands

    def _demonstrations(self, data: Path, amount: int) -> Job:
        given = self._given
        # A hand that trembles; without any noise, 2,000 were not enough. Nothing that goes wrong is shown.
        clean = [
            "--noise-m",
            "0",
            "0.003",
            "0.006",
            "--burst-chance",
            "0",
            "--flip-chance",
            "0",
            "--switch-share",
            "0",
        ]
        words = ["--episodes", amount, "--objects", 1, *clean, "--shard-episodes", 10]
        share = max(1, given.processes * amount // sum(given.amounts))
        return _job(data, "tools.train", "data", data, *words, "--processes", share)

    def _fit(self, run: Path, steps: int, span: float, *more: object) -> Job:
        words = ("--steps", steps, "--span", span, "--prompts", 1, *self._given.fit.split(), *more)
        return _job(run, "tools.train", "fit", _data(run), run, *words)

    @staticmethod
    def _export(run: Path) -> Job:
        return _job(run / "checkpoint", "tools.train", "export", run, run / "checkpoint")

    def _measurement(self, run: Path, file: Path, seed: int, count: int) -> Job:
        words = ("--seed", seed, "--episodes", count, "--processes", self._given.simulations)
        return _job(file, "tools.flywheel.evaluate", run / "checkpoint", file, *words)

    def _recordings(self, kind: str, weak: Path) -> list[Job]:
        given, bags, made = self._given, self._folder / "bags" / kind, self._folder / "sets" / kind
        words = ("--episodes", given.episodes, "--processes", max(1, round(_SHARES[kind] * given.processes)))
        form = ("--config", "demo", "--action", _ACTION, "--clock", "frames", "--fps", 10, "--crf", 12)
        return [
            _job(bags / JOURNAL, "tools.flywheel.collect", kind, weak / "checkpoint", bags, *words),
            _job(made, "vla_ros.cli", "export", bags, "--output", made, *form),
        ]

    def _continued(self, kind: str, weak: Path) -> Job:
        run = self._folder / kind
        made = self._folder / "sets" / kind if kind in KINDS else "none"
        return _job(_data(run), "tools.flywheel.lerobot", made, weak, _data(weak), run, _data(run))

    def _do(self, chains: Sequence[Sequence[Job]]) -> None:
        """Run chains of commands side by side, each on a GPU; without GPUs, one after another."""
        with ThreadPoolExecutor(len(chains) if self._given.gpus else 1) as pool:
            failures = [each for each in pool.map(self._follow, chains, range(len(chains))) if each]
        if failures:
            raise VlaRosError("; ".join(failures))

    def _follow(self, chain: Sequence[Job], number: int) -> str:
        """Run the commands of a chain that are not complete; return which one failed, or ""."""
        environment, given = dict(os.environ), self._given
        if given.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(given.gpus[number % len(given.gpus)])
        for job in chain:
            name = job.made.relative_to(self._folder).with_suffix("").as_posix().replace("/", "-")
            done, log = (self._folder / folder / name for folder in ("done", "logs"))
            if done.exists():
                continue
            for path in (done, log):
                path.parent.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            with log.open("w", encoding="utf-8") as stream:
                print(*job.words, file=stream, flush=True)
                command = [sys.executable, "-m", *job.words]
                ended = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
            if ended.returncode:
                return f"{log}: failed with status {ended.returncode}"
            done.touch()
            now = time.monotonic()
            print(f"{now - self._began:6.1f} s: {name} took {now - began:.1f} s", flush=True)
        return ""


def _job(made: Path, *words: object) -> Job:
    return Job([str(word) for word in words], made)


def _data(run: Path) -> Path:
    return run.with_name(f"{run.name}-data")


def _read(file: Path) -> dict[int, bool]:
    return {int(seed): bool(won) for seed, won in read_json(file).items()}


def _journal(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text(encoding="utf-8")))


def _rate(file: Path) -> float:
    won = _read(file)
    return sum(won.values()) / len(won)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.flywheel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path)
    add("--amounts", type=int, nargs="+", default=[200, 400, 800, 1600], metavar="N", help="demonstrations")
    add("--steps", type=int, default=2000, metavar="N", help="of the weak policies' training")
    add("--more-steps", type=int, default=1000, metavar="N", help="of the training that continues it")
    add("--span", type=float, default=0.0, metavar="S", help="seconds after which the weak policies' training ends")
    add("--more-span", type=float, default=0.0, metavar="S", help="seconds more of the training that continues it")
    add("--fit", default="", metavar="WORDS", help="further options of python -m tools.train fit")
    add("--episodes", type=int, default=50, metavar="N", help="of each kind")
    add("--choice", type=int, default=100, metavar="N", help="scenes that choose the weak policy")
    add("--scenes", type=int, default=400, metavar="N", help="held-out scenes of the table")
    add("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    add("--simulations", type=int, default=os.cpu_count() or 1, metavar="N", help="of one policy at a time")
    add("--gpus", type=int, nargs="*", default=[], metavar="GPU", help="numbers; none: one command at a time")
    try:
        Flywheel(parser.parse_args()).run()
    except VlaRosError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
