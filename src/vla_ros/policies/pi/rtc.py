"""Real-time chunking: a new chunk continues the chunk that is being executed.

*Guided* (any checkpoint): each flow step pulls the chunk towards the rest of the previous chunk in proportion to
the error, as in LeRobot. *Jacobian*: the same along the gradient of the squared error, as in the paper (arXiv
2506.07339). *Trained* (pi0.5 checkpoints trained for it): the first actions are fixed to the previous ones, and
their time is 0 in every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vla_ros.engine.flow_engine import Continuation
from vla_ros.errors import ConfigError
from vla_ros.policies.pi.normalization import Array
from vla_ros.types import FloatArray


@dataclass(frozen=True)
class RtcSettings:
    """How a checkpoint continues chunks, where the options leave it open."""

    mode: str = "auto"  # as ``policy.rtc``
    horizon: int = 0  # as ``policy.rtc_horizon``
    schedule: str = "LINEAR"  # how the weight falls between the delay and the horizon
    max_guidance: float = 10.0  # maximum factor of the correction


@dataclass(frozen=True, eq=False)
class RealTimeChunk:
    """The rest of the previous chunk, and how the new chunk continues it."""

    previous: Array  # float [T, A], normalised: the T actions not executed yet, A numbers each
    delay: int  # d, actions that will have been executed when the new chunk arrives
    mode: str = "guided"  # one of :data:`~vla_ros.policies.pi.options.MODES`
    execution_horizon: int = 10  # action at which guidance ends, at most T; unused if trained
    schedule: str = "LINEAR"  # how the weight falls between ``delay`` and the end
    max_guidance_weight: float = 10.0  # maximum factor of the correction

    def continuation(self, horizon: int, numbers: int, max_delay: int) -> Continuation:
        """Return the engine's input for chunks [horizon, numbers].

        ``max_delay`` is the longest delay in the checkpoint's training; 0 if it was not trained to continue chunks.
        Raises ConfigError if the model cannot continue the previous chunk.
        """
        shape, is_trained = self.previous.shape, self.mode == "trained"
        if len(shape) != 2 or not 1 <= shape[0] <= horizon or not 1 <= shape[1] <= numbers:
            raise ConfigError(
                f"RTC: the previous actions have shape {list(shape)}, expected [1 to {horizon}, 1 to {numbers}]"
            )
        if not np.isfinite(self.previous).all():
            raise ConfigError("RTC: the previous actions contain NaN or Inf")
        limit = min(max_delay, shape[0], horizon - 1) if is_trained else horizon
        if not 0 <= self.delay <= limit:
            trained = f" (the checkpoint was trained for at most {max_delay})" if is_trained else ""
            raise ConfigError(f"RTC: a delay of {self.delay} actions, expected 0 to {limit}{trained}")
        # Padding is 0, the mean of the data.
        previous = np.pad(self.previous, [(0, horizon - shape[0]), (0, numbers - shape[1])])
        if is_trained:
            return Continuation(previous, np.zeros(horizon), given=self.delay)
        return Continuation(previous, prefix_weights(self, horizon), self.max_guidance_weight)


def prefix_weights(rtc: RealTimeChunk, horizon: int) -> FloatArray:
    """Return the weights of the guidance, float64 [H]: 1 follows the previous action, 0 ignores it."""
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
