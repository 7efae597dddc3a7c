"""Message classes, CDR and type hashes without a ROS installation, from the definitions in rosbags.

The classes behave like rclpy's: keyword arguments, ROS defaults for missing fields, constants on the class. Numeric
arrays are converted to numpy arrays on assignment; ``byte`` fields are :class:`bytes` of length one.
"""

from __future__ import annotations

import functools
import operator
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import numpy as np

from vla_ros.errors import MissingDependencyError, VlaRosError, install

try:
    from rosbags.interfaces import Nodetype
    from rosbags.serde import SerdeError
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore
    from rosbags.typesys.base import normalize_fieldname
except ImportError as error:  # pragma: no cover - the suite runs with rosbags
    raise MissingDependencyError(
        f"message types without ROS need the library rosbags: {install('dds')}, or source ROS 2"
    ) from error

DISTROS = ("humble", "iron", "jazzy", "kilted", "lyrical")
DEFAULT_DISTRO = "jazzy"


# What rosbags lacks, from std_srvs, action_msgs, control_msgs 5.8, franka_msgs 2.0, interbotix_xs_msgs 0.0,
# moveit_msgs 2.6 and rosetta_interfaces 0.1.
MESSAGES = {
    "control_msgs/msg/GripperCommand": "float64 position\nfloat64 max_effort",
    "franka_msgs/msg/GraspEpsilon": "float64 inner\nfloat64 outer",
    "interbotix_xs_msgs/msg/JointGroupCommand": "string name\nfloat32[] cmd",
    "interbotix_xs_msgs/msg/JointSingleCommand": "string name\nfloat32 cmd",
}

_SERVICES = {
    "std_srvs/srv/SetBool": ("bool data", "bool success\nstring message"),
    "std_srvs/srv/Trigger": ("", "bool success\nstring message"),
    "std_srvs/srv/Empty": ("", ""),
    "moveit_msgs/srv/ServoCommandType": ("int8 command_type", "bool success"),
    "action_msgs/srv/CancelGoal": (
        "action_msgs/GoalInfo goal_info",
        "int8 return_code\naction_msgs/GoalInfo[] goals_canceling",
    ),
}
"""Request and response of each service."""

_ACTIONS = {
    "control_msgs/action/GripperCommand": (
        "control_msgs/GripperCommand command",
        "float64 position\nfloat64 effort\nbool stalled\nbool reached_goal",
    ),
    "control_msgs/action/ParallelGripperCommand": (
        "sensor_msgs/JointState command",
        "sensor_msgs/JointState state\nbool stalled\nbool reached_goal",
    ),
    "franka_msgs/action/Move": ("float64 width\nfloat64 speed", "bool success\nstring error"),
    "franka_msgs/action/Grasp": (
        "float64 width\nfranka_msgs/GraspEpsilon epsilon\nfloat64 speed\nfloat64 force",
        "bool success\nstring error",
    ),
    "rosetta_interfaces/action/RunPolicy": (
        "string prompt",
        "bool success\nstring message",
        "uint32 published_actions\nuint32 queue_depth\nstring status",
    ),
}
"""Goal, result and, if the node serves the action, feedback."""

_ID = "unique_identifier_msgs/UUID goal_id\n"
# rosidl adds this member to an empty structure, and it is on the wire.
_EMPTY = "uint8 structure_needs_at_least_one_member"


def _own_definitions() -> dict[str, Any]:
    """Return all types above for rosbags, with the types that rosidl derives for an action."""
    texts = dict(MESSAGES)
    for name, (request, response) in _SERVICES.items():
        texts |= {f"{name}_Request": request, f"{name}_Response": response}
    for name, (goal, result, *feedback) in _ACTIONS.items():
        texts |= {
            f"{name}_Goal": goal,
            f"{name}_Result": result,
            f"{name}_SendGoal_Request": f"{_ID}{name}_Goal goal",
            f"{name}_SendGoal_Response": "bool accepted\nbuiltin_interfaces/Time stamp",
            f"{name}_GetResult_Request": _ID,
            f"{name}_GetResult_Response": f"int8 status\n{name}_Result result",
        }
        if feedback:
            texts |= {f"{name}_Feedback": feedback[0], f"{name}_FeedbackMessage": f"{_ID}{name}_Feedback feedback"}
    # rosbags renames every type to a message, so only the value is used.
    return {name: next(iter(get_types_from_msg(text or _EMPTY, name).values())) for name, text in texts.items()}


class Byte(bytes):
    """One ``byte`` of ROS: equal to :class:`bytes` of length one, and usable as an integer index."""

    __slots__ = ()

    def __new__(cls, value: bytes | int) -> Byte:
        """Convert bytes of length one, or an integer from 0 to 255."""
        if isinstance(value, bytes) and len(value) == 1:
            return super().__new__(cls, (value[0],))
        number = operator.index(value)  # type: ignore[arg-type]
        return super().__new__(cls, (number & 0xFF,))

    def __index__(self) -> int:
        # CDR packs a byte as a signed char, which keeps the bits.
        return self[0] - 256 if self[0] > 127 else self[0]


class RosMessage:
    """Base of the generated classes. Equality is by value."""

    __slots__ = ()
    TYPE: ClassVar[str] = ""
    """Name as ``pkg/msg/Type``."""
    _fields: ClassVar[dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]]] = {}
    """For each field, the converter of assigned values and the factory of the default."""

    def __init__(self, *decoded: Any, **fields: Any) -> None:
        if decoded:  # only the decoder passes positional values, which have the right types except for bytes
            if len(decoded) != len(self._fields) or fields:
                raise TypeError(f"{self.TYPE} takes its fields as keyword arguments")
            for (name, (convert, _)), value in zip(self._fields.items(), decoded, strict=True):
                object.__setattr__(self, name, Byte(value) if convert is Byte else value)
            return
        for name, (_, default) in self._fields.items():
            if name not in fields:
                object.__setattr__(self, name, default())
        for name, value in fields.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._fields:
            raise AttributeError(f"{self.TYPE} has no field '{name}'; it has {', '.join(self._fields)}")
        try:
            object.__setattr__(self, name, self._fields[name][0](value))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{self.TYPE}.{name}: {error}") from None

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = ((getattr(self, name), getattr(other, name)) for name in self._fields)
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.TYPE}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._fields)})"


def _instance(cls: type, value: Any) -> Any:
    if not isinstance(value, cls):
        raise TypeError(f"expected {getattr(cls, 'TYPE', cls.__name__)}, found {type(value).__name__}")
    return value


def _float(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError("expected a number, found str")
    return float(value)


_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "char")
_SCALARS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "string": (functools.partial(_instance, str), str),
    "byte": (Byte, functools.partial(Byte, 0)),
    "bool": (bool, bool),
    **dict.fromkeys(("float32", "float64"), (_float, float)),
    **dict.fromkeys(_INTEGERS, (operator.index, int)),
}
"""For each elementary type, the converter of assigned values and the factory of the default."""


def _numbers(dtype: Any, length: int | None, value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)) and dtype.itemsize == 1:
        array = np.frombuffer(value, dtype=dtype)
    else:
        numbers = np.asarray(value)
        if numbers.size and not np.can_cast(numbers.dtype, dtype, "same_kind"):
            # Python integers become int64; accept them if the values fit.
            if numbers.dtype.kind not in "iub" or dtype.kind not in "iu":
                raise TypeError(f"expected {dtype.name} values, found {numbers.dtype.name}")
            limits = np.iinfo(dtype)
            if numbers.min() < limits.min or numbers.max() > limits.max:
                raise ValueError(f"expected values that fit into {dtype.name}")
        array = np.ascontiguousarray(numbers, dtype=dtype).reshape(-1)
    if length is not None and array.size != length:
        raise ValueError(f"expected {length} values, found {array.size}")
    return array


def _items(convert: Callable[[Any], Any], length: int | None, value: Any) -> list[Any]:
    if isinstance(value, str):
        raise TypeError("expected a list, found str")
    items = [convert(item) for item in value]
    if length is not None and len(items) != length:
        raise ValueError(f"expected {length} items, found {len(items)}")
    return items


class MessageTypes:
    """Message classes and CDR of one ROS distribution; get one with :func:`message_types`."""

    def __init__(self, distro: str) -> None:
        self.distro = distro
        self._store = get_typestore(Stores[f"ROS2_{distro.upper()}"])
        self._classes: dict[str, type[RosMessage]] = {}
        self._store.fielddefs.update(_own_definitions())

    def message(self, name: str) -> type[RosMessage]:
        """Return the class of ``pkg/msg/Type`` (or of ``pkg/srv/Type_Request`` and ``_Response``)."""
        known = self._classes.get(name)
        if known is not None:
            return known
        if name not in self._store.fielddefs:
            raise VlaRosError(
                f"message type '{name}' is not in the definitions of ROS 2 {self.distro}; write it as "
                "pkg/msg/Type, or source a ROS 2 installation that has it"
            )
        constants, described = self._store.fielddefs[name]
        fields = {normalize_fieldname(field): self._field(description) for field, description in described}
        namespace: dict[str, Any] = {
            "__slots__": tuple(fields),
            "__module__": __name__,
            "TYPE": name,
            "_fields": fields,
        }
        for constant, kind, value in constants:
            namespace[constant] = Byte(int(value)) if kind == "byte" else value
        cls: type[RosMessage] = type(name.replace("/", "__"), (RosMessage,), namespace)
        self._classes[name] = cls
        self._store.types[name] = cast("Any", cls)
        return cls

    def service(self, name: str) -> type[Any]:
        """Return the class of ``pkg/srv/Type`` with ``Request`` and ``Response``."""
        return self._parts(name, "service", _SERVICES, ("Request", "Response"))

    def action(self, name: str) -> type[Any]:
        """Return the class of ``pkg/action/Type`` with ``Goal``, ``Result``, its services and any ``Feedback``."""
        parts = ("Goal", "Result", "Feedback", "FeedbackMessage")
        return self._parts(name, "action", _ACTIONS, parts[: 4 if len(_ACTIONS.get(name, ())) > 2 else 2])

    def _parts(self, name: str, kind: str, known: Mapping[str, Any], parts: tuple[str, ...]) -> type[Any]:
        if name not in known:
            raise VlaRosError(
                f"{kind} type '{name}' is unknown without a ROS installation; expected one of {', '.join(known)}"
            )
        return _class_of_parts(self, name, parts)

    def type_hash(self, name: str) -> str:
        """Return the hash of a type as REP-2011 and rosidl write it: ``RIHS01_`` and 64 hexadecimal digits."""
        self.message(name)
        return self._store.hash_rihs01(name)

    def text(self, name: str) -> str:
        """Return the definition of a type and those of its fields' types, as rosbag2 stores it in a bag."""
        self.message(name)
        return self._store.generate_msgdef(name, ros_version=2)[0]

    def definition(self, name: str) -> list[tuple[str, Any]]:
        """Return the fields of a type as rosbags describes them: name and (node type, argument)."""
        self.message(name)
        return list(self._store.fielddefs[name][1])

    def serialize(self, message: Any) -> bytes:
        """Return a message as little-endian CDR with the 4-byte header."""
        name = type(message).TYPE
        try:
            return bytes(self._store.serialize_cdr(message, name, little_endian=True))
        except (AttributeError, TypeError, ValueError, SerdeError, struct.error) as error:
            raise VlaRosError(f"{name} cannot be serialised: {error}") from error

    def deserialize(self, data: bytes | memoryview, cls: type[Any]) -> Any:
        """Return the message of CDR ``data`` (4-byte header included); numeric arrays are read-only views of it."""
        name = cls.TYPE
        if len(data) < 4 or data[0] != 0 or data[1] > 1:
            raise VlaRosError(f"{len(data)} bytes are not a {name}: they do not start with a CDR header")
        definition = self._store.get_msgdef(name)
        function = definition.deserialize_cdr_le if data[1] else definition.deserialize_cdr_be
        try:
            # Typestore.deserialize_cdr rejects the padding that rmw_fastrtps appends to empty arrays.
            return function(memoryview(data)[4:], 0, definition.cls, self._store)[0]
        except (SerdeError, struct.error, ValueError, IndexError, UnicodeDecodeError) as error:
            raise VlaRosError(f"{len(data)} bytes are not a {name}: {error}") from error

    def _field(self, description: Any) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
        """Return the converter of assigned values and the factory of the default for one field."""
        kind, argument = description
        if kind == Nodetype.NAME:
            cls = self.message(argument)
            return functools.partial(_instance, cls), cls
        if kind == Nodetype.BASE:
            return _SCALARS[argument[0]]
        inner, length = argument
        fixed = length if kind == Nodetype.ARRAY else None
        if inner[0] == Nodetype.BASE and inner[1][0] != "string":
            dtype = np.dtype({"char": "uint8", "byte": "uint8", "bool": "bool"}.get(inner[1][0], inner[1][0]))
            return functools.partial(_numbers, dtype, fixed), functools.partial(np.zeros, fixed or 0, dtype)
        convert, default = self._field(inner)
        count = fixed or 0
        return functools.partial(_items, convert, fixed), lambda: [default() for _ in range(count)]


@functools.cache
def _class_of_parts(types: MessageTypes, name: str, parts: tuple[str, ...]) -> type[Any]:
    members: dict[str, Any] = {part: types.message(f"{name}_{part}") for part in parts}
    for service in ("SendGoal", "GetResult") if "Goal" in parts else ():
        members[service] = _class_of_parts(types, f"{name}_{service}", ("Request", "Response"))
    return type(name.replace("/", "__"), (), {"TYPE": name, **members})


def ros_distro(environment: Mapping[str, str] | None = None) -> str:
    """Return the distribution whose message definitions and discovery format apply: ``ROS_DISTRO``, else jazzy."""
    distro = (os.environ if environment is None else environment).get("ROS_DISTRO", "").lower()
    if distro == "rolling":
        return DISTROS[-1]
    return distro if distro in DISTROS else DEFAULT_DISTRO


@functools.cache
def message_types(distro: str | None = None) -> MessageTypes:
    """Return the message types of a distribution (default: :func:`ros_distro`), created once per process."""
    if distro is None:
        return message_types(ros_distro())
    return MessageTypes(distro)
