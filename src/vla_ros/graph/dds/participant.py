"""The DDS participant of one graph: domain, wait set, endpoints, and deletion in the right order."""

import threading
from typing import Any

from cyclonedds.core import DDSException, Entity, GuardCondition, Policy, Qos, WaitSet
from cyclonedds.domain import Domain, DomainParticipant
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic

from vla_ros.errors import VlaRosError
from vla_ros.graph.dds.wire import endpoint_qos, wire_type
from vla_ros.graph.environment import DdsEnvironment
from vla_ros.graph.messages import MessageTypes
from vla_ros.graph.qos import QoSProfile
from vla_ros.process import keep_freed_memory


class _Domains:
    """The DDS domains of this process: one per number, configured by its first user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Domain, str, int]] = {}

    def acquire(self, environment: DdsEnvironment) -> None:
        number, configuration = environment.domain_id, environment.configuration()
        with self._lock:
            if number in self._open:
                domain, present, users = self._open[number]
                if present != configuration:
                    raise VlaRosError(
                        f"this process is already in DDS domain {number}, with other settings of "
                        "ROS_AUTOMATIC_DISCOVERY_RANGE, ROS_LOCALHOST_ONLY, ROS_STATIC_PEERS or CYCLONEDDS_URI; "
                        "close that graph first, or use another ROS_DOMAIN_ID"
                    )
                self._open[number] = (domain, present, users + 1)
                return
            try:
                domain = Domain(number, configuration)
            except (DDSException, UnicodeEncodeError) as error:
                raise VlaRosError(
                    f"DDS domain {number} could not be opened: {error}. See Cyclone's message above; if "
                    f"CYCLONEDDS_URI is set ('{environment.user_configuration}'), check it"
                ) from error
            self._open[number] = (domain, configuration, 1)

    def release(self, number: int) -> None:
        with self._lock:
            domain, configuration, users = self._open.pop(number)
            if users > 1:
                self._open[number] = (domain, configuration, users - 1)
            else:
                delete(domain)


_domains = _Domains()


def delete(entity: Entity) -> None:
    """Delete a DDS entity now, not on garbage collection. Its finaliser may run twice."""
    entity.__del__()


class Participant:
    """A DDS participant with its wait set. Thread-safe as DDS is; call :meth:`close` once."""

    def __init__(self, environment: DdsEnvironment, types: MessageTypes) -> None:
        keep_freed_memory()
        self.environment = environment
        self.types = types
        _domains.acquire(environment)
        try:
            self.dds = DomainParticipant(environment.domain_id, Qos(Policy.Userdata(b"enclave=/;")))
        except DDSException as error:
            _domains.release(environment.domain_id)
            raise VlaRosError(
                f"cannot create a DDS participant in domain {environment.domain_id}: {error}. A host has room "
                "for 33 participants per domain: stop some, or choose another ROS_DOMAIN_ID"
            ) from error
        self.waitset = WaitSet(self.dds)
        self._guard = GuardCondition(self.dds)
        self.waitset.attach(self._guard)
        self._topics: dict[tuple[str, str], Topic[Any]] = {}
        self._lock = threading.Lock()

    def wake(self) -> None:
        self._guard.set(True)

    def wait(self, seconds: float) -> None:
        """Wait for data, for :meth:`wake` or until the timeout, without holding the interpreter lock."""
        self.waitset.wait(max(0, int(seconds * 1e9)))
        self._guard.set(False)

    def writer(
        self, topic: str, type_name: str, profile: QoSProfile, extra: str = "", *, ignore_local: bool = False
    ) -> tuple[DataWriter[Any], Any]:
        """Create a writer of a topic by its full DDS name; return it and the type of its samples.

        ``extra`` is added to its user data; with ``ignore_local``, readers of this participant do not see it.
        """
        qos = endpoint_qos(profile, self._user_data(type_name, extra), ignore_local=ignore_local)
        try:
            return DataWriter(self.dds, self._topic(topic, type_name), qos), wire_type(self.types, type_name)
        except DDSException as error:
            raise VlaRosError(f"cannot create a publisher of {type_name} on {topic}: {error}") from error

    def reader(
        self, topic: str, type_name: str, profile: QoSProfile, extra: str = "", *, ignore_local: bool = False
    ) -> DataReader[Any]:
        qos = endpoint_qos(profile, self._user_data(type_name, extra), ignore_local=ignore_local)
        try:
            return DataReader(self.dds, self._topic(topic, type_name), qos)
        except DDSException as error:
            raise VlaRosError(f"cannot create a subscription to {type_name} on {topic}: {error}") from error

    def close(self) -> None:
        """Leave the domain. Delete readers and writers first."""
        self.waitset.detach(self._guard)
        delete(self.waitset)
        delete(self._guard)
        for topic in self._topics.values():
            delete(topic)
        self._topics.clear()
        delete(self.dds)
        _domains.release(self.environment.domain_id)

    def _user_data(self, type_name: str, extra: str) -> str:
        # Type hashes are announced since Iron (REP-2016); Humble does not know the key.
        if self.environment.distro == "humble":
            return extra
        return f"typehash={self.types.type_hash(type_name)};{extra}"

    def _topic(self, name: str, type_name: str) -> Topic[Any]:
        with self._lock:
            key = (name, type_name)
            if key not in self._topics:
                self._topics[key] = Topic(self.dds, name, wire_type(self.types, type_name))
            return self._topics[key]
