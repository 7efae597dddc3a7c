"""A LeRobot checkpoint behind the package's :class:`~vla_ros.policies.base.Policy`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_ros.config import Config
from vla_ros.contract.spec import NOW, ImageFeature, Moment, PolicySpec, StateFeature
from vla_ros.errors import CheckpointError, VlaRosError
from vla_ros.policies.base import Policy, Progress, Session, no_progress, options_of
from vla_ros.policies.lerobot.checkpoint import Checkpoint, load
from vla_ros.policies.lerobot.options import LeRobotOptions
from vla_ros.types import ActionChunk, Observation

_IMAGES = "observation.images."
_STATE = "observation."


class LeRobotPolicy(Policy):
    """Answers as LeRobot's ``predict_action_chunk`` between its own processors does, to the bit.

    Images are those of the checkpoint's ``config.json`` without ``observation.images.``; what its state and action
    are made of no file says, so ``features.state`` and ``features.action`` must.
    """

    Options = LeRobotOptions

    def __init__(self, config: Config) -> None:
        self._options = options_of(config, LeRobotOptions)
        self._checkpoint: Checkpoint | None = None

    @property
    def loaded(self) -> Checkpoint:
        """The checkpoint.

        Raises:
            VlaRosError: :meth:`load` has not been called.
        """
        if self._checkpoint is None:
            raise VlaRosError("the policy is not loaded; call load() first")
        return self._checkpoint

    def load(self, progress: Progress = no_progress) -> None:
        """Load the checkpoint, and ask it once: only its answer says how long its chunks are."""
        options = self._options
        progress(0.0, "loading LeRobot's policy")
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._checkpoint = load(Path(options.checkpoint), device, options.tokenizer)
        if options.seed >= 0:
            torch.manual_seed(options.seed)
        progress(0.9, "asking it once")
        inputs = self._checkpoint.config.input_features
        moments = _moments(self._checkpoint.config)
        past = () if len(moments) == 1 else (len(moments),)
        blank = {name: np.zeros((*past, *_shape(name, feature)), _dtype(name)) for name, feature in inputs.items()}
        answer, _ = self._predict(blank, "warm up")
        self.spec = PolicySpec(
            images=tuple(ImageFeature(_key(name), moments=moments) for name in inputs if _is_image(name)),
            state=tuple(
                StateFeature(_key(name), size=feature.shape[0], moments=moments)
                for name, feature in inputs.items()
                if not _is_image(name)
            ),
            action=(),
            dimension=answer.shape[1],
            horizon=answer.shape[0],
        )
        progress(1.0, "ready")

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        """Answer one observation."""
        began = time.perf_counter()
        values: dict[str, Any] = {}
        for name, feature in self.loaded.config.input_features.items():
            values[name] = (observation.images if _is_image(name) else observation.state)[_key(name)]
            expected = _shape(name, feature)
            if _is_image(name) and values[name].shape[-3:] != expected:
                found, trained = (f"{shape[1]}x{shape[0]}" for shape in (values[name].shape[-3:], expected))
                raise VlaRosError(
                    f"image '{_key(name)}' is {found}, the checkpoint was trained on {trained}; resize it, for "
                    f'example with features.images: ["{_key(name)} = CAMERA {trained}"]'
                )
        actions, normalized = self._predict(values, observation.instruction)
        stages = {"predict": 1e3 * (time.perf_counter() - began)}
        return ActionChunk(actions, observation.stamp, normalized=normalized, stages_ms=stages)

    def _predict(self, values: Mapping[str, Any], instruction: str) -> tuple[Any, Any]:
        """Actions and normalised actions, float64 [K, D] each."""
        checkpoint = self.loaded
        batch: dict[str, Any] = {name: _tensor(name, value)[None] for name, value in values.items()}
        batch["task"] = [instruction]
        with torch.inference_mode():
            chunk = checkpoint.policy.predict_action_chunk(checkpoint.before(batch))
            actions = checkpoint.after(chunk)
        return tuple(found[0].double().cpu().numpy() for found in (actions, chunk))

    def close(self) -> None:
        """Free the model."""
        self._checkpoint = None


def _is_image(name: str) -> bool:
    return name.startswith((_IMAGES, "observation.image"))


def _key(name: str) -> str:
    """Our name of a feature: ``observation.images.front`` is ``front``, ``observation.state`` is ``state``."""
    return name.removeprefix(_IMAGES).removeprefix(_STATE)


def _shape(name: str, feature: Any) -> tuple[int, ...]:
    """Shape of a feature as an observation holds it: [H, W, 3] of an image, whose file says [3, H, W]."""
    shape = tuple(feature.shape)
    if not _is_image(name):
        return shape
    if len(shape) != 3 or shape[0] != 3:
        raise CheckpointError(f"{name}: the checkpoint takes an image of shape {shape}, expected (3, H, W)")
    return (*shape[1:], 3)


def _dtype(name: str) -> type:
    return np.uint8 if _is_image(name) else np.float64


def _tensor(name: str, value: Any) -> torch.Tensor:
    """[..., H, W, 3] uint8 as [..., 3, H, W] in [0, 1]; numbers as float32."""
    if not _is_image(name):
        return torch.from_numpy(np.asarray(value, np.float32))
    image = torch.from_numpy(np.ascontiguousarray(value))
    return image.movedim(-1, -3).contiguous().float() / 255


def _moments(config: Any) -> tuple[Moment, ...]:
    """When the policy wants its observations, oldest first; now, where it names none or ones to come."""
    indices = config.observation_delta_indices or [0]
    return tuple(Moment(steps=-index) for index in indices) if max(indices) <= 0 else NOW
