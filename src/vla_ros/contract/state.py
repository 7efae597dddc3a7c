"""Builds state vectors from joint states, other topics and forward kinematics."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from vla_ros.config import ArmConfig
from vla_ros.contract.components import CLIPPED, TOPIC, UNUSED, WRAPPED, Component
from vla_ros.contract.spec import StateFeature
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.kinematics.rotations import nearest, write_rotation
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray, JointState

_OPEN = 0.005  # m; a finger further from zero is open, so that its sign is that of its driver


class StateError(VlaRosError):
    """A component of a state vector is missing, stale, not finite or of the wrong length."""


@dataclass(frozen=True)
class Arm:
    """An arm of the robot that features refer to."""

    config: ArmConfig
    kinematics: Kinematics | None  # None without a URDF

    @property
    def joints(self) -> tuple[str, ...]:
        """The arm's joints in command order; empty without a URDF and ``robot.joint_names``."""
        return self.kinematics.joint_names if self.kinematics else self.config.robot.joint_names

    @property
    def fingers(self) -> tuple[str, ...]:
        return self.config.robot.gripper_joint_names


@dataclass(frozen=True)
class Measured:
    """The latest measurements."""

    joints: JointState | None = None  # joint state of all arms; None if it is stale
    # Newest message of each of ``robot.state_topics``, if any has arrived.
    topics: Mapping[str, JointState] = field(default_factory=lambda: MappingProxyType({}))
    # Arm to its joint state if it is not stale; empty if ``joints`` has all arms.
    arms: Mapping[str, JointState] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, arm: str) -> JointState | None:
        return self.arms.get(arm) if self.arms else self.joints


Read = Callable[[Measured], tuple[FloatArray, int]]
"""Returns the values of a component, in its form, and the stamp of the measurement in nanoseconds."""


class ContinuousRotation:
    """Chooses among the equivalent values of a rotation, so that they neither jump nor leave the training data.

    At a task's beginning, it chooses those nearest to ``reference`` (None: the wrapped ones), later those
    nearest to the previous ones.
    """

    def __init__(self, form: str, reference: FloatArray | None) -> None:
        self._form, self._reference, self._last = form, reference, reference

    def begin_task(self) -> None:
        self._last = self._reference

    def __call__(self, values: FloatArray) -> FloatArray:
        if self._last is not None:
            values = nearest(values, self._form, self._last)
        self._last = values
        return values


@dataclass(frozen=True)
class ComponentReader:
    """A component of a state vector and its source."""

    component: Component
    size: int  # number of values; 0 for a topic of any length
    source: str  # topic, joints and frame, for the printed table
    read: Read
    continuous: ContinuousRotation | None = None


@dataclass(frozen=True)
class StateReader:
    """Reads one state vector. Not thread-safe; frames must be read in the order of their stamps."""

    feature: StateFeature
    components: tuple[ComponentReader, ...]

    def unit_warnings(self) -> Iterator[str]:
        """Yield why the joint positions of the training data cannot be in the unit that their component states.

        LeRobot recorded joints in -100..100 of their calibrated range up to release 0.4.3, later in degrees. The
        ends of that range are met exactly, and no joint turns by more than 360 degrees.
        """
        start = 0
        for one in self.components:
            learned = self.feature.largest[start : start + one.size]
            start += one.size
            if one.component.quantity != "joint_position" or not learned:
                continue
            most, degrees = max(learned), one.component.form == "deg"
            ends = one.component.range
            wrong = (
                "cannot be degrees" if degrees and most > 360
                else "is less than a turn in radians" if degrees and most < 2 * math.pi
                else "is that of -100..100, as LeRobot recorded up to 0.4.3" if degrees and 99.9 < most < 100.1
                else "is beyond the range" if ends and most > 1.01 * max(map(abs, ends))
                else ""
            )  # fmt: skip
            if wrong:
                found = f"the training data's largest number, {most:.5g}, {wrong}"
                yield f"state '{self.feature.key}': {one.component}: {found}"

    def begin_task(self) -> None:
        """Begin an episode, in which rotation values do not jump."""
        for one in self.components:
            if one.continuous:
                one.continuous.begin_task()

    def read(self, measured: Measured, stamp: int, max_age: float) -> FloatArray:
        """Return the vector, float64 [N]; raises StateError, which names the feature and the component.

        ``stamp`` is the frame's stamp in nanoseconds. A component may be ``max_age`` seconds older (0: any age).
        """
        pieces = []
        for one in self.components:
            try:
                values, measured_at = one.read(measured)
            except StateError as error:
                raise StateError(f"state '{self.feature.key}': {one.component}: {error}") from None
            age = (stamp - measured_at) / 1e9
            wrong = ""
            if one.component.quantity != UNUSED and max_age and age > max_age:
                wrong = f"{age:.3g} s older than the frame, allowed {max_age:g} s (timeouts.joint_state_age)"
            elif one.size and len(values) != one.size:
                wrong = f"found {len(values)} numbers, expected {one.size}"
            elif not np.isfinite(values).all():
                wrong = f"number {int(np.argmin(np.isfinite(values)))} is {values[~np.isfinite(values)][0]}"
            if wrong:
                raise StateError(f"state '{self.feature.key}': {one.component}: {wrong}")
            pieces.append(one.continuous(values) if one.continuous else values)
        vector: FloatArray = np.concatenate(pieces)
        if self.feature.size and len(vector) != self.feature.size:
            raise StateError(
                f"state '{self.feature.key}': found {len(vector)} numbers, the policy expects {self.feature.size}"
            )
        return vector


def bind_state(feature: StateFeature, arms: Mapping[str, Arm], topics: Mapping[str, str]) -> StateReader:
    """Bind a state vector to the robot's topics and joints; ``topics`` maps names to topics.

    Raises ConfigError if a component has no source, or the vector not the size that the policy expects.
    """
    where = f"state '{feature.key}'"
    if not feature.components:
        size = f" of {feature.size} numbers" if feature.size else ""
        raise ConfigError(
            f"features.state: the policy's {where}{size} is not set; name its components, for example "
            f'"{feature.key} = arm.joint_position + arm.gripper"'
        )
    readers = tuple(_bind(component, arms, topics, where) for component in feature.components)
    total = sum(one.size for one in readers)
    if feature.size and all(one.size for one in readers) and total != feature.size:
        components = " + ".join(f"{one.component} ({one.size})" for one in readers)
        raise ConfigError(
            f"features.state: {where}: found {components}, {total} numbers; the policy expects {feature.size}"
        )
    return StateReader(feature, tuple(_continuing(feature, readers)))


def _continuing(feature: StateFeature, readers: tuple[ComponentReader, ...]) -> Iterator[ComponentReader]:
    """Yield the readers; those of rotations become continuous, beginning near the middle of the training data."""
    start, middle = 0, feature.middle if all(one.size for one in readers) else ()
    for one in readers:
        component, end = one.component, start + one.size
        rotation = component.quantity == "tip_rotation" and not component.form.startswith("rot6d")
        if rotation and component.choice != WRAPPED:
            learned = middle[start:end]
            reference = np.array(learned if len(learned) == one.size else component.near)
            suffix = f", near {np.array2string(reference, precision=3)} (checkpoint)" if learned else ""
            chosen = ContinuousRotation(component.form, reference if reference.size else None)
            one = replace(one, continuous=chosen, source=one.source + suffix)
        start = end
        yield one


def arm_of(component: Component, arms: Mapping[str, Arm], what: str) -> Arm:
    """Return the arm of a component that ``what`` needs; raises ConfigError if the robot lacks the arm."""
    if component.arm not in arms:
        raise ConfigError(f"robot.arms: {what} needs {component}, but the robot has the arms {', '.join(arms)}")
    return arms[component.arm]


def _bind(component: Component, arms: Mapping[str, Arm], topics: Mapping[str, str], where: str) -> ComponentReader:
    if component.quantity == UNUSED:
        return ComponentReader(component, component.count, "zeros", lambda measured: (np.zeros(component.count), 0))
    if component.quantity == TOPIC:
        if component.form not in topics:
            found = ", ".join(topics) or "none"
            raise ConfigError(
                f"robot.state_topics: {where} needs the state topic '{component.form}', found {found}; "
                f"add '{component.form}=/topic'"
            )
        return ComponentReader(
            component, component.count, topics[component.form], lambda measured: _topic(measured, component.form)
        )
    arm = arm_of(component, arms, where)
    read, names = _READERS[component.quantity](component, arm, f"{where} needs {component}")
    source = f"{arm.config.joint_states}: {', '.join(names)}"
    if component.quantity.startswith("tip_") and arm.kinematics is not None:
        source = f"{arm.config.joint_states}: {arm.kinematics.tip_frame} in {arm.kinematics.base_frame}"
    return ComponentReader(component, component.size(len(arm.joints), len(arm.fingers)), source, read)


def _topic(measured: Measured, name: str) -> tuple[FloatArray, int]:
    message = measured.topics.get(name)
    if message is None:
        raise StateError("no message yet (robot.state_topics)")
    return message.positions, message.stamp


def _select(measured: Measured, arm: Arm, names: tuple[str, ...], what: str) -> tuple[FloatArray, int]:
    joints = measured.of(arm.config.name)
    if joints is None:
        raise StateError("no usable joint state within timeouts.joint_state")
    try:
        return joints.select(names, what), joints.stamp
    except KeyError as error:
        raise StateError(str(error.args[0])) from None


Bound = tuple[Read, tuple[str, ...]]


def _joints(component: Component, arm: Arm, need: str) -> Bound:
    """Bind positions, velocities or efforts, read as ``(measured - origin) * factor + offset``."""
    names = component.joints or arm.joints
    joints = (*arm.joints, *arm.fingers)
    if not joints:
        raise ConfigError(f"robot.joint_names: {need}, but neither robot.urdf nor robot.joint_names is set")
    absent = [name for name in names if name not in joints]
    if absent:
        raise ConfigError(f"robot.joint_names: {need}, but {', '.join(absent)} is not among {', '.join(joints)}")
    field = {"joint_position": "positions", "joint_velocity": "velocities", "joint_effort": "efforts"}[
        component.quantity
    ]
    origin, factor, offset = _scale(component, arm, names, need)

    def read(measured: Measured) -> tuple[FloatArray, int]:
        values, stamp = _select(measured, arm, names, field)
        return _within((values - origin) * factor + offset, component), stamp

    return read, names


def _scale(
    component: Component, arm: Arm, names: tuple[str, ...], need: str
) -> tuple[FloatArray | float, FloatArray | float, float]:
    if component.form in ("deg", "deg/s"):
        return 0.0, 180 / np.pi, 0.0
    if component.range is None and component.form != "1":
        return 0.0, 1.0, 0.0
    if arm.kinematics is None or not set(names) <= set(arm.joints):
        raise ConfigError(f"robot.urdf: {need}, which is scaled by the URDF's limits of {', '.join(names)}")
    columns = [arm.joints.index(name) for name in names]
    if component.range is None:
        limits = arm.kinematics.velocity_limits[columns]
        return 0.0, 1 / _finite(limits, names, f"{need}, but the URDF has no velocity limit"), 0.0
    low, high = arm.kinematics.position_low[columns], arm.kinematics.position_high[columns]
    span = np.where(high - low < 1e3, high - low, np.inf)
    span = _finite(span, names, f"{need}, but the URDF has no position limits")
    start, end = component.range
    return low, (end - start) / span, start


def _finite(values: FloatArray, names: tuple[str, ...], need: str) -> FloatArray:
    absent = [name for name, value in zip(names, values, strict=True) if not np.isfinite(value)]
    if absent:
        raise ConfigError(f"robot.urdf: {need} for {', '.join(absent)}")
    return values


def _fingers(component: Component, arm: Arm, need: str) -> Bound:
    if not arm.fingers:
        raise ConfigError(f"robot.gripper_joint_names: {need}, found no finger joints")
    if component.quantity == "fingers":
        return _each_finger(component, arm, need)
    gripper, gauge = arm.config.gripper, arm.config.gripper.gauge
    names = (gauge.joint,) if gauge else arm.fingers
    shut, wide = (gauge.closed, gauge.open) if gauge else (gripper.closed_position, gripper.open_position)
    closed, opened = component.range or (shut, wide)

    def read(measured: Measured) -> tuple[FloatArray, int]:
        values, stamp = _select(measured, arm, names, "positions")
        opening = (values.mean() - shut) / (wide - shut)
        return _within(np.array([closed + opening * (opened - closed)]), component), stamp

    return read, names


def _within(values: FloatArray, component: Component) -> FloatArray:
    """Return ``values``, clipped to the component's range if it says so."""
    if component.choice != CLIPPED or component.range is None:
        return values
    clipped: FloatArray = np.clip(values, min(component.range), max(component.range))
    return clipped


def _each_finger(component: Component, arm: Arm, need: str) -> Bound:
    """Bind the fingers as measured, or with the component's signs, whichever signs the driver uses.

    A driver's sign is known once its finger has been open. Before, the distance from zero is written with the
    component's sign.
    """
    names, wanted = arm.fingers, np.array(component.signs)
    if not component.signs:
        return lambda measured: _select(measured, arm, names, "positions"), names
    if len(wanted) != len(names):
        raise ConfigError(f"robot.gripper_joint_names: {need}, {len(wanted)} fingers, found {', '.join(names)}")
    signs = np.zeros(len(names))  # sign of each finger in the driver's messages; 0 if not known yet

    def read(measured: Measured) -> tuple[FloatArray, int]:
        values, stamp = _select(measured, arm, names, "positions")
        opened = np.abs(values) > _OPEN
        signs[opened] = np.sign(values[opened])
        return wanted * np.where(signs == 0, np.abs(values), values * signs), stamp

    return read, tuple(("" if sign > 0 else "-") + name for sign, name in zip(wanted, names, strict=True))


def _tip(component: Component, arm: Arm, need: str) -> Bound:
    kinematics = arm.kinematics
    if kinematics is None:
        raise ConfigError(f"robot.urdf: not set, but {need}")

    def read(measured: Measured) -> tuple[FloatArray, int]:
        q, stamp = _select(measured, arm, kinematics.joint_names, "positions")
        if not np.isfinite(q).all():
            raise StateError(f"joint '{kinematics.joint_names[int(np.argmin(np.isfinite(q)))]}' is not a number")
        pose = kinematics.forward(q)
        return pose.position if component.quantity == "tip_position" else write_rotation(
            pose.rotation, component.form
        ), stamp

    return read, kinematics.joint_names


_READERS: Mapping[str, Callable[[Component, Arm, str], Bound]] = {
    "joint_position": _joints,
    "joint_velocity": _joints,
    "joint_effort": _joints,
    "gripper": _fingers,
    "fingers": _fingers,
    "tip_position": _tip,
    "tip_rotation": _tip,
}
