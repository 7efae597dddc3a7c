"""Disturbances while demonstrations are recorded, so that the data contain recoveries.

The executed action is noisy, the label stays the expert's clean action (DART; Laskey et al., 2017). A learner's own
small errors then lead to states that are in the data.
"""

from __future__ import annotations

import numpy as np

from tools.train.recipe import DataRecipe
from vla_ros.types import FloatArray

MEMORY = 0.7
"""Correlation of the disturbance from one step to the next."""

BURST_M = (0.01, 0.03)
"""Length of a push per step, metres."""


class Disturbance:
    """A :data:`~tools.train.episode.Noise` for the episode of ``seed``."""

    def __init__(self, recipe: DataRecipe, seed: int) -> None:
        self._recipe = recipe
        self._random = np.random.default_rng([seed, 0xD157])
        self.sd = float(self._random.choice(recipe.noise_m))
        """Standard deviation of this episode, metres."""
        self._drift = self._random.normal(size=3) * self.sd
        self._push = np.zeros(3)
        self._pushed_steps = 0
        self._flipped_steps = 0

    def __call__(self, step: int, action: FloatArray) -> FloatArray:
        """The action [7] to execute instead of the clean one."""
        if not self.sd:  # the data need undisturbed episodes, too
            return action
        rng = self._random
        self._drift = MEMORY * self._drift + (1 - MEMORY**2) ** 0.5 * self.sd * rng.normal(size=3)
        if not self._pushed_steps and rng.random() < self._recipe.burst_chance:
            way = rng.normal(size=3) * (1.0, 1.0, 0.6)
            self._push = way / np.linalg.norm(way) * rng.uniform(*BURST_M)
            self._pushed_steps = int(rng.integers(1, 4))
        if not self._flipped_steps and rng.random() < self._recipe.flip_chance:
            self._flipped_steps = int(rng.integers(1, 4))
        executed = action.copy()
        executed[:3] += self._drift
        if self._pushed_steps:
            self._pushed_steps -= 1
            executed[:3] += self._push
        if self._flipped_steps:
            self._flipped_steps -= 1
            executed[6] = 1.0 - executed[6]
        return executed
