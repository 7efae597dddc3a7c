"""``vla-ros finetune`` without ``--check``: what it does with its arguments."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vla_ros.config import load
from vla_ros.config.checkpoints import base_folder
from vla_ros.config.loading import assignment
from vla_ros.errors import ConfigError, printable
from vla_ros.files import check_output, save_text
from vla_ros.policies.base import Policy, checkpoint_options, create
from vla_ros_lab.replay.result import for_json
from vla_ros_lab.report.page import to_stdout
from vla_ros_lab.training.check import Comparison
from vla_ros_lab.training.episodes import EpisodeSamples, ReadOptions
from vla_ros_lab.training.finetune import FineTuning, data_files, finetune
from vla_ros_lab.training.reading import open_samples
from vla_ros_lab.training.statistics import in_layout, of_data
from vla_ros_models.checkpoint_files import checkpoint_folder


def fine_tune(
    arguments: argparse.Namespace,
    policy: Policy,
    samples: EpisodeSamples,
    report: Comparison,
    options: ReadOptions,
) -> int:
    """Train on data that were read and checked, and write the figures; returns the command's status."""
    printed = to_stdout(json=arguments.json)

    def say(line: str) -> None:
        if not printed:
            print(printable(line), flush=True)

    def make(folder: Path | str, view: Path | None = None) -> Policy:
        named = checkpoint_options(None, folder, arguments.config)
        views = [assignment("policy.view", str(view))] if view is not None else []
        return create(load(arguments.config, [*named, *arguments.param, *views]))

    for one in report.findings:
        say(f"{one.level}: {one.name}: {one.found}")
    statistics = None
    if report.choice == "data":
        learned = policy.learned()  # type: ignore[attr-defined]
        statistics = learned.layout, in_layout(learned, of_data(samples, learned), len(samples.data))
    config = load(
        arguments.config, [*checkpoint_options(None, arguments.checkpoint, arguments.config), *arguments.param]
    )
    folder, model = checkpoint_folder(arguments.checkpoint), config.policy
    if base_folder(folder, getattr(model, "base", "")) is not None:
        raise ConfigError(f"--checkpoint {folder}: has an adapter; merge it into its base first: vla-ros convert")
    if view := getattr(model, "view", ""):
        raise ConfigError(f"policy.view {view}: is trained without another one; leave it out")
    if getattr(model, "gpus", 1) > 1:
        raise ConfigError("policy.gpus: each process trains the whole network; set it to 1, and use torchrun")
    job = FineTuning(
        policy,
        folder,
        lambda spec: open_samples(arguments.data, spec, config, options),
        make,
        data_files(arguments.data),
        config,
        statistics,
        getattr(arguments, "flow_steps", 0),
        getattr(arguments, "flows", 1),
        bool(getattr(arguments, "observations", ())),
    )
    result = finetune(job, arguments, say)
    if arguments.json is not None:
        save_text(arguments.json, json.dumps(for_json(result), indent=2, allow_nan=False) + "\n")
    return 0


def require_outputs(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if what a run writes is not named or cannot be written."""
    if arguments.output is None:
        instead = ", or --check to train nothing" if hasattr(arguments, "check") else ""
        raise ConfigError(f"--output: not given; name the folder of the new checkpoint{instead}")
    check_output("--json", arguments.json)
