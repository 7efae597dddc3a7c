"""Train the demo's checkpoint from scratch: demonstrations, training, export, evaluation.

  python -m tools.train data work/data                  record demonstrations of the scripted expert
  python -m tools.train fit work/data work/run          train a small OpenVLA on them
  python -m tools.train export work/run work/checkpoint  export it in the published layout
  python -m tools.train evaluate work/checkpoint work/scores  measure success under each control

  python -m tools.train data work/chunks --horizon 16 --rate-hz 20    record chunks of joint positions
  python -m tools.train fit-flow work/chunks work/flow                train a small pi0.5 on them
  python -m tools.train export-flow work/flow work/pi                 export it in LeRobot's layout

An interrupted stage resumes when it is called again. See docs/demo-policy.md.
"""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from tools.train.recipe import (
    TRAINING_SEED,
    DataRecipe,
    FitOptions,
    FitRecipe,
    FlowNetworkRecipe,
    LabelRecipe,
    NetworkRecipe,
    Recipe,
    from_json,
)
from vla_ros.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    data = stages.add_parser("data", help="record demonstrations")
    data.add_argument("folder", type=Path, help="folder of the demonstrations")
    data.add_argument("--processes", type=int, default=0, metavar="N", help="0: one per core")
    _add_recipe(data, DataRecipe)

    for name, about, recipes in (
        ("fit", "train", (FitOptions, NetworkRecipe, LabelRecipe, FitRecipe)),
        ("fit-flow", "train a small pi0.5", (FitOptions, FlowNetworkRecipe, FitRecipe)),
    ):
        fit = stages.add_parser(name, help=about)
        fit.add_argument("data", type=Path, help="folder of the demonstrations")
        fit.add_argument("folder", type=Path, help="folder of the run")
        for recipe in recipes:
            _add_recipe(fit, recipe)

    for name, about in (("export", "export the checkpoint"), ("export-flow", "export the small pi0.5")):
        export = stages.add_parser(name, help=about)
        export.add_argument("run_folder", type=Path, metavar="run", help="folder of the run")
        export.add_argument("folder", type=Path, help="folder of the checkpoint")
        if name == "export":
            export.add_argument("--dtype", default="float16", help="float16, bfloat16 or float32")
            export.add_argument("--shards", type=int, default=2, metavar="N", help="safetensors files")
            export.add_argument("--evaluation", type=Path, metavar="FILE", help="rows of the card's table")
        else:
            export.add_argument(
                "--note", default="", metavar="TEXT", help="a sentence about the training, for the card"
            )

    evaluate = stages.add_parser("evaluate", help="measure success under each control")
    evaluate.add_argument("folder", type=Path, help="folder of the checkpoint")
    evaluate.add_argument("output", type=Path, help="folder of the results; what is there is not measured again")
    evaluate.add_argument("--episodes", type=int, default=100, metavar="N", help="per control")
    evaluate.add_argument("--seed", type=int, default=1_000_000, metavar="S", help="seed of the first episode")
    evaluate.add_argument("--only", default="", metavar="NAMES", help="controls, separated by commas")
    evaluate.add_argument("--processes", type=int, default=0, metavar="N", help="0: one per core")
    evaluate.add_argument("--device", default="auto", help="torch device of the network")


def _add_recipe(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    hints = get_type_hints(kind)
    for field in fields(kind):
        about = field.metadata["about"]
        if hints[field.name] is bool:
            parser.add_argument(f"--{field.name}", action="store_true", help=about)
            continue
        assert field.default is not MISSING  # every field has a default
        several = isinstance(field.default, tuple)
        item = type(field.default[0]) if several else hints[field.name]
        usual = " ".join(str(value) for value in field.default) if several else field.default
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=item,
            nargs="+" if several else None,
            default=field.default,
            metavar="V",
            help=f"{about} (default {usual})".replace("%", "%%"),
        )


def recipe_of(kind: type[Recipe], arguments: argparse.Namespace) -> Recipe:
    values: dict[str, Any] = {field.name: getattr(arguments, field.name) for field in fields(kind)}
    return from_json(kind, values)


def run(arguments: argparse.Namespace) -> int:
    """Run one stage.

    Raises:
        VlaRosError: The stage failed.
    """
    stages = {"data": _data, "fit": _fit, "export": _export, "fit-flow": _fit, "export-flow": _export}
    return {**stages, "evaluate": _evaluate}[arguments.stage](arguments)


def _bar() -> Progress:
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    return Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())


def _data(arguments: argparse.Namespace) -> int:
    from tools.train import data
    from vla_ros_lab.sim.tasks import TASK_NAMES

    recipe = recipe_of(DataRecipe, arguments)
    unknown = [task for task in recipe.tasks if task not in TASK_NAMES]
    if unknown:
        raise ConfigError(f"--tasks: found {unknown}, expected one or more of {', '.join(TASK_NAMES)}")
    with _bar() as bar:
        task = bar.add_task("episodes", total=recipe.episodes)
        data.generate(
            arguments.folder,
            recipe,
            arguments.processes,
            lambda episodes, frames: bar.update(task, completed=episodes, description=f"{frames} frames, episodes"),
        )
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    from tools.train import fit, flow_fit

    options = FitOptions(**{field.name: getattr(arguments, field.name) for field in fields(FitOptions)})
    recipe, folders = recipe_of(FitRecipe, arguments), (arguments.folder, arguments.data)
    training: Any
    if arguments.stage == "fit":
        network, labels = recipe_of(NetworkRecipe, arguments), recipe_of(LabelRecipe, arguments)
        training = fit.Run(*folders, network, labels, recipe, options)
    else:
        training = flow_fit.Run(*folders, recipe_of(FlowNetworkRecipe, arguments), recipe, options)
    with _bar() as bar:
        reading = bar.add_task("reading frames", total=None)
        frames = training.load(lambda done, total: bar.update(reading, completed=done, total=total))
    training.train(frames, print)
    print(training.evaluate(frames))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from tools.train import export, flow_export

    if arguments.stage == "export":
        layout = (arguments.dtype, arguments.shards, arguments.evaluation)
        export.export(arguments.run_folder, arguments.folder, *layout)
    else:
        flow_export.export(arguments.run_folder, arguments.folder, arguments.note)
    size = sum(path.stat().st_size for path in arguments.folder.glob("model*.safetensors"))
    print(f"wrote {arguments.folder}: {size / 1e6:.1f} MB of weights")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from tools.train.controls import chosen, markdown
    from tools.train.evaluate import evaluate

    if arguments.seed + arguments.episodes > TRAINING_SEED:
        raise ConfigError(
            f"--seed: found {arguments.seed}, expected all seeds to be below {TRAINING_SEED}, where training starts"
        )
    try:
        controls = chosen(arguments.only)
    except ValueError as error:
        raise ConfigError(f"--only: {error}") from None
    seeds = range(arguments.seed, arguments.seed + arguments.episodes)
    how = (arguments.output, arguments.processes, arguments.device)
    print(markdown(evaluate(arguments.folder, controls, seeds, *how)))
    return 0
