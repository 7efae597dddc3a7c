"""Looks ten times a second for nodes that command the same topics or have this node's name."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType

from vla_ros.control.publishers import (
    ANY,
    CompetingSources,
    describe_competing,
    gid_of,
    name_nodes,
    other_publishers,
)
from vla_ros.control.reasons import Reason
from vla_ros.execution.claim import Claim, count_duplicates
from vla_ros.graph.node import Node

PERIOD = 0.1
"""Seconds between checks."""


class GraphWatch:
    """Checks for nodes that compete for this node's topics or name.

    It is called on the thread that spins; any thread may read :attr:`found`. ``commands`` maps each resolved
    command topic to this node's publisher id; the topics are claimed until :meth:`close`. Nodes in ``allowed`` may
    share them. ``competing`` returns each reason, topic and its two sources; ``middleware`` returns why new
    processes cannot reach the node, or "".
    """

    def __init__(
        self,
        node: Node,
        commands: Mapping[str, bytes],
        allowed: Sequence[str],
        competing: Callable[[], Iterable[tuple[Reason, str, CompetingSources]]] = tuple,
        middleware: Callable[[], str] = str,
    ) -> None:
        self._node = node
        self._middleware = middleware
        self._competing = competing
        self._own = {topic: gid_of(gid) for topic, gid in commands.items()}
        self._claims = {topic: Claim(f"command {topic}", node.get_fully_qualified_name()) for topic in commands}
        self._allowed = frozenset(allowed)
        self._current: set[Hashable] = set()  # publishers, processes and topics of this check, and the one before
        self._previous: set[Hashable] = set()
        self.found: Mapping[Reason, str] = MappingProxyType({})

    def close(self) -> None:
        for claim in self._claims.values():
            claim.close()

    def look(self, *, at_once: bool = False) -> None:
        """Check the graph and store the problems in :attr:`found`.

        A publisher whose node's name is not discovered yet counts from the second check, so that the reason can
        name it; with ``at_once`` it counts immediately. One that leaves, and so loses its name, counts as before.
        """
        self._previous, self._current = self._current, set()
        found = self._commanders(at_once)
        gone = self._middleware()
        if gone:
            found[Reason.MIDDLEWARE_GONE] = gone
        if count_duplicates(self._node):
            found[Reason.NAME_CONTESTED] = f"another node is called {self._node.get_fully_qualified_name()}, too"
        for reason, topic, sources in self._competing():
            publishers = self._node.get_publishers_info_by_topic(self._node.resolve_topic_name(topic))
            text, is_named = describe_competing(sources, topic, publishers)
            again = self._was_there((reason, topic))
            if not is_named and again and reason in self.found:
                found[reason] = self.found[reason]
            elif is_named or again or at_once:
                found[reason] = text
        self.found = MappingProxyType(found)

    def servers(self, service: str) -> str:
        """Name the other nodes that serve ``service`` and so receive its calls, too; "" if there are none."""
        name, own = self._node.resolve_service_name(service), (self._node.get_name(), self._node.get_namespace())
        if count_duplicates(self._node):
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
        except Exception:  # rclpy's NodeNameNonExistentError: the node has left
            return False

    def _was_there(self, competitor: Hashable) -> bool:
        """Record a publisher, process or topic; return True if it was there at the previous check, too."""
        self._current.add(competitor)
        return competitor in self._previous

    def _commanders(self, at_once: bool) -> dict[Reason, str]:
        """Return the other nodes that claim a command topic or publish on it."""
        contests = []
        for topic, own in self._own.items():
            claimants = self._claims[topic].update()
            if ANY in self._allowed:
                continue
            # Allowed nodes are known only by name, so wait for the name.
            claimants = [each for each in claimants if each.name or not self._allowed or self._was_there(each.pid)]
            claimants = [each for each in claimants if each.name not in self._allowed]
            known = {each.name for each in claimants} | ({""} if claimants else set())  # unnamed: a claimant's
            found = other_publishers(self._node.get_publishers_info_by_topic(topic), own, self._allowed)
            found = {gid: node for gid, node in found.items() if self._was_there(gid) or node or at_once}
            found = {gid: node for gid, node in found.items() if node not in known}
            if claimants or found:
                contests.append(f"{name_nodes(found, map(str, claimants))} publishes on {topic}, too")
        return {Reason.COMMAND_CONTESTED: "; ".join(contests)} if contests else {}
