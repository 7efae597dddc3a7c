"""Access to the ROS 2 graph: one small Node interface on rclpy or the embedded DDS participant."""

import importlib.util
import platform
import sys
from collections.abc import Sequence

from vla_ros.errors import ConfigError, MissingDependencyError, install
from vla_ros.graph.node import Graph, Node

__all__ = ["Graph", "Node", "check_backend", "open_graph"]

BACKENDS = ("auto", "rclpy", "dds")


def open_graph(backend: str = "auto", args: Sequence[str] = (), log_level: str = "info") -> Graph:
    """Join the graph of ``ROS_DOMAIN_ID``.

    ``backend`` is ``rclpy`` (a sourced ROS 2), ``dds`` (the embedded participant), or ``auto``: rclpy if it
    can be imported, else DDS. ``args`` may contain remaps and parameters after ``--ros-args``. Raises
    ConfigError if an argument is invalid, or MissingDependencyError with what to install or source.
    """
    if check_backend(backend) == "dds":
        from vla_ros.graph.dds import DdsGraph

        return DdsGraph(args, log_level=log_level)
    from vla_ros.graph.rclpy_backend import RclpyGraph
    from vla_ros.middleware.checks import uses_iceoryx
    from vla_ros.middleware.daemons import wait_for_roudi

    if uses_iceoryx():  # iceoryx would wait for RouDi silently and ignore signals
        wait_for_roudi(lambda: False, lambda text: print(f"vla_ros: {text}", file=sys.stderr, flush=True))
    return RclpyGraph(args, log_level)


def check_backend(backend: str) -> str:
    """Return the backend that :func:`open_graph` takes, ``rclpy`` or ``dds``; raises what it raises."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend '{backend}' is unknown; expected one of {', '.join(BACKENDS)}")
    lacking = _no_dds() if backend == "dds" else _no_rclpy()
    if lacking and backend == "auto" and (other := _no_dds()):
        raise MissingDependencyError(f"cannot join the ROS 2 graph: {lacking}; alternatively: {other}")
    if lacking and backend != "auto":
        raise MissingDependencyError(lacking)
    return "dds" if lacking or backend == "dds" else "rclpy"


def _no_rclpy() -> str:
    """Return why rclpy does not import and what to do, or ""."""
    try:
        import rclpy  # noqa: F401
    except ImportError as error:
        spec = importlib.util.find_spec("rclpy")
        reason = f"rclpy is installed but fails to import ({error})" if spec else "rclpy is not on the Python path"
        return (
            f"{reason}; source a ROS 2 installation, such as: source /opt/ros/jazzy/setup.bash "
            f"(its Python version must be this one, {sys.version_info.major}.{sys.version_info.minor})"
        )
    return ""


def _no_dds() -> str:
    """Return why the embedded participant does not import and what to do, or ""."""
    try:
        import cyclonedds.core  # noqa: F401
        import rosbags.typesys  # noqa: F401
    except ImportError as error:
        return (
            f"the embedded DDS participant cannot be loaded ({error}); install it with: {install('dds')} "
            "(wheels of cyclonedds exist for Linux on x86-64 with Python 3.10 to 3.13; this is "
            f"{platform.system()} on {platform.machine()} with Python {platform.python_version()})"
        )
    return ""
