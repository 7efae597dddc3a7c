"""No two nodes of one name: whoever calls ``~/enable`` means one robot, and two would answer.

On one host a socket decides, at once and even where both start at the same moment; the kernel frees it with its
process. Nodes elsewhere are found by discovery, which takes a moment. It tells a newcomer nothing of processes that
were killed before, whatever their lease.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
from collections.abc import Mapping

from vla_ros.control.clock import Clock
from vla_ros.errors import ConfigError
from vla_ros.graph.node import Logger, Node
from vla_ros.policies.base import Progress

PATIENCE = 5.0
"""Seconds that a namesake has to leave the graph: it may be ending just now."""

_CURE = (
    "both would answer ~/enable. End that one first, or give this one another name (--ros-args -r __node:=NAME, or "
    "name:= of the launch file)"
)

_PERIOD = 0.1
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


def namesakes(node: Node) -> int:
    """How many other nodes have this node's full name."""
    own = (node.get_name(), node.get_namespace())
    return max(0, sum(tuple(each) == own for each in node.get_node_names_and_namespaces()) - 1)


class NameClaim:
    """Holds a node's name on this host until :meth:`close`; holds nothing where there are no abstract sockets.

    Args:
        name: Full name of the node.
        environment: Says which graph: nodes of other domains, or of another DDS configuration, do not count.

    Raises:
        ConfigError: Another process holds it.
    """

    def __init__(self, name: str, environment: Mapping[str, str] = os.environ) -> None:
        graph = [environment.get(variable, "") for variable in ("ROS_DOMAIN_ID", "CYCLONEDDS_URI")]
        address = "\0vla_ros/" + hashlib.sha256("\0".join([*graph, name]).encode()).hexdigest()[:32]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(address)
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"{name} runs already on this host ({_holder(address)}): {_CURE}") from None

    def close(self) -> None:
        """Free the name. Safe to call twice."""
        self._socket.close()


def _holder(address: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.settimeout(1.0)
            asking.connect(address)
            said = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:  # it ends just now
            return "process unknown"
    return f"process {_CREDENTIALS.unpack(said)[0]}"


def wait_until_alone(node: Node, logger: Logger, progress: Progress, clock: Clock) -> None:
    """Wait for at most :data:`PATIENCE` until no other node of this name is on the graph.

    ``progress`` is called again and again, and may raise to end it.

    Raises:
        ConfigError: One stayed.
    """
    deadline, name = clock.steady() + PATIENCE, node.get_fully_qualified_name()
    if namesakes(node):
        logger.warning(
            f"another node is called {name}: both would answer ~/enable; waiting {PATIENCE:g} s for it to leave"
        )
    while namesakes(node):
        if clock.steady() > deadline:
            raise ConfigError(f"another node on the graph is called {name}: {_CURE}")
        progress(0.99, f"waiting for the other {name} to leave")
        clock.sleep(_PERIOD)
