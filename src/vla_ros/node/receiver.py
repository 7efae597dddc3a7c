"""What becomes of a camera message when it comes: looked at, and left for the working thread, or dropped.

On the thread that spins, for every frame of every camera: a stamp is read, nothing is decoded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from vla_ros.config import Config
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import Safety
from vla_ros.control.watchdog import Now, Watchdog, digest
from vla_ros.errors import ImageError
from vla_ros.graph.node import Logger
from vla_ros.node.control_loop import Frame
from vla_ros.telemetry.stats import Stats
from vla_ros.vision.messages import CdrBytes, image_stamp, with_stamp


class _Dropped(Protocol):
    def __call__(self, stamp: int, camera: str, received: int, reason: Reason) -> None: ...


class FrameReceiver:
    """Receives the frames of all cameras.

    Args:
        config: The whole tree; :meth:`configure` takes a changed one.
        mailboxes: One per ``camera.topics``.
        watchdog: Says which frames may be used.
        safety: Told of those that may not.
        stats: Counts them.
        dropped: Told of each frame that had a stamp and was not used.
        now: The present on both clocks.
        logger: Says what is odd, once.
    """

    def __init__(
        self,
        config: Config,
        mailboxes: Sequence[Mailbox[Frame]],
        watchdog: Watchdog,
        safety: Safety,
        stats: Stats,
        dropped: _Dropped,
        now: Callable[[], Now],
        logger: Logger,
    ) -> None:
        self._config = config
        self._mailboxes = mailboxes
        self._watchdog = watchdog
        self._safety = safety
        self._stats = stats
        self._dropped = dropped
        self._now = now
        self._logger = logger
        self._arrived = [-math.inf] * len(mailboxes)
        self._unstamped: set[str] = set()

    def configure(self, config: Config) -> None:
        """Take options that may change while running."""
        self._config = config

    def receive(self, index: int, data: CdrBytes) -> None:
        """A message of camera ``index`` came, as its CDR bytes."""
        arrived = time.monotonic()
        self._stats.received()
        topic = self._config.camera.topics[index]
        try:
            stamp = image_stamp(data)
        except ImageError as error:
            self._drop(Reason.IMAGE_INVALID, f"{topic}: {error}")
            return
        now = self._now()
        if not stamp and not self._config.control.lockstep:
            stamp, data = now.ros, with_stamp(data, now.ros)
            self._say_unstamped(topic)
        seen = digest(data, skip=12) if self._config.timeouts.frozen_frames else None
        reason = self._watchdog.frame(topic, stamp, now, seen)
        if reason is not None:
            self._drop(reason, topic)
            self._dropped(stamp, topic, now.ros, reason)
            return
        before, self._arrived[index] = self._arrived[index], arrived
        if self._mailboxes[index].put(Frame(data, stamp, now.ros, arrived, arrived - before)):
            self._stats.dropped("replaced")
        self._stats.record({"transport": (now.ros - stamp) / 1e6, "receive": 1e3 * (time.monotonic() - arrived)})

    def _say_unstamped(self, topic: str) -> None:
        """Many drivers give no stamp. Their frames count as taken when they came, as joint states do."""
        self._stats.unstamped()
        if topic not in self._unstamped:
            self._unstamped.add(topic)
            self._logger.warning(
                f"{topic}: its frames have the stamp 0 and count as taken when they come; how old they really are "
                "nobody knows, and timeouts.frame_age cannot catch it. Let the driver stamp them"
            )

    def _drop(self, reason: Reason, detail: str) -> None:
        self._stats.dropped(reason.value)
        self._safety.report(reason, detail)
        self._logger.debug(f"{reason.value}: {detail}")
