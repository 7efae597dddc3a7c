"""Converts observations to the model's inputs, and chunks to the robot's actions.

All functions are pure and need no torch. Inputs are processed in the order of training: robot conversion,
normalisation, prompt, padding. Chunks are un-normalised, made absolute and converted for the robot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_ros.policies.pi.normalization import Array, Normalization
from vla_ros.policies.pi.prompt import PromptForm, prompt_tokens
from vla_ros.policies.pi.robots import (
    add_state,
    aloha_actions,
    aloha_state,
    aloha_targets,
    subtract_state,
)
from vla_ros.types import IntArray, RawImage, UInt8Array
from vla_ros.vision.processors import resize_with_pad, resize_with_pad_linear


@dataclass(frozen=True)
class Processing:
    """Prepares inputs and actions as in the checkpoint's training."""

    images: tuple[str, ...]  # keys in the model's order
    optional_images: tuple[str, ...]  # keys of images that may be missing
    antialias: bool  # True resizes as openpi does, to uint8; False as LeRobot, to float32
    prompt: PromptForm  # format of the prompt
    state_size: int  # numbers in the robot's state
    action_size: int  # numbers in its actions
    state: Normalization  # normalisation of the state
    actions: Normalization  # normalisation of the actions
    delta: tuple[bool, ...] = ()  # True for action dimensions relative to the state; empty if none are
    # True adds the measured state to relative actions (LeRobot); False adds it normalised and un-normalised
    # (openpi).
    raw_state: bool = False
    adapt: bool = False  # True converts ALOHA's joints and grippers
    # Normalises the rest of a previous chunk; None if it is the inverse of ``actions``.
    previous: Normalization | None = None
    summed_times: bool = True  # as for :func:`~vla_ros.policies.pi.network.euler_times`

    def prepared_images(self, images: Mapping[str, UInt8Array | RawImage], size: int) -> list[Any]:
        """Return the present images in the model's order; raw images are returned unchanged.

        Other images are resized to [size, size, 3], uint8 or float32 in [0, 1].
        """
        resize: Callable[..., NDArray[Any]] = resize_with_pad if self.antialias else resize_with_pad_linear
        present = [images[key] for key in self.images if key in images]
        return [one if isinstance(one, RawImage) else resize(one, (size, size)) for one in present]

    def normalized_state(self, state: Array) -> Array:
        """Normalise the robot's state, float [state_size]."""
        return self.state.normalize(self._robot_state(state))

    def tokens(self, encode: Callable[[str], list[int]], instruction: str, state: Array) -> IntArray:
        """Encode the instruction and the normalised state as tokens, int64 [L]."""
        return prompt_tokens(encode, instruction, self.prompt, state)

    def robot_actions(self, normalized: Array, state: Array) -> Array:
        """Convert the model's actions [H, action_dim] to the robot's units, [H, action_size]."""
        actions = self.actions.unnormalize(normalized)
        if self.delta:
            actions = add_state(actions, self._base(state), self.delta)
        actions = actions[..., : self.action_size]
        return aloha_actions(actions) if self.adapt else actions

    def model_actions(self, actions: Array, state: Array) -> Array:
        """Convert the robot's actions [T, action_size] to the model's, as for :meth:`robot_actions`."""
        values: Array = np.array(actions, np.float64)
        if self.adapt:
            values = aloha_targets(values)
        if self.delta:
            values = subtract_state(values, self._base(state), self.delta)
        return (self.previous or self.actions).normalize(values)

    def _base(self, state: Array) -> Array:
        base = self._robot_state(state)
        return base if self.raw_state else self.state.unnormalize(self.state.normalize(base))

    def _robot_state(self, state: Array) -> Array:
        return aloha_state(np.asarray(state, np.float64)) if self.adapt else state


def override(processing: Processing, prompt_state: str = "auto", resize: str = "auto") -> Processing:
    """Apply the settings that no file of a checkpoint states; ``auto`` changes nothing.

    ``prompt_state`` (pi0.5) is ``none``, ``as_is``, or ``padded`` for checkpoints trained with LeRobot before 0.5.
    ``resize`` is ``antialias`` (openpi) or ``linear`` (LeRobot), for checkpoints that were trained with one library
    and saved by the other.
    """
    form, antialias = processing.prompt, processing.antialias
    return replace(
        processing,
        prompt=form if prompt_state == "auto" else replace(form, state=prompt_state),
        antialias=antialias if resize == "auto" else resize == "antialias",
    )


def pad_state(state: Array, size: int) -> Array:
    """Pad ``state`` with zeros to float32 [size]."""
    result = np.zeros(size, np.float32)
    result[: len(state)] = state
    return result
