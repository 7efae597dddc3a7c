"""Distil the flow of a checkpoint of pi0, pi0.5, SmolVLA or GR00T into one, two or four steps (SnapFlow).

With --observations, only the images, states and instructions of the recordings count: the actions are the
checkpoint's own. No other program runs the result; vla-ros convert --teacher restores the checkpoint. See
docs/distill.md.
"""

import argparse
from pathlib import Path

from vla_ros.config.show import add_config_arguments, number
from vla_ros_lab.training.cli import add_data_arguments, open_data, read_options
from vla_ros_lab.training.finetune import add_run_arguments
from vla_ros_models.distillation import STEPS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, recordings = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    add("--checkpoint", required=True, metavar="DIR", help="checkpoint to distil")
    text = "bags, folders of bags, or one LeRobot v3 data set, with the actions to train on"
    recordings.add_argument("--data", nargs="+", type=Path, metavar="DATA", help=text)
    text = "the same, of which only the observations count: the checkpoint acts itself"
    recordings.add_argument("--observations", nargs="+", type=Path, default=(), metavar="DATA", help=text)
    add("--steps", type=int, choices=STEPS, default=1, help="flow steps of the new checkpoint")
    text = "optimiser's steps (default 20000, with which others reached their teacher on LIBERO)"
    add("--train-steps", type=number(int, 1), default=20_000, metavar="N", help=text)
    text = "noises and flow times of each observation, which is read once (default 4)"
    add("--flows", type=number(int, 1), default=4, metavar="N", help=text)
    add_config_arguments(parser)
    add("--json", type=Path, metavar="FILE", help="write all figures; - prints only them")
    add_data_arguments(parser)
    add_run_arguments(parser)
    parser.set_defaults(adapter="full", rank=0, alpha=0.0, targets="", train="", scores=None)


def run(arguments: argparse.Namespace) -> int:
    from vla_ros_lab.training.command import fine_tune, require_outputs

    arguments.flow_steps, arguments.steps = arguments.steps, arguments.train_steps
    arguments.statistics = "checkpoint"  # the flow is that of these statistics
    if arguments.observations:
        arguments.data, arguments.goal = arguments.observations, "measured"  # there may be no commands
    require_outputs(arguments)
    return fine_tune(arguments, *open_data(arguments), read_options(arguments))
