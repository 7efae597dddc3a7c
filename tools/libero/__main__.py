"""Trains and scores a small pi0.5 on five tasks of LIBERO; docs/benchmarks.md has the commands.

PY -m tools.libero.record work/demos --seconds 200     in LIBERO's Python: record demonstrations of the expert
python -m tools.libero fit work/demos work/run         train on them
python -m tools.libero export work/run work/checkpoint export in LeRobot's layout
python -m tools.libero dataset work/demos work/set     make a data set for vla-ros finetune (record --every 1)
python -m tools.libero score work/checkpoint work/scores --python PY    score it through the node; resumes
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from tools.libero import fit
from tools.libero.dataset import make_dataset
from tools.libero.score import score
from tools.train.recipe import FitOptions, FitRecipe
from vla_ros.errors import VlaRosError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools.libero", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    training = stages.add_parser("fit", help="train; resumes")
    training.add_argument("data", type=Path)
    training.add_argument("folder", type=Path)
    training.add_argument("--steps", type=int, default=6000, metavar="N")
    training.add_argument("--batch", type=int, default=256, metavar="N", help="frames of a step")
    training.add_argument("--learning-rate", type=float, default=8e-4, metavar="R", help="highest rate")
    training.add_argument("--warmup", type=int, default=200, metavar="N", help="steps until it is reached")
    training.add_argument("--seed", type=int, default=0, metavar="S", help="of the weights and the order of frames")
    training.add_argument("--geometry", action="store_true", help="geometric tokens (record --points)")
    training.add_argument("--device", default="auto")
    training.add_argument("--compile", action="store_true")
    exporting = stages.add_parser("export", help="write the checkpoint")
    exporting.add_argument("run", type=Path)
    exporting.add_argument("folder", type=Path)
    making = stages.add_parser("dataset", help="make a data set for vla-ros finetune and distill")
    making.add_argument("data", nargs="+", type=Path, help="folders of demonstrations, then the data set's folder")
    making.add_argument("--most", type=int, default=10**9, metavar="N", help="episodes of each task")
    scoring = stages.add_parser("score", help="run the table's cells; resumes")
    scoring.add_argument("checkpoint", help="folder, or ws://HOST:PORT of a `vla-ros serve` that has it")
    scoring.add_argument("folder", type=Path, help="folder of the results")
    scoring.add_argument("--python", required=True, metavar="PY", help="Python that has LIBERO and vla-eval")
    scoring.add_argument("--episodes", type=int, default=20, metavar="N", help="of each of the five tasks")
    scoring.add_argument("--shards", type=int, default=1, metavar="N", help="processes")
    scoring.add_argument("--only", default="*", metavar="PATTERN", help="only these cells: sync, 'live*', ...")
    options = parser.parse_args()
    try:
        if options.stage == "score":
            score(
                options.checkpoint, options.folder, options.python, options.episodes, options.shards, options.only
            )
            return 0
        if options.stage == "dataset":
            episodes, count = make_dataset(options.data[:-1], options.data[-1], options.most)
            print(f"{episodes} episodes, {count} frames")
            return 0
        if options.stage == "export":
            print(f"{fit.export(options.run, options.folder) / 1e6:.1f} million weights")
            return 0
        fields = ("steps", "batch", "learning_rate", "warmup", "seed")
        recipe = FitRecipe(**{name: getattr(options, name) for name in fields})
        how = FitOptions(device=options.device, compile=options.compile)
        network = replace(fit.NETWORK, geometry=options.geometry)
        run = fit.Run(options.folder, options.data, recipe, how, network)
        frames = run.load()
        print(f"{len(frames.training)} frames", flush=True)
        run.train(frames, print)
    except VlaRosError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
