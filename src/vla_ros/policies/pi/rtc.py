"""Real-time chunking: a new chunk continues the chunk that is being executed.

*Guided* (any checkpoint): each flow step pulls the chunk towards the rest of the previous one, by the error
itself as in LeRobot. *Jacobian*: by the gradient of the squared error, as in the paper (arXiv 2506.07339).
*Trained* (pi0.5 checkpoints trained for it): the first actions are fixed to the previous ones, and their time is
0 in every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vla_ros.errors import ConfigError
from vla_ros.policies.pi.normalization import Array
from vla_ros.types import FloatArray

SCHEDULES = ("LINEAR", "EXP", "ONES", "ZEROS")
MODES = ("guided", "jacobian", "trained")


@dataclass(frozen=True, eq=False)
class RealTimeChunk:
    """The rest of the previous chunk, and how the new chunk continues it."""

    previous: Array  # float [T, A], normalised: the T actions not executed yet, A numbers each
    delay: int  # d, actions that will have been executed when the new chunk arrives
    mode: str = "guided"  # one of :data:`MODES`
    execution_horizon: int = 10  # where guidance ends, at most T; trained has no guidance
    schedule: str = "LINEAR"  # how the weight falls between ``delay`` and the end
    max_guidance_weight: float = 10.0  # limit of the correction's factor


def check_chunk(rtc: RealTimeChunk, horizon: int, action_dim: int, max_delay: int) -> None:
    """Raise ConfigError if the model cannot continue the previous chunk.

    ``max_delay`` is the longest delay in the checkpoint's training; 0 if it was not trained to continue chunks.
    """
    shape = rtc.previous.shape
    if len(shape) != 2 or not 1 <= shape[0] <= horizon or not 1 <= shape[1] <= action_dim:
        raise ConfigError(
            f"RTC: the previous actions have shape {list(shape)}, expected [1 to {horizon}, 1 to {action_dim}]"
        )
    if not np.isfinite(rtc.previous).all():
        raise ConfigError("RTC: the previous actions hold NaN or Inf")
    limit = min(max_delay, shape[0], horizon - 1) if rtc.mode == "trained" else horizon
    if not 0 <= rtc.delay <= limit:
        trained = f" (the checkpoint was trained for at most {max_delay})" if rtc.mode == "trained" else ""
        raise ConfigError(f"RTC: a delay of {rtc.delay} actions, expected 0 to {limit}{trained}")


def prefix_weights(rtc: RealTimeChunk, horizon: int) -> FloatArray:
    """Return the weights of the guidance, float64 [H]: 1 follows the previous action, 0 is free."""
    end = min(rtc.execution_horizon, len(rtc.previous), horizon)
    start = min(rtc.delay, end)
    weights = np.zeros(horizon)
    weights[:start] = 1.0
    if rtc.schedule == "ONES":
        weights[:end] = 1.0
    elif rtc.schedule in ("LINEAR", "EXP"):
        falling = np.linspace(1.0, 0.0, end - start + 2)[1:-1]
        weights[start:end] = falling * np.expm1(falling) / (math.e - 1) if rtc.schedule == "EXP" else falling
    return weights


def padded(previous: Array, horizon: int, action_dim: int) -> FloatArray:
    """Pad the previous actions with zeros, the dataset's mean, to float64 [H, action_dim]."""
    result = np.zeros((horizon, action_dim))
    result[: previous.shape[0], : previous.shape[1]] = previous
    return result
