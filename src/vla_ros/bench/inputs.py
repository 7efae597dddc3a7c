"""Inputs of a measurement: distinct camera messages, made on demand, and a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from vla_ros.policies.openvla.architecture import Architecture
from vla_ros.types import IntArray
from vla_ros.vision.messages import encode_image

T = TypeVar("T")

_SHIFT = 7  # pixels from one frame to the next; more than what one pixel of the network sees of 1280x720


@dataclass(frozen=True)
class OnDemand(Generic[T]):
    """``count`` items, each made on access: a thousand large frames need the memory of one."""

    count: int
    make: Callable[[int], T]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> T:
        if not 0 <= index < self.count:
            raise IndexError(index)  # which also ends a loop over all of them
        return self.make(index)


def make_messages(count: int, height: int, width: int, seed: int = 0) -> OnDemand[bytes]:
    """``sensor_msgs/Image`` messages with random frames, never zeros: zeros run faster than real data.

    One random frame, shifted from message to message; the first ``height * width / 7`` of them differ.
    """
    base = np.random.default_rng(seed).integers(0, 256, (height * width, 3), dtype=np.uint8)

    def make(index: int) -> bytes:
        pixels = np.roll(base, _SHIFT * index, axis=0).reshape(height, width, 3)
        return encode_image(pixels, index, "camera")

    return OnDemand(count, make)


def make_prompt(architecture: Architecture, tokens: int, seed: int = 0) -> IntArray:
    """Make a prompt of BOS, random tokens and the closing token: int64 [tokens]."""
    words = np.random.default_rng(seed).integers(3, architecture.action_vocab_size // 2, max(1, tokens - 2))
    return np.array([architecture.llm.bos_token, *words, architecture.empty_token], dtype=np.int64)
