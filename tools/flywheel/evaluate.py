"""Run a checkpoint on held-out scenes of the simulated table and write which of them it succeeds in.

python -m tools.flywheel.evaluate CHECKPOINT FILE.json --seed 1000000 --episodes 400 --place "--camera-turn 20"
"""

import argparse
import json
import os
from pathlib import Path

from tools.train.evaluate import run_episodes


def evaluate(checkpoint: Path, file: Path, seeds: range, processes: int, place: str = "") -> dict[int, bool]:
    """Return success by seed, from ``file`` if it has these seeds."""
    if file.exists():
        known = {int(seed): won for seed, won in json.loads(file.read_text(encoding="utf-8")).items()}
        if known.keys() == set(seeds):
            return known
    won = {each["seed"]: each["success"] for each in run_episodes(checkpoint, place.split(), seeds, processes)}
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(won) + "\n", encoding="utf-8")
    part.replace(file)
    return won


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=1_000_000, metavar="S", help="seed of the first episode")
    parser.add_argument("--episodes", type=int, default=400, metavar="N")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--place", default="", metavar="WORDS", help="options of vla-ros demo")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.episodes)
    won = evaluate(given.checkpoint, given.file, seeds, given.processes, given.place)
    print(f"{given.checkpoint}: {sum(won.values())} of {len(won)}")


if __name__ == "__main__":
    main()
