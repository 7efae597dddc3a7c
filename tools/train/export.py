"""Exports a run as a checkpoint in the published layout, with a model card made from the recorded facts."""

import json
import platform
from pathlib import Path
from typing import Any

import torch

from tools.checkpoints.openvla import write_checkpoint
from tools.train.card import model_card
from tools.train.loop import RECIPE, STATISTICS, curve, restored
from tools.train.network import Trainee, architecture_of, token_ids
from tools.train.recipe import NetworkRecipe, from_json
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros_models.checkpoint_files import read_json

FACTS = "training.json"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def export(
    run: Path, folder: Path, dtype: str = "float16", shards: int = 2, evaluation: Path | None = None
) -> None:
    """Write the checkpoint of a run to ``folder``, in ``shards`` files, with ``training.json`` and ``README.md``.

    The training heads are left out. Float16 keeps three more bits of each weight than bfloat16 does. ``evaluation``
    is the file of :func:`~.evaluate.evaluate`, for the card.

    Raises:
        CheckpointError: The run has no state, or a weight is out of range for ``dtype``.
        ConfigError: ``dtype`` is not in :data:`DTYPES`.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}")
    recipe = read_json(run / RECIPE)
    architecture = architecture_of(from_json(NetworkRecipe, recipe["network"]))
    trainee = Trainee(architecture)
    step, seconds = restored(run, trainee)
    weights = {}
    for name, parameter in trainee.model.named_parameters():
        weights[name] = parameter.detach().to(DTYPES[dtype])
        if not torch.isfinite(weights[name]).all():
            raise CheckpointError(f"{run}: {name} is not finite in {dtype}; choose --dtype bfloat16")
    statistics = read_json(run / STATISTICS)
    write_checkpoint(folder, architecture, weights, statistics, token_ids(), shards)
    facts: dict[str, Any] = {
        **recipe,
        "steps_done": step,
        "seconds": round(seconds, 1),
        "parameters": sum(weight.numel() for weight in weights.values()),
        "dtype": dtype,
        "frames": next(iter(statistics.values()))["num_transitions"],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "curve": curve(run),
    }
    if evaluation is not None:
        facts["evaluation"] = json.loads(evaluation.read_text(encoding="utf-8"))
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(facts), encoding="utf-8")
