"""What the parts of a running node share, and the one place where the outcome of each frame is reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vla_ros.config import LiveConfig
from vla_ros.control.clock import Clock
from vla_ros.control.inputs import Inputs
from vla_ros.control.outcome import FrameOutcome, StepResult
from vla_ros.control.safety import Safety
from vla_ros.control.watchdog import Watchdog
from vla_ros.graph.node import Logger, Severity, say
from vla_ros.telemetry.stats import Stats


class Sink(Protocol):
    """Looks on: :class:`vla_ros.telemetry.telemetry.Telemetry` in the live node, the player in replay."""

    def step(self, step: StepResult) -> None:
        """A step was made, whether or not its command may be sent."""

    def frame(self, outcome: FrameOutcome) -> None:
        """What became of a frame."""


class News:
    """Log lines that may come with every message: the newest of each kind is logged when :meth:`flush` is called.

    Args:
        logger: Where they go.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._newest: dict[str, tuple[str, Severity]] = {}

    def tell(self, kind: str, text: str, severity: Severity = "warning") -> None:
        """Replace what was last told of this kind; from any thread."""
        self._newest[kind] = text, severity

    def flush(self) -> None:
        """Log what is new."""
        while self._newest:
            _, (text, severity) = self._newest.popitem()
            say(self._logger, text, severity)


@dataclass(frozen=True)
class Context:
    """Shared by receivers, control loop and outputs.

    Attributes:
        options: The options in force.
        clock: The time, and how to wait.
        inputs: Newest joint state, feeds and instruction.
        safety: What may move and why not.
        watchdog: Which inputs are stale, frozen, late or invalid.
        stats: Times and frame counts.
        sink: Shows or keeps what happens; decides nothing.
        news: Log lines that come often.
        logger: Of the node.
    """

    options: LiveConfig
    clock: Clock
    inputs: Inputs
    safety: Safety
    watchdog: Watchdog
    stats: Stats
    sink: Sink
    news: News
    logger: Logger

    def report(self, outcome: FrameOutcome) -> None:
        """Account for a frame. Called exactly once for each frame that was received."""
        if outcome.reason is not None:
            self.safety.report(outcome.reason, outcome.detail)
        self.stats.frame(outcome)
        self.sink.frame(outcome)
