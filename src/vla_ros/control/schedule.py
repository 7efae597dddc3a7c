"""Decides which step of which chunk comes next, and blends successive chunks.

Steps are consumed when they are executed, not by wall clock: an arm that holds does not skip steps. A chunk's first
action belongs to the time of its observation; steps that were executed during the inference are skipped
(:attr:`ActionSchedule.position`).

The schedules (``control.schedule``) differ in when the policy infers and in how two chunks are joined:

- ``sync`` infers when no step is left, and the arm waits. All others infer while the plan is executed.
- ``append`` uses the newest chunk unchanged.
- ``blend`` interpolates from the old chunk's remaining steps (or from its last action) to the new chunk's over
  ``blend_steps``.
- ``ensemble`` is ACT's temporal ensembling: the mean of all chunks' predictions for this step, weighted
  exp(-m i) with i = 0 for the oldest (Zhao et al., "Learning Fine-Grained Bimanual Manipulation with Low-Cost
  Hardware", 2023).
- ``rtc`` uses the newest chunk unchanged, because the policy was given the rest of the old chunk and continues it
  (Black, Galliker and Levine, "Real-Time Execution of Action Chunking Flow Policies", 2025). If the old chunk has
  ended by then, positions are interpolated over ``blend_steps``, starting where the last motion would lead in one
  more step or, if the arm has come to rest, at its last action.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from vla_ros.config import ControlConfig
from vla_ros.contract.spec import PolicySpec
from vla_ros.kinematics.rotations import nearest
from vla_ros.types import ActionChunk, FloatArray

ACT_DECAY = 0.01
"""m of the paper's experiments, and of LeRobot's documentation."""


@dataclass(frozen=True)
class Step:
    """One action to execute."""

    action: FloatArray  # float64 [D], after blending
    index: int  # position of the action in its chunk
    stamp: int  # stamp of the newest chunk's observation, nanoseconds


@dataclass(frozen=True)
class _Placed:
    """A chunk and the position (:attr:`ActionSchedule.position`) to which its first action belongs."""

    chunk: ActionChunk
    start: int

    def at(self, step: int) -> FloatArray | None:
        """Return the chunk's action for the step at this position, or None outside the chunk."""
        index = step - self.start
        return self.chunk.actions[index] if 0 <= index < len(self.chunk.actions) else None


class ActionSchedule:
    """Yields the steps of chunks one by one.

    Args:
        control: The options. Assigning new options to the attribute changes ``execute_steps`` and keeps the plan.
        spec: The policy's actions.
        unblended: Columns of the action that are never blended (binary grippers).
        rotations: Columns that are a rotation, with the form of that rotation.

    Attributes:
        kind: ``sync``, ``append``, ``blend``, ``ensemble`` or ``rtc``.
        position: Steps executed so far; a chunk's first action belongs to the position at its observation.
    """

    def __init__(
        self,
        control: ControlConfig,
        spec: PolicySpec,
        unblended: tuple[int, ...] = (),
        rotations: tuple[tuple[slice, str], ...] = (),
    ) -> None:
        self.control = control
        self.kind = resolve_schedule(control.schedule, spec)
        # As in ACT, an ensemble infers after each step, unless an option says otherwise.
        self._usual_steps = 1 if self.kind == "ensemble" else spec.execute_steps
        self._decay = ensemble_decay(control, spec)
        self.position = 0
        self._unblended = list(unblended)
        self._rotations = rotations
        self._positions = spec.motion in ("joint_position", "tip_position")
        self.reset()

    def reset(self) -> None:
        """Forget all chunks and the last action; :attr:`position` keeps counting."""
        self._placed: deque[_Placed] = deque()
        self._next: Step | None = None  # returned by next(), not executed yet
        self._since_load = 0
        self._last: FloatArray | None = None
        self._before_last: FloatArray | None = None
        self._before_load: FloatArray | None = None

    @property
    def left(self) -> int:
        """Steps that are left of the newest chunk, regardless of ``control.execute_steps``."""
        if not self._placed:
            return 0
        newest = self._placed[-1]
        return max(0, newest.start + len(newest.chunk.actions) - self.position)

    @property
    def left_until_inference(self) -> int:
        """Steps to execute before the next inference."""
        steps = self.control.execute_steps or self._usual_steps or self.left + self._since_load
        return max(0, min(self.left, steps - self._since_load))

    @property
    def is_ahead(self) -> bool:
        """True if the policy infers while the plan is executed."""
        return self.kind != "sync"

    @property
    def planned(self) -> int:
        """Steps that can be executed without another chunk."""
        return self.left if self.is_ahead else self.left_until_inference

    @property
    def wants_chunk(self) -> bool:
        """True if no step remains before the next inference."""
        return self.left_until_inference == 0

    def left_over(self, position: int) -> FloatArray:
        """Return the newest chunk's actions starting at ``position``, float64 [left, D], before limits."""
        if not self._placed:
            return np.zeros((0, 0))
        newest = self._placed[-1]
        return newest.chunk.actions[position - newest.start :].copy()

    def load(self, chunk: ActionChunk, start: int | None = None, *, rested: bool = False) -> None:
        """Switch to ``chunk``; older chunks are only used for blending.

        The chunk's actions must have shape [K, D] with K >= 1; the first action belongs to the :attr:`position`
        ``start`` (None: the current one). ``rested`` is True if the old chunk ended so long ago that the arm is at
        rest.
        """
        if chunk.actions.ndim != 2 or len(chunk.actions) == 0:
            raise ValueError(f"a chunk's actions have shape {chunk.actions.shape}, expected [steps, numbers]")
        start = self.position if start is None else start
        self._before_load = self._last if self.kind == "blend" else self._end_of_plan(start, rested)
        self._placed.append(_Placed(chunk, start))
        self._next = None
        self._since_load = 0
        keep = {"ensemble": len(self._placed), "blend": 2}.get(self.kind, 1)
        while len(self._placed) > keep:
            self._placed.popleft()

    def next(self) -> Step:
        """Return the next step; the same step until :meth:`sent` is called.

        The chunk continues after ``control.execute_steps`` until it ends or the next one arrives. Raises
        RuntimeError if no step is :attr:`left`.
        """
        newest = self._placed[-1] if self._placed else None
        own = newest.at(self.position) if newest else None
        if newest is None or own is None:
            raise RuntimeError("no step is left: load a chunk first")
        if self.kind in ("blend", "rtc"):
            action = self._linear(own)
        elif self.kind == "ensemble":
            action = self._ensemble(own)
        else:
            action = own
        if self._unblended and action is not own:
            action[self._unblended] = own[self._unblended]
        self._next = Step(action.copy(), self.position - newest.start, newest.chunk.stamp)
        return self._next

    def sent(self) -> None:
        """Record that the step returned by :meth:`next` was sent. Raises RuntimeError without one."""
        if self._next is None:
            raise RuntimeError("sent() without next()")
        self._before_last, self._last, self._next = self._last, self._next.action, None
        old = self._placed[0].at(self.position) if len(self._placed) > 1 else None
        if old is not None:  # after the old chunk's end, the blend continues from its last action
            self._before_load = old
        self.position += 1
        self._since_load += 1
        while len(self._placed) > 1 and self._placed[0].at(self.position) is None:
            self._placed.popleft()

    def _end_of_plan(self, start: int, rested: bool) -> FloatArray | None:
        """Return where a plan that has ended leaves the arm, or None if it has not ended."""
        before, last = self._before_last, self._last
        ended = self.kind == "rtc" and start < self.position and not self.left
        if not ended or not self._positions or last is None or before is None:
            return None
        return last if rested else 2 * last - self._like(before, last)

    def _linear(self, own: FloatArray) -> FloatArray:
        """Blend the old chunk with ``own``, whose weight is 1/(n+1), 2/(n+1), ... for n blend_steps."""
        share = (self._since_load + 1) / (self.control.blend_steps + 1)
        if share >= 1 or self._before_load is None:
            return own
        old = self._placed[0].at(self.position) if len(self._placed) > 1 else None
        before = self._before_load if old is None else old
        return (1 - share) * self._like(before, own) + share * own

    def _like(self, other: FloatArray, own: FloatArray) -> FloatArray:
        """Return ``other``, with rotations represented like those of ``own``, for averaging."""
        found = other.copy()
        for columns, form in self._rotations:
            found[columns] = nearest(other[columns], form, own[columns])
        return found

    def _ensemble(self, own: FloatArray) -> FloatArray:
        """Return the weighted mean of all predictions [n, D] for the current step."""
        placed = (each.at(self.position) for each in self._placed)
        predictions = [self._like(action, own) for action in placed if action is not None]
        weights = np.exp(-self._decay * np.arange(len(predictions)))
        mean: FloatArray = np.average(predictions, axis=0, weights=weights)
        return mean


def resolve_schedule(schedule: str, spec: PolicySpec) -> str:
    """Return the kind of schedule that ``control.schedule`` resolves to for a policy.

    Policies that return single steps use ``sync``. For others, ``auto`` resolves to ``ensemble`` if the checkpoint
    states temporal ensembling; ``auto`` and ``rtc`` resolve to ``rtc`` if the policy supports it, otherwise to
    ``blend``.
    """
    if spec.horizon == 1:
        return "sync"
    if schedule == "auto" and spec.ensemble_decay is not None:
        return "ensemble"
    if schedule in ("auto", "rtc"):
        return "rtc" if spec.continues_chunks else "blend"
    return schedule


def ensemble_decay(control: ControlConfig, spec: PolicySpec) -> float:
    """Return m of temporal ensembling: ``control.ensemble_decay``, or if -1, the checkpoint's, or else ACT's."""
    stated = ACT_DECAY if spec.ensemble_decay is None else spec.ensemble_decay
    return stated if control.ensemble_decay == -1 else control.ensemble_decay
