"""Turns images, state and instruction into the model's inputs, and its chunk into the robot's actions.

Pure functions over arrays; no torch. The order is that of training: robot conversion, normalisation, prompt,
padding. On the way back: un-normalisation of state and actions, absolute actions, robot conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_ros.errors import ConfigError, ImageError
from vla_ros.policies.pi.normalization import Array, Normalization
from vla_ros.policies.pi.prompt import STATES, PromptForm, prompt_tokens
from vla_ros.policies.pi.robots import (
    add_state,
    aloha_actions,
    aloha_state,
    aloha_targets,
    subtract_state,
)
from vla_ros.types import IntArray, UInt8Array
from vla_ros.vision.resize_with_pad import resize_with_pad, resize_with_pad_linear

RESIZES = ("antialias", "linear")


@dataclass(frozen=True)
class Processing:
    """How a checkpoint's training data was prepared."""

    images: tuple[str, ...]  # keys in the model's order
    optional_images: tuple[str, ...]  # those that may be missing
    antialias: bool  # True resizes as openpi does, to uint8; False as LeRobot, to float32
    prompt: PromptForm  # form of the prompt
    state_size: int  # numbers in the robot's state
    action_size: int  # numbers in its actions
    state: Normalization  # normalisation of the state
    actions: Normalization  # normalisation of the actions
    delta: tuple[bool, ...] = ()  # True if an action is relative to the state; empty for none
    # True adds the state as measured (LeRobot); False the state after normalisation and back (openpi).
    raw_state: bool = False
    adapt: bool = False  # True converts ALOHA's joints and grippers
    summed_times: bool = True  # which times the flow takes, as for :func:`~vla_ros.policies.pi.flow.euler_times`

    def present(self, images: Collection[str]) -> list[str]:
        """Return the keys of the present images, in the model's order; a missing required one is an error."""
        unknown = sorted(set(images) - set(self.images))
        missing = sorted(set(self.images) - set(images) - set(self.optional_images))
        if unknown or missing or not images:
            raise ImageError(
                f"images {sorted(images)} found, expected {list(self.images)}"
                + (f", of which {list(self.optional_images)} may be missing" if self.optional_images else "")
            )
        return [key for key in self.images if key in images]

    def resized_images(self, images: Mapping[str, UInt8Array], size: int) -> NDArray[Any]:
        """Resize the present images, in the model's order: uint8 or float32 in [0, 1], [cameras, size, size, 3]."""
        present = self.present(images)
        for key in present:
            image = images[key]
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
                raise ImageError(
                    f"image '{key}' is {image.dtype} {list(image.shape)}, expected uint8 [height, width, 3] RGB"
                )
        resize: Callable[..., NDArray[Any]] = resize_with_pad if self.antialias else resize_with_pad_linear
        return np.stack([resize(images[key], (size, size)) for key in present])

    def normalized_state(self, state: Array) -> Array:
        """Normalise the robot's state, float [state_size]; not padded. Another length, NaN and Inf are refused."""
        if state.shape != (self.state_size,) or not np.isfinite(state).all():
            raise ConfigError(f"the state is {state.tolist()}, expected {self.state_size} finite numbers")
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
        """Undo :meth:`robot_actions`: [T, action_size] to normalised, relative to ``state`` where they are."""
        values: Array = np.array(actions, np.float64)
        if self.adapt:
            values = aloha_targets(values)
        if self.delta:
            values = subtract_state(values, self._base(state), self.delta)
        return self.actions.normalize(values)

    def _base(self, state: Array) -> Array:
        """Return the state that relative actions are added to."""
        base = self._robot_state(state)
        return base if self.raw_state else self.state.unnormalize(self.state.normalize(base))

    def _robot_state(self, state: Array) -> Array:
        return aloha_state(np.asarray(state, np.float64)) if self.adapt else state


def override(processing: Processing, prompt_state: str = "auto", resize: str = "auto") -> Processing:
    """Set what a checkpoint's files do not state.

    ``prompt_state`` of pi0.5 is ``none``, ``as_is``, or ``padded`` for checkpoints trained with LeRobot before 0.5;
    ``resize`` is ``antialias`` (openpi) or ``linear`` (LeRobot), for checkpoints that were trained with one and
    saved with the other.
    """
    for name, value, known in (("prompt_state", prompt_state, STATES), ("resize", resize, RESIZES)):
        if value not in ("auto", *known):
            raise ConfigError(f"{name}: found {value!r}, expected auto, {', '.join(known)}")
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
