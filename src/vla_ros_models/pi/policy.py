"""pi0 and pi0.5 as a :class:`~vla_ros.policies.base.Policy`."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar, Generic, TypeVar

from vla_ros.config import Config
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import ConfigError
from vla_ros.policies.base import Progress
from vla_ros.types import FloatArray, Observation, PreviousChunk
from vla_ros_models.engine.flow_engine import FlowRequest
from vla_ros_models.memory import MemoryCheck
from vla_ros_models.network_policy import Images, Placement
from vla_ros_models.pi import FlowOptions, PiOptions, RtcSettings
from vla_ros_models.pi.checkpoint import PiCheckpoint, read_checkpoint
from vla_ros_models.pi.inference import PiModel, RealTimeChunk, load_model
from vla_ros_models.pi.loading import CHOICES, Parts, parameter_parts, plan_memory
from vla_ros_models.pi.processing import ROBOTS, find_robot, override
from vla_ros_models.sampling import SamplingPolicy, SamplingSession

WARM_PROMPT = 64

C = TypeVar("C", bound=PiCheckpoint)


class FlowPolicy(SamplingPolicy[PiModel, FlowRequest], Generic[C]):
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
    def _parts(self, checkpoint: C) -> Parts:
        """List the parts of every parameter."""

    @abstractmethod
    def _load(self, checkpoint: C, where: Placement, progress: Progress) -> PiModel:
        """Load the weights."""

    def describe(self) -> PolicySpec:
        return _spec(self._read())

    def _open(self, where: Placement) -> C:
        checkpoint = self._read()
        if self._options.rtc == "trained" and not checkpoint.trained_delay:
            raise ConfigError(
                f"policy.rtc: trained, but {checkpoint.folder} was not trained for it (no rtc_training_max_delay "
                "in its config.json); set guided"
            )
        plan = partial(
            plan_memory,
            self._parts(checkpoint),
            checkpoint.architecture,
            cameras=len(checkpoint.image_keys),
            prompt=checkpoint.processing.prompt.length,
            flow_steps=self._options.flow_steps or checkpoint.flow_steps,
        )
        self._memory = MemoryCheck(plan, CHOICES, str(where.device))
        return checkpoint

    def _build(self, opened: C, where: Placement, progress: Progress) -> None:
        self._loaded = self._load(opened, where, progress)
        self.spec, self._stated = _spec(opened), opened.rtc

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
        return self.loaded.request(named, state, observation.instruction, session.noise(observation), rtc)

    def _continue(self, previous: PreviousChunk, state: FloatArray) -> RealTimeChunk | None:
        options, model = self._options, self.loaded
        actions = self._rest(previous)[: model.architecture.horizon]
        if not len(actions):
            return None
        delay = min(previous.delay, len(actions))
        stated = self._stated
        mode = options.rtc if options.rtc != "auto" else stated.mode
        if mode in ("auto", "trained"):  # delays longer than in training are guided
            limit = min(model.trained_delay, model.architecture.horizon - 1)
            mode = "trained" if limit and delay <= limit else "guided"
        return RealTimeChunk(
            model.processing.model_actions(actions, state),
            delay,
            mode,
            options.rtc_horizon or stated.horizon or len(actions),
            stated.schedule if options.rtc_schedule == "auto" else options.rtc_schedule.upper(),
            options.rtc_max_guidance or stated.max_guidance,
        )


class PiPolicy(FlowPolicy[PiCheckpoint]):
    """Runs pi0 and pi0.5.

    With openpi's layout, images and state vectors have the names that openpi's own server expects from this robot
    (``observation/image``); with LeRobot's layout, the names in ``config.json`` without ``observation.`` and
    ``images.``.
    """

    Options = PiOptions
    title = "pi"
    _options: PiOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._preset = ROBOTS.get(config.preset)

    def _read(self) -> PiCheckpoint:
        options = self._options
        robot = find_robot(options.robot) if options.robot else None
        checkpoint = read_checkpoint(self.folder, robot, options.asset, self._preset)
        processing = override(checkpoint.processing, options.prompt_state, options.resize)
        return replace(checkpoint, processing=processing)

    def _parts(self, checkpoint: PiCheckpoint) -> Parts:
        return parameter_parts(checkpoint.architecture, checkpoint.stored)

    def _load(self, checkpoint: PiCheckpoint, where: Placement, progress: Progress) -> PiModel:
        options, device = self._options, str(where.device)
        steps, words, jacobian = options.flow_steps, options.tokenizer, options.rtc == "jacobian"
        return load_model(checkpoint, device, where.dtype, steps, words, progress, options.quantization, jacobian)


def _states(checkpoint: PiCheckpoint) -> Iterator[StateFeature]:
    processing, start = checkpoint.processing, 0
    # ALOHA's state is converted before it is normalised; it has no rotations.
    middle = () if processing.adapt else tuple(map(float, processing.state.middle))
    largest = () if processing.adapt else tuple(map(float, processing.state.largest))
    for key, count in checkpoint.state_keys:
        end = start + count
        yield StateFeature(key, size=count, middle=middle[start:end], largest=largest[start:end])
        start = end


def _spec(checkpoint: PiCheckpoint) -> PolicySpec:
    architecture, processing = checkpoint.architecture, checkpoint.processing
    size = (architecture.vision.image_size, architecture.vision.image_size)
    return PolicySpec(
        images=tuple(
            ImageFeature(key, processing.processor(size), required=name not in processing.optional_images)
            for key, name in zip(checkpoint.image_keys, processing.images, strict=True)
        ),
        state=tuple(_states(checkpoint)),
        action=(),
        dimension=processing.action_size,
        horizon=architecture.horizon,
        rate_hz=checkpoint.rate_hz,
        execute_steps=checkpoint.execute_steps,
        noise=(architecture.horizon, architecture.action_dim),
        continues_chunks=True,
    )
