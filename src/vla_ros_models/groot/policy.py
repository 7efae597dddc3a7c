"""GR00T N1.7 as a :class:`~vla_ros.policies.base.Policy`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vla_ros.config import Config
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.policies.base import Progress
from vla_ros.policies.published import loop_of
from vla_ros.types import Observation, PreviousChunk
from vla_ros_models.engine.flow_engine import Continuation
from vla_ros_models.groot import GrootOptions
from vla_ros_models.groot.building import tensor_shapes
from vla_ros_models.groot.inference import GrootRequest, LoadedGroot, continue_chunk, load_model
from vla_ros_models.groot.loading import GROOT_CHOICES, GrootCheckpoint, plan_memory, read_checkpoint
from vla_ros_models.memory import MemoryCheck
from vla_ros_models.network_policy import SELF_TEST_INSTRUCTION, Images, Placement
from vla_ros_models.normalization import LearnedStatistics
from vla_ros_models.processor_files import has_processors
from vla_ros_models.sampling import SamplingPolicy, SamplingSession
from vla_ros_models.training import Trainable


class GrootPolicy(SamplingPolicy[LoadedGroot, GrootRequest]):
    """Samples a chunk of actions from images, named parts of the state, and an instruction.

    Names are those of the checkpoint: with NVIDIA's layout the modality keys of the embodiment, with LeRobot's
    layout those of ``config.json`` without ``observation.`` and ``images.``.
    """

    Options = GrootOptions
    title = "groot"
    _options: GrootOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._preset = config.preset

    def describe(self) -> PolicySpec:
        return self._spec(read_checkpoint(self.folder, self._options))

    def learned(self) -> LearnedStatistics:
        """Return the statistics with which the checkpoint normalises; needs no weights."""
        checkpoint = read_checkpoint(self.folder, self._options)
        found = checkpoint.processing.learned("gr00t_lerobot" if has_processors(self.folder) else "gr00t")
        return replace(found, data_set=checkpoint.tag)

    def _open(self, where: Placement) -> GrootCheckpoint:
        checkpoint = read_checkpoint(self.folder, self._options)
        self._require_steps(checkpoint.distilled)
        viewed = self._viewed(checkpoint.stored, tensor_shapes(checkpoint.architecture))
        checkpoint, processing = replace(checkpoint, stored=viewed), checkpoint.processing
        plan = partial(
            plan_memory, checkpoint.architecture, cameras=len(processing.images), resize=processing.resize
        )
        self._memory = MemoryCheck(plan, GROOT_CHOICES, str(where.device))
        return checkpoint

    def _build(self, opened: GrootCheckpoint, where: Placement, progress: Progress) -> None:
        options = self._options
        self._loaded = load_model(
            opened, str(where.device), where.dtype, options.flow_steps, options.quantization, progress
        )
        self.spec = self._spec(opened)

    def _warm_up(self, batch: int) -> bool:
        """Capture graphs for a typical instruction with all cameras."""
        loaded, resize = self.loaded, self.loaded.processing.resize
        if loaded.engine.runner.graphs:
            unit, patch = resize.unit, loaded.architecture.vision.patch_size
            cameras = len(loaded.processing.images)
            units = resize.size[0] // unit, resize.size[1] // unit
            tokens = loaded.prompt.encode(SELF_TEST_INSTRUCTION, [units] * cameras)
            grid = resize.size[0] // patch, resize.size[1] // patch
            loaded.engine.warm_up([len(tokens.tokens), len(tokens.tokens) + 32], (grid,) * cameras, batch)
        return True

    def _request(self, session: SamplingSession, observation: Observation, images: Images) -> GrootRequest:
        noise = session.noise(observation)
        follow = None if observation.previous is None else self._continue(observation.previous)
        return self.loaded.request(images, self._state(observation), observation.instruction, noise, follow)

    def _batches(self, requests: Sequence[GrootRequest]) -> list[Sequence[GrootRequest]]:
        """Run requests with images of different sizes alone."""
        return [requests] if len({one.grids for one in requests}) == 1 else [[one] for one in requests]

    def _continue(self, previous: PreviousChunk) -> Continuation | None:
        """Return the previous chunk's rest; None if actions are relative: LeRobot does not continue them either."""
        loaded = self.loaded
        if loaded.processing.relative or not len(previous.actions):
            return None
        normalized = loaded.processing.model_actions(self._rest(previous))
        if previous.guided:
            normalized = normalized[: previous.delay + previous.guided]
        return continue_chunk(normalized, previous.delay, loaded.architecture, self._options.rtc_horizon)

    def trainable(self, where: Placement, recompute_layers: bool = True, **options: Any) -> Trainable:
        from vla_ros_models.groot.training import make_trainable

        found, device = read_checkpoint(self.folder, self._options), str(where.device)
        self._require_teacher(found.distilled)
        return make_trainable(found, self._spec(found), device, where.dtype, recompute_layers, **options)

    def _spec(self, checkpoint: GrootCheckpoint) -> PolicySpec:
        processing, sizes, loop = checkpoint.processing, checkpoint.architecture, loop_of("gr00t", self._preset)
        return PolicySpec(
            images=tuple(ImageFeature(key, processing.resize, required=False) for key in processing.images),
            state=tuple(StateFeature(key, size=size) for key, size in processing.state),
            action=(),
            dimension=processing.action_size,
            horizon=processing.rows,
            rate_hz=loop.rate_hz,
            execute_steps=min(loop.execute_steps or processing.rows, checkpoint.execute_steps),
            noise=(sizes.horizon, sizes.action_dim),
            continues_chunks=not processing.relative,
        )
