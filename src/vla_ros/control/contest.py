"""Detects two publishers where only one is allowed, and names their nodes, from discovery data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vla_ros.control.reasons import Reason
from vla_ros.control.sources import Contest

CONTESTS = frozenset(
    {
        Reason.MIDDLEWARE_GONE,
        Reason.COMMAND_CONTESTED,
        Reason.NAME_CONTESTED,
        Reason.JOINT_STATE_CONTESTED,
        Reason.CAMERA_CONTESTED,
    }
)
"""Every reason that :mod:`vla_ros.node.graph_watch` may report."""

ANY = "*"
"""In ``topics.command_shared_with``: any node."""

_GID_BYTES = 16  # of a DDS GUID; rmw pads it to 24 before Iron
_UNNAMED = ("", "_NODE_NAME_UNKNOWN_", "_CREATED_BY_BARE_DDS_APP_")  # rmw's names for an unknown node


def gid_of(gid: Iterable[int]) -> bytes:
    """Return an endpoint's id without padding, from rclpy or the embedded participant."""
    return bytes(gid)[:_GID_BYTES]


def node_of(endpoint: Any) -> str:
    """Return the full name of an endpoint's node, or ""."""
    if endpoint.node_name in _UNNAMED:
        return ""
    return f"{endpoint.node_namespace.rstrip('/')}/{endpoint.node_name}"


def others(endpoints: Iterable[Any], own: bytes, allowed: Collection[str] = ()) -> Mapping[bytes, str]:
    """Return the other publishers of a topic, by id, with the full name of the node ("" if unknown).

    ``endpoints`` are from ``get_publishers_info_by_topic``; ``allowed`` are names of nodes that may publish, or
    :data:`ANY`.
    """
    if ANY in allowed:
        return {}
    found = {gid_of(endpoint.endpoint_gid): node_of(endpoint) for endpoint in endpoints}
    return {gid: node for gid, node in found.items() if gid != own and (not node or node not in allowed)}


def named(found: Mapping[bytes, str], more: Iterable[str] = ()) -> str:
    """Return the names of the nodes of :func:`others`, and ``more``, as text."""
    names = {node or f"an unknown node (gid {gid.hex('.')})" for gid, node in found.items()}
    return " and ".join(sorted(names.union(more)))


def rivals(contest: Contest, topic: str, endpoints: Iterable[Any]) -> tuple[str, bool]:
    """Return a sentence that names two sources, and True if discovery knew both nodes.

    ``endpoints`` are from ``get_publishers_info_by_topic``.
    """
    known = {gid_of(endpoint.endpoint_gid): node_of(endpoint) for endpoint in endpoints}
    two = {source.publisher for source in (contest.first, contest.second)}
    # If an id is unknown to discovery, all publishers of the topic are named.
    who = {gid: known[gid] for gid in two} if two <= known.keys() else known
    is_named = all(who.values()) and len(who) >= len(two)
    names = named(who) or "nobody known"
    what = "" if contest.subject == topic else f"{contest.subject} "
    if len(two) == 2:
        return f"{names} publish {what}on {topic} in turn", is_named
    kinds = f"{contest.first.kind} and {contest.second.kind}"
    said = f"two positions of {what}that no velocity limit allows, " if what else f"{kinds} "
    return f"{names} publishes {said}in turn on {topic}", is_named
