"""Watches the graph for others that do what only one may do: ten looks a second at what discovery knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from vla_ros.control.contest import gid_of, named, others, rivals
from vla_ros.control.reasons import Reason
from vla_ros.control.sources import Contest
from vla_ros.graph.node import Node
from vla_ros.node.namesake import namesakes

PERIOD = 0.1
"""Seconds between looks."""


class GraphWatch:
    """Asks discovery who else is there. All calls from the thread that spins; :attr:`found` from any.

    Args:
        commands: Topics of commands (resolved) to the id of this node's publisher.
        allowed: ``topics.command_shared_with``.
        contests: Two sources of one thing at present: why it holds, on which topic, and who.
        middleware: Why nobody new can reach the node, or "".
    """

    def __init__(
        self,
        node: Node,
        commands: Mapping[str, bytes],
        allowed: Sequence[str],
        contests: Callable[[], Iterable[tuple[Reason, str, Contest]]] = tuple,
        middleware: Callable[[], str] = str,
    ) -> None:
        self._node = node
        self._middleware = middleware
        self._contests = contests
        self._own = {topic: gid_of(gid) for topic, gid in commands.items()}
        self._allowed = frozenset(allowed)
        self._unnamed: frozenset[bytes] = frozenset()
        self.found: Mapping[Reason, str] = MappingProxyType({})

    def look(self, *, at_once: bool = False) -> None:
        """Ask discovery, and leave in :attr:`found` what is wrong.

        Args:
            at_once: Count a publisher whose node's name has not come yet. Otherwise it has until the next look, so
                that the reason has its name.
        """
        found = self._commanders(at_once)
        gone = self._middleware()
        if gone:
            found[Reason.MIDDLEWARE_GONE] = gone
        if namesakes(self._node):
            found[Reason.NAME_CONTESTED] = f"another node is called {self._node.get_fully_qualified_name()}, too"
        for reason, topic, contest in self._contests():
            publishers = self._node.get_publishers_info_by_topic(self._node.resolve_topic_name(topic))
            found[reason] = rivals(contest, topic, publishers)
        self.found = MappingProxyType(found)

    def servers(self, service: str) -> str:
        """Which other nodes serve ``service`` (``~/enable``), for people; "" where only this one does.

        A call reaches all of them, and whoever made it meant one robot.
        """
        name, own = self._node.resolve_service_name(service), (self._node.get_name(), self._node.get_namespace())
        if namesakes(self._node):
            return f"another node called {self._node.get_fully_qualified_name()}"
        nodes = [tuple(each) for each in self._node.get_node_names_and_namespaces() if tuple(each) != own]
        return " and ".join(
            f"{space.rstrip('/')}/{node}" for node, space in nodes if self._serves(node, space, name)
        )

    def _serves(self, node: str, namespace: str, service: str) -> bool:
        try:
            return any(
                name == service for name, _ in self._node.get_service_names_and_types_by_node(node, namespace)
            )
        except Exception:  # rclpy's NodeNameNonExistentError, which no other backend has: it has gone
            return False

    def _commanders(self, at_once: bool) -> dict[Reason, str]:
        known, self._unnamed = self._unnamed, frozenset()
        said = []
        for topic, own in self._own.items():
            found = others(self._node.get_publishers_info_by_topic(topic), own, self._allowed)
            unnamed = {gid for gid, node in found.items() if not node}
            self._unnamed |= unnamed
            counted = {gid: node for gid, node in found.items() if at_once or node or gid in known}
            if counted:
                said.append(f"{named(counted)} publishes on {topic}, too")
        return {Reason.COMMAND_CONTESTED: "; ".join(said)} if said else {}
