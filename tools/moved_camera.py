"""Measure what viewpoint adapters regain after the table's camera was moved; resumes where it was stopped.

python -m tools.moved_camera FOLDER
python -m tools.moved_camera FOLDER --adapters view-lora --recorded 10 --steps 60 --episodes 40

Records episodes with the moved camera in which a scripted person corrects the checkpoint, or demonstrates the
task while the arm is pushed (--way), trains an adapter of each kind on the first of them, and compares success on
the same held-out scenes with that of the checkpoint alone.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.flywheel.collect import EXPERT
from vla_ros_lab.training.proof import as_json, paired_scores
from vla_ros_models.view import VIEW_FILE, VIEWS

CHECKPOINT = "demo"
TURN = 22.5  # degrees
SCENES, RECORDED = 1_000_000, 2_000_000
"""The first seed of each."""

RATES = {"view": 0.001, "view-lora": 0.0002}
# The demo's checkpoint was trained on a gripper that closes at 0.7.
TRAINING = "--config demo -p gripper.closed_value:=0.7"
DEMONSTRATIONS, CORRECTIONS = WAYS = ("demonstrations", "corrections")
"""What shows the task with the moved camera: the expert, or a person who corrects the checkpoint."""


def run(*words: object) -> None:
    """Run a module with arguments."""
    subprocess.run([sys.executable, "-m", *map(str, words)], check=True)


def recording(
    way: str, checkpoint: Path | str, bags: Path, count: int, processes: int, place: str
) -> tuple[object, ...]:
    """Return the command that records episodes in a :data:`WAYS`; ``place`` are options of ``vla-ros demo``."""
    who = ("corrected", checkpoint) if way == CORRECTIONS else ("autonomous", EXPERT)
    words = ("--episodes", count, "--seed", RECORDED, "--processes", processes, f"--place={place}")
    return "tools.flywheel.collect", *who, bags, *words


def training(
    adapter: str, checkpoint: Path | str, bags: Sequence[Path], output: Path, rate: float, options: str
) -> tuple[object, ...]:
    """Return the command that trains an adapter; ``options`` are those of ``vla-ros finetune``."""
    how = ("--adapter", adapter, "--learning-rate", rate, "--no-recompute", "--hold-out", 0, "--output", output)
    return "vla_ros.cli", "finetune", *bags, "--checkpoint", checkpoint, *how, *options.split()


def is_trained(output: Path) -> bool:
    """Return whether a training in this folder is complete."""
    return (output / "evidence" / "evidence.json").exists()


def record(folder: Path, way: str, count: int, processes: int) -> list[Path]:
    """Return the bags of ``count`` episodes; who demonstrates is pushed, and told another object halfway."""
    bags, more = folder / way, "--bump 0.05 --switch-at 8" if way == DEMONSTRATIONS else ""
    run(*recording(way, CHECKPOINT, bags, count, processes, f"--camera-turn {TURN} {more}"))
    return sorted(path for path in bags.iterdir() if path.is_dir())


def score(folder: Path, name: str, count: int, processes: int, *words: str) -> Path:
    """Return the file of the scores with the moved camera."""
    file = folder / "scores" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    seeds = ("--seed", SCENES, "--episodes", count, "--shards", processes)
    place = ("-b", f"camera_turn={TURN}", "--sync", "--resume", "--json", file)
    run("vla_ros.cli", "eval", "table", "--checkpoint", CHECKPOINT, *seeds, *place, *words)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path)
    add("--adapters", nargs="+", default=list(VIEWS), choices=VIEWS)
    add("--way", default=CORRECTIONS, choices=WAYS, help="what is recorded")
    add("--recorded", nargs="+", type=int, default=[10, 3, 1], metavar="N", help="episodes to train on")
    add("--rate", type=float, default=0.0, metavar="R", help=f"learning rate (default: {RATES})")
    add("--steps", type=int, default=300, metavar="N", help="of each training")
    add("--episodes", type=int, default=100, metavar="N", help="held-out scenes")
    add("--processes", type=int, default=1, metavar="N", help="simulations at a time")
    usual = "--device cpu --batch 8 --workers 0"
    add("--training", default=usual, metavar="WORDS", help=f"options of vla-ros finetune (default: {usual})")
    add("-p", dest="param", action="append", default=[], metavar="NAME:=VALUE", help="option of the scored node")
    given = parser.parse_args()
    folder, seeds = given.folder, (given.episodes, given.processes)
    options = f"{TRAINING} --steps {given.steps} {given.training}"
    param = [word for each in given.param for word in ("-p", each)]
    weak = score(folder, "moved", *seeds, *param)
    rows = {}
    bags = record(folder, given.way, max(given.recorded), given.processes)
    for count in given.recorded:
        for adapter in given.adapters:
            name, rate = f"{adapter}-{given.way}-{count}", given.rate or RATES[adapter]
            if not is_trained(output := folder.resolve() / name):
                run(*training(adapter, CHECKPOINT, bags[:count], output, rate, options))
            new = score(folder, name, *seeds, *param, "-p", f"policy.view:={output / VIEW_FILE}")
            rows[name] = as_json(found := paired_scores(weak, new))
            (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main()
