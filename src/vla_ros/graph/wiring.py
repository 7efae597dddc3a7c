"""Creates the endpoints of a node one by one and destroys them together."""

import math
import time
from collections.abc import Callable
from functools import partial
from logging import Logger
from typing import Any

from vla_ros.errors import VlaRosError
from vla_ros.graph.node import Backend, Node, RawSubscription
from vla_ros.graph.origin import Origin

_DISCOVERED = 2.0  # s; usually immediate
_LOG_PERIOD = 1.0  # s


class Wiring:
    """Publishers, subscriptions, services and timers of a node; :meth:`close` destroys them all.

    Attributes:
        taps: By resolved topic, what is called with the CDR bytes and the source timestamp
            (:class:`~vla_ros.graph.origin.Origin`) of each message that is received or sent. The topic's first
            endpoint takes it.
    """

    def __init__(self, graph: Backend, node: Node) -> None:
        self.graph = graph
        self.node = node
        self.taps: dict[str, Callable[[Any, int], None]] = {}
        self._closers: list[Callable[[], Any]] = []

    def publisher(self, type_name: str, topic: str, qos: str) -> Any:
        """Create a publisher of ``pkg/msg/Type`` with the profile called ``qos``."""
        publisher = self.node.create_publisher(self.graph.message(type_name), topic, self.graph.qos(qos))
        self.on_close(partial(self.node.destroy_publisher, publisher))
        tap = self.taps.pop(publisher.topic_name, None)
        return _Tapped(publisher, self.graph.serialize, tap) if tap else publisher

    def teller(self, type_name: str, topic: str, qos: str) -> Any:
        """Create a publisher for what is told, not commanded: what cannot be sent is logged, and not raised."""
        return _LoggingPublisher(self.publisher(type_name, topic, qos), self.node.get_logger())

    def publisher_and_gid(self, type_name: str, topic: str, qos: str) -> tuple[Any, bytes]:
        """Create a publisher and return it with its ``endpoint_gid`` in discovery.

        rclpy does not expose the gid, so the new entry in discovery is taken; an entry that a node of the same
        name on another host creates at the same instant could be mistaken for it. Raises VlaRosError if no entry
        appears within two seconds.
        """
        node = self.node
        name, own = node.resolve_topic_name(topic), (node.get_name(), node.get_namespace())
        before = {bytes(endpoint.endpoint_gid) for endpoint in node.get_publishers_info_by_topic(name)}
        publisher, deadline = self.publisher(type_name, topic, qos), time.monotonic() + _DISCOVERED
        while time.monotonic() < deadline:
            for endpoint in node.get_publishers_info_by_topic(name):
                gid = bytes(endpoint.endpoint_gid)
                if gid not in before and (endpoint.node_name, endpoint.node_namespace) == own:
                    return publisher, gid
            time.sleep(0.01)
        raise VlaRosError(f"discovery does not report this node's own publisher of {name}; does the RMW work?")

    def subscribe(self, type_name: str, topic: str, callback: Callable[[Any], None], qos: str) -> None:
        """Call ``callback`` with each message, whose lengths are checked (rclpy's typed subscriptions do not)."""
        self.subscribe_from(type_name, topic, lambda message, _: callback(message), qos)

    def subscribe_raw(
        self, type_name: str, topic: str, callback: Callable[[Any, Origin], None], qos: str
    ) -> RawSubscription:
        """Call ``callback`` with each message's CDR bytes and its origin."""
        cls, profile = self.graph.message(type_name), self.graph.qos(qos)
        tap = self.taps.pop(self.node.resolve_topic_name(topic), None)

        def on_cdr(cdr: Any, origin: Origin) -> None:
            if tap is not None:
                tap(cdr, origin.published)
            callback(cdr, origin)

        subscription = self.graph.subscribe_raw(self.node, cls, topic, on_cdr if tap else callback, profile)
        self.on_close(subscription.destroy)
        return subscription

    def subscribe_from(
        self, type_name: str, topic: str, callback: Callable[[Any, Origin], None], qos: str
    ) -> RawSubscription:
        """Call ``callback`` with each message and its origin."""
        cls = self.graph.message(type_name)

        def on_cdr(cdr: Any, origin: Origin) -> None:
            callback(self.graph.deserialize(cdr, cls), origin)

        return self.subscribe_raw(type_name, topic, on_cdr, qos)

    def service(self, type_name: str, name: str, callback: Callable[[Any, Any], Any]) -> None:
        """Serve ``std_srvs/srv/SetBool`` or ``Trigger``; if ``callback`` fails, the answer says why."""

        def answer(request: Any, response: Any) -> Any:
            try:
                return callback(request, response)
            except Exception as error:
                self.node.get_logger().error(f"{name} failed: {type(error).__name__}: {error}")
                self.graph.on_error(name, error)
                response.success, response.message = False, f"failed: {type(error).__name__}: {error}"
                return response

        service = self.node.create_service(self.graph.service(type_name), name, answer)
        self.on_close(partial(self.node.destroy_service, service))

    def client(self, type_name: str, name: str) -> Any:
        """Create a client of ``pkg/srv/Type`` (``service_is_ready()``, ``call_async(request)``)."""
        client = self.node.create_client(self.graph.service(type_name), name)
        self.on_close(partial(self.node.destroy_client, client))
        return client

    def action_client(self, type_name: str, name: str) -> Any:
        """Create a client of ``pkg/action/Type`` (:attr:`~vla_ros.graph.node.Backend.create_action_client`)."""
        client = self.graph.create_action_client(self.node, self.graph.action(type_name), name)
        self.on_close(client.destroy)
        return client

    def action_server(
        self,
        type_name: str,
        name: str,
        accept: Callable[[Any], bool],
        start: Callable[[Any], None],
        cancel: Callable[[Any], None],
    ) -> None:
        """Serve ``pkg/action/Type`` (:attr:`~vla_ros.graph.node.Backend.create_action_server`)."""
        kind = self.graph.action(type_name)
        self.on_close(self.graph.create_action_server(self.node, kind, name, accept, start, cancel).destroy)

    def timer(self, period: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` every ``period`` seconds of a steady clock."""
        created = self.graph.create_steady_timer(self.node, period, callback)
        self.on_close(partial(self.node.destroy_timer, created))

    def on_close(self, action: Callable[[], Any]) -> None:
        """Run ``action`` at :meth:`close`, in reverse order of registration."""
        self._closers.append(action)

    def close(self) -> None:
        """Destroy everything. Safe to call twice."""
        while self._closers:
            self._closers.pop()()
        self.taps.clear()


class _LoggingPublisher:
    """Logs what could not be sent, at most once in :data:`_LOG_PERIOD` seconds, and never raises."""

    def __init__(self, publisher: Any, logger: Logger) -> None:
        self._publisher, self._logger, self._logged = publisher, logger, -math.inf

    def publish(self, message: Any) -> None:
        try:
            self._publisher.publish(message)
        except Exception as error:
            now = time.monotonic()
            if now - self._logged > _LOG_PERIOD:
                self._logged = now
                self._logger.error(f"{self._publisher.topic_name}: not sent: {type(error).__name__}: {error}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)


class _Tapped:
    """A publisher whose messages are also passed to a tap, once they were sent."""

    def __init__(
        self, publisher: Any, serialize: Callable[[Any], bytes], tap: Callable[[bytes, int], None]
    ) -> None:
        self._publisher, self._serialize, self._tap = publisher, serialize, tap

    def publish(self, message: Any) -> None:
        cdr = message if isinstance(message, bytes) else self._serialize(message)
        self._publisher.publish(cdr)
        self._tap(cdr, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)
