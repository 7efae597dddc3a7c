"""An arm under position control as real ones are: it lags, sags, sticks, has backlash and a coarse encoder."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from vla_ros.types import FloatArray

_TICK = 0.01  # s


@dataclass(frozen=True)
class Faults:
    """What an arm of N joints does wrong; rad, rad/s and s."""

    lag: float  # time constant with which it follows; 0: at once
    sag: FloatArray  # [N], how far it rests from its command
    stick: float  # it does not move towards a command that is nearer
    play: float  # backlash: its joints may be half of it away from its motors
    quantum: float  # smallest step of its encoders
    late: int  # joint states by which the measurement is late

    @classmethod
    def draw(cls, rng: np.random.Generator, count: int = 7, largest: float = 0.1) -> Faults:
        """Any arm; one in four has each fault not at all, and ``largest`` bounds the sag."""

        def some(most: float) -> float:
            return float(rng.uniform(0, most)) * float(rng.random() > 0.25)

        sag = rng.uniform(-1, 1, count) * some(largest)
        return cls(some(0.2), sag, some(0.02), some(0.02), some(0.01), int(rng.integers(0, 3)))

    @property
    def offset(self) -> FloatArray:
        """How far the measured position may be from a constant command, [N]."""
        return np.abs(self.sag) + self.stick + self.play / 2 + self.quantum / 2


class RealArm:
    """Follows commands [N] from rest at ``position``, where it was commanded to be somewhere else.

    Attributes:
        push: rad/s with which somebody pushes the joints, [N]; the motors give way.
        blocked: Something keeps the arm where it is.
    """

    def __init__(self, faults: Faults, position: FloatArray, fastest: FloatArray) -> None:
        self.faults, self._fastest = faults, fastest
        self._motor, self._joint = position.copy(), position.copy()
        self.push, self.blocked = np.zeros(len(position)), False
        self._seen = deque([self._read()] * (faults.late + 1), maxlen=faults.late + 1)

    def move(self, command: FloatArray, seconds: float) -> None:
        """Follow a command for some time; then its joint state is newer."""
        faults = self.faults
        for _ in range(max(1, round(seconds / _TICK))):
            tick = seconds / max(1, round(seconds / _TICK))
            if np.any(self.push):
                self._motor = self._motor + self.push * tick
            elif not self.blocked:
                error = command - faults.sag - self._motor
                wanted = np.sign(error) * np.maximum(np.abs(error) - faults.stick, 0.0)
                share = 1.0 if faults.lag == 0 else 1 - np.exp(-tick / faults.lag)
                self._motor = self._motor + np.clip(share * wanted, -self._fastest * tick, self._fastest * tick)
            half = faults.play / 2
            self._joint = np.clip(self._joint, self._motor - half, self._motor + half)
        self._seen.append(self._read())

    def _read(self) -> FloatArray:
        quantum = self.faults.quantum
        return np.round(self._joint / quantum) * quantum if quantum else self._joint.copy()

    @property
    def measured(self) -> FloatArray:
        """The joint state [N] that has arrived."""
        return self._seen[0]
