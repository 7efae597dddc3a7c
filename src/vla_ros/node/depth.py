"""Points of depth cameras in the robot's base frame, by ``sensor_msgs/CameraInfo`` and transforms."""

from collections.abc import Callable
from typing import Any

import numpy as np

from vla_ros.contract.binding import Binding, colour_camera
from vla_ros.control.clock import Clock
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import ConfigError, ImageError
from vla_ros.execution.context import Context
from vla_ros.graph.origin import Origin
from vla_ros.graph.wiring import Wiring
from vla_ros.kinematics.links import Links
from vla_ros.kinematics.transforms import KEPT, TransformBuffer, TransformError
from vla_ros.kinematics.urdf import read_urdf
from vla_ros.record.topics import CAMERA_INFO, TRANSFORM, TRANSFORMS
from vla_ros.types import Float32Array, FloatArray
from vla_ros.vision.camera_model import CameraModel, read_camera_info
from vla_ros.vision.decode import DecodedPoints
from vla_ros.vision.depth import decode_compressed_depth, decode_depth
from vla_ros.vision.messages import CdrBytes

TRANSFORM_WAIT = 0.1
"""Seconds to wait for a transform that is not there yet if ``timeouts.camera_skew`` is 0."""

_LATCHED = 0.5  # s between looks at who publishes CameraInfo that has not come
_MOST_BYTES = 64 << 10  # of a message of transforms; hundreds of frames need less
_STAMP = slice(4, 12)  # of a serialised header


class DepthCameras:
    """Turns the depth images of a binding into points. Messages may come from any thread.

    Attributes:
        infos: Topics of CameraInfo that are needed, and whether their cameras' images are rectified.
        measured: Indices in ``camera.topics`` of the depth cameras.
        models: By topic of :attr:`infos`, its camera's model, or what is wrong with it.
        transforms: What was said on ``/tf`` and ``/tf_static``, or else follows from ``robot.urdf``.
        clock: The clock that waits.
    """

    def __init__(self, binding: Binding) -> None:
        config, self._binding = binding.config, binding
        self._colour = {index: colour_camera(binding.spec, config, key) for key, index in binding.points.items()}
        depth = {key for _, key in binding.spec.depth}
        self.measured = {at for key, at in binding.points.items() if key in depth or config.camera.each[at].info}
        self._placed = {binding.points[key] for _, key in binding.spec.points if key in binding.points}
        used = (*self._colour.values(), *(config.camera.each[index] for index in self._colour))
        self.infos = {one.info: one.rectified for one in used if one is not None and one.info}
        self.transforms, self.clock = self.buffer(), Clock()
        self._heard: dict[str, bytes] = {}
        self.models: dict[str, CameraModel | str] = {}

    def buffer(self, seconds: float = KEPT) -> TransformBuffer:
        """Return a buffer without transforms; it knows the robot's links if all arms have one URDF."""
        [urdf, *others] = {arm.robot.urdf for arm in self._binding.config.arms}
        return TransformBuffer(seconds, Links(read_urdf(urdf) if urdf and self.infos and not others else None))

    def hear(
        self, topic: str, cdr: CdrBytes, deserialize: Callable[[CdrBytes], Any], publisher: bytes = b""
    ) -> str:
        """Take a message of a topic of :attr:`infos` or of transforms; return why it is ignored, or ""."""
        if topic in self.infos:
            data = bytes(cdr)
            if self._heard.get(topic) != (same := data[: _STAMP.start] + data[_STAMP.stop :]):
                self._heard[topic] = same
                try:
                    self.models[topic] = read_camera_info(deserialize(cdr), rectified=self.infos[topic])
                except ConfigError as error:
                    self.models[topic] = str(error)
            return ""
        if len(cdr) > _MOST_BYTES:
            return f"found {len(cdr)} bytes, expected at most {_MOST_BYTES}"
        for one in deserialize(cdr).transforms:
            at, turned, stamp = one.transform.translation, one.transform.rotation, one.header.stamp
            numbers = (at.x, at.y, at.z, turned.x, turned.y, turned.z, turned.w)
            nanoseconds, static = stamp.sec * 1_000_000_000 + stamp.nanosec, topic == TRANSFORMS[1]
            ends = one.header.frame_id, one.child_frame_id
            self.transforms.add(*ends, nanoseconds, numbers, static=static, publisher=publisher)
        return ""

    def decode(self, index: int, data: CdrBytes, patience: float) -> tuple[DecodedPoints, Float32Array]:
        """Return the points of a depth image of camera ``index``, and its depth [H, W], aligned to its image.

        Waits up to ``patience`` seconds for transforms. Points of a camera without CameraInfo are unknown. Raises
        ImageError, and Refused if CameraInfo or transforms are missing or do not fit.
        """
        config = self._binding.config
        camera, colour = config.camera.each[index], self._colour[index]
        depth, stamp, frame = (decode_depth if camera.transport == "raw" else decode_compressed_depth)(data)
        model = self._model(camera.info) if camera.info else None
        for what, found in (("size", depth.shape), ("frame_id", frame.lstrip("/"))) if model is not None else ():
            if found != getattr(model, what):
                text = f"{camera.topic} has the {what} {found}, and {camera.info} {getattr(model, what)}"
                raise Refused(Reason.CAMERA_INFO_INVALID, text)
        if model is not None and colour is not None:
            other = self._model(colour.info)
            depth = model.register(depth, other, self._at(other.frame_id, frame, stamp, patience))
            model, frame = other, other.frame_id
        if np.isnan(depth).all():
            where = f" in the image of {colour.topic}" if colour is not None else ""
            raise ImageError(f"no depth is known{where}; check the lens, the projector and the range of the camera")
        points = np.full((*depth.shape, 3), np.nan, np.float32)
        if model is not None and index in self._placed:
            points = model.points(depth, self._at(config.robot.base_frame, frame, stamp, patience))
        return DecodedPoints(points, stamp, frame), depth

    def _model(self, topic: str) -> CameraModel:
        model = self.models.get(topic, "no message yet")
        if isinstance(model, str):
            raise Refused(Reason.CAMERA_INFO_INVALID, f"{topic}: {model}")
        return model

    def _at(self, target: str, source: str, stamp: int, patience: float) -> FloatArray:
        def arrived() -> bool:
            try:
                self.transforms.at(target, source, stamp)
            except TransformError as error:
                return error.jumped
            return True

        with self.transforms.changed:
            self.clock.wait_for(self.transforms.changed, arrived, patience)
            try:
                return self.transforms.at(target, source, stamp)
            except TransformError as error:
                if error.jumped:
                    text = f"{error}; call ~/reset when the new pose is right"
                    raise Refused(Reason.TRANSFORM_JUMPED, text) from None
                raise Refused(Reason.TRANSFORM_MISSING, f"{error} (waited {patience:g} s)") from None


def join_depth(context: Context, wiring: Wiring, cameras: DepthCameras) -> None:
    """Subscribe to CameraInfo and transforms, if a depth image is turned into points."""
    cameras.clock = context.clock

    def subscribe(topic: str, kind: str, profile: str) -> None:
        cls = wiring.graph.message(kind)

        def hear(cdr: Any, origin: Origin) -> None:
            if why := cameras.hear(topic, cdr, lambda data: wiring.graph.deserialize(data, cls), origin.publisher):
                context.throttled.log(topic, f"a message on {topic} was ignored: {why}", "error")

        wiring.subscribe_raw(kind, topic, hear, profile)

    unheard, taps = set(cameras.infos), dict(wiring.taps)

    def look() -> None:
        """Subscribe to what was published once, and is kept for whoever asks for it."""
        for topic in unheard - cameras.models.keys():
            name = wiring.node.resolve_topic_name(topic)
            ends = wiring.node.get_publishers_info_by_topic(name)
            if any(one.qos_profile.durability.name == "TRANSIENT_LOCAL" for one in ends):
                unheard.discard(topic)
                wiring.taps |= {name: taps[name]} if name in taps else {}  # the other subscription took it
                subscribe(topic, CAMERA_INFO, "instruction")

    for topic in cameras.infos:
        subscribe(topic, CAMERA_INFO, "state")
    if unheard:
        wiring.timer(_LATCHED, look)
    # A robot publishes many transforms at a time, and a late subscriber needs all static ones.
    for topic, profile in zip(TRANSFORMS, ("recorder", "event"), strict=True) if cameras.infos else ():
        subscribe(topic, TRANSFORM, profile)
