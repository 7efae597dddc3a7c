"""The embedded participant's graph: nodes, message classes, and the loop that runs callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vla_ros.graph.dds.action import DdsActionClient, DdsActionServer
from vla_ros.graph.dds.discovery import Discovery
from vla_ros.graph.dds.endpoints import DdsSubscription
from vla_ros.graph.dds.node import Context, DdsNode
from vla_ros.graph.dds.participant import Participant
from vla_ros.graph.environment import DdsEnvironment, dds_environment
from vla_ros.graph.logger import NodeLogger
from vla_ros.graph.messages import message_types
from vla_ros.graph.names import parse_ros_arguments
from vla_ros.graph.qos import QoSProfile, profile
from vla_ros.graph.spinning import SpinningGraph

_NEVER = float("inf")


@dataclass(frozen=True)
class DdsRawSubscription:
    """See :class:`vla_ros.graph.node.RawSubscription`."""

    node: DdsNode
    subscription: DdsSubscription

    def poll(self) -> None:
        """Run the callback for waiting samples on this thread."""
        for sample in self.subscription.take():
            self.subscription.dispatch(sample)

    def destroy(self) -> None:
        """Destroy the subscription. Safe to call twice."""
        self.node.destroy_subscription(self.subscription)


class DdsGraph(SpinningGraph):
    """See :class:`vla_ros.graph.node.Graph`.

    Callbacks run on the thread that calls :meth:`spin`, which waits on the wait set directly, so a sample's
    callback runs as soon as it arrives.
    """

    def __init__(
        self,
        args: Sequence[str] = (),
        environment: DdsEnvironment | None = None,
        log_level: str = "info",
    ) -> None:
        super().__init__()
        self.arguments = parse_ros_arguments(args)
        self.environment = environment or dds_environment()
        self.participant = Participant(self.environment, message_types(self.environment.distro))
        self.discovery = Discovery(self.participant)
        self._context = Context(self.arguments, self.participant, self.discovery, log_level)
        self._nodes: tuple[DdsNode, ...] = ()

    @property
    def backend(self) -> str:
        """``dds``."""
        return "dds"

    def describe(self) -> str:
        """Describe the domain and the discovery range in one line."""
        return f"embedded DDS participant: {self.environment.describe()}"

    def create_node(self, name: str, namespace: str | None = None) -> DdsNode:
        """Create a node; ``--ros-args`` remaps of name and namespace win over the arguments."""
        self._check_open(name)
        found = self.arguments.namespace(namespace or "/", name)
        absolute = found if found.startswith("/") else f"/{found}"
        node = DdsNode(self._context, self.arguments.node_name(name), absolute, self._forget)
        with self._lock:
            self._nodes += (node,)
        return node

    def message(self, type_name: str) -> Any:
        """Return the class of ``pkg/msg/Type``."""
        return self.participant.types.message(type_name)

    def service(self, type_name: str) -> Any:
        """Return the class of ``pkg/srv/Type``."""
        return self.participant.types.service(type_name)

    def action(self, type_name: str) -> Any:
        """Return the class of ``pkg/action/Type``."""
        return self.participant.types.action(type_name)

    def create_action_client(self, node: Any, action_type: Any, name: str) -> DdsActionClient:
        """Create a client of servers on rmw_cyclonedds."""
        return DdsActionClient(node, action_type, name)

    def create_action_server(
        self,
        node: Any,
        action_type: Any,
        name: str,
        accept: Callable[[Any], bool],
        start: Callable[[Any], None],
        cancel: Callable[[Any], None],
    ) -> DdsActionServer:
        """Create a server for clients on rmw_cyclonedds."""
        return DdsActionServer(node, self.participant.types, action_type, name, accept, start, cancel)

    def qos(self, name: str) -> QoSProfile:
        """Return the QoS profile called ``name``."""
        return profile(name)

    def create_steady_timer(self, node: Any, period: float, callback: Callable[[], Any]) -> Any:
        """Create a timer; all timers of this backend use the steady clock."""
        return node.create_timer(period, callback)

    def deserialize(self, cdr: Any, msg_type: Any) -> Any:
        """Deserialise a message from its CDR bytes."""
        return self.participant.types.deserialize(cdr, msg_type)

    def subscribe_raw(
        self, node: Any, msg_type: Any, topic: str, callback: Callable[[Any, bytes], None], qos_profile: Any
    ) -> DdsRawSubscription:
        """Subscribe like the node's own raw subscription, which copies once, but with the publisher's gid."""
        made = node.create_subscription(msg_type, topic, callback, qos_profile, raw=True)
        made.tells_publisher = True
        return DdsRawSubscription(node, made)

    def _spin_once(self, period: float) -> None:
        self.participant.wait(min(period, self._until_timer()))
        self._run_arrived()
        self._run_timers()
        self.discovery.update()

    def _wake(self) -> None:
        self.participant.wake()

    def _forget(self, node: DdsNode) -> None:
        with self._lock:
            self._nodes = tuple(item for item in self._nodes if item is not node)

    def _leave(self) -> None:
        for node in self._nodes:
            node.destroy_node()
        self.discovery.close()
        self.participant.close()

    def _until_timer(self) -> float:
        due = min(
            (timer.due for node in self._nodes for timer in node.timers if not timer.canceled), default=_NEVER
        )
        return max(0.0, due - time.monotonic())

    def _run_arrived(self) -> None:
        for node in self._nodes:
            for inbox in node.inboxes:
                for sample in inbox.take():
                    self._guarded(node.get_logger(), inbox.name, inbox.dispatch, sample)

    def _run_timers(self) -> None:
        for node in self._nodes:
            for timer in node.timers:
                if timer.expire(time.monotonic()):
                    self._guarded(node.get_logger(), f"a timer of {timer.period} s", timer.callback)

    def _guarded(self, logger: NodeLogger, what: str, function: Callable[..., Any], *args: Any) -> None:
        if self._closing:
            return
        try:
            function(*args)
        except Exception as error:  # one bad message must not stop the robot's node
            logger.exception(f"callback of {what} failed: {type(error).__name__}: {error}")
