"""Measures all controls with a checkpoint and saves each row as soon as it is measured."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.train.controls import Control, summarize
from tools.train.export import FACTS, add_evaluation
from tools.train.rollouts import roll_out
from vla_ros.policies.checkpoint_files import read_json


def evaluate(
    checkpoint: Path,
    controls: Sequence[Control],
    seeds: Sequence[int],
    *,
    processes: int = 0,
    device: str = "auto",
    journal: Path | None = None,
    progress: Callable[[str, int], None] = lambda name, done: None,
) -> list[dict[str, Any]]:
    """Measure the controls in float32; the rows are also written to ``journal`` and the checkpoint's card.

    Args:
        checkpoint: Folder of the checkpoint.
        controls: The controls to measure.
        seeds: Seeds of the episodes.
        processes: Number of parallel simulations; 0: one per core.
        device: Torch device of the network.
        journal: JSON file; rows that it already has for the same weights and seeds are not measured again.
        progress: Called with a control's name and the number of its finished episodes.

    Returns:
        One row per control (:func:`~.controls.summarize`).

    Raises:
        VlaRosError: The checkpoint does not load, or a simulation exited.
    """
    has_facts = (checkpoint / FACTS).exists()
    mark = {"steps_done": read_json(checkpoint / FACTS)["steps_done"] if has_facts else None}
    mark |= {"first_seed": seeds[0], "episodes": len(seeds), "machine": machine(device)}
    known: list[dict[str, Any]] = []
    if journal is not None and journal.exists():
        known = json.loads(journal.read_text(encoding="utf-8"))
    rows = []
    for control in controls:
        found = [row for row in known if row["name"] == control.name and mark.items() <= row.items()]
        if not found:
            found = [{**_measure(checkpoint, control, seeds, processes, device, progress), **mark}]
            known = [row for row in known if row["name"] != control.name] + found
            if journal is not None:
                journal.parent.mkdir(parents=True, exist_ok=True)
                journal.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        rows += found
        if has_facts:
            add_evaluation(checkpoint, found)
    return rows


def machine(device: str) -> str:
    """Return the name of the GPU, or the number of CPU cores, of a torch device or ``auto``, for the table."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores"


def _measure(
    checkpoint: Path,
    control: Control,
    seeds: Sequence[int],
    processes: int,
    device: str,
    progress: Callable[[str, int], None],
) -> dict[str, Any]:
    options = (f"policy.device:={device}", "policy.dtype:=float32")
    rollouts = roll_out(
        checkpoint, control.options, seeds, processes, options, lambda done: progress(control.name, done)
    )
    return summarize(control, rollouts)
