"""Records all messages of the simulation in a rosbag2 bag (MCAP)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vla_ros.errors import MissingDependencyError, VlaRosError

_LATCHED = frozenset({"/vla_policy/instruction"})


class BagRecorder:
    """Writes messages to a new bag, as ``ros2 bag record`` does; ``clock`` returns their times in nanoseconds."""

    clock: Callable[[], int] = staticmethod(time.time_ns)

    def __init__(self, path: Path) -> None:
        try:
            from rosbags.rosbag2 import StoragePlugin, Writer
            from rosbags.typesys import Stores, get_typestore
        except ImportError as error:
            raise MissingDependencyError(
                f"--record: rosbags does not import ({error}); install the extra: pip install 'vla_ros[dds]'"
            ) from error
        if path.exists():
            raise VlaRosError(f"--record {path}: already exists; name a new folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._store = get_typestore(Stores.ROS2_JAZZY)
        self._writer = Writer(path, version=9, storage_plugin=StoragePlugin.MCAP)
        self._writer.open()
        self._connections: dict[str, Any] = {}
        self._last = 0

    def __call__(self, topic: str, kind: str, message: Any) -> None:
        """Write one message or its CDR bytes (a :data:`~vla_ros.sim.node.Tap`)."""
        if topic not in self._connections:
            self._connections[topic] = self._writer.add_connection(
                topic, kind, typestore=self._store, offered_qos_profiles=[_qos(topic in _LATCHED)]
            )
        data = message if isinstance(message, bytes) else _serialize(message, kind)
        self._last = max(self._last + 1, self.clock())
        with self._named_errors():
            self._writer.write(self._connections[topic], self._last, data)

    def close(self) -> None:
        with self._named_errors():
            self._writer.close()

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


def _qos(latched: bool) -> Any:
    """Return the QoS: RELIABLE, KEEP_LAST, and TRANSIENT_LOCAL if a player must latch the topic."""
    from rosbags.interfaces import Qos, QosDurability, QosHistory, QosLiveliness, QosReliability, QosTime

    forever = QosTime(2147483647, 4294967295)
    durability = QosDurability.TRANSIENT_LOCAL if latched else QosDurability.VOLATILE
    delivery = (QosHistory.KEEP_LAST, 1 if latched else 10, QosReliability.RELIABLE, durability)
    return Qos(*delivery, forever, forever, QosLiveliness.AUTOMATIC, forever, False)
