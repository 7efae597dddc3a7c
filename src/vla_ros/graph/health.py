"""Detects why messages do not arrive: wrong types, incompatible QoS, no publisher.

It uses only the Node interface, so it works the same under rclpy and the embedded participant.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vla_ros.graph.qos import incompatibilities

_VIDEO = ("foxglove_msgs/msg/CompressedVideo", "ffmpeg_image_transport_msgs/msg/FFMPEGPacket")
_VIDEO_HINT = (
    "a video stream, in which an image needs those before it, but a policy takes the newest image alone. Set the "
    "driver's image_transport to compressed or raw, camera.topic to that topic, and camera.transport to its kind"
)


@dataclass(frozen=True)
class Watched:
    """A topic (resolved name) whose publishers or subscriptions on other nodes are checked."""

    topic: str
    profile: Any  # QoS profile of either backend
    required: bool = True  # False if a publisher is optional, such as a stop button
    type_name: str = ""  # the topic's type; endpoints of another type are reported. Empty accepts every type
    published: bool = False
    """True if this node publishes the topic: types and QoS of subscriptions are checked, but none is required."""


@dataclass(frozen=True)
class TopicProblem:
    """A problem with a topic, and its fix."""

    topic: str
    kind: str  # ``wrong_type``, ``incompatible_qos`` or ``no_publisher``
    text: str


class TopicHealth:
    """Checks the publishers and subscriptions of other nodes. Call :meth:`check` about once a second."""

    def __init__(
        self,
        node: Any,
        watched: Sequence[Watched],
        publisher_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._watched = tuple(watched)
        self._timeout = publisher_timeout
        self._clock = clock
        begin = clock()
        self._alone_since: dict[str, float | None] = dict.fromkeys((item.topic for item in self._watched), begin)

    def check(self) -> tuple[TopicProblem, ...]:
        return tuple(finding for item in self._watched for finding in self._look(item))

    def _look(self, item: Watched) -> list[TopicProblem]:
        if item.published:
            subscriptions = self._node.get_subscriptions_info_by_topic(item.topic)
            return [finding for subscription in subscriptions for finding in _obstacles(item, subscription)]
        publishers = self._node.get_publishers_info_by_topic(item.topic)
        if publishers:
            self._alone_since[item.topic] = None
            return [finding for publisher in publishers for finding in _obstacles(item, publisher)]
        if not item.required:
            return []
        since = self._alone_since[item.topic]
        if since is None:
            since = self._alone_since[item.topic] = self._clock()
        if self._clock() - since < self._timeout:
            return []
        return [
            TopicProblem(
                item.topic,
                "no_publisher",
                f"{item.topic} has had no publisher for {self._timeout:g} s. Is the driver running, is the name "
                f"right (ros2 topic list; remap with --ros-args -r {item.topic}:=/other)? Both sides need the same "
                "ROS_DOMAIN_ID, and across hosts ROS_AUTOMATIC_DISCOVERY_RANGE=SUBNET (on Humble, "
                "ROS_LOCALHOST_ONLY=0)",
            )
        ]


def _obstacles(item: Watched, endpoint: Any) -> list[TopicProblem]:
    """Return why no messages pass between this node and the endpoint at the other end of a topic."""
    name = f"{endpoint.node_namespace.rstrip('/')}/{endpoint.node_name}"
    theirs, ours = endpoint.topic_type, item.type_name
    if item.published:
        begin = f"{name} will receive nothing on {item.topic}: "
        types = f"it subscribes to {theirs}, this node publishes {ours}. Choose a matching output (control.output, "
        types += "gripper.output), or name another topic"
        reasons = incompatibilities(endpoint.qos_profile, item.profile)
        fix = "Make it request no more than that, or relay the topic"
    else:
        begin = f"nothing will arrive on {item.topic} from {name}: "
        types = f"it publishes {theirs}, this node subscribes to {ours}. Name another topic, or set the type "
        types += "(for images: camera.transport raw or compressed)"
        reasons = incompatibilities(item.profile, endpoint.qos_profile)
        fix = "Start that publisher with the requested policy (drivers often have a parameter), or relay the topic"
        if theirs in _VIDEO:
            types = f"it publishes {theirs}, {_VIDEO_HINT}"
    if theirs and ours and theirs != ours:
        return [TopicProblem(item.topic, "wrong_type", begin + types)]
    if reasons:
        return [TopicProblem(item.topic, "incompatible_qos", f"{begin}{' and '.join(reasons)}. {fix}")]
    return []
