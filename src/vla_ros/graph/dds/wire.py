"""DDS types of ROS messages, with CDR bytes as samples, and their names on the wire."""

import functools
import re
from typing import Any

from cyclonedds.core import InstanceState, Policy, Qos, SampleState, ViewState
from cyclonedds.idl import make_idl_struct
from cyclonedds.idl import types as idl
from rosbags.interfaces import Nodetype

from vla_ros.graph.messages import MessageTypes
from vla_ros.graph.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy

TOPIC_PREFIX = "rt"
REQUEST_PREFIX = "rq"
REPLY_PREFIX = "rr"

ANY_UNREAD = SampleState.NotRead | ViewState.Any | InstanceState.Any
"""Mask of the conditions that wake the loop."""

_SCALARS: dict[str, Any] = {
    "bool": bool,
    "string": str,
    "byte": idl.uint8,
    "char": idl.uint8,
    **{
        name: getattr(idl, name)
        for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")
    },
}
_DDS_TYPE = re.compile(r"(\w+)::(\w+)::dds_::(\w+)_")


def dds_type_name(name: str) -> str:
    """Return the name that ``pkg/msg/Type`` has in DDS discovery."""
    package, kind, base = name.split("/")
    return f"{package}::{kind}::dds_::{base}_"


def ros_type_name(name: str) -> str:
    """Return ``pkg/msg/Type`` for a type name in DDS discovery; other names are returned unchanged."""
    match = _DDS_TYPE.fullmatch(name)
    return "/".join(match.groups()) if match else name


def _init(self: Any, cdr: bytes = b"") -> None:
    self.cdr = cdr


def _serialize(self: Any, buffer: Any = None, endianness: Any = None, use_version_2: Any = None) -> bytes:
    return bytes(self.cdr)


def _deserialize(cls: Any, data: bytes, has_header: bool = True, use_version_2: Any = None) -> Any:
    return cls(data)


@functools.cache
def wire_type(types: MessageTypes, name: str) -> Any:
    """Return the DDS type of a ROS type (``pkg/msg/Type``): it has all fields, but its samples are CDR bytes.

    A sample is created from CDR bytes with the 4-byte header and has the attributes ``cdr`` and, once received,
    ``sample_info``.
    """
    fields = _fields(types, name)
    if name.endswith(("_Request", "_Response")):
        # Cyclone checks each blob against the type, and the header of rmw_cyclonedds' services is in the blob.
        fields = {"client_guid": idl.uint64, "sequence_number": idl.int64, **fields}
    blob = make_idl_struct(name.rpartition("/")[2] + "_", dds_type_name(name), fields)
    # Assigned to the class itself: the builder derives the type from the annotations and must find IdlStruct as
    # the base, so a subclass or mixin would not do.
    blob.__init__ = _init
    blob.serialize = _serialize
    blob.deserialize = classmethod(_deserialize)
    blob.deserialize_key = classmethod(_deserialize)
    return blob


@functools.cache
def _structure(types: MessageTypes, name: str) -> Any:
    return make_idl_struct(name.rpartition("/")[2] + "_", dds_type_name(name), _fields(types, name))


def _fields(types: MessageTypes, name: str) -> dict[str, Any]:
    return {field: _field(types, description) for field, description in types.definition(name)}


def _field(types: MessageTypes, description: Any) -> Any:
    kind, argument = description
    if kind == Nodetype.NAME:
        return _structure(types, argument)
    if kind == Nodetype.BASE:
        base, bound = argument
        return idl.bounded_str[bound] if base == "string" and bound else _SCALARS[base]
    inner, length = argument
    item = _field(types, inner)
    if kind == Nodetype.ARRAY:
        return idl.array[item, length]
    return idl.sequence[item, length] if length else idl.sequence[item]


def endpoint_qos(profile: QoSProfile, user_data: str, *, ignore_local: bool = False) -> Qos:
    """Return the DDS policies of a reader or writer with this profile, the same as the RMWs set."""
    policies: list[Any] = [
        # Zero: a write that would have to wait fails instead.
        Policy.Reliability.Reliable(0)
        if profile.reliability is ReliabilityPolicy.RELIABLE
        else Policy.Reliability.BestEffort,
        Policy.Durability.TransientLocal
        if profile.durability is DurabilityPolicy.TRANSIENT_LOCAL
        else Policy.Durability.Volatile,
        Policy.History.KeepAll
        if profile.history is HistoryPolicy.KEEP_ALL
        else Policy.History.KeepLast(profile.depth),
        Policy.WriterDataLifecycle(autodispose=False),
        # XCDR1, which all of ROS uses; without this policy Cyclone offers XCDR2, which matches no ROS endpoint.
        Policy.DataRepresentation(use_cdrv0_representation=True),
        Policy.Userdata(user_data.encode()),
    ]
    if profile.durability is DurabilityPolicy.TRANSIENT_LOCAL:
        policies.append(Policy.DurabilityService(0, Policy.History.KeepLast(profile.depth), -1, -1, -1))
    if ignore_local:
        policies.append(Policy.IgnoreLocal.Participant)
    return Qos(*policies)


def ros_profile(qos: Qos) -> QoSProfile:
    """Return the profile that an endpoint announced; DDS does not announce the history."""
    history = qos[Policy.History]
    return QoSProfile(
        reliability=ReliabilityPolicy.RELIABLE
        if isinstance(qos[Policy.Reliability], Policy.Reliability.Reliable)
        else ReliabilityPolicy.BEST_EFFORT,
        durability=DurabilityPolicy.VOLATILE
        if qos[Policy.Durability] in (None, Policy.Durability.Volatile)
        else DurabilityPolicy.TRANSIENT_LOCAL,
        depth=getattr(history, "depth", 0),
        history=HistoryPolicy.KEEP_ALL if history == Policy.History.KeepAll else HistoryPolicy.KEEP_LAST,
    )
