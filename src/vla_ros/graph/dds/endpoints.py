"""Publishers, subscriptions and timers of the embedded participant, with rclpy's interface."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from cyclonedds.core import DDSException, Entity, ReadCondition
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader

from vla_ros.errors import VlaRosError
from vla_ros.graph.dds.participant import Participant, delete
from vla_ros.graph.dds.wire import ANY_UNREAD, TOPIC_PREFIX
from vla_ros.graph.origin import Origin
from vla_ros.graph.qos import QoSProfile


class DdsPublisher:
    """Sends messages on a topic. Any thread may publish."""

    def __init__(self, participant: Participant, msg_type: Any, topic: str, profile: QoSProfile) -> None:
        self.topic_name = topic
        self.qos_profile = profile
        self.msg_type = msg_type
        self._types = participant.types
        self._lock = threading.Lock()
        self._writer: DataWriter[Any] | None
        self._writer, self._sample = participant.writer(TOPIC_PREFIX + topic, msg_type.TYPE, profile)
        self.writer_guid = self._writer.guid.bytes

    def publish(self, msg: Any) -> None:
        """Send a message, or its CDR (:class:`bytes`, 4-byte header included). Never waits for a subscriber.

        Raises VlaRosError if the message has another type or cannot be serialised, or the node was destroyed.
        """
        if isinstance(msg, (bytes, bytearray, memoryview)):
            cdr = bytes(msg)
        elif isinstance(msg, self.msg_type):
            cdr = self._types.serialize(msg)
        else:
            raise VlaRosError(
                f"{self.topic_name} expects {self.msg_type.TYPE} or its bytes, found {type(msg).__name__}"
            )
        # The lock keeps destroy() from deleting the writer in the middle of a write.
        with self._lock:
            if self._writer is None:
                raise VlaRosError(f"the publisher of {self.topic_name} was destroyed; nothing was sent")
            try:
                self._writer.write(self._sample(cdr))
            except DDSException as error:
                raise VlaRosError(f"{self.topic_name} could not be sent ({len(cdr)} bytes): {error}") from error

    def get_subscription_count(self) -> int:
        with self._lock:
            return len(self._writer.get_matched_subscriptions()) if self._writer is not None else 0

    def destroy(self) -> None:
        with self._lock:
            if self._writer is not None:
                delete(self._writer)
                self._writer = None


class Inbox(ABC):
    """A reader whose samples wake the graph's spin, which calls :meth:`dispatch` with each sample."""

    def __init__(self, participant: Participant, reader: DataReader[Any], name: str, depth: int) -> None:
        self.name = name
        self.reader_guid = reader.guid.bytes
        self._participant = participant
        self._depth = depth
        self._lock = threading.Lock()
        self._reader: DataReader[Any] | None = reader
        self._condition = ReadCondition(reader, ANY_UNREAD)
        self._entities: tuple[Entity, ...] = (self._condition, reader)
        participant.waitset.attach(self._condition)

    def take(self) -> list[tuple[bytes, Origin]]:
        """Take up to ``depth`` waiting samples, oldest first; return the CDR and origin of each."""
        with self._lock:
            if self._reader is None:
                return []
            taken = self._reader.take(N=self._depth, condition=self._condition)
            # Samples without data report publishers that left.
            return [(item.cdr, self._origin(item)) for item in taken if item.sample_info.valid_data]

    @abstractmethod
    def dispatch(self, sample: tuple[bytes, Origin]) -> None:
        """Pass one sample to the callback."""

    def destroy(self) -> None:
        with self._lock:
            if self._reader is not None:
                self._participant.waitset.detach(self._condition)
                self._reader = None
                for entity in self._entities:
                    delete(entity)

    def _origin(self, item: Any) -> Origin:
        """Return a sample's origin, empty if it is not needed. Call with the lock held."""
        return Origin()


class DdsSubscription(Inbox):
    """Receives messages of a topic."""

    def __init__(
        self,
        participant: Participant,
        msg_type: Any,
        topic: str,
        callback: Callable[[Any], Any],
        profile: QoSProfile,
        *,
        raw: bool = False,
    ) -> None:
        self.topic_name = topic
        self.qos_profile = profile
        self.msg_type = msg_type
        self.callback = callback
        self.raw = raw
        self.tells_origin = False  # the callback takes the message's origin as well
        self._publishers: dict[int, bytes] = {}
        reader = participant.reader(TOPIC_PREFIX + topic, msg_type.TYPE, profile)
        super().__init__(participant, reader, topic, profile.depth)

    def dispatch(self, sample: tuple[bytes, Origin]) -> None:
        cdr, origin = sample
        message = cdr if self.raw else self._participant.types.deserialize(cdr, self.msg_type)
        self.callback(*((message, origin) if self.tells_origin else (message,)))

    def _origin(self, item: Any) -> Origin:
        """Return a sample's origin, with the publisher's handle if it has already left. Call with the lock held."""
        if not self.tells_origin:
            return Origin()
        handle = int(item.sample_info.publication_handle)
        if handle not in self._publishers:
            assert self._reader is not None
            endpoint = self._reader.get_matched_publication_data(handle)
            publisher = endpoint.key.bytes if endpoint else handle.to_bytes(8, "little")
            self._publishers[handle] = publisher
        return Origin(self._publishers[handle], max(0, int(item.sample_info.source_timestamp)))


class DdsTimer:
    """Calls back at a fixed rate on the thread that spins; missed calls are skipped."""

    def __init__(self, period: float, callback: Callable[[], Any]) -> None:
        if not period >= 0.0:
            raise VlaRosError(f"a timer's period is {period} s; expected 0 or more")
        self.period = period
        self.callback = callback
        self.due = time.monotonic() + period
        self.canceled = False

    def cancel(self) -> None:
        self.canceled = True

    def expire(self, now: float) -> bool:
        """Return whether the timer is due at ``now`` (monotonic seconds), and if so, schedule the next call."""
        if self.canceled or now < self.due:
            return False
        self.due += self.period
        if self.due <= now:
            self.due = now + self.period
        return True
