"""Other commanders and sources are named from discovery data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vla_ros.control.contest import gid_of, named, others, rivals
from vla_ros.control.sources import Contest, Source

OWN, THEIRS = bytes(range(16)), bytes(range(100, 116))


def endpoint(gid: Any, name: str = "teleop", namespace: str = "/") -> Any:
    return SimpleNamespace(endpoint_gid=gid, node_name=name, node_namespace=namespace)


def test_the_own_publisher_is_known_by_its_id() -> None:
    """Another node may have this node's name."""
    assert others([endpoint(OWN)], OWN) == {}
    assert others([endpoint(OWN), endpoint(THEIRS)], OWN) == {THEIRS: "/teleop"}


def test_ids_of_every_distribution_are_equal() -> None:
    padded = [*THEIRS, *bytes(8)]  # rclpy gives numbers; Humble pads them
    assert gid_of(padded) == gid_of(THEIRS) == gid_of(memoryview(THEIRS)) == THEIRS
    assert others([endpoint([*OWN, *bytes(8)]), endpoint(padded)], OWN) == {THEIRS: "/teleop"}


def test_publishers_of_unknown_nodes_count() -> None:
    for name in ("", "_NODE_NAME_UNKNOWN_", "_CREATED_BY_BARE_DDS_APP_"):
        found = others([endpoint(THEIRS, name, name)], OWN, ["/teleop"])
        assert found == {THEIRS: ""}
        assert named(found) == f"an unknown node (gid {THEIRS.hex('.')})"


def test_nodes_that_may_share_the_topic_do_not_count() -> None:
    there = [endpoint(OWN), endpoint(THEIRS, "mux", "/arm"), endpoint(THEIRS[::-1], "teleop")]
    assert named(others(there, OWN)) == "/arm/mux and /teleop"
    assert named(others(there, OWN, ["/arm/mux"])) == "/teleop"
    assert others(there, OWN, ["*"]) == {}


def test_two_sources_are_named_by_their_nodes() -> None:
    two = Source(OWN, "a"), Source(THEIRS, "b")
    there = [endpoint(OWN, "robot"), endpoint(THEIRS, "leftover", "/old"), endpoint(THEIRS[::-1], "gripper")]
    text = "/old/leftover and /robot publish j1 on /joint_states in turn"
    assert rivals(Contest("j1", *two), "/joint_states", there) == (text, True)
    text = "/old/leftover and /robot publish on /image in turn"
    assert rivals(Contest("/image", *two), "/image", there) == (text, True)
    for late in ([endpoint(OWN, "robot")], [endpoint(OWN, "robot"), endpoint(THEIRS, "_NODE_NAME_UNKNOWN_")]):
        assert not rivals(Contest("j1", *two), "/joint_states", late)[1]


def test_unknown_ids_name_all_publishers_of_the_topic() -> None:
    two = Source(b"\x01" * 8), Source(b"\x02" * 8)
    there = [endpoint(OWN, "robot"), endpoint(THEIRS, "leftover")]
    assert rivals(Contest("j1", *two), "/joint_states", there)[0].startswith("/leftover and /robot publish j1")
    assert rivals(Contest("j1", *two), "/joint_states", [])[0].startswith("nobody known")


def test_a_publisher_of_two_kinds_is_named_with_both() -> None:
    relay = [endpoint(OWN, "relay")]
    kinds = Source(OWN, "64x48 'rgb8'"), Source(OWN, "32x24 'rgb8'")
    found = rivals(Contest("/image", *kinds), "/image", relay)[0]
    assert found == "/relay publishes 64x48 'rgb8' and 32x24 'rgb8' in turn on /image"
    found = rivals(Contest("j1", Source(OWN, 0), Source(OWN, 1)), "/joint_states", relay)[0]
    assert found == "/relay publishes two positions of j1 that no velocity limit allows, in turn on /joint_states"
