"""The ROS 2 graph: nodes with rclpy's names and semantics, backed by rclpy or by the DDS participant.

Node logic is written once for these types and tested on both backends.
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from logging import Logger
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from vla_ros.errors import VlaRosError, printable
from vla_ros.graph.origin import Origin

if TYPE_CHECKING:
    from typing import Self, TypeAlias

    from vla_ros.graph.dds.node import DdsNode

    Node: TypeAlias = DdsNode  # the subset of rclpy.node.Node that the package uses
else:
    Node = Any

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


def printable_logger(logger: Any) -> Logger:
    """Return a logger whose text has no control characters; rclpy writes what it gets."""
    return logger if isinstance(logger, Logger) else cast("Logger", _PrintableLogger(logger))


class _PrintableLogger:
    """The methods of rclpy's logger that the package uses; each severity has its own line, see :func:`say`."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def debug(self, message: str) -> None:
        self._logger.debug(printable(message))

    def info(self, message: str) -> None:
        self._logger.info(printable(message))

    def warning(self, message: str) -> None:
        self._logger.warning(printable(message))

    def error(self, message: str) -> None:
        self._logger.error(printable(message))


_DEFAULTS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupts:
    """Context manager that records SIGINT and SIGTERM on the main thread, unless the program has its own handlers.

    :meth:`check` raises KeyboardInterrupt between two callbacks. Python would raise it wherever the thread is, and
    print and lose it in a destructor or a callback from C, which rclpy's wait runs a hundred times a second. A
    second signal raises at once, which ends a hanging callback. Leaving the context raises KeyboardInterrupt if a
    signal arrived after the last check.
    """

    def __init__(self) -> None:
        self._came = False
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        if self._came:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number, default in _DEFAULTS.items():
                if signal.getsignal(number) == default:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None:
            self.check()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True


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
    """A subscription created by :attr:`Backend.subscribe_raw`."""

    def poll(self) -> None:
        """Run the callback for waiting messages on this thread; the graph may spin on another.

        Raises the first error of a message; those behind it are taken all the same, or by the next call.
        """

    def destroy(self) -> Any:
        """Destroy the subscription."""


class Backend:
    """Message classes and QoS profiles of a backend, and the endpoints for which rclpy's Node has no method."""

    backend: str
    """``rclpy`` or ``dds``."""

    message: Callable[[str], Any]
    """Class of ``pkg/msg/Type``. Constructor: keyword arguments, missing fields have their ROS defaults."""

    service: Callable[[str], Any]
    """Class of ``pkg/srv/Type`` with ``Request`` and ``Response``."""

    action: Callable[[str], Any]
    """Class of ``pkg/action/Type`` with ``Goal`` and ``Result``."""

    qos: Callable[[str], Any]
    """QoS profile by its name in :data:`vla_ros.graph.qos.PROFILES`, as the type that the backend takes."""

    serialize: Callable[[Any], bytes]
    """Serialises a message to CDR bytes, which publishers take as well."""

    deserialize: Callable[[Any, Any], Any]
    """``(cdr, msg_type)``: deserialises a message from its CDR bytes."""

    create_steady_timer: Callable[[Any, float, Callable[[], Any]], Any]
    """``(node, period, callback)``: creates a timer that does not stop with simulated time."""

    create_action_client: Callable[[Any, Any, str], Any]
    """``(node, action_type, name)``: creates an action client as ``rclpy.action.ActionClient``.

    It has ``server_is_ready()``, ``destroy()`` and ``send_goal_async(goal)``, which returns a future of a handle
    with ``accepted`` and ``get_result_async()``, whose future yields ``status`` and ``result``. Futures complete on
    the thread that spins; call the client only from that thread.
    """

    create_action_server: Callable[..., Any]
    """``(node, action_type, name, accept, start, cancel)``: serves an action; the server has ``destroy()``.

    The callbacks run on the thread that spins and must not block: ``accept`` decides whether to accept a goal
    message, ``start`` receives the accepted :class:`ServedGoal`, ``cancel`` a goal that a client wants to cancel.
    """

    on_error: Callable[[str, Exception], None] = staticmethod(lambda where, error: None)
    """``(where, error)``: called, on the thread that spins, when a callback has failed.

    A VlaRosError is that of a message, and is only logged.
    """

    lost_checks: str = ""
    """The checks that are lost with this way to receive messages, and why; "" if none is."""

    subscribe_raw: Callable[[Any, Any, str, Callable[[Any, Origin], None], Any], RawSubscription]
    """``(node, msg_type, topic, callback, qos_profile)``: passes each message's CDR bytes and its origin.

    Like ``create_subscription(raw=True)``, with fewer copies; the callback may get a read-only ``memoryview``.
    """


class Graph(Backend, ABC):
    """A joined ROS 2 graph: creates nodes and runs their callbacks, one at a time, in :meth:`spin`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._spinning = threading.Lock()
        self._spinner: threading.Thread | None = None
        self._closing = False
        self._closed = False

    @abstractmethod
    def describe(self) -> str:
        """Describe middleware, domain and discovery range in one line for the log."""

    @abstractmethod
    def create_node(self, name: str, namespace: str | None = None) -> Node:
        """Create a node; ``--ros-args`` remaps of name and namespace win over the arguments."""

    @abstractmethod
    def _spin_once(self, period: float) -> None:
        """Run the callbacks that are due, waiting at most ``period`` seconds for one."""

    @abstractmethod
    def _wake(self) -> None:
        """End the wait of :meth:`_spin_once`."""

    @abstractmethod
    def _leave(self) -> None:
        """Destroy the nodes and disconnect. Called once, when no thread is spinning any more."""

    def spin(self, until: Callable[[], bool], period: float = 0.1) -> None:
        """Run callbacks until ``until()`` is True, checked at least every ``period`` s, or the graph is closed.

        Unless the program has its own handlers, SIGINT and SIGTERM raise KeyboardInterrupt between two callbacks,
        so that nodes can still publish. An exception in a callback is logged and passed to :attr:`on_error`; then
        the next callback runs.
        """
        if not self._spinning.acquire(blocking=False):
            raise VlaRosError("this graph is already spinning; its callbacks run on one thread")
        self._spinner = threading.current_thread()
        try:
            with Interrupts() as interrupts:
                while not self._closing and not until():
                    self._spin_once(period)
                    interrupts.check()
        finally:
            self._spinner = None
            self._spinning.release()
            if self._closing:
                self.close()

    def spin_once(self, period: float = 0.0) -> None:
        """Run the callbacks that are due, for a thread with a loop of its own instead of :meth:`spin`."""
        if not self._closing:
            self._spin_once(period)

    def wake(self) -> None:
        if not self._closing:
            self._wake()

    def close(self) -> None:
        """Destroy all nodes and disconnect. Safe to call twice, from callbacks and from other threads."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._wake()
        if self._spinner is threading.current_thread():
            return  # spin closes the graph after this callback
        with self._spinning:
            if not self._closed:
                self._closed = True
                self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self, name: str) -> None:
        if self._closing:
            raise VlaRosError(f"node '{name}' cannot be created: this graph was closed")
