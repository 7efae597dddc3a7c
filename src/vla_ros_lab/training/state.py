"""The state of a run: what trains, and its optimiser. A half-written state never loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vla_ros.errors import CheckpointError, VlaRosError

_TENSORS, _REST = "state.safetensors", "state.json"


def save(folder: Path, step: int, parameters: Mapping[str, nn.Parameter], optimizer: Any, rest: Any) -> None:
    """Write the state after ``step`` to ``folder``, and delete older ones; ``rest`` is JSON."""
    tensors: dict[str, Tensor] = {f"parameter.{name}": one.data for name, one in parameters.items()}
    plain: dict[str, dict[str, Any]] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                plain.setdefault(str(index), {})[key] = value
    target, partial = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        # Copies: a file cannot hold two names of one memory.
        save_file(
            {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}, partial / _TENSORS
        )
        text = json.dumps({"step": step, "optimizer": plain, "rest": rest})
        (partial / _REST).write_text(text, encoding="utf-8")
        for name in (_TENSORS, _REST):
            with (partial / name).open("rb") as file:
                os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise VlaRosError(
            f"{folder}: the state after step {step} could not be written ({error}); free some space, then run the "
            "command again: it resumes from the state before"
        ) from error
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    for old in folder.glob("step-*"):
        if old != target:
            shutil.rmtree(old)


def restore_state(folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: Any = None) -> tuple[int, Any]:
    """Load the newest state into parameters and optimiser; return its step and the rest, or 0 and None.

    Raises CheckpointError if it is damaged or of another network.
    """
    found = sorted(folder.glob("step-*"))
    if not found:
        return 0, None
    try:
        content = json.loads((found[-1] / _REST).read_text(encoding="utf-8"))
        tensors = load_file(found[-1] / _TENSORS)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[f"parameter.{name}"])
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{found[-1]}: is not a state of this network ({error}); start again in another folder"
        ) from error
    if optimizer is None:
        return int(content["step"]), content["rest"]
    state: dict[int, dict[str, Any]] = {int(index): dict(one) for index, one in content["optimizer"].items()}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            index, _, key = rest.partition(".")
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(content["step"]), content["rest"]
