"""Finds publishers where only one is allowed, and the names of their nodes, in discovery data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vla_ros.control.sources import Contest

ANY = "*"
"""Entry of ``topics.command_shared_with`` that allows every node."""

_GID_BYTES = 16  # length of a DDS GUID; before Iron, rmw pads it to 24 bytes
_UNNAMED = ("", "_NODE_NAME_UNKNOWN_", "_CREATED_BY_BARE_DDS_APP_")  # rmw's names for an unknown node


def gid_of(gid: Iterable[int]) -> bytes:
    """Return the id of an endpoint, from rclpy or the embedded participant, without padding."""
    return bytes(gid)[:_GID_BYTES]


def node_of(endpoint: Any) -> str:
    """Return the full name of an endpoint's node, or "" if it is unknown."""
    if endpoint.node_name in _UNNAMED:
        return ""
    return f"{endpoint.node_namespace.rstrip('/')}/{endpoint.node_name}"


def others(endpoints: Iterable[Any], own: bytes, allowed: Collection[str] = ()) -> Mapping[bytes, str]:
    """Map the id of each other publisher of a topic to its node's full name ("" if unknown).

    ``endpoints`` come from ``get_publishers_info_by_topic``, ``own`` is the id of this node's publisher, and
    ``allowed`` names nodes that may publish, or contains :data:`ANY`.
    """
    if ANY in allowed:
        return {}
    found = {gid_of(endpoint.endpoint_gid): node_of(endpoint) for endpoint in endpoints}
    return {gid: node for gid, node in found.items() if gid != own and (not node or node not in allowed)}


def named(found: Mapping[bytes, str], more: Iterable[str] = ()) -> str:
    """Return the node names in ``found`` (from :func:`others`) and in ``more`` as text."""
    names = {node or f"an unknown node (gid {gid.hex('.')})" for gid, node in found.items()}
    return " and ".join(sorted(names.union(more)))


def rivals(contest: Contest, topic: str, endpoints: Iterable[Any]) -> tuple[str, bool]:
    """Return a sentence that names both sources, and True if both nodes are known.

    ``endpoints`` come from ``get_publishers_info_by_topic``.
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
