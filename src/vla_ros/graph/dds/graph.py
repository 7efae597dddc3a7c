"""The embedded participant's graph: nodes, message classes, and the loop that runs callbacks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import Logger
from typing import Any

from vla_ros.errors import VlaRosError
from vla_ros.graph.dds.action import DdsActionClient, DdsActionServer
from vla_ros.graph.dds.discovery import Discovery
from vla_ros.graph.dds.endpoints import DdsSubscription
from vla_ros.graph.dds.node import DdsContext, DdsNode
from vla_ros.graph.dds.participant import Participant
from vla_ros.graph.environment import dds_environment
from vla_ros.graph.messages import message_types
from vla_ros.graph.names import parse_ros_arguments
from vla_ros.graph.node import Graph
from vla_ros.graph.qos import profile

_NEVER = float("inf")


@dataclass(frozen=True)
class DdsRawSubscription:
    """See :class:`vla_ros.graph.node.RawSubscription`."""

    node: DdsNode
    subscription: DdsSubscription

    def poll(self) -> None:
        failed: Exception | None = None
        for sample in self.subscription.take():
            try:
                self.subscription.dispatch(sample)
            except Exception as error:  # noqa: PERF203 - the messages behind it are taken, too
                failed = failed or error
        if failed is not None:
            raise failed

    def destroy(self) -> None:
        self.node.destroy_subscription(self.subscription)


def _subscribe_raw(
    node: DdsNode, msg_type: Any, topic: str, callback: Callable[..., Any], qos_profile: Any
) -> DdsRawSubscription:
    subscription = node.create_subscription(msg_type, topic, callback, qos_profile, raw=True)
    subscription.tells_origin = True
    return DdsRawSubscription(node, subscription)


class DdsGraph(Graph):
    """The graph of the embedded participant; :meth:`Graph.spin` waits on the participant's wait set."""

    def __init__(self, args: Sequence[str] = (), log_level: str = "info") -> None:
        super().__init__()
        self.arguments = parse_ros_arguments(args)
        self.environment = dds_environment()
        self.participant = Participant(self.environment, message_types(self.environment.distro))
        self.discovery = Discovery(self.participant)
        self._context = DdsContext(self.arguments, self.participant, self.discovery, log_level)
        self._nodes: tuple[DdsNode, ...] = ()
        types = self.participant.types
        self.backend = "dds"
        self.message, self.service, self.action = types.message, types.service, types.action
        self.qos, self.serialize, self.deserialize = profile, types.serialize, types.deserialize
        self.create_steady_timer = DdsNode.create_timer
        self.create_action_client, self.create_action_server = DdsActionClient, DdsActionServer
        self.subscribe_raw = _subscribe_raw

    def describe(self) -> str:
        return f"embedded DDS participant: {self.environment.describe()}"

    def create_node(self, name: str, namespace: str | None = None) -> DdsNode:
        self._check_open(name)
        resolved = self.arguments.namespace(namespace or "/", name)
        absolute = resolved if resolved.startswith("/") else f"/{resolved}"
        node = DdsNode(self._context, self.arguments.node_name(name), absolute, self._forget)
        with self._lock:
            self._nodes += (node,)
        return node

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

    def _guarded(self, logger: Logger, what: str, function: Callable[..., Any], *args: Any) -> None:
        if self._closing:
            return
        try:
            function(*args)
        except Exception as error:  # one bad message must not stop the robot's node
            logger.exception(f"callback of {what} failed: {type(error).__name__}: {error}")
            if not isinstance(error, VlaRosError):
                self.on_error(f"callback of {what}", error)
