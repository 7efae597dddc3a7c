"""Receives messages under rclpy by its public interface alone.

:mod:`vla_ros.graph.rclpy_frames` binds structs of rcl, which a distribution may change: where they were not tried,
or cannot be loaded, this module takes their place. rclpy's raw subscription copies each message once more, and says
when a message was published (its message info), but not by whom.
"""

from collections.abc import Callable
from typing import Any

from vla_ros.graph.node import RawSubscription
from vla_ros.graph.origin import Origin

LOST_CHECKS = (
    "publishers of one topic are not told apart (camera_contested, joint_state_contested, scene_contested, "
    "person_contested), and after a suspension (suspended) joint states are read only when their turn comes"
)
"""The checks that this path loses."""


class _Polled:
    """A raw subscription that only the executor reads."""

    def __init__(self, node: Any, subscription: Any) -> None:
        self._node, self._subscription = node, subscription

    def poll(self) -> None:
        """Do nothing: rclpy has no public way to take a message outside its executor."""

    def destroy(self) -> None:
        self._node.destroy_subscription(self._subscription)


def subscribe_public(
    node: Any, msg_type: Any, topic: str, callback: Callable[[Any, Origin], None], qos_profile: Any
) -> RawSubscription:
    """Call ``callback`` with a read-only view of each message's CDR bytes and when it was published."""

    def hear(cdr: bytes, info: Any) -> None:
        callback(memoryview(cdr), Origin(published=max(0, int(info["source_timestamp"]))))

    return _Polled(node, node.create_subscription(msg_type, topic, hear, qos_profile, raw=True))
