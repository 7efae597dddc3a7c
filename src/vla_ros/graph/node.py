"""The subset of ``rclpy.node.Node`` that this package uses, with rclpy's names and meanings.

A real ``rclpy`` node satisfies these protocols as it is; the embedded DDS participant implements them and no
more. Node logic is written once against them and tested against both.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Protocol

Message = Any
"""A message object: attributes named as the fields of the ROS type. Classes come from :class:`Graph`."""


class Logger(Protocol):
    """A node's logger; ``rclpy``'s loggers satisfy it."""

    def debug(self, message: str) -> Any:
        """Log for developers."""

    def info(self, message: str) -> Any:
        """Log for users."""

    def warning(self, message: str) -> Any:
        """Log a warning: what is wrong and what to do."""

    def error(self, message: str) -> Any:
        """Log an error: what failed and what to do."""


Severity = Literal["info", "warning", "error"]


def say(logger: Logger, message: str, severity: Severity) -> None:
    """Log with a severity that is known only at run time.

    rclpy remembers the severity of each line of code that logs and raises ValueError if it changes, so each
    severity has its own line here.
    """
    if severity == "error":
        logger.error(message)
    elif severity == "warning":
        logger.warning(message)
    else:
        logger.info(message)


class Timer(Protocol):
    """A periodic callback."""

    def cancel(self) -> None:
        """Stop the timer."""


class Node(Protocol):
    """A node on the ROS 2 graph: the subset that this package uses."""

    def get_name(self) -> str:
        """Return the node's name without its namespace."""

    def get_namespace(self) -> str:
        """Namespace, starting with ``/``."""

    def get_fully_qualified_name(self) -> str:
        """Return the node's name with its namespace."""

    def get_logger(self) -> Any:
        """Return the node's :class:`Logger`."""

    def get_clock(self) -> Any:
        """The ROS clock: system time, or ``/clock`` with ``use_sim_time``. Its ``now()`` has ``nanoseconds``."""

    def create_publisher(self, msg_type: Any, topic: str, qos_profile: Any) -> Any:
        """Create a publisher; ``~`` and relative names are expanded, remaps applied.

        Its ``publish`` takes a message, or its CDR bytes with the 4-byte header, and never waits for a subscriber.
        """

    def create_subscription(
        self, msg_type: Any, topic: str, callback: Callable[[Any], Any], qos_profile: Any, *, raw: bool = False
    ) -> Any:
        """Call ``callback`` with each message, or with its CDR bytes (4-byte header included) when ``raw``.

        Middlewares pad CDR to a multiple of four bytes: up to three zero bytes may follow the message.
        """

    def create_timer(self, timer_period_sec: float, callback: Callable[[], Any]) -> Any:
        """Create a :class:`Timer` that calls ``callback`` every ``timer_period_sec`` seconds."""

    def create_service(self, srv_type: Any, srv_name: str, callback: Callable[[Any, Any], Any]) -> Any:
        """Create a service: ``callback(request, response)`` fills and returns the response."""

    def create_client(self, srv_type: Any, srv_name: str) -> Any:
        """Create a client: ``service_is_ready()``; ``call_async(request)`` returns a future of the response."""

    def count_publishers(self, topic_name: str) -> int:
        """Return the number of publishers of a topic; the name is expanded but not remapped, as in rclpy."""

    def count_subscribers(self, topic_name: str) -> int:
        """Return the number of subscriptions of a topic; the name is expanded but not remapped, as in rclpy."""

    def get_publishers_info_by_topic(self, topic_name: str) -> list[Any]:
        """Each publisher of a topic (``rclpy.topic_endpoint_info``); the name is expanded but not remapped."""

    def get_subscriptions_info_by_topic(self, topic_name: str) -> list[Any]:
        """Each subscription of a topic (``rclpy.topic_endpoint_info``); the name is expanded but not remapped."""

    def get_node_names(self) -> list[str]:
        """Return the name of every node on the graph."""

    def get_node_names_and_namespaces(self) -> list[tuple[str, str]]:
        """Return the name and namespace of every node on the graph."""

    def get_service_names_and_types_by_node(
        self, node_name: str, node_namespace: str
    ) -> list[tuple[str, list[str]]]:
        """Return the name and types of each service of a node. rclpy raises if there is no such node (any more)."""

    def resolve_topic_name(self, topic: str) -> str:
        """Return the fully qualified name of a topic, after remaps."""

    def resolve_service_name(self, service: str) -> str:
        """Return the fully qualified name of a service, after remaps."""

    def destroy_publisher(self, publisher: Any) -> Any:
        """Destroy the endpoint."""

    def destroy_subscription(self, subscription: Any) -> Any:
        """Destroy the endpoint."""

    def destroy_service(self, service: Any) -> Any:
        """Destroy a service."""

    def destroy_client(self, client: Any) -> Any:
        """Destroy a client."""

    def destroy_timer(self, timer: Any) -> Any:
        """Stop and destroy a timer."""

    def destroy_node(self) -> Any:
        """Destroy the node; its publishers then refuse to publish."""


EXECUTING, CANCELING, SUCCEEDED, CANCELED, ABORTED = range(2, 7)
"""States of a goal (``action_msgs/msg/GoalStatus``)."""


class ServedGoal(Protocol):
    """A goal that an action server has accepted."""

    goal: Any

    def publish_feedback(self, feedback: Any) -> None:
        """Send feedback to the clients."""

    def end(self, status: int, result: Any) -> None:
        """End the goal, once: :data:`SUCCEEDED`, :data:`ABORTED` or, after ``cancel``, :data:`CANCELED`."""


class RawSubscription(Protocol):
    """A subscription of :meth:`Vocabulary.subscribe_raw`."""

    def poll(self) -> None:
        """Run the callback for waiting messages on this thread, which need not be the one that spins."""

    def destroy(self) -> Any:
        """Destroy the subscription."""


class Vocabulary(Protocol):
    """Message classes and QoS profiles of a backend."""

    @property
    def backend(self) -> str:
        """``rclpy`` or ``dds``."""

    def message(self, type_name: str) -> Any:
        """Class of ``pkg/msg/Type``. Constructor: keyword arguments, missing fields have their ROS defaults."""

    def service(self, type_name: str) -> Any:
        """Return the class of ``pkg/srv/Type`` with ``Request`` and ``Response``."""

    def action(self, type_name: str) -> Any:
        """Return the class of ``pkg/action/Type`` with ``Goal`` and ``Result``."""

    def create_action_client(self, node: Node, action_type: Any, name: str) -> Any:
        """Create a client of an action server, as ``rclpy.action.ActionClient``: the subset for goals and results.

        ``server_is_ready()``; ``send_goal_async(goal)`` returns a future of a handle with ``accepted`` and
        ``get_result_async()``, whose future yields ``status`` and ``result``; ``destroy()``. Futures complete on
        the thread that spins; call the client only from there.
        """

    def create_action_server(
        self,
        node: Node,
        action_type: Any,
        name: str,
        accept: Callable[[Any], bool],
        start: Callable[[Any], None],
        cancel: Callable[[Any], None],
    ) -> Any:
        """Serve an action; returns an object with ``destroy()``.

        These run on the thread that spins and must not block: ``accept`` decides whether to accept a goal message,
        ``start`` receives the accepted :class:`ServedGoal`, ``cancel`` the one that a client wants to cancel.
        """

    def qos(self, name: str) -> Any:
        """Return the QoS profile called ``name``.

        ``camera``, ``command``, ``instruction``, ``state`` (subscriptions), ``state_publisher``, ``diagnostics``
        or ``default``; :mod:`vla_ros.graph.qos` describes each.
        """

    def create_steady_timer(self, node: Node, period: float, callback: Callable[[], Any]) -> Timer:
        """Create a timer of ``node`` on the steady clock: a watchdog must not stop with simulated time."""

    def deserialize(self, cdr: Any, msg_type: Any) -> Any:
        """Deserialise a message from its CDR bytes."""

    def subscribe_raw(
        self, node: Node, msg_type: Any, topic: str, callback: Callable[[Any, bytes], None], qos_profile: Any
    ) -> RawSubscription:
        """Call ``callback`` with each message's CDR bytes and its publisher's id; copied as rarely as possible.

        As ``create_subscription(raw=True)``, but the callback may get a read-only ``memoryview``. The id is the
        publisher's ``endpoint_gid`` if the middleware gives it, else another number that is different for each
        publisher (Cyclone DDS under rclpy), and b"" if it gives none.
        """


class Graph(Vocabulary, Protocol):
    """A joined ROS 2 graph: makes nodes and runs callbacks.

    Callbacks of all its nodes run one after the other on the thread that calls :meth:`spin`.
    """

    def describe(self) -> str:
        """One line for the log: middleware, domain and discovery range."""

    def create_node(self, name: str, namespace: str | None = None) -> Node:
        """Create a node; ``--ros-args`` remaps of name and namespace win over the arguments."""

    def spin(self, until: Callable[[], bool], period: float = 0.1) -> None:
        """Run callbacks until ``until()``, checked at least every ``period`` seconds, is true.

        Unless the program has its own handlers, SIGINT and SIGTERM raise KeyboardInterrupt between two callbacks,
        so that nodes can still publish. Exceptions in a callback are logged, and the next callback runs.
        """

    def wake(self) -> None:
        """Make a spin on another thread check ``until()`` now."""

    def close(self) -> None:
        """Destroy all nodes and disconnect from the graph. Safe to call twice."""

    def __enter__(self) -> Graph: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
