"""Converts observations to SmolVLA's inputs, prompt included, and chunks to the robot's actions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vla_ros.errors import ConfigError
from vla_ros.types import IntArray
from vla_ros_models.normalization import Array
from vla_ros_models.pi.processing import (
    AlohaGripper,
    Processing,
    aloha_actions,
    aloha_state,
    aloha_targets,
    prompt_parts,
)

GRIPPER = AlohaGripper(0.4, 1.5, 1.5 - 0.4)
"""LeRobot's convention for ALOHA's grippers."""


@dataclass(frozen=True)
class SmolVlaProcessing(Processing):
    """Prepares inputs and actions as LeRobot's SmolVLA does; ALOHA's numbers are converted when normalised."""

    centred: ClassVar[bool] = False
    control: tuple[str, ...] = ()  # control tokens, which an instruction may not have
    truncate_left: bool = False  # True drops a long prompt's first tokens, False its last ones

    def normalized_state(self, state: Array) -> Array:
        normalized = self.state.normalize(state)
        return aloha_state(normalized, GRIPPER) if self.adapt else normalized

    def tokens(self, encode: Callable[[str], list[int]], instruction: str, state: Array) -> IntArray:
        if found := [token for token in self.control if token in instruction]:
            raise ConfigError(f"policy.instruction: has the control tokens {found}; remove them")
        ids, most = encode("".join(prompt_parts(instruction, self.prompt, state))), self.prompt.length
        return np.asarray(ids[-most:] if self.truncate_left else ids[:most], np.int64)

    def shown_actions(self, normalized: Array) -> Array:
        actions = normalized[:, : self.action_size]
        return aloha_actions(actions, GRIPPER) if self.adapt else actions

    def robot_actions(self, normalized: Array, state: Array) -> Array:
        return self.actions.unnormalize(self.shown_actions(normalized))

    def model_actions(self, actions: Array, state: Array) -> Array:
        values = (self.previous or self.actions).normalize(self.converted_actions(actions, state))
        return aloha_targets(values, GRIPPER) if self.adapt else values

    def converted_actions(self, actions: Array, state: Array) -> Array:
        return np.asarray(actions, np.float64)

    def converted_state(self, state: Array) -> Array:
        return state
