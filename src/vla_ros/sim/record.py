"""A rosbag2 bag (MCAP) of what the simulation sends and hears, for ``ros2 bag play`` and ``vla-ros replay``."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

from vla_ros.errors import MissingDependencyError, VlaRosError

_LATCHED = frozenset({"/vla_policy/instruction"})
_TYPES = {
    "/camera/image_raw": "sensor_msgs/msg/Image",
    "/wrist_camera/image_raw": "sensor_msgs/msg/Image",
    "/joint_states": "sensor_msgs/msg/JointState",
    "/sim/objects": "sensor_msgs/msg/JointState",
    "/arm/joint_command": "sensor_msgs/msg/JointState",
    "/vla_policy/action": "std_msgs/msg/Float64MultiArray",
    "/vla_policy/instruction": "std_msgs/msg/String",
}


class BagRecorder:
    """Writes messages as they come; the log time is when they came, as with ``ros2 bag record``.

    Args:
        path: Folder of the new bag.

    Raises:
        MissingDependencyError: rosbags is not installed.
        VlaRosError: The folder exists already.
    """

    def __init__(self, path: Path) -> None:
        try:
            from rosbags.rosbag2 import StoragePlugin, Writer
            from rosbags.typesys import Stores, get_typestore
        except ImportError as error:
            raise MissingDependencyError(
                f"--record: rosbags does not import ({error}); install the extra: pip install 'vla_ros[dds]'"
            ) from error
        if path.exists():
            raise VlaRosError(f"--record {path}: exists already, expected the name of a new folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._store = get_typestore(Stores.ROS2_JAZZY)
        self._writer = Writer(path, version=9, storage_plugin=StoragePlugin.MCAP)
        self._writer.open()
        self._connections: dict[str, Any] = {}
        self._last = 0

    def __call__(self, topic: str, stamp: int, message: Any) -> None:
        """Write one message or its CDR bytes (a :data:`~vla_ros.sim.node.Tap`)."""
        if topic not in self._connections:
            self._connections[topic] = self._writer.add_connection(
                topic, _TYPES[topic], typestore=self._store, offered_qos_profiles=[_qos(topic in _LATCHED)]
            )
        data = message if isinstance(message, bytes) else _serialize(message, _TYPES[topic])
        self._last = max(self._last, time.time_ns())
        self._writer.write(self._connections[topic], self._last, data)

    def close(self) -> None:
        """Finish the bag."""
        self._writer.close()

    def __enter__(self) -> BagRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serialize(message: Any, kind: str) -> bytes:
    from vla_ros.graph.messages import message_types

    types = message_types()
    if hasattr(message, "get_fields_and_field_types"):  # rclpy's own class
        from rclpy.serialization import serialize_message

        # rmw_fastrtps leaves slack behind a message with empty lists, for which readers of bags refuse it.
        message = types.deserialize(serialize_message(message), types.message(kind))
    return types.serialize(message)


def _qos(latched: bool) -> Any:
    """RELIABLE, KEEP_LAST, TRANSIENT_LOCAL where a player must latch it."""
    from rosbags.interfaces import Qos, QosDurability, QosHistory, QosLiveliness, QosReliability, QosTime

    forever = QosTime(2147483647, 4294967295)
    return Qos(
        history=QosHistory.KEEP_LAST,
        depth=1 if latched else 10,
        reliability=QosReliability.RELIABLE,
        durability=QosDurability.TRANSIENT_LOCAL if latched else QosDurability.VOLATILE,
        deadline=forever,
        lifespan=forever,
        liveliness=QosLiveliness.AUTOMATIC,
        liveliness_lease_duration=forever,
        avoid_ros_namespace_conventions=False,
    )
