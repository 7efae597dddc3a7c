"""Measure what viewpoint adapters regain after the table's camera was moved; resumes where it was stopped.

python -m tools.moved_camera FOLDER
python -m tools.moved_camera FOLDER --adapters view-lora --demonstrations 10 --steps 60 --episodes 40

Records demonstrations of the scripted expert with the moved camera, trains an adapter of each kind on the first
episodes of them, and compares success on the same held-out scenes with that of the checkpoint alone.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.flywheel.evaluate import evaluate
from tools.flywheel.table import compare, markdown
from vla_ros_models.view import VIEW_FILE, VIEWS

CHECKPOINT = "demo"
PLACE = "--camera-turn 22.5"
SCENES, DEMONSTRATIONS = 1_000_000, 2_000_000
"""The first seed of each."""

PART = 10
"""Episodes of one process, whose results are written together."""

RATES = {"view": 0.03, "view-lora": 0.002}
# The demo's checkpoint was trained on a gripper that closes at 0.7.
TRAINING = (
    "--config demo -p gripper.closed_value:=0.7 --device cpu --batch 8 --workers 0 --no-recompute --hold-out 0"
)


def run(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "vla_ros.cli", *map(str, words)], check=True)


def train(folder: Path, adapter: str, count: int, steps: int) -> Path:
    """Return the file of an adapter that was trained on ``count`` demonstrations."""
    bag, output = folder / f"demonstrations-{count}", folder / f"{adapter}-{count}"
    if not (bag / "metadata.yaml").exists():
        words = (*PLACE.split(), "--seed", DEMONSTRATIONS, "--episodes", count)
        run("demo", "--policy", "expert", *words, "--record", bag)
    if not (output / "evidence" / "evidence.json").exists():
        words = ("--adapter", adapter, "--steps", steps, "--learning-rate", RATES[adapter], "--output", output)
        run("finetune", bag, "--checkpoint", CHECKPOINT, *TRAINING.split(), *words)
    return output / VIEW_FILE


def measure(folder: Path, name: str, words: str, count: int, processes: int) -> Mapping[int, bool]:
    """Return success by seed."""
    found: dict[int, bool] = {}
    for first in range(SCENES, SCENES + count, PART):
        part = range(first, min(first + PART, SCENES + count))
        found |= evaluate(Path(CHECKPOINT), folder / "scores" / f"{name}-{first}.json", part, processes, words)
        print(f"{name}: {sum(found.values())} of {len(found)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path)
    add("--adapters", nargs="+", default=list(VIEWS), choices=VIEWS)
    add("--demonstrations", nargs="+", type=int, default=[10, 3, 1], metavar="N", help="episodes to train on")
    add("--steps", type=int, default=300, metavar="N", help="of each training")
    add("--episodes", type=int, default=100, metavar="N", help="held-out scenes")
    add("--processes", type=int, default=1, metavar="N", help="of an evaluation")
    given = parser.parse_args()
    folder, seeds = given.folder, (given.episodes, given.processes)
    weak = measure(folder, "moved", PLACE, *seeds)
    rows = {"the checkpoint, camera moved": compare(weak, weak)}
    for count in given.demonstrations:
        for adapter in given.adapters:
            name, file = f"{adapter}-{count}", train(folder, adapter, count, given.steps)
            found = measure(folder, name, f"{PLACE} -p policy.view:={file.resolve()}", *seeds)
            rows[f"{adapter}, {count} episodes"] = compare(weak, found)
            (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(markdown(rows), flush=True)


if __name__ == "__main__":
    main()
