"""Measures the controls with a checkpoint; one ``vla-ros eval table`` runs the episodes of each, and resumes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tools import forks
from tools.train.controls import Control, summarize
from tools.train.recipe import DATASET
from vla_ros.errors import VlaRosError
from vla_ros_models.checkpoint_files import read_json

ROWS = "evaluation.json"


def run_demo(*words: str, **environment: str) -> dict[str, Any]:
    """Run ``vla-ros demo``; see :func:`run_command`."""
    return run_command("demo", *words, **environment)


def run_command(*words: str, **environment: str) -> dict[str, Any]:
    """Run a ``vla-ros`` command with these words and one thread, and return its figures.

    Raises:
        VlaRosError: It failed; the text is the end of its output.
    """
    command = [sys.executable, "-m", "vla_ros.cli", *words, "--json", "-"]
    variables = {"OMP_NUM_THREADS": "1", **os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        raise VlaRosError((done.stderr or done.stdout)[-2000:])
    return dict(json.loads(done.stdout))


def words_of(control: Control, checkpoint: Path | str, seeds: range, device: str = "auto") -> tuple[str, ...]:
    """Return the arguments of ``vla-ros`` that run a control's episodes with a checkpoint, in float32."""
    node = (f"unnorm_key:={DATASET}", f"device:={device}", "dtype:=float32", "engine:=reference")
    start = ("eval", "table", "--policy", "openvla", "--checkpoint", str(checkpoint))
    scenes = ("--seed", str(seeds[0]), "--episodes", str(len(seeds)))
    return (*start, *scenes, *(word for one in node for word in ("-p", f"policy.{one}")), *control.options)


def evaluate(
    checkpoint: Path, controls: Sequence[Control], seeds: range, folder: Path, processes: int, device: str
) -> list[dict[str, Any]]:
    """Measure the controls; ``folder`` gets a result of each, and :data:`ROWS`.

    ``processes`` is the number of parallel simulations (0: one per core). Returns one row per control
    (:func:`~.controls.summarize`). Raises VlaRosError if an episode ended in an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = min(processes or os.cpu_count() or 1, len(seeds))
    rows = []
    for control in controls:
        file = folder / f"{control.name}.json"
        words = (*words_of(control, checkpoint, seeds, device), "--shards", str(count), "--json", str(file))
        status = forks.Fork(forks.vla_ros, (*words, "--resume"), 1, 2).wait()
        if status or read_json(file)["errors"]:
            raise VlaRosError(f"{file}: was not measured; see above, and run it again")
        rows.append({**summarize(control, read_json(file)["tasks"][0]["episodes"]), "machine": machine(device)})
        (folder / ROWS).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def machine(device: str) -> str:
    """Return the name of the GPU, or the number of CPU cores, of a torch device or ``auto``, for the table."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores"
