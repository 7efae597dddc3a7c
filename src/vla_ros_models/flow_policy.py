"""A policy that samples chunks by flow matching and continues them in real time: pi0, pi0.5 and SmolVLA.

Real-time chunking: with *guided* (any checkpoint), each flow step pulls the chunk towards the rest of the previous
chunk in proportion to the error, as in LeRobot. *jacobian* does the same along the gradient of the squared error,
as in the paper (arXiv 2506.07339). With *trained* (pi0.5 checkpoints trained for it), the first actions are fixed
to the previous ones, and their time is 0 in every step.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.policies.base import Progress
from vla_ros.types import Float32Array, FloatArray, IntArray, Observation, PreviousChunk, RawImage, UInt8Array
from vla_ros.vision.points import camera_positions
from vla_ros_models.checkpoint_files import StoredTensor
from vla_ros_models.engine.flow_engine import Continuation, FlowEngine, FlowRequest
from vla_ros_models.flow_options import FlowOptions, RtcSettings
from vla_ros_models.memory import MemoryCheck, MemoryNeeds
from vla_ros_models.network_policy import Images, Placement
from vla_ros_models.normalization import Array, LearnedStatistics, zero_padded
from vla_ros_models.processor_files import has_processors
from vla_ros_models.sampling import Converts, SamplingPolicy, SamplingSession, check_noise
from vla_ros_models.tokenizers import Tokenizer
from vla_ros_models.training import StoredPart

WARM_PROMPT = 64

CHOICES = (("float32", "none"), ("bfloat16", "none"))
"""Options to suggest if memory does not suffice."""


class FlowProcessing(Converts, Protocol):
    """Converts observations to the network's inputs, and chunks to the robot's actions and back."""

    @property
    def images(self) -> tuple[str, ...]: ...

    def prepared_images(self, images: Mapping[str, UInt8Array | RawImage], size: int) -> list[Any]: ...

    def normalized_state(self, state: Array) -> Array: ...

    def tokens(self, encode: Callable[[str], list[int]], instruction: str, state: Array) -> IntArray: ...

    def model_actions(self, actions: Array, state: Array) -> Array: ...

    def learned(self, layout: str) -> LearnedStatistics: ...


class FlowCheckpoint(Protocol):
    """Everything about a checkpoint except its weights."""

    @property
    def spec(self) -> PolicySpec: ...

    @property
    def processing(self) -> FlowProcessing: ...

    @property
    def rtc(self) -> RtcSettings: ...

    @property
    def trained_delay(self) -> int: ...

    @property
    def parts(self) -> Mapping[str, Sequence[StoredPart]]: ...

    @property
    def stored(self) -> Mapping[str, StoredTensor]: ...

    @property
    def distilled(self) -> int: ...

    def plan(self, flow_steps: int) -> Callable[[str, str, str], MemoryNeeds]: ...


@dataclass(frozen=True, eq=False)
class RealTimeChunk:
    """The rest of the previous chunk, and how the new chunk continues it."""

    previous: Array  # float [T, A], normalised: the T actions not executed yet, A numbers each
    delay: int  # d, actions that will have been executed when the new chunk arrives
    mode: str = "guided"  # one of :data:`~vla_ros_models.flow_options.MODES`
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


@dataclass(frozen=True, eq=False)
class LoadedFlow:
    """A loaded model, which keeps no state between calls."""

    engine: FlowEngine  # runs the network
    processing: FlowProcessing  # converts inputs and actions
    tokenizer: Tokenizer  # text to ids
    image_size: int  # side in pixels of the network's images
    longest: int  # largest number of tokens in a prompt
    trained_delay: int = 0  # longest delay of trained real-time chunking

    def request(
        self,
        images: Mapping[str, UInt8Array | RawImage],
        state: Array,
        instruction: str,
        noise: Array | int,
        rtc: RealTimeChunk | None = None,
        positions: Float32Array | None = None,
    ) -> FlowRequest:
        """Prepare one observation for the engine.

        ``images`` maps keys to upright RGB images, uint8 [H, W, 3], or to raw images; optional images may be
        missing. ``state`` is float [state_size] in the robot's units. ``noise`` is standard normal, float [horizon,
        action_dim], or a seed; the same noise gives the same chunk. ``rtc`` is the rest of the previous chunk, or
        None. ``positions`` are those of the patches, for a model with geometric tokens.
        """
        sizes = self.engine.model
        check_noise(noise, sizes.horizon, sizes.action_dim)
        prepared = self.processing.prepared_images(images, self.image_size)
        normalized = self.processing.normalized_state(state)
        tokens = self._tokens(instruction, normalized, len(prepared))
        follow = None if rtc is None else rtc.continuation(sizes.horizon, sizes.action_dim, self.trained_delay)
        make_state = partial(zero_padded, normalized, sizes.state_dim)
        return FlowRequest(prepared, tokens, make_state, noise, follow, positions)

    def _tokens(self, instruction: str, state: Array, images: int) -> IntArray:
        """Return the prompt's tokens; ``images`` are present."""
        return self.processing.tokens(self.tokenizer.encode, instruction, state)


C = TypeVar("C", bound=FlowCheckpoint)


class FlowPolicy(SamplingPolicy[LoadedFlow, FlowRequest], Generic[C]):
    """Samples a chunk of actions from images, state and an instruction."""

    Options: ClassVar[type[FlowOptions]]
    _options: FlowOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._stated = RtcSettings()

    @abstractmethod
    def _read(self) -> C:
        """Read the checkpoint without its weights."""

    @abstractmethod
    def _load(self, checkpoint: C, where: Placement, progress: Progress) -> LoadedFlow:
        """Load the weights."""

    def describe(self) -> PolicySpec:
        return self._read().spec

    def learned(self) -> LearnedStatistics:
        """Return the statistics with which the checkpoint normalises; needs no weights."""
        checkpoint = self._read()
        return checkpoint.processing.learned("lerobot" if has_processors(self.folder) else "openpi")

    def _open(self, where: Placement) -> C:
        checkpoint = self._read()
        self._require_steps(checkpoint.distilled)
        if checkpoint.distilled:
            self._require_guidance(checkpoint.distilled)
        if self._options.rtc == "trained" and not checkpoint.trained_delay:
            raise ConfigError(
                f"policy.rtc: trained, but {self.folder} was not trained for it (no rtc_training_max_delay "
                "in its config.json); set guided"
            )
        self._memory = MemoryCheck(checkpoint.plan(self._options.flow_steps), CHOICES, str(where.device))
        if not self._options.view:
            return checkpoint
        names = [part.name for group in checkpoint.parts.values() for part in group]
        return replace(checkpoint, stored=self._viewed(checkpoint.stored, names))  # type: ignore[type-var]

    def _require_guidance(self, steps: int) -> None:
        """Raise ConfigError for guidance that is not defined with few ``steps``."""
        if steps == 1 and self._options.rtc == "jacobian":
            raise ConfigError(
                "policy.rtc: jacobian corrects noisy actions, which later flow steps turn into a plan, but "
                f"{self.folder} has one flow step; set guided or auto"
            )
        if self._options.rtc_max_guidance > steps:
            raise ConfigError(
                f"policy.rtc_max_guidance: {self._options.rtc_max_guidance:g}, but one of {steps} flow steps would "
                f"then correct more than the whole error; set at most {steps}, or 0"
            )

    def _build(self, opened: C, where: Placement, progress: Progress) -> None:
        self._loaded = self._load(opened, where, progress)
        self.spec, self._stated = opened.spec, opened.rtc

    def _warm_up(self, batch: int) -> bool:
        """Capture graphs for a typical prompt, and for the longest, which serves others in the meantime."""
        processing, engine = self.loaded.processing, self.loaded.engine
        if engine.runner.graphs:
            prompts = min(WARM_PROMPT, self.loaded.longest), self.loaded.longest
            engine.warm_up(prompts, len(processing.images), batch)
        return True

    def _request(self, session: SamplingSession, observation: Observation, images: Images) -> FlowRequest:
        state = self._state(observation)
        rtc = None if observation.previous is None else self._continue(observation.previous, state)
        names = dict(zip(self.spec.image_keys, self.loaded.processing.images, strict=True))
        named = {names[key]: image for key, image in images.items()}
        model = self.loaded
        positions: Float32Array | None = None
        if self.spec.points:
            sizes = model.image_size, model.engine.model.patches
            positions = camera_positions(observation.points, self.spec.points, list(images), *sizes)
        noise = session.noise(observation)
        return model.request(named, state, observation.instruction, noise, rtc, positions)

    def _continue(self, previous: PreviousChunk, state: FloatArray) -> RealTimeChunk | None:
        options, model, stated = self._options, self.loaded, self._stated
        actions = self._rest(previous)[: model.engine.model.horizon]
        if not len(actions):
            return None
        delay = min(previous.delay, len(actions))
        mode = options.rtc if options.rtc != "auto" else stated.mode
        if mode in ("auto", "trained"):  # delays longer than in training are guided
            limit = min(model.trained_delay, model.engine.model.horizon - 1)
            mode = "trained" if limit and delay <= limit else "guided"
        return RealTimeChunk(
            model.processing.model_actions(actions, state),
            delay,
            mode,
            delay + previous.guided if previous.guided else options.rtc_horizon or stated.horizon or len(actions),
            stated.schedule if options.rtc_schedule == "auto" else options.rtc_schedule.upper(),
            options.rtc_max_guidance or stated.max_guidance,
        )
