"""Discovers the graph: DDS endpoints from the built-in topics, node names from ``ros_discovery_info``.

``rmw_dds_common/msg/ParticipantEntitiesInfo`` lists the endpoints of each node of a participant; each
ROS process publishes one for its nodes, transient-local, whenever something changes.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cyclonedds.builtin import (
    BuiltinDataReader,
    BuiltinTopicDcpsParticipant,
    BuiltinTopicDcpsPublication,
    BuiltinTopicDcpsSubscription,
)
from cyclonedds.core import InstanceState, Policy, ReadCondition

from vla_ros.errors import VlaRosError
from vla_ros.graph.dds.participant import Participant, delete
from vla_ros.graph.dds.wire import ANY_UNREAD, REQUEST_PREFIX, TOPIC_PREFIX, ros_profile, ros_type_name
from vla_ros.graph.messages import MessageTypes, message_types
from vla_ros.graph.qos import DurabilityPolicy, HistoryPolicy, QoSProfile

_INFO = "rmw_dds_common/msg/ParticipantEntitiesInfo"
_TOPIC = "ros_discovery_info"
_WRITER_QOS = QoSProfile(durability=DurabilityPolicy.TRANSIENT_LOCAL, depth=1)
# All participants write the same instance of the topic, so a KEEP_LAST reader would keep only one sample.
_READER_QOS = QoSProfile(durability=DurabilityPolicy.TRANSIENT_LOCAL, history=HistoryPolicy.KEEP_ALL)

_ROUNDS, _SAMPLES = 32, 256  # what one look at the graph takes at most; the rest waits for the next

PUBLISHERS, SUBSCRIPTIONS = 0, 1
UNKNOWN_NODE = "_NODE_NAME_UNKNOWN_"
UNKNOWN_NAMESPACE = "_NODE_NAMESPACE_UNKNOWN_"


@dataclass(frozen=True)
class TopicEndpointInfo:
    """One publisher or subscription known from discovery."""

    node_name: str
    node_namespace: str
    topic_type: str
    qos_profile: QoSProfile
    endpoint_gid: bytes
    topic_type_hash: str = ""


@dataclass(frozen=True)
class NodeEntities:
    """A node and the GIDs of its endpoints."""

    name: str
    namespace: str
    readers: tuple[bytes, ...] = ()
    writers: tuple[bytes, ...] = ()


class Discovery:
    """Announces a participant's nodes and stores what others announce. Thread-safe."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._lock = threading.RLock()
        self._closed = False
        self._own: dict[Any, NodeEntities] = {}
        self._remote: dict[bytes, tuple[NodeEntities, ...]] = {}
        self._endpoints: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
        self._builtin = tuple(
            BuiltinDataReader(participant.dds, topic)
            for topic in (BuiltinTopicDcpsPublication, BuiltinTopicDcpsSubscription)
        )
        self._participants = BuiltinDataReader(participant.dds, BuiltinTopicDcpsParticipant)
        self._reader = participant.reader(_TOPIC, _INFO, _READER_QOS, ignore_local=True)
        self._writer, self._sample = participant.writer(_TOPIC, _INFO, _WRITER_QOS, ignore_local=True)
        # Attaching the reader itself would wake the loop for its other statuses until they are read.
        self._condition = ReadCondition(self._reader, ANY_UNREAD)
        participant.waitset.attach(self._condition)

    def announce(self, key: Any, node: NodeEntities | None) -> None:
        """Announce a node of this participant, or its removal (None); ``key`` identifies the node."""
        with self._lock:
            if self._closed:
                return
            if node is None:
                self._own.pop(key, None)
            else:
                self._own[key] = node
            self._writer.write(self._sample(self._serialized()))

    def update(self) -> None:
        with self._lock:
            if self._closed:
                return
            for item in _taken(self._reader):
                if item.sample_info.valid_data:
                    self._receive(item.cdr)
            for participant in _taken(self._participants):
                if participant.sample_info.instance_state != InstanceState.Alive:
                    self._remote.pop(participant.key.bytes, None)

    def nodes(self) -> list[tuple[str, str]]:
        self.update()
        with self._lock:
            return [(node.name, node.namespace) for node in self._all_nodes()]

    def services(self, name: str, namespace: str) -> list[tuple[str, list[str]]]:
        """Return the services of a node with their types, like rclpy's ``get_service_names_and_types_by_node``."""
        self.update()
        with self._lock:
            owned = {
                guid
                for node in self._all_nodes()
                if (node.name, node.namespace) == (name, namespace)
                for guid in node.readers
            }
            requests = [
                (topic.removeprefix(REQUEST_PREFIX).removesuffix("Request"), ros_type_name(endpoint.type_name))
                for endpoint in self._known(SUBSCRIPTIONS)
                if endpoint.key.bytes in owned and (topic := endpoint.topic_name).startswith(f"{REQUEST_PREFIX}/")
            ]
            return [(service, [kind.removesuffix("_Request")]) for service, kind in requests]

    def topics(self) -> list[tuple[str, list[str]]]:
        """Return every topic with its types, like rclpy's ``get_topic_names_and_types``."""
        self.update()
        found: dict[str, set[str]] = {}
        with self._lock:
            for endpoint in (*self._known(PUBLISHERS), *self._known(SUBSCRIPTIONS)):
                if endpoint.topic_name.startswith(f"{TOPIC_PREFIX}/"):
                    name = endpoint.topic_name.removeprefix(TOPIC_PREFIX)
                    found.setdefault(name, set()).add(ros_type_name(endpoint.type_name))
        return [(name, sorted(kinds)) for name, kinds in sorted(found.items())]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._participant.waitset.detach(self._condition)
            for entity in (*self._builtin, self._participants, self._condition, self._reader, self._writer):
                delete(entity)

    def endpoints(self, kind: int, topic: str) -> list[TopicEndpointInfo]:
        """Return the :data:`PUBLISHERS` or :data:`SUBSCRIPTIONS` (``kind``) of a fully qualified topic."""
        self.update()
        name = TOPIC_PREFIX + topic
        with self._lock:
            owners: dict[bytes, NodeEntities] = {}
            for node in self._all_nodes():
                owners.update(dict.fromkeys((node.writers, node.readers)[kind], node))
            return [
                _info(endpoint, owners.get(endpoint.key.bytes))
                for endpoint in self._known(kind)
                if endpoint.topic_name == name
            ]

    def _known(self, kind: int) -> list[Any]:
        """Return every publisher or subscription. Call with the lock held."""
        if self._closed:
            return []
        endpoints = self._endpoints[kind]
        for endpoint in _taken(self._builtin[kind]):
            if endpoint.sample_info.instance_state == InstanceState.Alive and endpoint.qos is not None:
                endpoints[endpoint.key] = endpoint
            else:
                endpoints.pop(endpoint.key, None)
        return list(endpoints.values())

    def _all_nodes(self) -> Iterable[NodeEntities]:
        yield from self._own.values()
        for nodes in self._remote.values():
            yield from nodes

    def _receive(self, cdr: bytes) -> None:
        for types in self._formats():
            try:
                info = types.deserialize(cdr, types.message(_INFO))
            except VlaRosError:
                continue
            self._remote[_guid(info.gid)] = tuple(
                NodeEntities(
                    node.node_name,
                    node.node_namespace,
                    tuple(_guid(gid) for gid in node.reader_gid_seq),
                    tuple(_guid(gid) for gid in node.writer_gid_seq),
                )
                for node in info.node_entities_info_seq
            )
            return

    def _formats(self) -> Iterable[MessageTypes]:
        """Return both message formats, this participant's first: a graph may mix ROS distributions."""
        yield self._participant.types
        yield message_types("jazzy" if self._participant.environment.distro == "humble" else "humble")

    def _serialized(self) -> bytes:
        types = self._participant.types
        gid = types.message("rmw_dds_common/msg/Gid")
        node_info = types.message("rmw_dds_common/msg/NodeEntitiesInfo")
        size = self._participant.environment.gid_size

        def packed(guid: bytes) -> Any:
            return gid(data=guid.ljust(size, b"\0"))

        return types.serialize(
            types.message(_INFO)(
                gid=packed(self._participant.dds.guid.bytes),
                node_entities_info_seq=[
                    node_info(
                        node_namespace=node.namespace,
                        node_name=node.name,
                        reader_gid_seq=[packed(guid) for guid in node.readers],
                        writer_gid_seq=[packed(guid) for guid in node.writers],
                    )
                    for node in self._own.values()
                ],
            )
        )


def _guid(gid: Any) -> bytes:
    return bytes(gid.data[:16])


def _info(endpoint: Any, node: NodeEntities | None) -> TopicEndpointInfo:
    user = endpoint.qos[Policy.Userdata]
    fields = dict(
        item.split("=", 1) for item in (user.data.decode("latin-1") if user else "").split(";") if "=" in item
    )
    return TopicEndpointInfo(
        node_name=node.name if node else UNKNOWN_NODE,
        node_namespace=node.namespace if node else UNKNOWN_NAMESPACE,
        topic_type=ros_type_name(endpoint.type_name),
        qos_profile=ros_profile(endpoint.qos),
        endpoint_gid=endpoint.key.bytes,
        topic_type_hash=fields.get("typehash", ""),
    )


def _taken(reader: Any) -> Iterator[Any]:
    for _ in range(_ROUNDS):
        taken = reader.take(N=_SAMPLES)
        yield from taken
        if not taken:
            return
