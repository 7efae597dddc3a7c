"""Measure what viewpoint adapters regain after the table's camera was moved; resumes where it was stopped.

python -m tools.moved_camera FOLDER
python -m tools.moved_camera FOLDER --adapters view --demonstrations 10 --episodes 100

Records demonstrations of the scripted expert with the moved camera, trains an adapter of each kind on the first
episodes of them, and compares success on the same held-out scenes with that of the checkpoint alone.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.flywheel.evaluate import evaluate
from tools.flywheel.table import compare, markdown
from vla_ros_models.view import VIEW_FILE, VIEWS

CHECKPOINT = "demo"
FIRST = 2_000_000
"""Seed of the first demonstration; scenes have smaller ones."""

PART = 10
"""Episodes of one process, whose results are written together."""

TRAINING = {
    "view": ("--steps", "80", "--learning-rate", "0.03"),
    "view-lora": ("--steps", "60", "--learning-rate", "0.002"),
}


def run(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "vla_ros.cli", *map(str, words)], check=True)


def train(folder: Path, adapter: str, count: int, turn: float) -> Path:
    """Return the file of an adapter that was trained on ``count`` demonstrations."""
    bag, output = folder / f"demonstrations-{count}", folder / f"{adapter}-{count}"
    if not (bag / "metadata.yaml").exists():
        run(
            "demo",
            "--policy",
            "expert",
            "--camera-turn",
            turn,
            "--seed",
            FIRST,
            "--episodes",
            count,
            "--record",
            bag,
        )
    if not (output / "evidence" / "evidence.json").exists():
        # The demo's checkpoint was trained on a gripper that closes at 0.7.
        words = (
            "--config",
            "demo",
            "-p",
            "gripper.closed_value:=0.7",
            "--batch",
            16,
            "--workers",
            0,
            "--no-recompute",
        )
        held = ("--hold-out", 0, "--device", "cpu", *TRAINING[adapter])
        run("finetune", bag, "--checkpoint", CHECKPOINT, *words, *held, "--adapter", adapter, "--output", output)
    return output / VIEW_FILE


def measure(folder: Path, name: str, words: str, seeds: range, processes: int) -> Mapping[int, bool]:
    """Return success by seed."""
    found: dict[int, bool] = {}
    for first in range(seeds.start, seeds.stop, PART):
        part = range(first, min(first + PART, seeds.stop))
        found |= evaluate(Path(CHECKPOINT), folder / "scores" / f"{name}-{first}.json", part, processes, words)
        print(f"{name}: {sum(found.values())} of {len(found)}", flush=True)
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path)
    add("--adapters", nargs="+", default=list(VIEWS), choices=VIEWS)
    add("--demonstrations", nargs="+", type=int, default=[10, 3, 1], metavar="N", help="episodes to train on")
    add("--turn", type=float, default=22.5, metavar="DEG", help="by which the camera is moved")
    add("--episodes", type=int, default=100, metavar="N", help="held-out scenes")
    add("--seed", type=int, default=1_000_000, metavar="S", help="of the first scene")
    add("--processes", type=int, default=1, metavar="N", help="of an evaluation")
    options = parser.parse_args(given)
    folder, seeds = options.folder, range(options.seed, options.seed + options.episodes)
    place = f"--camera-turn {options.turn}"
    weak, rows = measure(folder, "moved", place, seeds, options.processes), {}
    rows["the checkpoint, camera moved"] = compare(weak, weak)
    for count in options.demonstrations:
        for adapter in options.adapters:
            file = train(folder, adapter, count, options.turn)
            name, words = f"{adapter}-{count}", f"{place} -p policy.view:={file.resolve()}"
            rows[f"{adapter}, {count} episodes"] = compare(
                weak, measure(folder, name, words, seeds, options.processes)
            )
            (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(markdown(rows), flush=True)


if __name__ == "__main__":
    main()
