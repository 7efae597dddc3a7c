"""A policy that answers at once and moves nothing: for bring-up and for measuring everything around a model."""

from __future__ import annotations

import numpy as np

from vla_ros.config import Config
from vla_ros.policies.base import Progress, no_progress
from vla_ros.types import ActionChunk, ActionSpec, Observation


class HoldPolicy:
    """Answers every observation with a zero motion and an open gripper (``gripper.open_value``)."""

    def __init__(self, config: Config) -> None:
        self._spec = ActionSpec(image_keys=tuple(config.camera.keys))
        self._gripper = config.gripper.open_value

    @property
    def spec(self) -> ActionSpec:
        """Seven numbers, end-effector deltas, one step per chunk."""
        return self._spec

    def load(self, progress: Progress = no_progress) -> None:
        """Nothing to load."""
        progress(1.0, "hold policy: nothing to load")

    def infer(self, observation: Observation) -> ActionChunk:
        """Zero motion, stamped with the observation's stamp."""
        action = np.zeros((1, self._spec.dimension))
        action[0, -1] = self._gripper
        return ActionChunk(actions=action, stamp=observation.stamp)

    def reset(self) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to free."""
