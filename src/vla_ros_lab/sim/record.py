"""Records all messages of the simulation in a rosbag2 bag (MCAP)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vla_ros.errors import MissingDependencyError, VlaRosError
from vla_ros.files import check_parent

_LATCHED = frozenset({"/vla_policy/instruction"})
_CHUNK = 1 << 20  # bytes that wait to be written


class BagRecorder:
    """Writes messages to a new bag, as ``ros2 bag record`` does; ``clock`` returns their times in nanoseconds."""

    clock: Callable[[], int] = staticmethod(time.time_ns)

    def __init__(self, path: Path) -> None:
        try:
            from vla_ros.record.bag import BagWriter
            from vla_ros.record.topics import Recorded
        except ImportError as error:
            raise MissingDependencyError(
                f"--record: {error.name} does not import; install the extra: pip install 'vla_ros[replay]'"
            ) from error
        if path.exists():
            raise VlaRosError(f"--record {path}: already exists; name a new folder")
        check_parent("--record", path)
        self._path, self._message = path, Recorded
        with self._named_errors():
            self._writer = BagWriter(path, ())
        self._topics = set[str]()
        self._waiting, self._size, self._last = list[Recorded](), 0, 0

    def __call__(self, topic: str, kind: str, message: Any) -> None:
        """Write one message or its CDR bytes (a :data:`~vla_ros_lab.sim.node.Tap`)."""
        from vla_ros.record.topics import Topic

        data = message if isinstance(message, bytes) else _serialize(message, kind)
        self._last = max(self._last + 1, self.clock())
        with self._named_errors():
            if topic not in self._topics:
                self._topics.add(topic)
                self._writer.define(Topic(topic, kind, "instruction" if topic in _LATCHED else "default"))
            self._waiting.append(self._message(self._last, self._last, topic, data))
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


def _serialize(message: Any, kind: str) -> bytes:
    from vla_ros.graph.messages import message_types

    types = message_types()
    if hasattr(message, "get_fields_and_field_types"):  # rclpy's own class
        from rclpy.serialization import serialize_message

        # rmw_fastrtps appends padding to empty arrays, which bag readers reject.
        message = types.deserialize(serialize_message(message), types.message(kind))
    return types.serialize(message)
