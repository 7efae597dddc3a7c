"""Measure what geometric tokens gain, on the simulated table or on LIBERO; resumes where it was stopped.

python -m tools.geometry FOLDER
python -m tools.geometry FOLDER --gpus 2 --processes 30 --seconds 430
python -m tools.geometry FOLDER --libero ~/libero/bin/python --shards 5      Python of LIBERO and vla-eval

Trains small pi0.5 of one size on the same demonstrations, with and without tokens, and compares their success on
the same held-out scenes: as trained, with targets outside the region of the demonstrations, and with the camera
moved around the table. Policies with tokens also run with the depth of a stereo camera, and a wrong calibration;
those without also with viewpoint adapters, trained on a few episodes with the moved camera.
"""

import argparse
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tools.flywheel.collect import JOURNAL
from tools.libero.expert import TASKS
from tools.libero.scene import POINTS
from tools.libero.score import NODE
from tools.moved_camera import DEMONSTRATIONS, RATES, WAYS, is_trained, recording, training
from tools.train.data import POINTS_OPTIONS, size_options
from vla_ros_lab.eval.intervals import paired, wilson
from vla_ros_models.view import VIEW, VIEW_FILE, VIEW_LORA, VIEWS

SHRINK = 0.06
"""Metres by which the region of the demonstrations' objects is smaller, so that the camera sees what is outside."""

WRONG, SENSOR = ("-b", "extrinsics=[0.02, 3.0]"), ("-b", "depth_sensor=true")
PLACES: Mapping[str, tuple[str, ...]] = {
    "as trained": (),
    "camera moved by 22.5 degrees": ("-b", "camera_turn=22.5"),
    "displaced by 8 cm": ("-b", "displace=0.08"),
    "displaced by 4 cm": ("-b", "displace=0.04"),
    "displaced by 12 cm": ("-b", "displace=0.12"),
    "camera moved by 10 degrees": ("-b", "camera_turn=10.0"),
    "camera moved by 35 degrees": ("-b", "camera_turn=35.0"),
}
"""Conditions for all policies, the most telling first."""

DEPTHS: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("as trained", "stereo camera", SENSOR),
    ("camera moved by 22.5 degrees", "wrong calibration", WRONG),
    ("as trained", "wrong calibration", WRONG),
    ("camera moved by 10 degrees", "wrong calibration", WRONG),
    ("camera moved by 35 degrees", "wrong calibration", WRONG),
)
"""Conditions for policies with tokens: a place, and how its points are wrong."""

CONDITIONS: Sequence[tuple[str, tuple[str, ...]]] = (
    *PLACES.items(),
    *((f"{place}, {how}", (*PLACES[place], *words)) for place, how, words in DEPTHS),
)
PLAIN, TOKENS = "plain", "tokens"
TURNS = (22.5, 10.0, 35.0)
ADAPTERS = {VIEW: "FTM", VIEW_LORA: "FLA"}
"""Viewpoint adapters by the names of their paper."""

CHUNKS = "-p control.rate_hz:=20.0 -p policy.horizon:=16 -p control.execute_steps:=8"
"""The expert moves as in the demonstrations of the policies."""

ADAPTING = "--config demo --config demo_pi --base-dtype float32 --augment none"
SCENES = 1_000_000
"""The first seed of an evaluation."""

DATA = (
    "--horizon 16 --rate-hz 20 --max-steps 120 --noise-m 0 0.0015 0.003 0.0045 --every 2 --shard-episodes 10 "
    f"--points --shrink {SHRINK}"
)

SPREAD = 0.5
"""Share of the usual distances by which LIBERO's objects are moved in demonstrations, for the same reason."""

SIDE = 112
SMALL_DATA = f"--objects 1 --switch-share 0 --side {SIDE}"
SMALL_NET = (
    "--prompts 1 --vision-width 96 --vision-blocks 2 --prefix-width 96 --prefix-hidden 192 --expert-width 64 "
    "--expert-hidden 128 --depth 3 --heads 3 --head-dim 32"
)
"""What a machine without a GPU trains in minutes: one object, images of 112 pixels, a network of a tenth."""


@dataclass(frozen=True, order=True)
class Net:
    """A policy to train."""

    kind: str  # :data:`PLAIN` or :data:`TOKENS`
    shift: int  # patches by which its images were shifted at most
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.shift}-{self.seed}"


@dataclass(frozen=True)
class Adaptation:
    """A viewpoint adapter to train."""

    net: Net
    turn: float  # of the camera, degrees
    way: str  # one of :data:`~.moved_camera.WAYS`
    adapter: str  # one of :data:`ADAPTERS`

    @property
    def place(self) -> str:
        return f"camera moved by {self.turn:g} degrees"

    def label(self, count: int) -> str:
        return f"{ADAPTERS[self.adapter]} of {count} {self.way}"


Outcomes = Mapping[tuple[int, str, int], bool]
"""Whether an episode succeeded, by the policy's seed, the task and the initial state."""


class StopError(Exception):
    """No time is left."""


class Commands:
    """Runs commands until ``seconds`` have passed; then ends those that run, and starts no other."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def run(self, log: Path, *words: object, python: str = sys.executable, **variables: str) -> None:
        """Run a module of a Python with its output in ``log``; raises StopError, or CalledProcessError."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise StopError
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [python, "-m", *map(str, words)]
        with log.open("a", encoding="utf-8") as stream:
            environment = {**os.environ, **variables}
            running = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
            try:
                status = running.wait(left)
            except subprocess.TimeoutExpired:
                running.terminate()  # an evaluation writes what it has
                running.wait()
                raise StopError from None
        if status:
            raise subprocess.CalledProcessError(status, command, log.read_text(encoding="utf-8")[-2000:])


class Study:
    """The stages, on the simulated table; each resumes, and does nothing if it is done."""

    max_steps = 100  # control steps of an episode, at 20 Hz
    _last = "README.md"  # file that an export writes last
    _without_gpu: Mapping[str, str] = MappingProxyType({"CUDA_VISIBLE_DEVICES": ""})

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._folder: Path = given.folder
        self._commands = Commands(given.seconds)
        every = ",".join(map(str, range(max(given.gpus, 1))))
        self._gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or every).split(",")[: max(given.gpus, 1)]
        self._trainings = given.trainings or len(self._gpus)
        self._devices: queue.Queue[str] = queue.Queue()
        for _, device in zip(range(self._trainings), itertools.cycle(self._gpus), strict=False):
            self._devices.put(device)
        self.nets = [
            Net(kind, shift, seed) for seed in range(given.seeds) for shift in given.shifts for kind in given.kinds
        ]
        self.adaptations = [
            Adaptation(net, turn, way, adapter)
            for way in given.ways
            for turn in given.turns
            for net in self.nets
            if net.kind == PLAIN and given.adapted and not given.libero
            for adapter in VIEWS
        ]
        self._recording = threading.Lock()

    def record(self) -> None:
        if all(map(self._is_exported, self.nets)):
            return
        given, small = self._given, SMALL_DATA if self._given.small else ""
        words = (*f"{DATA} {small}".split(), "--episodes", given.demonstrations, "--processes", given.processes)
        self._commands.run(self._log("data"), "tools.train", "data", self._folder / "data", *words)

    def train(self, net: Net) -> Path:
        """Return the folder of the checkpoint."""
        given, run, output = self._given, self._folder / "runs" / net.name, self._checkpoint(net)
        if self._is_exported(net):
            return output
        how: tuple[object, ...] = ("--steps", given.steps, "--batch", given.batch, "--seed", net.seed)
        how += ("--learning-rate", given.learning_rate, "--warmup", min(200, given.steps // 4))
        how += (*(("--geometry",) if net.kind == TOKENS else ()), *(("--compile",) if given.compile else ()))
        device = self._devices.get()
        try:
            threads = {"OMP_NUM_THREADS": str(given.threads), "CUDA_VISIBLE_DEVICES": device}
            fit, export = self._stages(net)
            log = self._log(net.name)
            self._commands.run(log, *fit, self._folder / "data", run, *how, **threads)
            self._commands.run(log, *export, run, output, **threads)
        finally:
            self._devices.put(device)
        return output

    def adapt(self, index: int, one: Adaptation) -> Path:
        """Return the file of an adapter; the same episodes train both kinds."""
        given, checkpoint = self._given, self._checkpoint(one.net)
        who = f"{one.turn:g}" if one.way == DEMONSTRATIONS else f"{one.net.name}-{one.turn:g}"
        bags = self._folder / one.way / who
        output = self._folder / "adapters" / f"{one.net.name}-{one.turn:g}-{one.way}-{one.adapter}"
        place = f"--shrink {SHRINK} --camera-turn {one.turn} {CHUNKS if one.way == DEMONSTRATIONS else ''}"
        if given.small:
            place += " --objects 1 " + " ".join(f"-p {option}" for option in size_options(SIDE))
        with self._recording:
            if not (bags / JOURNAL).exists():
                words = recording(one.way, checkpoint, bags, given.adapted, given.processes, place)
                self._commands.run(
                    self._log(f"{one.way}-{who}"), *words, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
                )
        if not is_trained(output):
            options = f"{ADAPTING} --steps {given.adapter_steps} --batch 32 --workers {given.shards - 1}"
            rate = given.adapter_rates[VIEWS.index(one.adapter)]
            threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": self._gpus[index % len(self._gpus)]}
            words = training(one.adapter, checkpoint, [bags], output, rate, options)
            self._commands.run(self._log(output.name), *words, **threads)
        return output / VIEW_FILE

    def _stages(self, net: Net) -> tuple[Sequence[object], Sequence[object]]:
        """Return the beginnings of the commands that train and that export."""
        fit = ("fit-flow", "--shift", net.shift, *(SMALL_NET.split() if self._given.small else ()))
        return ("tools.train", *fit), ("tools.train", "export-flow")

    def score(self, net: Net, name: str, words: Sequence[str]) -> None:
        """Score a policy in one condition."""
        given, file = self._given, self._file(net, name)
        benchmark, options = self._scenes(net)
        options = ["policy.device:=cpu", "policy.threads:=1", "control.execute_steps:=8", *options]
        node = [word for option in options for word in ("-p", option)]
        how = ("--sync", "--resume", "--shards", given.shards, "--max-steps", given.max_steps or self.max_steps)
        what = ("--policy", "pi", "--checkpoint", self._checkpoint(net), "--json", file)
        log, cpu = self._log(f"{file.stem}-eval"), {"OMP_NUM_THREADS": "1", **self._without_gpu}
        file.parent.mkdir(parents=True, exist_ok=True)
        self._commands.run(log, "vla_ros.cli", "eval", *benchmark, *what, *how, *words, *node, **cpu)

    def _scenes(self, net: Net) -> tuple[Sequence[object], Sequence[str]]:
        """Return the words that say which scenes are run, and the node's options."""
        given = self._given
        scenes = ("table", "--seed", SCENES, "--episodes", given.episodes, "-b", f"shrink={SHRINK}")
        options = POINTS_OPTIONS if net.kind == TOKENS else ()
        return (*scenes, *(("-b", "objects=1") if given.small else ())), (
            *options,
            *(size_options(SIDE) if given.small else ()),
        )

    def run(self) -> list[str]:
        """Run all stages; return what failed."""
        self.record()
        given = self._given
        jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        failed: list[str] = []

        trained, lock = set[Net](), threading.Lock()

        def train(position: int) -> None:
            net = self.nets[position]
            with self._noted(failed):
                self.train(net)
                with lock:  # all kinds of a seed, or the first to be trained would take all the time
                    trained.add(net)
                    kinds = [replace(net, kind=kind) for kind in given.kinds]
                    for one in kinds if trained.issuperset(kinds) else ():
                        most = min(given.conditions, len(CONDITIONS) if one.kind == TOKENS else len(PLACES))
                        for index in range(most):
                            jobs.put((index, self.nets.index(one), partial(self.score, one, *CONDITIONS[index])))

        def adapt(position: int) -> None:
            one = self.adaptations[position]
            with self._noted(failed):
                view = ("-p", f"policy.view:={self.adapt(position, one).resolve()}")
                words = (*PLACES[one.place], *view)
                name = f"{one.place}, {one.label(given.adapted)}"
                jobs.put((len(CONDITIONS), position, partial(self.score, one.net, name, words)))

        def score() -> None:
            while (job := jobs.get()[2]) is not None:
                with self._noted(failed):
                    job()

        workers = max(1, given.processes // given.shards)
        scorers = [threading.Thread(target=score) for _ in range(workers)]
        for one in scorers:
            one.start()
        try:
            with ThreadPoolExecutor(self._trainings) as trainers:
                list(trainers.map(train, range(len(self.nets))))
            with ThreadPoolExecutor(workers if given.gpus else 1) as trainers:
                list(trainers.map(adapt, range(len(self.adaptations))))
        finally:
            for _ in scorers:
                jobs.put((len(CONDITIONS) + 1, 0, None))
            for one in scorers:
                one.join()
        return failed

    @staticmethod
    @contextmanager
    def _noted(failed: list[str]) -> Iterator[None]:
        """Note a command that failed; what is left undone for lack of time is no failure."""
        try:
            yield
        except StopError:
            pass
        except subprocess.CalledProcessError as error:
            failed.append(f"{error}\n{error.output}")

    def rows(self) -> list[dict[str, Any]]:
        """Return what has been measured: success on the same scenes with and without something, the difference."""
        found, count = [], self._given.adapted
        for shift in self._given.shifts:
            plain = {place: self._outcomes(PLAIN, shift, place) for place in PLACES}
            for place in PLACES:
                names = {"tokens": (TOKENS, place)}
                names |= {f"tokens, {how}": (TOKENS, f"{place}, {how}") for one, how, _ in DEPTHS if one == place}
                labels = dict.fromkeys(one.label(count) for one in self.adaptations if one.place == place)
                names |= {label: (PLAIN, f"{place}, {label}") for label in labels}
                for what, (kind, name) in names.items():
                    outcomes = compared(plain[place], self._outcomes(kind, shift, name))
                    found.append({"shift": shift, "place": place, "with": what, **outcomes})
        return [row for row in found if row["pairs"]]

    def _outcomes(self, kind: str, shift: int, name: str) -> Outcomes:
        nets = [net for net in self.nets if (net.kind, net.shift) == (kind, shift)]
        logs = [(net.seed, self._file(net, name).with_suffix(".episodes.jsonl")) for net in nets]
        texts = [(seed, log.read_text(encoding="utf-8").rpartition("\n")[0]) for seed, log in logs if log.exists()]
        read = [(seed, json.loads(line)) for seed, text in texts for line in text.splitlines()[1:]]
        ended = [(seed, one) for seed, one in read if one["success"] is not None]
        return {(seed, one["task"], one["state"]): one["success"] for seed, one in ended}

    def _checkpoint(self, net: Net) -> Path:
        return self._folder / "checkpoints" / net.name

    def _is_exported(self, net: Net) -> bool:
        return (self._checkpoint(net) / self._last).exists()

    def _file(self, net: Net, name: str) -> Path:
        return self._folder / "scores" / f"{net.name}-{name.replace(', ', '-').replace(' ', '_')}.json"

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"


class LiberoStudy(Study):
    """The same on five tasks of LIBERO, whose Python is ``--libero``; both cameras have points."""

    max_steps = 220
    _last = "tokenizer.json"
    _without_gpu = MappingProxyType({})  # robosuite renders on it, and fails with an empty list

    def record(self) -> None:
        given, done = self._given, self._folder / "data" / "done"
        if done.exists():
            return
        count = max(len(TASKS), given.processes // len(TASKS) * len(TASKS))  # as many of each task
        how: tuple[object, ...] = ("--processes", count, "--episodes", -(-given.demonstrations // count))
        how += ("--points", "--spread", SPREAD, "--seconds", given.record_seconds)
        self._commands.run(
            self._log("data"), "tools.libero.record", self._folder / "data", *how, python=given.libero
        )
        done.touch()

    def _stages(self, net: Net) -> tuple[Sequence[object], Sequence[object]]:
        return ("tools.libero", "fit"), ("tools.libero", "export")

    def _scenes(self, net: Net) -> tuple[Sequence[object], Sequence[str]]:
        scenes: tuple[object, ...] = ("tools.libero.benchmark:Benchmark", "--python", self._given.libero)
        scenes += ("--tasks", ",".join(map(str, TASKS)), "--episodes", -(-self._given.episodes // len(TASKS)))
        scenes += ("--step-timeout", 300, "-b", f"spread={SPREAD}")
        if net.kind == PLAIN:
            return scenes, NODE[1::2]
        keys = f"camera.keys:=[agent, wrist, {', '.join(POINTS)}]"
        topics = ", ".join(f"/{name}/image" for name in ("agentview", "wrist", *POINTS))
        return (*scenes, "-b", "points=true"), (
            *NODE[1::2],
            keys,
            f"camera.topics:=[{topics}]",
            "robot.base_frame:=robot0_base",
        )


def compared(plain: Outcomes, other: Outcomes) -> dict[str, Any]:
    """Return the successes of both on the scenes that both have, with their intervals, and the difference."""
    both = plain.keys() & other.keys()
    lost, gained = (sum(a[key] and not b[key] for key in both) for a, b in ((plain, other), (other, plain)))
    found: dict[str, Any] = {}
    for kind, one in ((PLAIN, plain), ("other", other)):
        won = sum(one[key] for key in both)
        found |= {kind: [won, len(both)], f"{kind}_interval": wilson(won, len(both))}
    difference = (gained - lost) / len(both) if both else None
    return found | {"pairs": len(both), "difference": difference, "interval": paired(lost, gained, len(both))}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| shift | condition | with | without it | with it | difference, points (95 %) | pairs |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        cells = [str(row["shift"]), str(row["place"]), str(row["with"])]
        for kind in (PLAIN, "other"):
            (won, count), (low, high) = row[kind], row[f"{kind}_interval"]
            cells.append(f"{won} of {count} ({100 * low:.0f} to {100 * high:.0f} %)")
        low, high = row["interval"]
        cells.append(f"{100 * row['difference']:+.1f} ({100 * low:+.0f} to {100 * high:+.0f})")
        lines.append(f"| {' | '.join([*cells, str(row['pairs'])])} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, cores = parser.add_argument, os.cpu_count() or 1
    add("folder", type=Path)
    add("--demonstrations", type=int, default=2500, metavar="N", help="episodes of the expert")
    add("--steps", type=int, default=2000, metavar="N", help="of each training")
    add("--batch", type=int, default=256, metavar="N", help="frames of a step")
    add("--compile", action="store_true", help="compile the training step")
    add("--learning-rate", type=float, default=8e-4, metavar="R", help="highest rate")
    add("--small", action="store_true", help="one object, small images and a small network, for a CPU")
    add("--conditions", type=int, default=len(CONDITIONS), metavar="N", help="score only the first N conditions")
    add("--threads", type=int, default=4, metavar="N", help="threads of a training")
    add("--seeds", type=int, default=2, metavar="N", help="policies of each kind")
    add(
        "--shifts",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="patches by which images are shifted at most",
    )
    add("--episodes", type=int, default=100, metavar="N", help="held-out scenes of a condition")
    add("--max-steps", type=int, metavar="N", help="control steps of an episode, at 20 Hz (table 100, LIBERO 220)")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs that train")
    add("--trainings", type=int, metavar="N", help="trainings at a time (default: one a GPU)")
    add("--processes", type=int, default=max(1, cores - 2), metavar="N", help="processes of all evaluations")
    add("--shards", type=int, default=4, metavar="N", help="processes of one evaluation")
    add("--kinds", nargs="+", default=[PLAIN, TOKENS], choices=(PLAIN, TOKENS), help="of policies")
    add("--adapted", type=int, default=10, metavar="N", help="episodes of a viewpoint adapter; 0: no adapters")
    add("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="who shows these episodes")
    add("--turns", type=float, nargs="+", default=list(TURNS), choices=TURNS, help="of the camera, degrees")
    add("--adapter-steps", type=int, default=400, metavar="N", help="of an adapter's training, 32 frames each")
    rates = [RATES[one] for one in VIEWS]
    add("--adapter-rates", type=float, nargs=2, default=rates, metavar="R", help="learning rates of FTM and FLA")
    add("--seconds", type=float, default=1e9, metavar="S", help="end after this long; the next run goes on")
    add("--libero", metavar="PY", help="measure on LIBERO, whose Python this is")
    add("--record-seconds", type=float, default=1e9, metavar="S", help="of LIBERO's demonstrations, at most")
    given = parser.parse_args()
    if given.libero and (given.small or given.shifts != [0]):
        parser.error("--libero: --small and --shifts are the table's")
    sources = Path(__file__).parents[1] / "src"  # which LIBERO's Python needs, too
    os.environ["PYTHONPATH"] = os.pathsep.join([str(sources), os.environ.get("PYTHONPATH", "")])
    study = LiberoStudy(given) if given.libero else Study(given)
    failed: list[str] = []
    try:
        failed = study.run()
    except StopError:
        failed = ["no time was left for the demonstrations"]
    rows = study.rows()
    (given.folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (given.folder / "table.md").write_text(table(rows), encoding="utf-8")
    print(table(rows), *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
