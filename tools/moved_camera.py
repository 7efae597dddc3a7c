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
from pathlib import Path

from vla_ros_lab.training.proof import as_json, paired_scores
from vla_ros_models.view import VIEW_FILE, VIEWS

CHECKPOINT = "demo"
TURN = 22.5  # degrees
SCENES, DEMONSTRATIONS = 1_000_000, 2_000_000
"""The first seed of each."""

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
        words = ("--camera-turn", TURN, "--seed", DEMONSTRATIONS, "--episodes", count)
        run("demo", "--policy", "expert", *words, "--record", bag)
    if not (output / "evidence" / "evidence.json").exists():
        how = ("--adapter", adapter, "--steps", steps, "--learning-rate", RATES[adapter], "--output", output)
        run("finetune", bag, "--checkpoint", CHECKPOINT, *TRAINING.split(), *how)
    return output / VIEW_FILE


def score(folder: Path, name: str, count: int, processes: int, *words: str) -> Path:
    """Return the file of the scores with the moved camera."""
    file = folder / "scores" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    seeds = ("--seed", SCENES, "--episodes", count, "--shards", processes)
    place = ("-b", f"camera_turn={TURN}", "--sync", "--resume", "--json", file)
    run("eval", "table", "--checkpoint", CHECKPOINT, *seeds, *place, *words)
    return file


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
    weak = score(folder, "moved", *seeds)
    rows = {}
    for count in given.demonstrations:
        for adapter in given.adapters:
            name, file = f"{adapter}-{count}", train(folder, adapter, count, given.steps)
            found = paired_scores(weak, score(folder, name, *seeds, "-p", f"policy.view:={file.resolve()}"))
            rows[f"{adapter}, {count} episodes"] = as_json(found)
            (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(f"{adapter}, {count} episodes: {found}", flush=True)


if __name__ == "__main__":
    main()
