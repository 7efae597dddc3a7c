"""A depth camera on a mount: its images, CameraInfo and transforms, which stop, change or do not fit."""

from typing import Any

import numpy as np

from tools.faults.channel import SECOND
from vla_ros.graph.node import Graph
from vla_ros.vision.messages import encode_image

IMAGE, INFO = "/depth/image", "/depth/camera_info"
_SIZE = (48, 64)  # height, width
_MOVED = 0.02  # m


class DepthCamera:
    """Sees a plane at 0.8 m; its pose is on ``/tf``, or it is on the robot's link ``link``.

    :meth:`become` begins a fault: ``silent``, ``lost``, ``moved``, ``size``, ``blind`` or ``two``.
    """

    def __init__(self, graph: Graph, node: Any, link: str = "") -> None:
        self._make, self._fault, self._x = graph.message, "", 0.0

        def publisher(kind: str, topic: str, qos: str) -> Any:
            return node.create_publisher(graph.message(kind), topic, graph.qos(qos))

        self._images = publisher("sensor_msgs/msg/Image", IMAGE, "camera")
        self._infos = publisher("sensor_msgs/msg/CameraInfo", INFO, "state_publisher")
        self._moving = publisher("tf2_msgs/msg/TFMessage", "/tf", "diagnostics")
        self._static = publisher("tf2_msgs/msg/TFMessage", "/tf_static", "event")
        self._rng = np.random.default_rng(0)
        self._other = publisher("tf2_msgs/msg/TFMessage", "/tf", "diagnostics")
        self._link, self._others = link, 0
        self._publish(self._static, link or "mount", "optical", 0)

    def become(self, fault: str) -> None:
        self._fault, self._others = fault, 5 if fault == "two" else 0  # messages of another publisher
        if fault == "moved":
            self._x += _MOVED
            self._publish(self._static, "mount", "optical", 0)

    def send(self, stamp: int) -> None:
        """Publish what belongs to a frame of this stamp, nanoseconds."""
        if self._fault != "lost" and not self._link:
            self._publish(self._moving, "base_link", "mount", stamp)
        if self._others:
            self._others -= 1
            self._publish(self._other, "base_link", "mount", stamp - 1_000_000, _MOVED)
        height, width = (2 * side if self._fault == "size" else side for side in _SIZE)
        k = np.array([50, 0, width / 2, 0, 50, height / 2, 0, 0, 1], float)
        info = self._make("sensor_msgs/msg/CameraInfo")(
            header=self._header("optical", stamp),
            height=height,
            width=width,
            distortion_model="plumb_bob",
            d=np.zeros(5),
            k=k,
            r=np.eye(3).ravel(),
            p=np.insert(k, (3, 6, 9), 0),
            binning_x=0,
            binning_y=0,
            roi=self._make("sensor_msgs/msg/RegionOfInterest")(),
        )
        self._infos.publish(info)
        if self._fault != "silent":
            near = 0 if self._fault == "blind" else 790
            depth = self._rng.integers(near, (near and 811) or 1, _SIZE).astype("<u2")[..., None].view(np.uint8)
            self._images.publish(encode_image(depth, stamp, "optical", "16UC1"))

    def _publish(self, publisher: Any, parent: str, child: str, stamp: int, moved: float = 0.0) -> None:
        make = self._make
        one = make("geometry_msgs/msg/TransformStamped")()
        one.header, one.child_frame_id = self._header(parent, stamp), child
        one.transform.translation.x, one.transform.rotation.w = self._x if child == "optical" else moved, 1.0
        publisher.publish(make("tf2_msgs/msg/TFMessage")(transforms=[one]))

    def _header(self, frame: str, stamp: int) -> Any:
        time = self._make("builtin_interfaces/msg/Time")(sec=stamp // SECOND, nanosec=stamp % SECOND)
        return self._make("std_msgs/msg/Header")(stamp=time, frame_id=frame)
