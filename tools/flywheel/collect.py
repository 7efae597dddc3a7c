"""Record episodes of a policy on the simulated table: corrected by a scripted person, or autonomous.

  python -m tools.flywheel.collect corrected CHECKPOINT FOLDER --episodes 50
  python -m tools.flywheel.collect autonomous expert FOLDER --episodes 10      demonstrations of the scripted expert

Kept are corrected episodes with a takeover, and the autonomous ones that succeed. The same command resumes.
"""

import argparse
import json
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

from tools.flywheel.session import OPTIONS, Session
from vla_ros.errors import VlaRosError
from vla_ros.execution.source import PolicySource
from vla_ros.policies.base import create
from vla_ros_lab.eval.arguments import parse, plan_demo
from vla_ros_lab.eval.scene import episode_options, make_table, rate_of

KINDS = ("corrected", "autonomous")
JOURNAL = "episodes.json"

_SECONDS = 15  # of simulated time; a corrected episode is longer
EXPERT = "expert"
_ALONE = ("-p", "policy.device:=cpu", "-p", "policy.threads:=1")


class Collector:
    """Records episodes of one kind in ``folder``, with one policy and one table."""

    def __init__(self, kind: str, checkpoint: Path | str, folder: Path, place: str) -> None:
        self._kind, self._folder = kind, folder
        takeover = [word for option in OPTIONS for word in ("-p", option)]
        who: tuple[str, ...] = ("--checkpoint", str(checkpoint), *_ALONE)
        if checkpoint == EXPERT:
            who = ("--policy", EXPERT, "--actions", "joint_position")
        how = ("--simulated-time", *place.split(), "-p", "control.schedule:=sync", *takeover)
        self._arguments = parse(*who, *how)
        self._config = plan_demo(self._arguments).config
        if kind != "autonomous":
            self._arguments.max_steps = round(_SECONDS * rate_of(self._config))
        self._source = PolicySource(create(self._config))
        self._source.load()  # before rendering: torch crashes if Mesa has loaded its LLVM
        self._table = make_table(self._arguments, self._config)

    def close(self) -> None:
        self._table.close()
        self._source.close()

    def record(self, seed: int) -> dict[str, int | bool]:
        """Record the episode of ``seed``, and remove its bag if it is not kept; return what happened."""
        path, kind = self._folder / str(seed), self._kind
        shutil.rmtree(path, ignore_errors=True)
        session = Session(
            self._table, self._config, self._source, episode_options(self._arguments, self._config), path,
            helps=kind == "corrected",
        )  # fmt: skip
        result = session.run(seed)
        kept = session.takeovers > 0 if kind == "corrected" else bool(result.success)
        if not kept:
            shutil.rmtree(path)
        outcome = {"seed": seed, "kept": kept, "success": bool(result.success), "steps": result.steps}
        return {**outcome, "takeovers": session.takeovers}


_worker: list[Collector] = []


def _begin_worker(kind: str, checkpoint: Path | str, folder: Path, place: str) -> None:
    _worker.append(Collector(kind, checkpoint, folder, place))


def _record(seed: int) -> dict[str, int | bool]:
    return _worker[0].record(seed)


def collect(
    kind: str, checkpoint: Path | str, folder: Path, count: int, seed: int, processes: int, place: str = ""
) -> list[dict[str, int | bool]]:
    """Record episodes from ``seed`` on until ``count`` are kept; return what happened in each."""
    folder.mkdir(parents=True, exist_ok=True)
    journal, found = folder / JOURNAL, list[dict[str, int | bool]]()
    if journal.exists():
        return list(json.loads(journal.read_text(encoding="utf-8")))
    given, seeds = (kind, checkpoint, folder, place), range(seed, seed + 20 * count)
    if processes == 1:
        with closing(Collector(*given)) as collector:
            for each in seeds:
                found.append(collector.record(each))
                if sum(one["kept"] for one in found) == count:
                    break
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, context, _begin_worker, given) as pool:
            for outcome in pool.map(_record, seeds):
                found.append(outcome)
                if sum(one["kept"] for one in found) == count:
                    break
            pool.shutdown(cancel_futures=True)
    kept = {str(one["seed"]) for one in found if one["kept"]}
    for path in folder.iterdir():  # others were recorded meanwhile
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
    if not kept:
        raise VlaRosError(f"{folder}: none of {len(found)} {kind} episodes can be kept")
    journal.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("checkpoint", help=f"of the policy, or {EXPERT}")
    parser.add_argument("folder", type=Path, help="folder of the bags")
    parser.add_argument("--episodes", type=int, default=50, metavar="N", help="episodes to keep")
    parser.add_argument("--seed", type=int, default=3_000_000, metavar="S", help="seed of the first episode")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--place", default="", metavar="WORDS", help="options of vla-ros demo")
    given = parser.parse_args()
    how = (given.episodes, given.seed, given.processes, given.place)
    found = collect(given.kind, given.checkpoint, given.folder, *how)
    won = sum(one["success"] for one in found)
    kept, taken = sum(one["kept"] for one in found), sum(one["takeovers"] for one in found)
    print(f"{given.folder}: {len(found)} episodes, {won} succeeded, {taken} takeovers, {kept} kept")


if __name__ == "__main__":
    main()
