"""Measures all controls with a checkpoint and saves each row as soon as it is measured.

The episodes are those of ``vla-ros demo --simulated-time``, in parallel processes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from tools.train.controls import Control, summarize
from tools.train.export import FACTS, add_evaluation
from tools.train.recipe import DATASET
from vla_ros.errors import VlaRosError
from vla_ros_models.checkpoint_files import read_json


def words_of(checkpoint: Path | str) -> tuple[str, ...]:
    """Return the options of ``vla-ros demo`` that run a checkpoint of this trainer."""
    return "--policy", "openvla", "--checkpoint", str(checkpoint), "-p", f"policy.unnorm_key:={DATASET}"


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


def run_episodes(
    checkpoint: Path | str,
    options: Sequence[str],
    seeds: range,
    processes: int = 0,
    device: str = "auto",
    progress: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """Run the episodes of ``seeds`` in float32, and return the demo's figures of each in order.

    Args:
        checkpoint: Folder of the checkpoint.
        options: Options of ``vla-ros demo`` (:mod:`~tools.train.controls`).
        seeds: Seeds of the episodes, one after the other.
        processes: Number of parallel demos; 0: one per core.
        device: Torch device of the networks.
        progress: Called with the number of finished episodes.

    Raises:
        VlaRosError: A demo failed, for example because the checkpoint does not load.
    """
    network = (f"policy.device:={device}", "policy.dtype:=float32", "policy.engine:=reference")
    words = (*words_of(checkpoint), "--simulated-time", *(word for each in network for word in ("-p", each)))
    count = min(processes or os.cpu_count() or 1, len(seeds))
    parts = [seeds[len(seeds) * part // count : len(seeds) * (part + 1) // count] for part in range(count)]
    episodes: list[dict[str, Any]] = []
    with ThreadPoolExecutor(count) as pool:
        runs = [
            pool.submit(run_demo, *words, *options, "--seed", str(part[0]), "--episodes", str(len(part)))
            for part in parts
        ]
        for run in as_completed(runs):
            episodes += run.result()["episodes"]
            progress(len(episodes))
    return sorted(episodes, key=lambda episode: int(episode["seed"]))


def evaluate(
    checkpoint: Path,
    controls: Sequence[Control],
    seeds: range,
    *,
    processes: int = 0,
    device: str = "auto",
    journal: Path | None = None,
    progress: Callable[[str, int], None] = lambda name, done: None,
) -> list[dict[str, Any]]:
    """Measure the controls; the rows are also written to ``journal`` and the checkpoint's card.

    Args:
        checkpoint: Folder of the checkpoint.
        controls: The controls to measure.
        seeds: Seeds of the episodes.
        processes: Number of parallel demos; 0: one per core.
        device: Torch device of the networks.
        journal: JSON file; rows that it already has for the same weights and seeds are not measured again.
        progress: Called with a control's name and the number of its finished episodes.

    Returns:
        One row per control (:func:`~.controls.summarize`).

    Raises:
        VlaRosError: A demo failed, for example because the checkpoint does not load.
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

            def tell(done: int, name: str = control.name) -> None:
                progress(name, done)

            episodes = run_episodes(checkpoint, control.options, seeds, processes, device, tell)
            found = [{**summarize(control, episodes), **mark}]
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
