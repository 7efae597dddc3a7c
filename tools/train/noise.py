"""What disturbs the arm while demonstrations are recorded, so that the recoveries are in the data.

Noise goes into what is executed; the label stays the expert's clean answer to the state (as in DART, Laskey et
al., 2017). A learner's own small errors then lead to states that it knows.
"""

from __future__ import annotations

import numpy as np

from tools.train.recipe import DataRecipe
from vla_ros.types import FloatArray

MEMORY = 0.7
"""Correlation of the disturbance from one step to the next."""

BURST_M = (0.01, 0.03)
"""Length of a shove per step, metres."""


class Disturbance:
    """A :data:`~tools.train.episode.Noise` for one episode.

    Args:
        recipe: Strengths and chances.
        seed: Of the episode; the same seed disturbs in the same way.
    """

    def __init__(self, recipe: DataRecipe, seed: int) -> None:
        self._recipe = recipe
        self._random = np.random.default_rng([seed, 0xD157])
        self.sd = float(self._random.choice(recipe.noise_m))
        """Standard deviation of this episode, metres."""
        self._drift = self._random.normal(size=3) * self.sd
        self._shove = np.zeros(3)
        self._shove_left = 0
        self._flip_left = 0

    def __call__(self, step: int, action: FloatArray) -> FloatArray:
        """The action [7] that is executed in the place of the clean one."""
        if not self.sd:  # undisturbed: what a good day looks like must be in the data too
            return action
        rng = self._random
        self._drift = MEMORY * self._drift + (1 - MEMORY**2) ** 0.5 * self.sd * rng.normal(size=3)
        if not self._shove_left and rng.random() < self._recipe.burst_chance:
            way = rng.normal(size=3) * (1.0, 1.0, 0.6)
            self._shove = way / np.linalg.norm(way) * rng.uniform(*BURST_M)
            self._shove_left = int(rng.integers(1, 4))
        if not self._flip_left and rng.random() < self._recipe.flip_chance:
            self._flip_left = int(rng.integers(1, 4))
        executed = action.copy()
        executed[:3] += self._drift
        if self._shove_left:
            self._shove_left -= 1
            executed[:3] += self._shove
        if self._flip_left:
            self._flip_left -= 1
            executed[6] = 1.0 - executed[6]
        return executed
