"""All controls on one checkpoint, each row noted as soon as it is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.train.controls import Control
from tools.train.export import FACTS, add_evaluation
from tools.train.figures import summarize
from tools.train.rollouts import Rollout, roll_out
from vla_ros.policies.openvla.architecture import read_json


def evaluate(
    checkpoint: Path,
    controls: Sequence[Control],
    seeds: Sequence[int],
    *,
    processes: int = 0,
    device: str = "auto",
    journal: Path | None = None,
    told: Callable[[str, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure the controls; figures go into ``journal`` and into the checkpoint's card.

    The network runs in float32 on every device, as the demo's does on a CPU.

    Args:
        checkpoint: Folder of the checkpoint.
        controls: What to measure.
        seeds: Of the scenes.
        processes: Simulations at a time; 0 takes one per core.
        device: Torch device of the network.
        journal: JSON file; rows that it has of the same weights and seeds are not measured again.
        told: Hears the control's name and the number of its episodes that are done.

    Returns:
        One row per control (:func:`~.figures.summarize`).

    Raises:
        VlaRosError: The checkpoint does not load, or a simulation ended.
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
            found = [{**_measure(checkpoint, control, seeds, processes, device, told), **mark}]
            known = [row for row in known if row["name"] != control.name] + found
            if journal is not None:
                journal.parent.mkdir(parents=True, exist_ok=True)
                journal.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        rows += found
        if has_facts:
            add_evaluation(checkpoint, found)
    return rows


def machine(device: str) -> str:
    """What the network runs on, for the table: the GPU's name, or how many cores the CPU has.

    Args:
        device: Torch device, or ``auto``.
    """
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores"


def _measure(
    checkpoint: Path,
    control: Control,
    seeds: Sequence[int],
    processes: int,
    device: str,
    told: Callable[[str, int], None] | None,
) -> dict[str, Any]:
    done = 0

    def one(_: Rollout) -> None:
        nonlocal done
        done += 1
        if told is not None:
            told(control.name, done)

    options = (f"policy.device:={device}", "policy.dtype:=float32")
    return summarize(control, roll_out(checkpoint, control.words, seeds, processes, options, one))
