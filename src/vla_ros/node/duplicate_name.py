"""Refuses to start a second node of the same name, because both would serve ``~/enable``.

On one host a :class:`~vla_ros.node.claim.Claim` decides. Discovery finds nodes on other hosts, but takes a
moment and does not report processes that were killed before this node started.
"""

import os
from collections.abc import Mapping
from logging import Logger

from vla_ros.control.clock import Clock
from vla_ros.errors import ConfigError
from vla_ros.graph.node import Node
from vla_ros.node.claim import Claim
from vla_ros.policies.base import Progress

DUPLICATE_PATIENCE = 5.0
"""Seconds to wait for a node of the same name, which may be shutting down, to leave the graph."""

_CURE = (
    "both would answer ~/enable. Shut that node down first, or give this one another name (--ros-args -r "
    "__node:=NAME, or name:= of the launch file)"
)

_PERIOD = 0.1


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
