"""Deploy, correct, export, fine-tune, deploy: does a policy get better by corrections?

  python -m tools.flywheel FOLDER

Deploys the demo's policy in a place that its demonstrations do not show, because the camera was moved. It finds out
how far the camera must be moved for a success of about 60 %, and records there 50 episodes that a scripted person
corrects with a leader arm, 50 that the person demonstrates, and 50 in which the policy succeeds alone. Each set is
exported to LeRobot's format and continues the training, together with some of the policy's demonstrations; a fourth
training continues with those alone. All are measured on the same held-out scenes.

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
from statistics import fmean
from typing import Any

from tools.flywheel.collect import JOURNAL, KINDS
from tools.flywheel.table import compare, markdown
from vla_ros.config.checkpoints import folder_of
from vla_ros.errors import VlaRosError
from vla_ros_models.checkpoint_files import read_json

_CHOICE, _SCENES = 2_000_000, 1_000_000  # first seeds of the scenes that choose the place, and of the table
_WANTED = 0.6
_PLACES = (5.0, 10.0, 15.0, 20.0, 30.0, 40.0)
_FIT = "--learning-rate 2e-4 --warmup 30"
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
        self._data, self._began = self._folder / "demonstrations", time.monotonic()

    def run(self) -> dict[str, Any]:
        """Make the table, and return what is in table.json."""
        given, folder = self._given, self._folder
        place, rates = self._choose()
        scenes = {name: folder / "scenes" / f"{name}.json" for name in ("weak", *NAMES)}
        measured = (_SCENES, given.scenes, given.simulations)
        self.do([
            [self._measurement(given.begin, scenes["weak"], place, *measured)],
            *([
                *(self._recordings(kind, place) if kind in KINDS else ()),
                self._continued(kind),
                self._fit(folder / kind),
                _job(made := folder / kind / "checkpoint", "tools.train", "export", folder / kind, made),
                self._measurement(made, scenes[kind], place, *measured),
            ] for kind in NAMES),
        ])  # fmt: skip
        return self._table(place, rates)

    def _choose(self) -> tuple[str, dict[str, float]]:
        """Return the place whose success is nearest to 60 %, and the success in each; looks twice, then closer."""
        given, rates = self._given, dict[str, float]()
        values, chains = list(given.places), [[self._demonstrations()]]
        for count in (given.choice, 2 * given.choice):
            files = {f"--{given.change} {value:g}": self._folder / f"choice/{value:g}.json" for value in values}
            seen = (_CHOICE, count, max(1, 2 * given.simulations // len(files)))
            looks = [[self._measurement(given.begin, file, place, *seen)] for place, file in files.items()]
            self.do(chains + looks)
            found = {place: fmean(_read(file).values()) for place, file in files.items()}
            rates, chains = rates | found, []
            last = max((row for row, rate in enumerate(found.values()) if rate > _WANTED), default=0)
            low, high = values[last], values[min(last + 1, len(values) - 1)]
            values = [low + share * (high - low) for share in (0.25, 0.5, 0.75)]
        place = min(found, key=lambda each: abs(rates[each] - _WANTED))
        print(f"success by place: {rates}; chosen: {place}", flush=True)
        return place, rates

    def _table(self, place: str, rates: dict[str, float]) -> dict[str, Any]:
        given, folder = self._given, self._folder
        won = {name: _read(folder / "scenes" / f"{name}.json") for name in ("weak", *NAMES)}
        names = {"weak": f"{given.begin.name}, with {place}"} | NAMES
        rows = {names[name].format(given.episodes): compare(won["weak"], won[name]) for name in won}
        frames = {name: read_json(_data(folder / name) / "frames.json") for name in NAMES}
        journals = {
            kind: json.loads((folder / "bags" / kind / JOURNAL).read_text(encoding="utf-8")) for kind in KINDS
        }
        facts = {
            "options": {name: str(value) for name, value in vars(given).items()},
            "success_by_place": rates,
            "place": place,
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

    def _demonstrations(self) -> Job:
        words = ("--episodes", self._given.demonstrations, "--shard-episodes", 10)
        return _job(self._data, "tools.train", "data", self._data, *words, "--processes", self._given.processes)

    def _fit(self, run: Path) -> Job:
        given = self._given
        words = ("--steps", given.steps, "--span", given.span, "--prompts", 1, *_UNSEEN, *given.fit.split())
        return _job(run, "tools.train", "fit", _data(run), run, *words)

    @staticmethod
    def _measurement(checkpoint: Path, file: Path, place: str, seed: int, count: int, processes: int) -> Job:
        words = ("--seed", seed, "--episodes", count, "--processes", processes, f"--place={place}")
        return _job(file, "tools.flywheel.evaluate", checkpoint, file, *words)

    def _recordings(self, kind: str, place: str) -> list[Job]:
        given, bags, made = self._given, self._folder / "bags" / kind, self._folder / "sets" / kind
        processes = max(1, round(_SHARES[kind] * given.processes))
        words = ("--episodes", given.episodes, "--processes", processes, f"--place={place}")
        form = ("--config", "demo", "--action", _ACTION, "--clock", "frames", "--fps", 10, "--crf", 12)
        return [
            _job(bags / JOURNAL, "tools.flywheel.collect", kind, given.begin, bags, *words),
            _job(made, "vla_ros.cli", "export", bags, "--output", made, *form),
        ]

    def _continued(self, kind: str) -> Job:
        run = self._folder / kind
        made = self._folder / "sets" / kind if kind in KINDS else "none"
        return _job(_data(run), "tools.flywheel.lerobot", made, self._given.begin, self._data, run, _data(run))

    def do(self, chains: Sequence[Sequence[Job]]) -> None:
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


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.flywheel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path)
    add("--begin", type=Path, default=folder_of("demo"), metavar="DIR", help="checkpoint to deploy")
    add("--change", default="camera-turn", metavar="NAME", help="option of vla-ros demo that makes another place")
    add("--places", type=float, nargs="+", default=_PLACES, metavar="V", help="values of it, harder and harder")
    add("--demonstrations", type=int, default=600, metavar="N", help="of the policy's own, in all trainings")
    add("--steps", type=int, default=600, metavar="N", help="of the training that continues it")
    add("--span", type=float, default=0.0, metavar="S", help="seconds after which that training ends")
    add("--fit", default=_FIT, metavar="WORDS", help="further options of python -m tools.train fit")
    add("--episodes", type=int, default=50, metavar="N", help="of each kind")
    add("--choice", type=int, default=100, metavar="N", help="scenes of each place, to choose it")
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
