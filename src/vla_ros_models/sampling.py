"""Base class of policies that sample chunks from noise: pi0, pi0.5, SmolVLA and GR00T."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.policies.base import Session
from vla_ros.policies.options import SamplingOptions
from vla_ros.types import ActionChunk, FloatArray, Observation, PreviousChunk
from vla_ros_models.engine.flow_engine import ChunkEngine, FlowAnswer, FlowRequest
from vla_ros_models.network_policy import Asked, Loaded, NetworkPolicy
from vla_ros_models.normalization import Array


@dataclass
class SamplingSession(Session):
    """State of one robot."""

    seed: int  # ``policy.seed``
    answered: int = 0  # chunks since the episode began; part of the next noise seed

    def reset(self) -> None:
        self.answered = 0

    def noise(self, observation: Observation) -> FloatArray | int:
        """Return the observation's noise, or else the seed of the episode's next chunk."""
        return (self.seed << 31) + self.answered if observation.noise is None else observation.noise


def check_noise(noise: Array | int, horizon: int, numbers: int) -> None:
    """Raise ConfigError if ``noise`` is an array of another shape than [horizon, numbers]."""
    if isinstance(noise, np.ndarray) and noise.shape != (horizon, numbers):
        raise ConfigError(f"the noise has shape {list(noise.shape)}, expected {[horizon, numbers]}")


class Converts(Protocol):
    """Converts a chunk to the robot's actions."""

    @property
    def action_size(self) -> int: ...

    def robot_actions(self, normalized: Array, state: Array) -> Array: ...

    def shown_actions(self, normalized: Array) -> Array: ...


class Sampling(Loaded, Protocol):
    """A loaded model: its engine, and how it converts actions."""

    @property
    def engine(self) -> ChunkEngine[Any, Any]: ...

    @property
    def processing(self) -> Converts: ...


M = TypeVar("M", bound=Sampling)
Q = TypeVar("Q", bound=FlowRequest)


class SamplingPolicy(NetworkPolicy[M, SamplingSession, Q], Generic[M, Q]):
    """Samples chunks with a :class:`~vla_ros_models.engine.flow_engine.ChunkEngine`."""

    _options: SamplingOptions
    takes_any_size = True

    def _require_steps(self, distilled: int) -> None:
        """Raise ConfigError if the options ask for other flow steps than the checkpoint was distilled into."""
        if distilled and self._options.flow_steps not in (0, distilled):
            raise ConfigError(
                f"policy.flow_steps: {self._options.flow_steps}, but {self.folder} was distilled into {distilled} "
                f"and knows no other number; set 0, or restore its teacher with vla-ros convert --teacher"
            )

    def _require_teacher(self, distilled: int) -> None:
        """Raise ConfigError if a checkpoint that is to be trained was distilled."""
        if distilled:
            raise ConfigError(
                f"--checkpoint {self.folder}: was distilled into {distilled} flow steps; train its teacher "
                "(vla-ros convert --teacher), then distil the result"
            )

    def start_session(self) -> SamplingSession:
        return SamplingSession(self._options.seed)

    def _try_out(self) -> None:
        super()._try_out()
        self.loaded.engine.wait()

    def _batches(self, requests: Sequence[Q]) -> list[Sequence[Q]]:
        """Divide requests, in their order, into batches for the engine."""
        return [requests]

    def _answer(self, asked: Sequence[Asked[SamplingSession, Q]]) -> Iterator[ActionChunk | VlaRosError]:
        engine, processing = self.loaded.engine, self.loaded.processing
        batches = self._batches([one.request for one in asked])
        answers = [answer for batch in batches for answer in engine.answer(batch)]
        for one, answer in zip(asked, answers, strict=True):
            if not isinstance(answer, FlowAnswer):
                yield answer
                continue
            one.session.answered += 1
            actions = processing.robot_actions(answer.actions, self._state(one.observation))
            yield ActionChunk(
                actions=np.asarray(actions, np.float64),
                stamp=one.observation.stamp,
                normalized=np.asarray(processing.shown_actions(answer.actions), np.float64),
                stages_ms=answer.stages_ms,
                info={"prompt_tokens": len(one.request.tokens)},
            )

    def _rest(self, previous: PreviousChunk) -> FloatArray:
        """Return what is left of the previous chunk, [T, action_size]; raises ConfigError for another shape."""
        actions, size = previous.actions, self.loaded.processing.action_size
        if actions.ndim != 2 or actions.shape[1] != size:
            raise ConfigError(
                f"{self.title}: the previous actions have shape {list(actions.shape)}, expected [T, {size}]"
            )
        return actions
