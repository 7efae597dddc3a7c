"""Decides which step of which chunk comes next, and blends successive chunks.

Steps are consumed when they are executed, not by wall clock: an arm that holds for a second does not skip a second
of the plan. A chunk's first action belongs to the time of its observation; steps executed during the inference are
skipped (:attr:`ChunkSchedule.position`).

The schedules (``control.schedule``) differ in when the policy infers, and in the seam between two chunks:

- ``sync`` infers when no step is left, and the arm waits. The others infer while the plan is executed.
- ``append`` takes the newest chunk as it is.
- ``blend`` interpolates from the old chunk's remaining steps (or from its last action) to the new chunk's over
  ``blend_steps``.
- ``ensemble`` is ACT's temporal ensembling: the mean of every chunk's prediction for this step, weighted
  exp(-m i) with i = 0 for the oldest (Zhao et al., "Learning Fine-Grained Bimanual Manipulation with Low-Cost
  Hardware", 2023).
- ``rtc`` takes the newest chunk as it is, because the policy was given the rest of the old one and completes it
  (Black, Galliker and Levine, "Real-Time Execution of Action Chunking Flow Policies", 2025). If the old chunk has
  ended by then, positions are interpolated over ``blend_steps``: from where the last motion leads in one more step
  or, if the arm has come to rest, from its last action.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from vla_ros.config import ControlConfig
from vla_ros.contract.spec import PolicySpec
from vla_ros.kinematics.rotations import nearest
from vla_ros.types import ActionChunk, FloatArray


@dataclass(frozen=True)
class Step:
    """One action to execute."""

    action: FloatArray  # float64 [D], after blending
    index: int  # position in its chunk
    stamp: int  # stamp of the newest chunk's observation, nanoseconds


@dataclass(frozen=True)
class _Placed:
    """A chunk and the step of the episode to which its first action belongs."""

    chunk: ActionChunk
    start: int

    def at(self, step: int) -> FloatArray | None:
        """Return the chunk's action for a step of the episode, or None outside the chunk."""
        index = step - self.start
        return self.chunk.actions[index] if 0 <= index < len(self.chunk.actions) else None


class ChunkSchedule:
    """Yields the steps of chunks one by one.

    Args:
        control: The options. Assigning others to the attribute changes ``execute_steps``; the plan is kept.
        spec: The policy's actions.
        unblended: Columns of the action that are never blended (binary grippers).
        rotations: Columns that are a rotation, with its form.

    Attributes:
        kind: ``sync``, ``append``, ``blend``, ``ensemble`` or ``rtc``.
    """

    def __init__(
        self,
        control: ControlConfig,
        spec: PolicySpec,
        unblended: tuple[int, ...] = (),
        rotations: tuple[tuple[slice, str], ...] = (),
    ) -> None:
        self.control = control
        self.kind = choose(control.schedule, spec)
        self._executed = 0
        self._unblended = list(unblended)
        self._rotations = rotations
        self._positions = spec.motion in ("joint_position", "tip_position")
        self.reset()

    def reset(self) -> None:
        """Forget all chunks and the last action; :attr:`position` keeps counting."""
        self._placed: deque[_Placed] = deque()
        self._since_load = 0
        self._last: FloatArray | None = None
        self._before_last: FloatArray | None = None
        self._before_load: FloatArray | None = None

    @property
    def position(self) -> int:
        """Steps executed so far; the first action of a chunk belongs to its value when the policy was asked."""
        return self._executed

    @property
    def left(self) -> int:
        """Remaining steps of the newest chunk, regardless of ``control.execute_steps``."""
        if not self._placed:
            return 0
        newest = self._placed[-1]
        return max(0, newest.start + len(newest.chunk.actions) - self._executed)

    @property
    def remaining(self) -> int:
        """Number of steps that :meth:`next` can return before it needs another chunk."""
        # As in ACT, an ensemble infers after each step, unless an option says otherwise.
        steps = self.control.execute_steps or (1 if self.kind == "ensemble" else self.left + self._since_load)
        return max(0, min(self.left, steps - self._since_load))

    @property
    def wants_chunk(self) -> bool:
        """True when a new chunk is needed: nothing remains to be executed."""
        return self.remaining == 0

    def rest(self, position: int) -> FloatArray:
        """Return the newest chunk's actions from ``position`` on, float64 [left, D], as the policy predicted them.

        They do not include limits that changed the commands sent: a policy continues its own numbers, and its next
        chunk passes the same limits.
        """
        if not self._placed:
            return np.zeros((0, 0))
        newest = self._placed[-1]
        return newest.chunk.actions[position - newest.start :].copy()

    def load(self, chunk: ActionChunk, start: int | None = None, *, rested: bool = False) -> None:
        """Switch to ``chunk``; older chunks are only used for blending. Its actions must be [K, D] with 1 <= K.

        ``start`` is the :attr:`position` to which its first action belongs. ``rested``: the old chunk ended so long
        ago that the arm has come to rest.
        """
        if chunk.actions.ndim != 2 or len(chunk.actions) == 0:
            raise ValueError(f"a chunk's actions have shape {chunk.actions.shape}, expected [steps, numbers]")
        start = self._executed if start is None else start
        self._before_load = self._last if self.kind == "blend" else self._onward(start, rested)
        self._placed.append(_Placed(chunk, start))
        self._since_load = 0
        keep = {"ensemble": len(self._placed), "blend": 2}.get(self.kind, 1)
        while len(self._placed) > keep:
            self._placed.popleft()

    def next(self, *, overrun: bool = False) -> Step | None:
        """Return the step to execute now, the same one until :meth:`executed` is called; None if there is none.

        ``overrun`` goes on to the chunk's end where ``execute_steps`` are used up (the next chunk is on its way).
        """
        if not self._placed or (self.remaining == 0 and not overrun):
            return None
        newest = self._placed[-1]
        own = newest.at(self._executed)
        if own is None:
            return None
        if self.kind in ("blend", "rtc"):
            action = self._linear(own)
        elif self.kind == "ensemble":
            action = self._ensemble(own)
        else:
            action = own
        if self._unblended and action is not own:
            action[self._unblended] = own[self._unblended]
        return Step(action.copy(), self._executed - newest.start, newest.chunk.stamp)

    def executed(self) -> None:
        """Record that the step returned by :meth:`next` was sent to the arm."""
        step = self.next(overrun=True)
        if step is None:
            raise RuntimeError("executed() without a step: load a chunk first")
        self._before_last, self._last = self._last, step.action
        old = self._placed[0].at(self._executed) if len(self._placed) > 1 else None
        if old is not None:  # where the old chunk ends, the blend goes on from its last action
            self._before_load = old
        self._executed += 1
        self._since_load += 1
        while len(self._placed) > 1 and self._placed[0].at(self._executed) is None:
            self._placed.popleft()

    def _onward(self, start: int, rested: bool) -> FloatArray | None:
        """Return where a plan that ended before a chunk from ``start`` on has left the arm, or None."""
        before, last = self._before_last, self._last
        ended = self.kind == "rtc" and start < self._executed and not self.left
        if not ended or not self._positions or last is None or before is None:
            return None
        return last if rested else 2 * last - self._like(before, last)

    def _linear(self, own: FloatArray) -> FloatArray:
        """Blend from the previous action to ``own`` with shares 1/(n+1), 2/(n+1), ... of the new chunk."""
        share = (self._since_load + 1) / (self.control.blend_steps + 1)
        if share >= 1 or self._before_load is None:
            return own
        old = self._placed[0].at(self._executed) if len(self._placed) > 1 else None
        before = self._before_load if old is None else old
        return (1 - share) * self._like(before, own) + share * own

    def _like(self, other: FloatArray, own: FloatArray) -> FloatArray:
        """Return ``other`` with its rotations expressed like those of ``own``, so that they can be averaged."""
        found = other.copy()
        for columns, form in self._rotations:
            found[columns] = nearest(other[columns], form, own[columns])
        return found

    def _ensemble(self, own: FloatArray) -> FloatArray:
        """Return the mean of all predictions [n, D] for the current step, oldest first, weighted by exp(-m i)."""
        placed = (each.at(self._executed) for each in self._placed)
        predictions = [self._like(action, own) for action in placed if action is not None]
        weights = np.exp(-self.control.ensemble_decay * np.arange(len(predictions)))
        mean: FloatArray = np.average(predictions, axis=0, weights=weights)
        return mean


def choose(schedule: str, spec: PolicySpec) -> str:
    """Return the kind of schedule that ``control.schedule`` means for this policy.

    Policies with single steps are ``sync``. ``auto`` means ``rtc`` if the policy supports it, otherwise ``blend``.
    """
    if spec.horizon == 1:
        return "sync"
    if schedule in ("auto", "rtc"):
        return "rtc" if spec.continues_chunks else "blend"
    return schedule
