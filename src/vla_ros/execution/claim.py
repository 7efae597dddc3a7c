"""Claims a name that only one node per host may use, such as a node name or a command topic.

Discovery may take seconds. An abstract Unix socket decides at once, and the kernel releases it when its process
ends. Nodes on other hosts, or in containers with their own network, are found by discovery only.
"""

import contextlib
import errno
import hashlib
import os
import re
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from logging import Logger

from vla_ros.control.clock import Clock
from vla_ros.errors import ConfigError
from vla_ros.graph.node import Node
from vla_ros.policies.base import Progress

_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid
_NAME = re.compile(rb"[/\w]{1,300}")
_ANSWER = 0.2  # s; wait for the holder's name at the start

DUPLICATE_PATIENCE = 5.0
"""Seconds to wait for a node of the same name, which may be shutting down, to leave the graph."""

_CURE = (
    "both would answer ~/enable. Shut that node down first, or give this one another name (--ros-args -r "
    "__node:=NAME, or name:= of the launch file)"
)

_PERIOD = 0.1
_MOST = 64  # connections that one look accepts


@dataclass
class Claimant:
    """Another node with the same claim; until they are known, ``name`` is "" and ``pid`` 0."""

    connection: socket.socket | None
    pid: int = 0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name or 'a node'} (process {self.pid or 'unknown'})"

    def is_there(self) -> bool:
        """Return True while the node is connected; store its name once it has arrived."""
        try:
            received = self.connection.recv(512) if self.connection else b""
        except BlockingIOError:
            return True
        except OSError:
            return False
        if _NAME.fullmatch(received):
            self.name = received.decode()
        return bool(received)


class Claim:
    """Holds ``what`` (such as ``command /arm/joint_command``), or waits for it, until :meth:`close`.

    The holder listens and the others stay connected to it, so that each side notices when the other ends.
    Domain and Cyclone DDS configuration in ``environment`` identify the graph.
    """

    def __init__(self, what: str, name: str, environment: Mapping[str, str] = os.environ) -> None:
        graph = [environment.get("ROS_DOMAIN_ID") or "0", environment.get("CYCLONEDDS_URI", "")]
        self._address = "\0vla_ros/" + hashlib.sha256("\0".join([*graph, what]).encode()).hexdigest()[:32]
        self._name = name.encode()
        self._server: socket.socket | None = None
        self._others: list[Claimant] = []
        for other in self.update():
            if other.connection:
                select.select([other.connection], [], [], _ANSWER)

    def update(self) -> list[Claimant]:
        """Return the other nodes that claim the same, after new ones were accepted. Call it ten times a second."""
        gone = [other for other in self._others if not other.is_there()]
        self._others = [other for other in self._others if other not in gone]
        _close(gone)
        if self._server is None and not self._others:
            self._take()
        with contextlib.suppress(OSError):  # no further connection
            for _ in range(_MOST if self._server is not None else 0):
                self._meet(self._server.accept()[0])  # type: ignore[union-attr]
        return self._others

    @property
    def is_held(self) -> bool:
        """True if this node was the first and holds the claim."""
        return self._server is not None

    def close(self) -> None:
        """Release the claim. May be called twice."""
        _close(self._others)
        self._others = []
        if self._server is not None:
            self._server.close()
            self._server = None

    def _take(self) -> None:
        """Become the holder, or connect to the current holder."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.setblocking(False)
        try:
            made.bind(self._address)
            made.listen()
            self._server = made
        except OSError as error:
            made.close()
            if error.errno == errno.EADDRINUSE:
                self._join()

    def _join(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.setblocking(False)
        try:
            made.connect(self._address)
        except OSError:  # the holder is just starting or ending, or too many wait
            made.close()
            self._others = [Claimant(None)]
        else:
            self._meet(made)

    def _meet(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        other = Claimant(connection, _CREDENTIALS.unpack(credentials)[0])
        with contextlib.suppress(OSError):
            connection.send(self._name)
        if other.is_there():
            self._others.append(other)
        else:
            connection.close()


def _close(claimants: list[Claimant]) -> None:
    for each in claimants:
        if each.connection is not None:
            each.connection.close()


def count_duplicates(node: Node) -> int:
    """Return the number of other nodes with this node's full name."""
    own = (node.get_name(), node.get_namespace())
    return max(0, sum(tuple(each) == own for each in node.get_node_names_and_namespaces()) - 1)


def claim_name(name: str, environment: Mapping[str, str] = os.environ) -> Claim:
    """Claim a full node name on this host. Raises ConfigError if another node holds it."""
    claim = Claim(f"name {name}", name, environment)
    for other in () if claim.is_held else claim.update():  # the holder may start; the others refuse
        claim.close()
        raise ConfigError(f"{name} is already running on this host (process {other.pid or 'unknown'}): {_CURE}")
    return claim


def wait_until_alone(node: Node, logger: Logger, progress: Progress, clock: Clock) -> None:
    """Wait until no other node on the graph has this name. ``progress`` may raise to end the wait.

    Raises ConfigError if another node kept the name for :data:`DUPLICATE_PATIENCE`.
    """
    deadline, name = clock.steady() + DUPLICATE_PATIENCE, node.get_fully_qualified_name()
    if count_duplicates(node):
        logger.warning(
            f"another node is called {name}: both would answer ~/enable; waiting {DUPLICATE_PATIENCE:g} s for it "
            "to leave"
        )
    while count_duplicates(node):
        if clock.steady() > deadline:
            raise ConfigError(f"another node on the graph is called {name}: {_CURE}")
        progress(0.99, f"waiting for the other {name} to leave")
        clock.sleep(_PERIOD)
