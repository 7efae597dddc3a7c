"""Saves and restores the state of a training run as safetensors."""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from vla_ros.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(path: Path, trainee: nn.Module, optimizer: torch.optim.Optimizer, step: int, seconds: float) -> None:
    """Write weights and AdamW's moments atomically, after ``step`` steps in ``seconds``."""
    tensors = {}
    for name, parameter in trainee.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach().cpu()
        for moment in _MOMENTS:
            value = optimizer.state[parameter].get(moment)
            if value is not None:
                tensors[f"{moment}.{name}"] = value.detach().cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(tensors, str(part), metadata={"step": str(step), "seconds": f"{seconds:.1f}"})
    part.replace(path)


def restore(path: Path, trainee: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> tuple[int, float]:
    """Restore a state written by :func:`save`; return its steps and seconds.

    Raises:
        CheckpointError: The file is missing, damaged or belongs to another network.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            facts = file.metadata()
            step = int(facts["step"])
            stored = set(file.keys())
            for name, parameter in trainee.named_parameters():
                with torch.no_grad():
                    parameter.copy_(file.get_tensor(f"weight.{name}"))
                if optimizer is None or f"{_MOMENTS[0]}.{name}" not in stored:
                    continue
                moments = {moment: file.get_tensor(f"{moment}.{name}").to(parameter.device) for moment in _MOMENTS}
                fused = any(group.get("fused") for group in optimizer.param_groups)
                device = parameter.device if fused else torch.device("cpu")  # where AdamW keeps its step count
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(step), dtype=torch.float32, device=device),
                    **moments,
                }
            return step, float(facts["seconds"])
    except (SafetensorError, OSError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{path}: is not a state of this network ({error}); start again in another folder"
        ) from error
