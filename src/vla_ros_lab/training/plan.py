"""Estimates the memory of a training step before it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vla_ros.errors import OutOfMemoryError
from vla_ros_lab.training.adapting import Adapted
from vla_ros_models.memory import GB, available_memory

_STATES = {"adamw": 8, "adamw8bit": 2}
"""Bytes of the optimiser for each number that trains."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    libraries: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.libraries

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / GB:.2f}" for name, value in vars(self).items())
        return f"{self.total / GB:.2f} GB ({parts})"


def plan_step(adapted: Adapted, batch: int, optimizer: str, tokens: int, *, recompute: bool) -> StepMemory:
    """Estimate a step of ``batch`` samples with ``tokens`` tokens each, images included.

    The activations are those of the widest decoder: one layer's, and each layer's input, or each layer's without
    ``recompute``.
    """
    trainee = adapted.trainable.trainee
    device = next(iter(adapted.parameters.values())).device
    every = [*trainee.parameters(), *trainee.buffers()]
    weights = sum(one.numel() * one.element_size() for one in every)
    trains = sum(one.numel() for one in adapted.parameters.values())
    shape = adapted.trainable.decoder
    number = 2 if device.type == "cuda" else 4
    layer = tokens * (10 * shape.hidden_size + 4 * shape.intermediate_size) + shape.heads * tokens**2
    kept = shape.layers * tokens * shape.hidden_size if recompute else shape.layers * layer
    logits = 2 * 4 * batch * min(tokens, 64) * shape.vocab_size
    return StepMemory(
        weights,
        4 * trains,
        _STATES[optimizer] * trains,
        number * batch * (2 * layer + kept) + logits,
        1_000_000_000 if device.type == "cuda" else 100_000_000,
    )


def require(found: StepMemory, device: torch.device) -> str:
    """Describe the plan and the free memory; raises OutOfMemoryError if it does not suffice."""
    free = available_memory(str(device))
    if free is None:
        return f"needs {found} on {device}"
    held = found.weights if device.type == "cuda" else 0  # loaded already
    if found.total - held > free:
        raise OutOfMemoryError(
            f"a training step needs {found} on {device}, but {(free + held) / GB:.2f} GB are there. Lower --batch "
            "and raise --accumulation, take --adapter qlora or --optimizer adamw8bit, or drop --no-recompute"
        )
    return f"needs {found} on {device}, {(free + held) / GB:.2f} GB are there"
