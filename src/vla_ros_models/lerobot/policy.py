"""Runs a LeRobot checkpoint in this process."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_ros.config import Config
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import VlaRosError
from vla_ros.policies.base import Policy, Progress, Session, no_progress, options_of
from vla_ros.types import ActionChunk, Observation, PreviousChunk
from vla_ros_models.lerobot.checkpoint import (
    Checkpoint,
    Input,
    is_image_feature,
    load_policy,
    read_inputs,
    read_spec,
)
from vla_ros_models.lerobot.options import LeRobotOptions


class Episode(Session):
    """What a policy with a memory needs to know of the episode."""

    first: Any = None  # the oldest frame of its first observation; None before that

    def reset(self) -> None:
        self.first = None


class LeRobotPolicy(Policy):
    """Runs a checkpoint with LeRobot's own processors and ``predict_action_chunk``.

    Chunks are bit-identical to LeRobot's. Image keys are the names in the checkpoint's ``config.json`` without
    ``observation.images.``. ``features.state`` and ``features.action`` must name the parts of state and action,
    because no file of a checkpoint names them.
    """

    Options = LeRobotOptions

    def __init__(self, config: Config) -> None:
        self._options = options_of(config, LeRobotOptions)
        self._folder = Path(self._options.checkpoint).expanduser()
        self._checkpoint: Checkpoint | None = None
        self._inputs: tuple[Input, ...] = ()

    def describe(self) -> PolicySpec:
        return read_spec(self._folder)

    def load(self, progress: Progress = no_progress) -> None:
        """Load the checkpoint and run one inference to get the shape of the chunks."""
        options = self._options
        progress(0.0, "loading LeRobot's policy")
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._checkpoint, self._inputs = (
            load_policy(self._folder, device, options.tokenizer),
            read_inputs(self._folder),
        )
        if options.seed >= 0:
            torch.manual_seed(options.seed)
        progress(0.9, "inferring once")
        spec = self.describe()
        features: tuple[ImageFeature | StateFeature, ...] = (*spec.images, *spec.state)
        steps = {one.key: len(one.delta_timestamps) for one in features}
        past = {key: () if many == 1 else (many,) for key, many in steps.items()}
        blank = {one.name: np.zeros((*past[one.key], *one.shape), np.uint8) for one in self._inputs}
        answer, _ = self._predict(Episode(), blank, "warm up")
        horizon, dimension = answer.shape
        continues = self._checkpoint.continues
        self.spec = replace(spec, horizon=horizon, dimension=dimension, continues_chunks=continues)
        progress(1.0, "ready")

    def start_session(self) -> Episode:
        return Episode()

    def infer(self, session: Episode, observation: Observation) -> ActionChunk:
        began = time.perf_counter()
        values: dict[str, Any] = {}
        assert self._checkpoint is not None
        for one in self._inputs:
            given: Mapping[str, Any] = observation.images if one.is_image else observation.state
            if one.key not in given and not one.required:
                continue
            value = values[one.name] = given[one.key]
            if one.is_image and one.fixed and value.shape[-3:] != one.shape:
                found, trained = (f"{width}x{height}" for height, width, _ in (value.shape[-3:], one.shape))
                raise VlaRosError(
                    f"image '{one.key}' is {found}, but the checkpoint was trained on {trained}; resize it, "
                    f'for example with features.images: ["{one.key} = CAMERA [{trained}]"]'
                )
        if self.spec.images and not any(map(is_image_feature, values)):
            raise VlaRosError(f"found no image, expected at least one of {list(self.spec.image_keys)}")
        actions, normalized = self._predict(session, values, observation.instruction, observation.previous)
        stages = {"predict": 1e3 * (time.perf_counter() - began)}
        return ActionChunk(actions, observation.stamp, normalized=normalized, stages_ms=stages)

    def _predict(
        self, episode: Episode, values: Mapping[str, Any], instruction: str, previous: PreviousChunk | None = None
    ) -> tuple[Any, Any]:
        """Return actions and normalised actions, each float64 [K, D]."""
        checkpoint = self._checkpoint
        assert checkpoint is not None
        batch: dict[str, Any] = {name: _tensor(name, value)[None] for name, value in values.items()}
        batch["task"] = [instruction]
        if previous is not None:  # the preprocessor normalises it as in training
            batch["action"] = torch.from_numpy(previous.actions).float()[None]
        with torch.no_grad():  # not inference_mode, in which real-time chunking cannot compute gradients
            batch = checkpoint.before(batch)
            left = batch.pop("action", None)
            episode.first = checkpoint.remember(batch, episode.first)
            chunk = checkpoint.policy.predict_action_chunk(batch, **checkpoint.guidance(previous, left))
            actions = checkpoint.after(chunk)
        return tuple(tensor[0].double().cpu().numpy() for tensor in (actions, chunk))

    def close(self) -> None:
        self._checkpoint = None


def _tensor(name: str, value: Any) -> torch.Tensor:
    """Convert an image to float32 [..., 3, H, W] in [0, 1], or a state to float32."""
    if not is_image_feature(name):
        return torch.from_numpy(np.asarray(value, np.float32))
    image = torch.from_numpy(np.array(value))  # a copy: messages are read-only
    return image.movedim(-1, -3).contiguous().float() / 255
