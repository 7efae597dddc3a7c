"""Decides which messages are recorded, without a graph and without files."""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from vla_ros.config.record import RecordConfig
from vla_ros.record.topics import TRANSFORMS, Recorded


class Mark(Enum):
    """An entry after a bag's last message, which says what becomes of the bag."""

    CLOSE = "close"  # the bag is complete
    DISCARD = "discard"  # the bag is removed


class Selection:
    """Chooses messages and keeps them until they are written, at most ``record.memory`` of them.

    ``latched`` are topics whose last message is part of the state: each bag begins with them.
    """

    def __init__(self, options: RecordConfig, latched: Collection[str]) -> None:
        self._options, self._latched = options, latched
        self._limit = options.memory << 20
        self._last: dict[tuple[str, bytes], Recorded] = {}  # by topic, and where all are part of the state, content
        self._past: deque[Recorded] = deque()  # with ``last``, while nothing is recorded
        self._chosen: list[Recorded | Mark] = []
        self._bytes = 0  # of messages that are kept
        self._episode = False
        self._passes = options.what in ("all", "last")  # messages other than the latched belong in the bag
        self.is_open = options.what == "all"
        self.dropped: Counter[str] = Counter()  # by topic, because there was no room

    def add(self, message: Recorded) -> None:
        """Keep a message if it is recorded, now or perhaps later."""
        latched, size = message.topic in self._latched, len(message.data)
        if latched:
            each = bytes(message.data) if message.topic.endswith(TRANSFORMS[1]) else b""
            self._last[message.topic, each] = message
        if self.is_open and (latched or self._passes):
            if self._bytes + size > self._limit:
                self.dropped[message.topic] += 1
                return
            self._chosen.append(message)
            self._bytes += size
        elif not self.is_open and self._options.what == "last":
            self._past.append(message)
            self._bytes += size
            oldest = message.time - int(self._options.seconds * 1e9)
            while self._past and (self._past[0].time < oldest or self._bytes > self._limit):
                self._bytes -= len(self._past.popleft().data)

    def miss(self, topic: str, count: int) -> None:
        """Count messages that were dropped before they came here, if they would have been recorded."""
        if (self.is_open and (topic in self._latched or self._passes)) or self._options.what == "last":
            self.dropped[topic] += count

    def hear(self, event: Mapping[str, Any], time: int) -> None:
        """Follow an event of the node, which was added before: episodes begin and end bags."""
        kind, what = event.get("event"), self._options.what
        if what not in ("episodes", "corrections"):
            return
        self._episode = kind == "episode_start" or (self._episode and kind != "episode_end")
        self._passes = self._episode and (what == "episodes" or event.get("mode") == "correcting")
        if self._episode:
            self.begin(time)
        else:
            self.end(Mark.DISCARD if event.get("label") == "discard" else Mark.CLOSE)

    def begin(self, time: int) -> None:
        """Begin a bag with what is kept, unless one is open; ``time`` is now, in ns.

        Latched messages get the time of the first message that is kept, or now.
        """
        if not self.is_open:
            self.is_open = True
            first = self._past[0].time if self._past else time
            self._chosen += [one._replace(time=first) for one in self._last.values() if one.time <= first]
            self._chosen += self._past
            self._past.clear()

    def end(self, mark: Mark = Mark.CLOSE) -> None:
        """End the bag that is open."""
        if self.is_open:
            self._chosen.append(mark)
        self.is_open = False

    def take(self) -> list[Recorded | Mark]:
        """Return what was chosen since the last call."""
        taken, self._chosen = self._chosen, []
        self._bytes = sum(len(message.data) for message in self._past)
        return taken
