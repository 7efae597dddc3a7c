"""A node of the embedded participant: the subset of ``rclpy.node.Node`` that this package uses."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import Logger
from typing import Any, TypeVar

from vla_ros.errors import ConfigError, VlaRosError, printable
from vla_ros.graph.dds.discovery import PUBLISHERS, SUBSCRIPTIONS, Discovery, NodeEntities, TopicEndpointInfo
from vla_ros.graph.dds.endpoints import DdsPublisher, DdsSubscription, DdsTimer, Inbox
from vla_ros.graph.dds.participant import Participant
from vla_ros.graph.dds.service import DdsClient, DdsService
from vla_ros.graph.messages import MessageTypes
from vla_ros.graph.names import RosArguments, check_absolute, check_node_name, expand_name
from vla_ros.graph.qos import PROFILES, QoSProfile

T = TypeVar("T")
InboxT = TypeVar("InboxT", bound=Inbox)


_ROOT = "vla_ros.node"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix(_ROOT + ".")
        level = {"WARNING": "WARN", "CRITICAL": "FATAL"}.get(record.levelname, record.levelname)
        text = f"[{level}] [{record.created:.9f}] [{name}]: {record.getMessage()}"
        return printable(f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text)


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current standard error, which test runners and progress bars replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> object:
        return sys.stderr


def node_logger(name: str, level: str = "info") -> logging.Logger:
    """Return the logger of the node with this full name."""
    root = logging.getLogger(_ROOT)
    if not any(isinstance(handler, _Stderr) for handler in root.handlers):
        handler = _Stderr()
        handler.setFormatter(_Format())
        root.addHandler(handler)
    logger = root.getChild(name.strip("/").replace("/", "."))
    logger.setLevel(_LEVELS[level])
    # If ROS's `launch` is imported, new loggers of the process do not propagate by default.
    root.propagate = logger.propagate = True
    return logger


@dataclass(frozen=True)
class Time:
    """A point in time: nanoseconds since the clock's epoch (1970, or the start of the simulation)."""

    nanoseconds: int


class RosClock:
    """The ROS clock: system time, or with simulated time the newest time of ``/clock`` (0 before the first)."""

    def __init__(self, *, simulated: bool = False) -> None:
        self._simulated: int | None = 0 if simulated else None

    def now(self) -> Time:
        return Time(time.time_ns() if self._simulated is None else self._simulated)

    @property
    def ros_time_is_active(self) -> bool:
        """True if time comes from ``/clock``; named as in ``rclpy.clock.ROSClock``."""
        return self._simulated is not None

    def on_clock(self, message: Any) -> None:
        self._simulated = message.clock.sec * 1_000_000_000 + message.clock.nanosec


@dataclass(frozen=True)
class DdsContext:
    """State that all nodes of one graph share."""

    arguments: RosArguments  # remaps and parameters of the command line
    participant: Participant  # owns the DDS endpoints
    discovery: Discovery  # knows the other participants and announces the nodes of this one
    log_level: str  # least severe messages that nodes show


class DdsNode:
    """A node on the graph, created by :meth:`DdsGraph.create_node`. Its methods behave as in rclpy."""

    def __init__(
        self, context: DdsContext, name: str, namespace: str, on_destroy: Callable[[DdsNode], None]
    ) -> None:
        self._context, self._on_destroy = context, on_destroy
        self._name = check_node_name(name)
        self._namespace = check_absolute(namespace, "namespace")
        self._logger = node_logger(self.get_fully_qualified_name(), context.log_level)
        self._lock = threading.RLock()
        self._destroyed = False
        self.publishers: tuple[DdsPublisher, ...] = ()
        self.inboxes: tuple[Inbox, ...] = ()
        self.timers: tuple[DdsTimer, ...] = ()
        simulated = context.arguments.values(self.get_fully_qualified_name()).get("use_sim_time", False)
        if not isinstance(simulated, bool):
            raise ConfigError(f"use_sim_time: found {simulated!r}, expected true or false")
        self._clock = RosClock(simulated=simulated)
        self._announce()
        if simulated:
            clock = context.participant.types.message("rosgraph_msgs/msg/Clock")
            self.create_subscription(clock, "/clock", self._clock.on_clock, PROFILES["clock"])

    def get_name(self) -> str:
        return self._name

    def get_namespace(self) -> str:
        return self._namespace

    def get_fully_qualified_name(self) -> str:
        return f"{'' if self._namespace == '/' else self._namespace}/{self._name}"

    @property
    def types(self) -> MessageTypes:
        return self._context.participant.types

    def get_logger(self) -> Logger:
        return self._logger

    def get_clock(self) -> RosClock:
        return self._clock

    def resolve_topic_name(self, topic: str) -> str:
        return self._context.arguments.resolve(topic, self._name, self._namespace)

    def resolve_service_name(self, service: str) -> str:
        return self._context.arguments.resolve(service, self._name, self._namespace, "service")

    def create_publisher(self, msg_type: Any, topic: str, qos_profile: QoSProfile | int) -> DdsPublisher:
        """Create a publisher; ``~`` and relative names are expanded, remaps applied.

        Its ``publish`` takes a message, or its CDR bytes with the 4-byte header, and never waits for a subscriber.
        """
        name = self.resolve_topic_name(topic)
        with self._alive():
            publisher = DdsPublisher(self._context.participant, msg_type, name, _profile(qos_profile))
            self.publishers += (publisher,)
            self._announce()
        return publisher

    def create_subscription(
        self,
        msg_type: Any,
        topic: str,
        callback: Callable[[Any], Any],
        qos_profile: QoSProfile | int,
        *,
        raw: bool = False,
    ) -> DdsSubscription:
        """Call ``callback`` with each message, or, if ``raw``, with its CDR bytes (4-byte header included).

        Middlewares pad CDR to a multiple of four bytes: up to three zero bytes may follow the message.
        """
        name = self.resolve_topic_name(topic)
        profile = _profile(qos_profile)
        return self._add(
            lambda: DdsSubscription(self._context.participant, msg_type, name, callback, profile, raw=raw)
        )

    def create_timer(self, timer_period_sec: float, callback: Callable[[], Any]) -> DdsTimer:
        with self._alive():
            timer = DdsTimer(timer_period_sec, callback)
            self.timers += (timer,)
        self._context.participant.wake()
        return timer

    def create_client(self, srv_type: Any, srv_name: str) -> DdsClient:
        """Create a client; its ``call_async(request)`` returns a future of the response.

        It reaches only servers on rmw_cyclonedds.
        """
        name = self.resolve_service_name(srv_name)
        return self._add(lambda: DdsClient(self._context.participant, srv_type, name))

    def create_service(self, srv_type: Any, srv_name: str, callback: Callable[[Any, Any], Any]) -> DdsService:
        """Create a service: ``callback(request, response)`` fills and returns the response, or a future of it.

        Only clients on rmw_cyclonedds reach it.
        """
        name = self.resolve_service_name(srv_name)
        return self._add(lambda: DdsService(self._context.participant, srv_type, name, callback, self._logger))

    def destroy_timer(self, timer: DdsTimer) -> bool:
        timer.cancel()
        with self._lock:
            owned = timer in self.timers
            self.timers = _without(self.timers, timer)
        return owned

    def destroy_publisher(self, endpoint: DdsPublisher | Inbox) -> bool:
        """Destroy a publisher, subscription, service or client; return False if it is not this node's."""
        with self._lock:
            owned = endpoint in (*self.publishers, *self.inboxes)
            self.publishers, self.inboxes = _without(self.publishers, endpoint), _without(self.inboxes, endpoint)
            endpoint.destroy()
            if owned:
                self._announce()
        return owned

    destroy_subscription = destroy_service = destroy_client = destroy_publisher

    def count_publishers(self, topic_name: str) -> int:
        """Return the number of publishers of a topic; the name is expanded but not remapped, as in rclpy."""
        return len(self.get_publishers_info_by_topic(topic_name))

    def count_subscribers(self, topic_name: str) -> int:
        return len(self.get_subscriptions_info_by_topic(topic_name))

    def get_publishers_info_by_topic(self, topic_name: str) -> list[TopicEndpointInfo]:
        return self._infos(PUBLISHERS, topic_name)

    def get_subscriptions_info_by_topic(self, topic_name: str) -> list[TopicEndpointInfo]:
        return self._infos(SUBSCRIPTIONS, topic_name)

    def get_node_names_and_namespaces(self) -> list[tuple[str, str]]:
        return self._context.discovery.nodes()

    def get_topic_names_and_types(self) -> list[tuple[str, list[str]]]:
        return self._context.discovery.topics()

    def get_service_names_and_types_by_node(
        self, node_name: str, node_namespace: str
    ) -> list[tuple[str, list[str]]]:
        return self._context.discovery.services(node_name, node_namespace)

    def get_node_names(self) -> list[str]:
        return [name for name, _ in self.get_node_names_and_namespaces()]

    def destroy_node(self) -> None:
        with self._lock:
            if self._destroyed:
                return
            self._destroyed = True
            for timer in self.timers:
                timer.cancel()
            for inbox in self.inboxes:
                inbox.destroy()
            for publisher in self.publishers:
                publisher.destroy()
            self.inboxes, self.publishers, self.timers = (), (), ()
            self._context.discovery.announce(self, None)
            self._on_destroy(self)

    def _infos(self, kind: int, topic: str) -> list[TopicEndpointInfo]:
        return self._context.discovery.endpoints(kind, expand_name(topic, self._name, self._namespace))

    def _add(self, create: Callable[[], InboxT]) -> InboxT:
        with self._alive():
            inbox = create()
            self.inboxes += (inbox,)
            self._announce()
        return inbox

    def _alive(self) -> threading.RLock:
        if self._destroyed:
            raise VlaRosError(f"node {self.get_fully_qualified_name()} was destroyed; nothing can be added to it")
        return self._lock

    def _announce(self) -> None:
        readers = tuple(inbox.reader_guid for inbox in self.inboxes)
        services = [inbox for inbox in self.inboxes if isinstance(inbox, (DdsService, DdsClient))]
        writers = [item.writer_guid for item in (*self.publishers, *services)]
        self._context.discovery.announce(self, NodeEntities(self._name, self._namespace, readers, tuple(writers)))


def _without(items: tuple[T, ...], left_out: object) -> tuple[T, ...]:
    return tuple(item for item in items if item is not left_out)


def _profile(value: QoSProfile | int) -> QoSProfile:
    """Return the profile; as in rclpy, a number means a reliable, volatile profile of that depth."""
    return QoSProfile(depth=value) if isinstance(value, int) else value
