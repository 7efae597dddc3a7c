"""pi0 and pi0.5 behind the package's :class:`~vla_ros.policies.base.Policy`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vla_ros.config import Config
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.engine.flow_engine import FlowRequest
from vla_ros.engine.resizer import resizes
from vla_ros.errors import CheckpointError, ConfigError, ImageError, VlaRosError
from vla_ros.policies.base import Policy, Progress, Session, no_progress, options_of
from vla_ros.policies.checkpoint_files import checkpoint_folder, read_json
from vla_ros.policies.devices import choose_device, explain_out_of_memory
from vla_ros.policies.pi.checkpoint import LEROBOT, PiCheckpoint, detect_layout, read_checkpoint
from vla_ros.policies.pi.inference import Chunk, PiModel, load_model
from vla_ros.policies.pi.options import PiOptions
from vla_ros.policies.pi.processing import override
from vla_ros.policies.pi.robots import ROBOTS, find_robot
from vla_ros.policies.pi.rtc import RealTimeChunk
from vla_ros.types import (
    ActionChunk,
    FloatArray,
    ImageProcessor,
    Observation,
    PreviousChunk,
    RawImage,
    UInt8Array,
)
from vla_ros.vision.processors import ResizeWithPad

logger = logging.getLogger(__name__)

WARM_PROMPT = 64
LEAST_CHANGE = 1e-4
"""Least change of a chunk between two images, as a share of its spread."""


@dataclass(frozen=True)
class LinearResize(ImageProcessor):
    """LeRobot's resize, whose result is not rounded; the policy does it itself and takes images unprocessed."""

    size: tuple[int, int]

    def __call__(self, image: UInt8Array) -> UInt8Array:
        """Return the image itself."""
        return image


@dataclass
class PiSession(Session):
    """State of one robot."""

    seed: int  # ``policy.seed``
    answered: int = 0  # chunks since the episode began; each has noise of its own

    def reset(self) -> None:
        """Start again with the first noise."""
        self.answered = 0


class PiPolicy(Policy):
    """Samples a chunk of actions from images, state and an instruction.

    With openpi's layout, images and state vectors have the names that openpi's own server takes from this robot
    (``observation/image``); with LeRobot's, those of its ``config.json`` without ``observation.`` and ``images.``.
    """

    Options = PiOptions

    def __init__(self, config: Config) -> None:
        self._options = options_of(config, PiOptions)
        self._preset = config.preset
        self._model: PiModel | None = None
        self._keys: dict[str, str] = {}

    @property
    def model(self) -> PiModel:
        """The network with its preprocessing and postprocessing, once :meth:`load` has been called."""
        if self._model is None:
            raise VlaRosError("pi: not loaded; call load() first")
        return self._model

    def load(self, progress: Progress = no_progress) -> None:
        """Read the checkpoint, check that memory suffices and that the model sees, warm up."""
        self.close()
        options = self._options
        if options.threads:
            torch.set_num_threads(options.threads)
        device = choose_device(options.device)
        dtype = self._dtype(device)
        checkpoint = self._read(checkpoint_folder(options.checkpoint))
        if options.rtc == "trained" and not checkpoint.trained_delay:
            raise ConfigError(
                f"policy.rtc: trained, but {checkpoint.folder} was not trained for it (no rtc_training_max_delay "
                "in its config.json); set guided"
            )
        keys, states = _features(checkpoint, self._robot_name(checkpoint.layout))
        self._keys = keys

        def partly(share: float, what: str) -> None:
            progress(0.95 * share, what)
            if share == 0.0:
                logger.info("%s %s: %s", checkpoint.architecture.model, checkpoint.folder.name, what)

        with explain_out_of_memory(str(device), lambda: "Set policy.quantization:=fp8 or policy.device:=cpu"):
            tokenizer = Path(options.tokenizer).expanduser() if options.tokenizer else None
            self._model = load_model(
                checkpoint,
                str(device),
                dtype,
                options.flow_steps or None,
                tokenizer,
                partly,
                options.quantization,
                options.rtc == "jacobian",
            )
            self.spec = _spec(checkpoint, keys, states)
            progress(0.95, "self-test" if options.self_test else "warm-up")
            try:
                self._warm_up(checkpoint.folder)
            except BaseException:
                self.close()
                raise
        progress(1.0, f"{checkpoint.architecture.model} {checkpoint.folder.name} on {device} in {dtype}")

    def describe(self) -> PolicySpec:
        """Return inputs and outputs from the checkpoint's files, without its weights."""
        checkpoint = self._read(checkpoint_folder(self._options.checkpoint))
        return _spec(checkpoint, *_features(checkpoint, self._robot_name(checkpoint.layout)))

    def start_session(self) -> PiSession:
        """Start a session at the first noise of ``policy.seed``."""
        return PiSession(self._options.seed)

    def infer(self, session: PiSession, observation: Observation) -> ActionChunk:
        """Infer a chunk from one observation; ``info`` contains ``prompt_tokens``."""
        [answer] = self.infer_batch([(session, observation)])
        if isinstance(answer, VlaRosError):
            raise answer
        return answer

    def infer_batch(self, requests: Sequence[tuple[PiSession, Observation]]) -> list[ActionChunk | VlaRosError]:
        """Infer for several robots; those with the same number of images run as one batch."""
        asked = [self._asked(session, observation) for session, observation in requests]
        answers: dict[int, ActionChunk | VlaRosError] = {}
        groups: dict[tuple[int, bool], list[int]] = {}
        for index, one in enumerate(asked):
            if isinstance(one, VlaRosError):
                answers[index] = one
            else:
                images = one[0].images
                groups.setdefault((len(images), isinstance(images[0], RawImage)), []).append(index)
        for members in groups.values():
            found = self._answer([one for index in members if not isinstance(one := asked[index], VlaRosError)])
            for index, chunk in zip(members, found, strict=True):
                session, observation = requests[index]
                answers[index] = (
                    chunk if isinstance(chunk, VlaRosError) else _action_chunk(chunk, observation.stamp)
                )
                session.answered += not isinstance(chunk, VlaRosError)
        return [answers[index] for index in range(len(requests))]

    def close(self) -> None:
        """Free the weights."""
        if self._model is None:
            return
        self._model.engine.close()
        self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _dtype(self, device: torch.device) -> str:
        options = self._options
        auto = "bfloat16" if device.type == "cuda" else "float32"
        dtype = auto if options.dtype == "auto" else options.dtype
        if options.quantization == "fp8" and device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if dtype != "bfloat16" or capability < (8, 9):
                raise ConfigError(
                    f"policy.quantization: fp8 needs bfloat16 and compute capability 8.9, found {dtype} and "
                    f"{capability[0]}.{capability[1]}; set none"
                )
        return dtype

    def _robot_name(self, layout: str) -> str:
        if layout == LEROBOT:
            return self._options.robot
        return self._options.robot or (self._preset if self._preset in ROBOTS else "")

    def _read(self, folder: Path) -> PiCheckpoint:
        options = self._options
        name = self._robot_name(detect_layout(read_json(folder / "config.json"), folder))
        checkpoint = read_checkpoint(folder, find_robot(name) if name else None, options.asset)
        return checkpoint.with_processing(override(checkpoint.processing, options.prompt_state, options.resize))

    def _asked(self, session: PiSession, observation: Observation) -> tuple[FlowRequest, FloatArray] | VlaRosError:
        """Return the engine's request, and the state in the robot's units."""
        try:
            images = self._images(observation)
            missing = [one.key for one in self.spec.state if one.key not in observation.state]
            if missing:
                raise ConfigError(f"pi: no state '{missing[0]}'; found {sorted(observation.state)}")
            state = np.concatenate([observation.state[one.key] for one in self.spec.state])
            noise = (session.seed << 31) + session.answered if observation.noise is None else observation.noise
            rtc = None if observation.previous is None else self._continue(observation.previous, state)
            return self.model.request(images, state, observation.instruction, noise, rtc), state
        except VlaRosError as error:  # an invalid request must not affect the others
            return error

    def _continue(self, previous: PreviousChunk, state: FloatArray) -> RealTimeChunk | None:
        options, model = self._options, self.model
        actions, size = previous.actions[: model.architecture.horizon], model.processing.action_size
        if actions.ndim != 2 or actions.shape[1] != size:
            raise ConfigError(f"pi: the previous actions have shape {list(actions.shape)}, expected [T, {size}]")
        if not len(actions):
            return None
        delay = min(previous.delay, len(actions))
        mode = options.rtc
        if mode in ("auto", "trained"):  # a longer delay than it was trained for is guided
            limit = min(model.trained_delay, model.architecture.horizon - 1)
            mode = "trained" if limit and delay <= limit else "guided"
        return RealTimeChunk(
            model.processing.model_actions(actions, state),
            delay,
            mode,
            options.rtc_horizon or len(actions),
            options.rtc_schedule.upper(),
            options.rtc_max_guidance,
        )

    def _images(self, observation: Observation) -> Mapping[str, UInt8Array | RawImage]:
        raw, images = observation.raw_images, observation.images
        device = self.model.engine.model.device
        if (
            self.model.processing.antialias
            and images
            and all(key in raw and resizes(device, raw[key]) for key in images)
        ):
            return {name: raw[key] for key, name in self._keys.items() if key in raw}
        unknown = sorted(set(images) - set(self._keys))
        if unknown:
            raise ImageError(f"pi: unknown images {unknown}, expected {list(self._keys)}")
        return {name: images[key] for key, name in self._keys.items() if key in images}

    def _answer(self, asked: Sequence[tuple[FlowRequest, FloatArray]]) -> list[Chunk | VlaRosError]:
        model = self.model
        with explain_out_of_memory(str(model.engine.model.device), lambda: "Load the policy again"):
            answers = model.engine.answer([request for request, _ in asked])
        return [
            answer if isinstance(answer, VlaRosError) else model.chunk(request, state, answer)
            for (request, state), answer in zip(asked, answers, strict=True)
        ]

    def prepare(self, batch: int) -> bool:
        """Capture graphs for a typical and for the longest prompt, which stands in for others at first."""
        processing, engine = self.model.processing, self.model.engine
        if engine.runner.graphs:
            prompts = min(WARM_PROMPT, processing.prompt.length), processing.prompt.length
            with explain_out_of_memory(str(engine.model.device), lambda: "Set policy.quantization:=fp8"):
                engine.warm_up(prompts, len(processing.images), batch)
        return True

    def _warm_up(self, folder: Path) -> None:
        """Capture graphs, and infer from two images to check that the model uses them."""
        processing, size = self.model.processing, self.model.architecture.vision.image_size
        self.prepare(1)
        state = np.zeros(processing.state_size)
        chunks = []
        for level in (32, 224):
            image = np.full((size, size, 3), 32, np.uint8)
            image[:, : size // 2, 0] = level
            chunks.append(
                self.model.infer(
                    dict.fromkeys(processing.images, image), state, "pick up the red cube", 0
                ).normalized
            )
        self.model.engine.wait()
        change = float(np.abs(chunks[0] - chunks[1]).max() / chunks[0].std())
        if self._options.self_test and not change > LEAST_CHANGE:
            raise CheckpointError(
                f"{folder}: the model does not see: two different images change its chunk by {change:.1e}. The "
                "vision tower or the projector is damaged or untrained; policy.self_test:=false starts it anyway"
            )


def _spec(checkpoint: PiCheckpoint, keys: Mapping[str, str], states: tuple[StateFeature, ...]) -> PolicySpec:
    size, processing = checkpoint.architecture.vision.image_size, checkpoint.processing
    resize = ResizeWithPad if processing.antialias else LinearResize
    return PolicySpec(
        images=tuple(
            ImageFeature(key, resize((size, size)), required=name not in processing.optional_images)
            for key, name in keys.items()
        ),
        state=states,
        action=(),
        dimension=processing.action_size,
        horizon=checkpoint.architecture.horizon,
        noise=(checkpoint.architecture.horizon, checkpoint.architecture.action_dim),
        continues_chunks=True,
    )


def _features(checkpoint: PiCheckpoint, robot: str) -> tuple[dict[str, str], tuple[StateFeature, ...]]:
    """Return the policy's image keys with the model's names, and its state vectors."""
    processing = checkpoint.processing
    if checkpoint.layout != LEROBOT:
        chosen = find_robot(robot)
        states = tuple(StateFeature(key, size=size) for key, size in chosen.state_keys)
        return dict(zip(chosen.image_keys, processing.images, strict=True)), states
    names: Iterable[str] = processing.images
    keys = {name.removeprefix("observation.").removeprefix("images."): name for name in names}
    return keys, (StateFeature("state", size=processing.state_size),)


def _action_chunk(chunk: Chunk, stamp: int) -> ActionChunk:
    return ActionChunk(
        actions=np.asarray(chunk.actions, np.float64),
        stamp=stamp,
        normalized=np.asarray(chunk.normalized[:, : chunk.actions.shape[1]], np.float64),
        stages_ms=chunk.stages_ms,
        info={"prompt_tokens": len(chunk.tokens)},
    )
