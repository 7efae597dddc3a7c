"""Notices that the process was suspended, and tells which messages were published before it resumed.

A suspended process (SIGSTOP, a cgroup freezer, a paused container, a machine that sleeps or starves it) continues
as if nothing had happened: with commands computed before, and with messages that waited in sockets meanwhile.
"""

import math
import threading
import time
from dataclasses import dataclass

from vla_ros.control.clock import Clock

LONGEST = 0.25
"""Seconds without a call of :meth:`Suspension.notice` that count as a suspension; the node calls it at 50 Hz."""

_SETTLED = 1.0  # s; a message without a stamp was published at most this long before it arrives
_LONG = 1.0  # s; a suspension in which messages get lost because nobody takes them
_REPAIRED = 3.2  # s; after this time, lost messages have been sent again: Fast DDS' writers offer them every 3 s
_DRAINED = 0.2  # s; after this time, messages that waited during a shorter suspension have been processed
_COUNTED = 100  # messages; the shortest delay is that of the last one or two hundred
_PUBLISHERS = 256  # remembered; all are forgotten beyond that


@dataclass
class _Delay:
    """Shortest time from a publisher's stamp, on its clock, to the arrival, on ours: transport and clock offset."""

    shortest: float
    before: float = math.inf  # of the previous messages
    count: int = 0


class Suspension:
    """Notices suspensions of this process. Thread-safe. All times are seconds of :meth:`Clock.awake`.

    Attributes:
        resumed: When the process last resumed, as noticed; -infinity if it was never suspended.
        lasted: Seconds for which it was suspended then.
        settled: When messages that were sent meanwhile, such as a stop, have arrived and been processed: lost ones
            are sent again, and the executor processes those that waited in any order.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = math.inf
        self._delays: dict[bytes, _Delay] = {}
        self.resumed, self.lasted, self.settled = -math.inf, 0.0, -math.inf

    def notice(self) -> None:
        """Record that the process runs. Call it at least every 0.1 s, and before everything that is sent."""
        with self._lock:
            now = self._clock.awake()
            last, self._last = self._last, now
            if now - last > LONGEST:
                self.lasted, self.resumed = now - last, now
                self.settled = max(self.settled, now + (_REPAIRED if self.lasted > _LONG else _DRAINED))

    @property
    def void(self) -> str:
        """Why a request to move that arrives now is refused: it may have waited for over a second; or ""."""
        self.notice()
        if self.lasted <= _LONG or self._clock.awake() >= self.settled:
            return ""
        return f"refused: the process did not run for {self.lasted:.1f} s, so this request may be old; ask again"

    def note_arrival(self, publisher: bytes, stamp: int) -> float:
        """Record a message that arrives now; return when it was published at the earliest, s of ``Clock.awake``.

        The publisher's clock may differ from ours: its stamp and the shortest delay of its messages tell the time.
        Until a publisher is known, its clock counts as ours.

        Args:
            publisher: The publisher's id.
            stamp: Nanoseconds of the publisher's system clock; 0 if the middleware does not provide it.
        """
        now = self._clock.awake()
        if not stamp:
            return now - _SETTLED
        seconds = stamp / 1e9
        with self._lock:
            if publisher not in self._delays and len(self._delays) >= _PUBLISHERS:
                self._delays.clear()
            known = self._delays.setdefault(publisher, _Delay(now - time.time()))
            known.shortest, known.count = min(known.shortest, now - seconds), known.count + 1
            shortest = min(known.shortest, known.before)
            if known.count == _COUNTED:
                known.shortest, known.before, known.count = math.inf, known.shortest, 0
        return seconds + shortest
