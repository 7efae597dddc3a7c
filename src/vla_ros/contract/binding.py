"""Binds a policy's features to the robot's topics and joints when the policy is loaded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vla_ros.config import ArmConfig, Config, ControlConfig
from vla_ros.config.control import ENVIRONMENT
from vla_ros.config.sections import STATE_TOPIC_TYPES, Camera
from vla_ros.contract.components import MOTIONS, UNUSED, Component
from vla_ros.contract.features import complete_spec, join_states
from vla_ros.contract.fingers import check_fingers
from vla_ros.contract.spec import NOW, DeltaTimestamp, ImageFeature, PolicySpec
from vla_ros.contract.state import Arm, StateReader, arm_of, bind_state
from vla_ros.errors import ConfigError
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import JointState

_POSE = ("x", "y", "z", "qx", "qy", "qz", "qw")
_WRENCH = ("fx", "fy", "fz", "tx", "ty", "tz")


def state_message_type(name: str) -> str:
    """Return the full name of a message type of :data:`~vla_ros.config.sections.STATE_TOPIC_TYPES`."""
    return f"{STATE_TOPIC_TYPES[name]}/msg/{name}"


def read_state_message(message: Any, now: int = 0) -> JointState:
    """Convert a message of one of :data:`~vla_ros.config.sections.STATE_TOPIC_TYPES` to named numbers.

    A ``JointState`` yields its positions, a ``PoseStamped`` its position and quaternion x, y, z, w, and a
    ``WrenchStamped`` its force and torque. A message without a stamp gets the stamp ``now``, in nanoseconds.
    """
    if not hasattr(message, "header"):
        values = np.asarray(message.data, dtype=np.float64)
        return JointState(tuple(f"[{index}]" for index in range(len(values))), values, now)
    stamp = int(message.header.stamp.sec) * 1_000_000_000 + int(message.header.stamp.nanosec)
    if hasattr(message, "pose"):
        at, turned = message.pose.position, message.pose.orientation
        return JointState(_POSE, np.array([at.x, at.y, at.z, turned.x, turned.y, turned.z, turned.w]), stamp or now)
    if hasattr(message, "wrench"):
        force, torque = message.wrench.force, message.wrench.torque
        values = np.array([force.x, force.y, force.z, torque.x, torque.y, torque.z])
        return JointState(_WRENCH, values, stamp or now)
    return JointState(tuple(message.name), np.asarray(message.position, dtype=np.float64), stamp or now)


UNKNOWN_RATE = 5.0
"""``control.rate_hz`` of a policy whose rate nothing states, in hertz."""


@dataclass(frozen=True)
class Binding:
    """The sources of a policy's inputs and the targets of its actions on a robot."""

    spec: PolicySpec  # the policy's spec, completed with the options
    # Image key to index in ``camera.topics``, in the policy's order; optional images may be missing.
    cameras: Mapping[str, int]
    states: tuple[StateReader, ...]  # readers of the state vectors
    columns: tuple[tuple[Component, slice], ...]  # every component of the action with its columns
    # Rows of :meth:`table`: feature, component, size, source or target.
    rows: tuple[tuple[str, str, str, str], ...]
    config: Config  # the options, with the rate that the policy or the preset states
    points: Mapping[str, int] = field(default_factory=dict)  # key of points or depth to index in ``camera.topics``

    @property
    def lead(self) -> int:
        """Index in ``camera.topics`` of the camera whose frames begin inferences: the first that is used."""
        return min(self.cameras.values())

    @property
    def camera_topics(self) -> tuple[str, ...]:
        """Topics of the cameras that are used, also for points and depth."""
        return tuple(self.config.camera.topics[index] for index in sorted(self.used))

    @property
    def used(self) -> tuple[int, ...]:
        """Indices in ``camera.topics`` of images, points and depth that are used."""
        return (*self.cameras.values(), *self.points.values())

    def table(self) -> str:
        """Return the binding as text: one line per component, in aligned columns."""
        rows = (("feature", "what", "size", "from or to"), *self.rows)
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3])).rstrip()
            for row in rows
        )


def make_arms(config: Config) -> dict[str, Arm]:
    """Return the robot's arms by name, with kinematics for those that have a URDF."""
    return {one.name: Arm(one, _kinematics(one, len(config.arms) > 1)) for one in config.arms}


def _kinematics(arm: ArmConfig, named: bool) -> Kinematics | None:
    robot = arm.robot
    if not robot.urdf:
        return None
    try:
        return Kinematics.from_urdf(robot.urdf, robot.joint_names, robot.base_frame, robot.tip_frame)
    except ConfigError as error:
        raise ConfigError(f"arm '{arm.name}': {error}" if named else str(error)) from None


def bind(spec: PolicySpec, config: Config, arms: Mapping[str, Arm]) -> Binding:
    """Bind a policy's features to the robot.

    Raises ConfigError, naming both sides, if a feature has no source, two features use the same joint or topic,
    lengths differ or a unit is incompatible.
    """
    try:
        return _bind(spec, config, arms)
    except ConfigError as error:
        raise ConfigError(f"{error} (preset: {config.preset})" if config.preset else str(error)) from None


def _bind(spec: PolicySpec, config: Config, arms: Mapping[str, Arm]) -> Binding:
    spec = complete_spec(spec, config)
    config = with_rate(config, spec)
    topics = {topic.name: topic.topic for topic in config.robot.parsed_state_topics}
    _check_joints(arms)
    cameras, points = _cameras(spec, config), _points(spec, config)
    states = tuple(bind_state(feature, arms, topics) for feature in join_states(spec.state, config))
    counts = {name: len(arm.joints) for name, arm in arms.items()}
    if not spec.dimension:
        spec = replace(
            spec, dimension=sum(component.size(counts.get(component.arm, 0)) for component in spec.action)
        )
    _check_action(spec, arms, config.control)
    for arm in arms.values():
        check_fingers(arm)
    columns = spec.columns(counts)
    chunk = [("action", "chunk", str(spec.horizon), "actions in a chunk")] if spec.horizon > 1 else []
    actions = _action_rows(columns, arms, config)
    frames = [("frames", "as trained", "", config.features.frames)] if config.features.frames else []
    images = (*_image_rows(spec, config, cameras), *_points_rows(spec, config, points))
    images += (*_unused_rows(config, {**cameras, **points}),)
    rows = (*images, *_state_rows(states), *chunk, *actions, *frames)
    return Binding(spec, cameras, states, columns, rows, config, points)


def with_rate(config: Config, spec: PolicySpec) -> Config:
    """Return the options with the policy's own rate, unless the options set one."""
    control = config.control
    rate = control.rate_hz if control.rate_hz >= 0 else spec.rate_hz or UNKNOWN_RATE
    return replace(config, control=replace(control, rate_hz=rate))


def _check_joints(arms: Mapping[str, Arm]) -> None:
    """Check that no joint belongs to two arms on the same topic."""
    owners: dict[tuple[str, str], str] = {}
    for name, arm in arms.items():
        topic = arm.config.joint_states
        for joint in (*arm.joints, *arm.fingers):
            other = owners.setdefault((topic, joint), name)
            if other != name:
                raise ConfigError(
                    f"{name}.joint_names: found '{joint}' on {topic}, which belongs to '{other}'; name each arm's "
                    f"own joints, or set {name}.joint_states to another topic"
                )


def _cameras(spec: PolicySpec, config: Config) -> dict[str, int]:
    keys, indices = config.camera.keys, dict[str, int]()
    for image in spec.images:
        camera = image.source
        if camera not in keys:
            if not image.required:
                continue
            raise ConfigError(
                f"camera.keys: the policy needs the image '{image.key}'"
                + (f" from '{camera}' (features.images)" if image.camera else "")
                + f", but the cameras provide {', '.join(keys)}; set camera.topics and camera.keys, or name its "
                f'camera: features.images: ["{image.key} = {keys[0]}"]'
            )
        other = next((key for key, index in indices.items() if index == keys.index(camera)), None)
        if other is not None:
            both = f"'{other}' and '{image.key}'"
            raise ConfigError(f"features.images: found the camera '{camera}' for {both}; each needs its own camera")
        indices[image.key] = keys.index(camera)
    if not indices:
        wanted = ", ".join(image.key for image in spec.images)
        raise ConfigError(f"camera.keys: found {', '.join(keys)}, but the policy takes {wanted}")
    return indices


def _points(spec: PolicySpec, config: Config) -> dict[str, int]:
    keys, each = config.camera.keys, config.camera.each
    for image, key in (*spec.points, *spec.depth):
        what, encoding = ("depth", "16UC1 or 32FC1") if (image, key) in spec.depth else ("points", "32FC3")
        if key not in keys:
            more = ", metres in robot.base_frame, or of a depth image with camera.info" if what == "points" else ""
            raise ConfigError(
                f"camera.keys: the policy needs the {what} '{key}' of '{image}', but the cameras provide "
                f"{', '.join(keys)}; add the topic of a sensor_msgs/Image with the encoding {encoding}{more}, to "
                "camera.topics, and this key to camera.keys"
            )
        if what == "points" and not each[keys.index(key)].info and each[keys.index(key)].transport != "raw":
            raise ConfigError(f"camera.transport: found compressed, but the points '{key}' are raw")
        if what == "points" and not config.robot.base_frame:
            raise ConfigError(f"robot.base_frame: not set, but the points '{key}' have to be in it")
        shown = camera_of(spec, config, image)
        if shown and (shown.processor != "policy" or shown.crop_area):
            found = f"camera.processor and camera.crop_area: set for '{shown.key}'"
            raise ConfigError(f"{found}, but the {what} '{key}' fit what the policy does with it; leave them out")
    return {key: keys.index(key) for _, key in (*spec.points, *spec.depth)}


def _check_action(spec: PolicySpec, arms: Mapping[str, Arm], control: ControlConfig) -> None:
    if not spec.action:
        raise ConfigError(
            f"features.action: not set, and the checkpoint does not describe the {spec.dimension} numbers of an "
            'action; name their components, for example ["arm.joint_position", "arm.gripper"]'
        )
    for component in spec.action:
        if component.quantity != UNUSED:
            arm_of(component, arms, "the action")
    for name, arm in arms.items():
        own = [component for component in spec.action if component.arm == name]
        motions = [component for component in own if component.quantity in MOTIONS]
        if len(motions) != 1:
            found = " and ".join(map(str, motions)) or "nothing"
            expected = ", ".join(MOTIONS)
            raise ConfigError(f"features.action: found {found} to move '{name}', expected one of {expected}")
        quantities = [component.quantity for component in own]
        twice = [quantity for quantity in quantities if quantities.count(quantity) > 1]
        if twice:
            raise ConfigError(f"features.action: found {name}.{twice[0]} twice, expected it once")
        if ("tip_position" in quantities) != ("tip_rotation" in quantities):
            found = " and ".join(map(str, own))
            raise ConfigError(f"features.action: found {found}, expected tip_position and tip_rotation together")
        for component in own:
            _check_form(component, arm, control)


def _check_form(component: Component, arm: Arm, control: ControlConfig) -> None:
    """Check that a component's form agrees with the options for the gripper range and the rotation."""
    if component.quantity == "gripper" and component.range:
        closed, opened = arm.config.gripper.closed_value, arm.config.gripper.open_value
        if (closed, opened) != component.range:
            raise ConfigError(
                f"gripper.closed_value and gripper.open_value: found {closed:g} and {opened:g}, but the policy "
                f"returns {component}; set them to the two ends of this range, closed first"
            )
    if component.quantity == "tip_delta" and component.form not in ("", control.rotation):
        raise ConfigError(
            f"control.rotation: found {control.rotation}, expected {component.form}: actions are {component}"
        )


_Rows = Iterator[tuple[str, str, str, str]]


def _image_rows(spec: PolicySpec, config: Config, cameras: Mapping[str, int]) -> _Rows:
    for image in spec.images:
        if image.key not in cameras:
            yield image.key, "image", "", "no camera (optional)"
            continue
        camera = config.camera.each[cameras[image.key]]
        turned = "" if camera.orientation == "none" else f", {camera.orientation}"
        yield image.key, "image", _size(image), f"{camera.topic}{turned}{_times(image.delta_timestamps)}"


def _points_rows(spec: PolicySpec, config: Config, points: Mapping[str, int]) -> _Rows:
    for image, key in (*spec.points, *spec.depth):
        camera, colour = config.camera.each[points[key]], colour_camera(spec, config, key)
        urdfs = {arm.robot.urdf for arm in config.arms}
        poses = "/tf or else robot.urdf" if len(urdfs) == 1 and all(urdfs) else "/tf"
        source = [camera.topic, *([camera.info, poses] if camera.info else [])]
        source += [f"onto {colour.topic}"] if colour else []
        what = "depth[m]" if (image, key) in spec.depth else f"points[m] in {config.robot.base_frame}"
        yield key, what, "", ", ".join(source)


def camera_of(spec: PolicySpec, config: Config, image: str) -> Camera | None:
    """Return the camera of an image of the policy, or None if it has none."""
    source = next(one.source for one in spec.images if one.key == image)
    return next((one for one in config.camera.each if one.key == source), None)


def colour_camera(spec: PolicySpec, config: Config, key: str) -> Camera | None:
    """Return the camera to which the points or depth ``key`` are registered, or None if they are aligned to it."""
    colour = camera_of(spec, config, {key: image for image, key in (*spec.points, *spec.depth)}[key])
    own = config.camera.each[config.camera.keys.index(key)].info
    return colour if colour and own and colour.info not in ("", own) else None


def _unused_rows(config: Config, cameras: Mapping[str, int]) -> _Rows:
    for index, (key, topic) in enumerate(zip(config.camera.keys, config.camera.topics, strict=True)):
        if index not in cameras.values():
            yield key, "image", "", f"{topic}: not used by the policy, and not watched"


def _size(image: ImageFeature) -> str:
    size = image.processor.size if image.processor else image.size or image.takes
    return f"{size[1]}x{size[0]}" if size else "any"


def _times(delta_timestamps: Sequence[DeltaTimestamp]) -> str:
    if tuple(delta_timestamps) == NOW:
        return ""
    return " at " + ", ".join(f"{one.seconds:g} s" if one.seconds else str(one.steps) for one in delta_timestamps)


def _state_rows(states: Sequence[StateReader]) -> _Rows:
    for state in states:
        for component in state.components:
            at = _times(state.feature.delta_timestamps)
            yield (
                state.feature.key,
                str(component.component),
                str(component.size or "any"),
                f"{component.source}{at}",
            )


def _action_rows(columns: Sequence[tuple[Component, slice]], arms: Mapping[str, Arm], config: Config) -> _Rows:
    for component, place in columns:
        size = str(place.stop - place.start)
        if component.quantity == UNUSED:
            yield "action", str(component), size, "ignored"
            continue
        arm = arms[component.arm]
        topic, joints = arm.config.command, arm.joints
        if component.quantity == "gripper":
            topic, joints = arm.config.gripper_topic or topic, arm.fingers
            if arm.config.output != ENVIRONMENT and (config.gripper.mode == "none" or not joints):
                yield "action", str(component), size, "ignored (gripper.mode none, or no gripper_joint_names)"
                continue
        frame = (
            f" in {arm.kinematics.base_frame}" if arm.kinematics and component.quantity.startswith("tip_") else ""
        )
        yield "action", str(component), size, f"{topic}: {', '.join(joints) or arm.config.output}{frame}"
