"""The graph of the embedded participant: nodes, message classes, and the loop that runs callbacks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from vla_ros.errors import VlaRosError
from vla_ros.graph.dds.discovery import Discovery
from vla_ros.graph.dds.endpoints import DdsSubscription
from vla_ros.graph.dds.node import Context, DdsNode
from vla_ros.graph.dds.participant import Participant
from vla_ros.graph.dds.service import DdsService
from vla_ros.graph.environment import DdsEnvironment, dds_environment
from vla_ros.graph.interrupts import Interrupts
from vla_ros.graph.logger import NodeLogger
from vla_ros.graph.messages import message_types
from vla_ros.graph.names import parse_ros_arguments
from vla_ros.graph.qos import QoSProfile, profile

_NEVER = float("inf")


class DdsGraph:
    """See :class:`vla_ros.graph.node.Graph`.

    Callbacks run on the thread that calls :meth:`spin`, which itself waits on the wait set: nothing lies between
    the arrival of a sample and its callback.
    """

    def __init__(
        self,
        args: Sequence[str] = (),
        environment: DdsEnvironment | None = None,
        log_level: str = "info",
    ) -> None:
        self.arguments = parse_ros_arguments(args)
        self.environment = environment or dds_environment()
        self.participant = Participant(self.environment, message_types(self.environment.distro))
        self.discovery = Discovery(self.participant)
        self._context = Context(self.arguments, self.participant, self.discovery, log_level)
        self._nodes: tuple[DdsNode, ...] = ()
        self._lock = threading.RLock()
        self._spinning = threading.Lock()
        self._spinner: threading.Thread | None = None
        self._closing = False
        self._closed = False

    @property
    def backend(self) -> str:
        """``dds``."""
        return "dds"

    def describe(self) -> str:
        """One line that says which domain was joined and how far discovery reaches."""
        return f"embedded DDS participant: {self.environment.describe()}"

    def create_node(self, name: str, namespace: str | None = None) -> DdsNode:
        """A node; ``--ros-args`` remaps of name and namespace win over the arguments."""
        if self._closing:
            raise VlaRosError(f"node '{name}' cannot be made: this graph was closed")
        found = self.arguments.namespace(namespace or "/", name)
        absolute = found if found.startswith("/") else f"/{found}"
        node = DdsNode(self._context, self.arguments.node_name(name), absolute, self._forget)
        with self._lock:
            self._nodes += (node,)
        return node

    def message(self, type_name: str) -> Any:
        """Class of ``pkg/msg/Type``."""
        return self.participant.types.message(type_name)

    def service(self, type_name: str) -> Any:
        """Class of ``pkg/srv/Type``."""
        return self.participant.types.service(type_name)

    def qos(self, name: str) -> QoSProfile:
        """Profile by name."""
        return profile(name)

    def create_steady_timer(self, node: Any, period: float, callback: Callable[[], Any]) -> Any:
        """A timer; all of this participant's are steady."""
        return node.create_timer(period, callback)

    def deserialize(self, cdr: Any, msg_type: Any) -> Any:
        """A message of its CDR bytes."""
        return self.participant.types.deserialize(cdr, msg_type)

    def subscribe_raw(
        self, node: Any, msg_type: Any, topic: str, callback: Callable[[Any, bytes], None], qos_profile: Any
    ) -> Callable[[], None]:
        """As the node's own raw subscription, which copies once; with the publisher's gid."""
        made = node.create_subscription(msg_type, topic, callback, qos_profile, raw=True)
        made.tells_publisher = True
        return partial(node.destroy_subscription, made)

    def spin(self, until: Callable[[], bool], period: float = 0.1) -> None:
        """Run callbacks until ``until()`` is true or the graph is closed.

        An exception of a callback is logged with its traceback, and the next callback runs.

        Raises:
            KeyboardInterrupt: SIGINT or SIGTERM came, and the program has no handlers of its own for them.
        """
        if not self._spinning.acquire(blocking=False):
            raise VlaRosError("this graph is spinning already; its callbacks run on one thread")
        self._spinner = threading.current_thread()
        try:
            with Interrupts() as interrupts:
                while not self._closing and not until():
                    self.participant.wait(min(period, self._until_timer()))
                    self._run_arrived()
                    self._run_timers()
                    self.discovery.update()
                    interrupts.check()
        finally:
            self._spinner = None
            self._spinning.release()
            if self._closing:
                self.close()

    def wake(self) -> None:
        """Make a spin ask ``until()`` now; for any thread."""
        if not self._closing:
            self.participant.wake()

    def close(self) -> None:
        """Destroy all nodes and leave the graph. Safe to call twice, from callbacks and from other threads."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self.participant.wake()
        if self._spinner is threading.current_thread():
            return  # spin closes when it has come back from this callback
        with self._spinning:
            self._leave()

    def __enter__(self) -> DdsGraph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget(self, node: DdsNode) -> None:
        with self._lock:
            self._nodes = tuple(item for item in self._nodes if item is not node)

    def _leave(self) -> None:
        if self._closed:
            return
        self._closed = True
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
            receivers: tuple[DdsSubscription | DdsService, ...] = (*node.subscriptions, *node.services)
            for receiver in receivers:
                for sample in receiver.take():
                    name = receiver.topic_name if isinstance(receiver, DdsSubscription) else receiver.srv_name
                    self._guarded(node.get_logger(), name, receiver.dispatch, sample)

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
