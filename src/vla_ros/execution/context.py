"""State shared by the parts of a running node, and the only place that reports the outcome of a frame."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from logging import Logger
from typing import Protocol

from vla_ros.config import LiveConfig
from vla_ros.control.clock import Clock
from vla_ros.control.inputs import Inputs
from vla_ros.control.outcome import FrameOutcome, StepResult
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import Safety
from vla_ros.control.suspension import Suspension
from vla_ros.control.watchdog import Watchdog
from vla_ros.graph.node import Severity, say
from vla_ros.telemetry.stats import Stats


class Sink(Protocol):
    """Observes steps and frames.

    It is :class:`vla_ros.telemetry.telemetry.Telemetry` in the live node, and the player in replay.
    """

    def on_step(self, step: StepResult) -> None:
        """Called after each step, whether or not its command may be sent."""

    def on_outcome(self, outcome: FrameOutcome) -> None:
        """Called with the outcome of a frame."""


class ThrottledLogger:
    """Throttles log lines that could come with every message: :meth:`flush` logs the newest of each kind."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._newest: dict[str, tuple[str, Severity]] = {}

    def log(self, kind: str, text: str, severity: Severity = "warning") -> None:
        """Log ``text`` at the next flush unless a newer text of its kind replaces it. Any thread may call it."""
        self._newest[kind] = text, severity

    def flush(self) -> None:
        while self._newest:
            _, (text, severity) = self._newest.popitem()
            say(self._logger, text, severity)


class Reacting(Protocol):
    """The part of :class:`Safety` that the drivers' endpoints need."""

    def sending(self) -> AbstractContextManager[bool]:
        """See :meth:`Safety.sending`."""

    def react(self, reason: Reason, detail: str = "") -> None:
        """See :meth:`Safety.react`."""


class Surroundings(Protocol):
    """The part of :class:`Context` that the drivers' endpoints need, which a guard's process has as well."""

    @property
    def options(self) -> LiveConfig: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def safety(self) -> Reacting: ...
    @property
    def throttled(self) -> ThrottledLogger: ...
    @property
    def logger(self) -> Logger: ...


@dataclass(frozen=True)
class Context:
    """State shared by receivers, control loop and outputs."""

    options: LiveConfig
    clock: Clock
    inputs: Inputs  # newest joint state, state topics and instruction
    safety: Safety
    suspension: Suspension
    watchdog: Watchdog  # which inputs are stale, frozen, late or invalid
    stats: Stats
    sink: Sink  # publishes or records steps and outcomes
    throttled: ThrottledLogger  # for log lines that may come with every message
    logger: Logger

    def report(self, outcome: FrameOutcome) -> None:
        """Report the outcome of a frame; called exactly once for each received frame."""
        if outcome.reason is not None:
            self.safety.react(outcome.reason, outcome.detail)
        self.stats.on_outcome(outcome)
        self.sink.on_outcome(outcome)
