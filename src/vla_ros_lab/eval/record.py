"""Records all messages of the simulation in a rosbag2 bag (MCAP)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vla_ros.errors import MissingDependencyError, VlaRosError, install
from vla_ros.files import check_parent
from vla_ros.record.topics import Recorded, Topic

_LATCHED = frozenset({"/vla_policy/instruction"})
_CHUNK = 1 << 20  # bytes that wait to be written


class BagRecorder:
    """Writes messages to a new bag, as ``ros2 bag record`` does; ``clock`` returns their times in nanoseconds."""

    clock: Callable[[], int] = staticmethod(time.time_ns)

    def __init__(self, path: Path) -> None:
        try:
            from vla_ros.graph.messages import message_types
            from vla_ros.record.bag import BagWriter
        except ImportError as error:
            found = f"--record: {error.name} does not import"
            raise MissingDependencyError(f"{found}; install it with: {install('replay')}") from error
        if path.exists():
            raise VlaRosError(f"--record {path}: already exists; name a new folder")
        check_parent("--record", path)
        self._path, self._types = path, message_types()
        with self._named_errors():
            self._writer = BagWriter(path, ())
        self._topics = set[str]()
        self._waiting, self._size, self._last = list[Recorded](), 0, 0

    def hear(self, topic: str, kind: str, cdr: bytes | memoryview, published: int) -> None:
        """Write a message of the type ``kind``; its time is the clock's."""
        # rmw_fastrtps appends padding to empty arrays, which bag readers reject.
        data = self._types.serialize(self._types.deserialize(cdr, self._types.message(kind)))
        self._last = max(self._last + 1, self.clock())
        with self._named_errors():
            if topic not in self._topics:
                self._topics.add(topic)
                self._writer.define(Topic(topic, kind, "instruction" if topic in _LATCHED else "default"))
            self._waiting.append(Recorded(self._last, self._last, topic, data))
            self._size += len(data)
            if self._size >= _CHUNK:
                self._write()

    def close(self) -> None:
        with self._named_errors():
            self._write()
            self._writer.close()

    def _write(self) -> None:
        waiting, self._waiting, self._size = self._waiting, [], 0
        self._writer.write(waiting)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise VlaRosError(f"--record {self._path}: cannot be written ({error.strerror})") from None
