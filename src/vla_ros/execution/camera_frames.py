"""Keeps the newest frame of each camera and reports exactly one outcome per frame."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vla_ros.control.clock import Now
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.outcome import REPLACED, FrameOutcome
from vla_ros.control.rate_limiter import RateLimiter
from vla_ros.control.reasons import Reason
from vla_ros.execution.context import Context
from vla_ros.vision.messages import CdrBytes


@dataclass(frozen=True, eq=False)
class Frame:
    """A camera message as received."""

    data: CdrBytes
    stamp: int  # its header's stamp in nanoseconds
    camera: str
    arrived: Now  # time of arrival
    interval: float = math.inf  # seconds since the previous frame; infinite for the first

    def outcome(self, outcome: str, **details: Any) -> FrameOutcome:
        """Return the frame's outcome; ``details`` are further fields."""
        return FrameOutcome(self.stamp, self.camera, self.arrived.ros, outcome, **details)


class NewestFrames:
    """Takes frames from the mailboxes of all cameras when the camera ``lead`` has one. Used from one thread."""

    def __init__(
        self, context: Context, mailboxes: Sequence[Mailbox[Frame]], limiter: RateLimiter, lead: int = 0
    ) -> None:
        self._context, self._limiter = context, limiter
        self._mailboxes, self._lead = mailboxes, lead
        self._newest: list[Frame | None] = [None] * len(mailboxes)
        self._unreported: set[int] = set()  # cameras whose newest frame has no outcome yet

    @property
    def messages(self) -> list[CdrBytes | None]:
        """The newest message of each camera, or None for a camera without one."""
        return [frame.data if frame else None for frame in self._newest]

    def wait(self, patience: float) -> bool:
        """Wait up to ``patience`` seconds for a frame of the camera ``lead``; return True if there is one."""
        return self._mailboxes[self._lead].wait(patience)

    def take(self, patience: float = 0.0) -> Frame | None:
        """Take the waiting frame of ``lead``, and the other cameras' newest frames; None without a frame.

        If the rate limiter waits for the frame after it, that one is taken instead if it arrives in time, at most
        ``patience`` seconds from now.
        """
        frame = self._mailboxes[self._lead].take()
        if frame is None:
            return None
        now, arrived = self._context.clock.steady(), frame.arrived.steady / 1e9
        wait = min(self._limiter.patience(now, arrived, arrived + frame.interval), patience)
        if wait > 0 and (newer := self._mailboxes[self._lead].take(wait)) is not None:
            self._context.report(frame.outcome(REPLACED))
            frame = newer
        self._use(self._lead, frame)
        for index, mailbox in enumerate(self._mailboxes):
            if index != self._lead and (other := mailbox.take()) is not None:
                self._use(index, other)
        return frame

    def discard(self) -> None:
        """Drop the waiting frames: they show the arm before a person handed it back."""
        for mailbox in self._mailboxes:
            if (frame := mailbox.take()) is not None:
                self._context.report(frame.outcome(REPLACED))

    def report_unused(self, frame: Frame, reason: Reason, detail: str, *, holds: bool = True) -> None:
        """Report why the newest frame of ``lead`` led to no command; if not ``holds``, only count the reason."""
        self._unreported.discard(self._lead)
        if not holds:
            self._context.safety.count(reason)
        self._context.report(frame.outcome(reason.value, reason=reason if holds else None, detail=detail))

    def finish(self, outcome: str, **details: object) -> None:
        """Report the newest frames' outcome, unless reported; ``details`` are fields of :class:`FrameOutcome`."""
        for index in sorted(self._unreported):
            used = self._newest[index]
            assert used is not None
            self._context.report(used.outcome(outcome, **details))
        self._unreported.clear()

    def _use(self, index: int, frame: Frame) -> None:
        """Make a frame its camera's newest; if the previous frame has no outcome, report it as replaced."""
        before, self._newest[index] = self._newest[index], frame
        if before is not None and index in self._unreported:
            self._context.report(before.outcome(REPLACED))
        self._unreported.add(index)
