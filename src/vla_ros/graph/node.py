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
    """A node's logger; an ``rclpy`` logger."""

    def debug(self, message: str) -> Any:
        """Log for developers."""

    def info(self, message: str) -> Any:
        """Log for everybody."""

    def warning(self, message: str) -> Any:
        """Log a warning: what is wrong and what to do."""

    def error(self, message: str) -> Any:
        """Log an error: what failed and what to do."""


Severity = Literal["info", "warning", "error"]


def say(logger: Logger, message: str, severity: Severity) -> None:
    """Log with a severity that is known only at run time.

    rclpy remembers the severity of each line of code that logs, and raises ValueError where one line logs with
    another: so each severity has a line of its own here.
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
        """Stop it."""


class Node(Protocol):
    """A node on the ROS 2 graph: the subset that this package uses."""

    def get_name(self) -> str:
        """Return the name without namespace."""

    def get_namespace(self) -> str:
        """Namespace, starting with ``/``."""

    def get_fully_qualified_name(self) -> str:
        """Return the namespace and name."""

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
        """Answer requests: ``callback(request, response)`` fills and returns the response."""

    def create_client(self, srv_type: Any, srv_name: str) -> Any:
        """Create a client: ``service_is_ready()``; ``call_async(request)`` gives a future of the response."""

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
        """Leave a topic."""

    def destroy_subscription(self, subscription: Any) -> Any:
        """Leave a topic."""

    def destroy_service(self, service: Any) -> Any:
        """Answer no more requests."""

    def destroy_client(self, client: Any) -> Any:
        """Ask no more."""

    def destroy_timer(self, timer: Any) -> Any:
        """Stop a timer."""

    def destroy_node(self) -> Any:
        """Leave the graph. Its publishers then refuse to publish."""


EXECUTING, CANCELING, SUCCEEDED, CANCELED, ABORTED = range(2, 7)
"""States of a goal (``action_msgs/msg/GoalStatus``)."""


class ServedGoal(Protocol):
    """A goal that an action server has taken."""

    goal: Any

    def publish_feedback(self, feedback: Any) -> None:
        """Tell the clients how far it is."""

    def end(self, status: int, result: Any) -> None:
        """End it, once, as :data:`SUCCEEDED`, :data:`ABORTED` or, after ``cancel``, :data:`CANCELED`."""


class RawSubscription(Protocol):
    """A subscription of :meth:`Vocabulary.subscribe_raw`."""

    def poll(self) -> None:
        """Call back with the messages that wait, on this thread, which need not be the one that spins."""

    def destroy(self) -> Any:
        """Leave the topic."""


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

        ``server_is_ready()``; ``send_goal_async(goal)`` gives a future of a handle with ``accepted`` and
        ``get_result_async()``, whose future has ``status`` and ``result``; ``destroy()``. Futures end on the thread
        that spins, and only that one may call.
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

        On the thread that spins, which nothing may block, ``accept`` says whether to take a goal message, ``start``
        gets the :class:`ServedGoal` that was taken, and ``cancel`` the one that a client wants to end.
        """

    def qos(self, name: str) -> Any:
        """Return the profile by name.

        ``camera``, ``command``, ``instruction``, ``state`` (subscriptions), ``state_publisher``, ``diagnostics``
        or ``default``; :mod:`vla_ros.graph.qos` describes each.
        """

    def create_steady_timer(self, node: Node, period: float, callback: Callable[[], Any]) -> Timer:
        """Create a timer of ``node`` on the steady clock: a watchdog must not stop with simulated time."""

    def deserialize(self, cdr: Any, msg_type: Any) -> Any:
        """Return a message of its CDR bytes."""

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
        """One line for the log: middleware, domain, and how far discovery reaches."""

    def create_node(self, name: str, namespace: str | None = None) -> Node:
        """Create a node; ``--ros-args`` remaps of name and namespace win over the arguments."""

    def spin(self, until: Callable[[], bool], period: float = 0.1) -> None:
        """Run callbacks until ``until()`` (asked at least every ``period`` seconds) is true.

        SIGINT and SIGTERM, where the program has no handlers of its own for them, raise KeyboardInterrupt out of
        it between two callbacks, so the nodes can still publish. An exception of a callback
        is logged, and the next callback runs.
        """

    def wake(self) -> None:
        """Make a spin on another thread ask ``until()`` now."""

    def close(self) -> None:
        """Destroy all nodes and leave the graph. Safe to call twice."""

    def __enter__(self) -> Graph: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
