"""``ros2 run vla_ros vla_policy_node``: the managed node in its own process.

Signals (:mod:`vla_ros.node.signals`) only set a flag, which is checked between callbacks and between steps of
loading, because an exception raised inside an import may get lost.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vla_ros.graph.launcher import end_with_launcher
from vla_ros.node.signals import Signals
from vla_ros.process import end_process, keep_freed_memory, use_environment

if TYPE_CHECKING:
    from vla_ros.node.lifecycle_node import VlaPolicyNode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the node until SIGINT or SIGTERM; return 1 if parameters are wrong or an autostarted node fails."""
    signals = Signals()
    use_environment("vla_ros.node.lifecycle_main")
    end_with_launcher()
    try:
        return end_process(_run(signals, arguments))
    except BaseException:  # KeyboardInterrupt before the node was created; an import turns it into any other error
        if not signals.name:
            raise
        signals.ending()
        _say(f"ended by {signals.name}: nothing was started")
        # Interrupted within exec(), as in dataclass(), Python ends by SIGINT although the exception was caught.
        os._exit(0)


def _run(signals: Signals, arguments: Sequence[str] | None) -> int:
    import rclpy
    from rclpy.signals import SignalHandlerOptions

    from vla_ros.errors import VlaRosError
    from vla_ros.middleware.checks import uses_iceoryx
    from vla_ros.middleware.daemons import wait_for_roudi
    from vla_ros.node.lifecycle_node import VlaPolicyNode

    keep_freed_memory()
    try:
        if uses_iceoryx() and not wait_for_roudi(lambda: bool(signals.name), _say):
            raise KeyboardInterrupt
    except VlaRosError as error:
        _say(str(error))
        return 1
    # rclpy's own handlers would shut the context down on a signal, before the last hold is sent.
    try:
        rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    except RuntimeError as error:  # arguments that rcl cannot parse
        _say(str(error).partition(", at /")[0])
        return 1
    node: VlaPolicyNode | None = None
    status = 0
    try:
        node = VlaPolicyNode(
            interrupted=lambda: bool(signals.name), parameter_overrides=_overrides(arguments or sys.argv)
        )
        status = _spin(node, signals)
    except VlaRosError as error:
        _say(str(error))
        status = 1
    except KeyboardInterrupt:
        if node is None:
            raise
    except BaseException as error:
        if node is None:
            raise
        node.fail(error)
        status = 1
    finally:
        signals.ending()
        if node is not None:
            node.leave()
            node.get_logger().info(f"ended{' by ' + signals.name if signals.name else ''}: the arm holds")
            node.destroy_node()
        rclpy.try_shutdown()
    return status


def _overrides(arguments: Sequence[str]) -> list[Any]:
    """Return the parameters of the command line, of which rcl loses some.

    In Jazzy, ``-p limits.velocity_scale:=0.1`` after a file with ``velocity_scale: 1`` is lost, because a variant
    keeps both and the integer comes first; so is a flat name after two files that nest it.
    """
    from rclpy.parameter import Parameter

    from vla_ros.graph.names import parse_ros_arguments
    from vla_ros.node.run import NODE_NAME

    ros = parse_ros_arguments(arguments)
    values = ros.values(ros.full_name(NODE_NAME))
    return [Parameter(name, value=value) for name, value in values.items() if value not in (None, [])]


def _say(text: str) -> None:
    print(f"vla_policy_node: {text}", file=sys.stderr, flush=True)


def _spin(node: VlaPolicyNode, signals: Signals) -> int:
    from rclpy.executors import SingleThreadedExecutor

    from vla_ros.graph.rclpy_backend import spin_once

    executor = SingleThreadedExecutor()
    executor.add_node(node)
    ready = False
    while not node.interrupted() and spin_once(executor, node.get_logger(), 0.1, node.fail):
        for answer in node.follow(signals.take_requests(), ready=ready):
            node.get_logger().info(answer)
        ready = node.is_active
        if node.exit_status is not None:
            return node.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
