"""The rclpy backend: uses ``rclpy`` nodes and adds the loop, QoS profiles and message classes."""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import rclpy
from rclpy.action import ActionClient, ActionServer, CancelResponse, GoalResponse
from rclpy.clock import Clock as RclpyClock
from rclpy.clock import ClockType
from rclpy.context import Context
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor, TimeoutException
from rclpy.logging import LoggingSeverity
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.serialization import deserialize_message, serialize_message
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future
from rclpy.utilities import get_rmw_implementation_identifier

from vla_ros.errors import ConfigError, VlaRosError, printable
from vla_ros.graph import rclpy_frames, rclpy_public
from vla_ros.graph.cdr import check_lengths
from vla_ros.graph.names import rcl_reach
from vla_ros.graph.node import ABORTED, CANCELED, SUCCEEDED, Backend, Graph
from vla_ros.graph.qos import profile
from vla_ros.process import keep_freed_memory

_SEVERITIES = {
    "debug": LoggingSeverity.DEBUG,
    "info": LoggingSeverity.INFO,
    "warn": LoggingSeverity.WARN,
    "error": LoggingSeverity.ERROR,
}


class RclpyBackend(Backend):
    """Message classes and QoS profiles of the sourced installation."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = "rclpy"
        self.message, self.service, self.action = (partial(_interface, kind) for kind in ("msg", "srv", "action"))
        self.qos = _qos
        self.serialize = serialize_message
        self.deserialize = _deserialize
        # rclpy's default is the node's clock, which may be simulated.
        steady = RclpyClock(clock_type=ClockType.STEADY_TIME)
        self.create_steady_timer = partial(Node.create_timer, clock=steady)
        self.create_action_client = ActionClient
        self.create_action_server = create_action_server
        reason = rclpy_frames.why_not(os.environ)
        self.lost_checks = f"{reason}: {rclpy_public.LOST_CHECKS}" if reason else ""
        self.subscribe_raw = rclpy_public.subscribe_public if reason else rclpy_frames.subscribe_raw


def _deserialize(cdr: Any, msg_type: Any) -> Any:
    check_lengths(cdr, msg_type)
    try:
        return deserialize_message(bytes(cdr), msg_type)
    except Exception as error:
        raise VlaRosError(f"{msg_type.__name__}: found {len(cdr)} bytes that are none: {error}") from error


def _qos(name: str) -> QoSProfile:
    qos = profile(name)
    return QoSProfile(
        reliability=ReliabilityPolicy[qos.reliability.name],
        durability=DurabilityPolicy[qos.durability.name],
        history=HistoryPolicy[qos.history.name],
        depth=qos.depth,
    )


class RclpyGraph(RclpyBackend, Graph):
    """A graph on rclpy, with its own context, so that a process can have several graphs."""

    def __init__(self, args: Sequence[str] = (), log_level: str = "info") -> None:
        super().__init__()
        keep_freed_memory()
        self._context = Context()
        try:
            # rclpy's own signal handlers shut the context down before the node can send a last command.
            rclpy.init(args=list(args), context=self._context, signal_handler_options=SignalHandlerOptions.NO)
        except Exception as error:
            raise ConfigError(f"rclpy does not accept the arguments {list(args)}: {error}") from error
        self._executor = SingleThreadedExecutor(context=self._context)
        self._log_level = log_level
        self._nodes: list[Any] = []

    def describe(self) -> str:
        return (
            f"rclpy of ROS 2 {os.environ.get('ROS_DISTRO', 'unknown')}, {get_rmw_implementation_identifier()}, "
            f"domain {self._context.get_domain_id()}, discovery range {rcl_reach(os.environ)}"
        )

    def create_node(self, name: str, namespace: str | None = None) -> Any:
        self._check_open(name)
        try:
            node = Node(name, namespace=namespace, context=self._context)
        except rclpy.exceptions.InvalidNodeNameException as error:
            raise ConfigError(f"node name '{name}' is not valid: {error}") from error
        except rclpy.exceptions.InvalidNamespaceException as error:
            raise ConfigError(f"namespace '{namespace}' is not valid: {error}") from error
        node.get_logger().set_level(_SEVERITIES[self._log_level])
        self._executor.add_node(node)
        self._nodes.append(node)
        return node

    def _wake(self) -> None:
        self._executor.wake()

    def _leave(self) -> None:
        for node in self._nodes:
            self._executor.remove_node(node)
            node.destroy_node()
        self._executor.shutdown()
        self._context.try_shutdown()

    def _spin_once(self, period: float) -> None:
        logger = self._nodes[0].get_logger() if self._nodes else rclpy.logging.get_logger("vla_ros")
        if not spin_once(self._executor, logger, period, partial(self.on_error, "a callback")):
            self._closing = True


def spin_once(
    executor: Any, logger: Any, period: float, on_error: Callable[[Exception], object] = lambda error: None
) -> bool:
    """Run one callback, waiting at most ``period`` seconds; return False once the context is shut down.

    An exception in the callback is logged, not raised; ``on_error`` gets it unless it is a VlaRosError.
    """
    try:
        executor.spin_once(timeout_sec=period)
    except TimeoutException:
        pass
    except ExternalShutdownException:
        return False
    except Exception as error:  # one bad message must not stop the robot's node
        text = f"callback failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        logger.error(printable(text))
        if not isinstance(error, VlaRosError):
            on_error(error)
    return True


def _interface(kind: str, type_name: str) -> Any:
    parts = type_name.split("/")
    if len(parts) != 3 or parts[1] != kind:
        raise VlaRosError(f"type name '{type_name}' is not valid; expected pkg/{kind}/Type")
    try:
        return getattr(importlib.import_module(f"{parts[0]}.{kind}"), parts[2])
    except (ImportError, AttributeError) as error:
        raise VlaRosError(
            f"the sourced ROS installation has no '{type_name}' ({error}); install the package {parts[0]}, "
            f"such as: sudo apt install ros-$ROS_DISTRO-{parts[0].replace('_', '-')}"
        ) from error


_LAST_WORDS = 1.0  # s to send results before the server is destroyed
_ROUNDS = 10


class RclpyServedGoal:
    """See :class:`vla_ros.graph.node.ServedGoal`."""

    def __init__(self, handle: Any) -> None:
        self._handle, self.goal = handle, handle.request
        self.ended = Future()

    def publish_feedback(self, feedback: Any) -> None:
        self._handle.publish_feedback(feedback)

    def end(self, status: int, result: Any) -> None:
        handle = self._handle
        {SUCCEEDED: handle.succeed, ABORTED: handle.abort, CANCELED: handle.canceled}[status]()
        self.ended.set_result(result)


class RclpyActionServer:
    """An action server that sends all results before it is destroyed."""

    def __init__(self, node: Any, server: ActionServer, goals: Mapping[bytes, RclpyServedGoal]) -> None:
        self._node, self._server, self._goals = node, server, goals

    def destroy(self) -> None:
        """Destroy the server; the results of ended goals are sent first, unless another thread is spinning."""
        deadline, rounds = time.monotonic() + _LAST_WORDS, _ROUNDS
        ended = [goal for goal in self._goals.values() if goal.ended.done()]
        while ended and rounds and time.monotonic() < deadline:
            rounds -= not self._goals  # the result is sent by a task that runs later
            try:
                self._node.executor.spin_once(timeout_sec=0.01)
            except Exception:  # within a callback, or after a shutdown
                break
        self._server.destroy()


def create_action_server(
    node: Any,
    action_type: Any,
    name: str,
    accept: Callable[[Any], bool],
    start: Callable[[Any], None],
    cancel: Callable[[Any], None],
) -> RclpyActionServer:
    """See :attr:`vla_ros.graph.node.Backend.create_action_server`."""
    goals: dict[bytes, RclpyServedGoal] = {}

    async def execute(handle: Any) -> Any:
        key = bytes(handle.goal_id.uuid)
        goal = goals[key] = RclpyServedGoal(handle)
        start(goal)
        try:
            return await goal.ended
        finally:
            del goals[key]

    def on_cancel(handle: Any) -> CancelResponse:
        goal = goals.get(bytes(handle.goal_id.uuid))
        if goal is None:
            return CancelResponse.REJECT
        # The goal becomes CANCELING only after this function returns.
        node.executor.create_task(cancel, goal)
        return CancelResponse.ACCEPT

    server = ActionServer(
        node,
        action_type,
        name,
        execute,
        goal_callback=lambda goal: GoalResponse.ACCEPT if accept(goal) else GoalResponse.REJECT,
        cancel_callback=on_cancel,
    )
    return RclpyActionServer(node, server, goals)
