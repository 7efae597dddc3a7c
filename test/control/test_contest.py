"""Who else commands, out of what discovery tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vla_ros.control.contest import gid_of, named, others

OWN, THEIRS = bytes(range(16)), bytes(range(100, 116))


def endpoint(gid: Any, name: str = "teleop", namespace: str = "/") -> Any:
    return SimpleNamespace(endpoint_gid=gid, node_name=name, node_namespace=namespace)


def test_only_the_id_tells_ones_own_publisher() -> None:
    """Another node may have this node's name."""
    assert others([endpoint(OWN)], OWN) == {}
    assert others([endpoint(OWN), endpoint(THEIRS)], OWN) == {THEIRS: "/teleop"}


def test_the_ids_of_every_distribution_are_understood() -> None:
    padded = [*THEIRS, *bytes(8)]  # rclpy gives numbers; Humble pads them
    assert gid_of(padded) == gid_of(THEIRS) == gid_of(memoryview(THEIRS)) == THEIRS
    assert others([endpoint([*OWN, *bytes(8)]), endpoint(padded)], OWN) == {THEIRS: "/teleop"}


def test_a_program_without_a_node_counts() -> None:
    for name in ("", "_NODE_NAME_UNKNOWN_", "_CREATED_BY_BARE_DDS_APP_"):
        found = others([endpoint(THEIRS, name, name)], OWN, ["/teleop"])
        assert found == {THEIRS: ""}
        assert named(found) == f"an unknown node (gid {THEIRS.hex('.')})"


def test_whoever_may_share_is_no_contest() -> None:
    there = [endpoint(OWN), endpoint(THEIRS, "mux", "/arm"), endpoint(THEIRS[::-1], "teleop")]
    assert named(others(there, OWN)) == "/arm/mux and /teleop"
    assert named(others(there, OWN, ["/arm/mux"])) == "/teleop"
    assert others(there, OWN, ["*"]) == {}
