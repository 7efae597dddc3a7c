from types import SimpleNamespace
from typing import Any

from vla_ros.control.publishers import (
    CompetingSources,
    DataSource,
    describe_competing,
    gid_of,
    name_nodes,
    other_publishers,
)

OWN, THEIRS = bytes(range(16)), bytes(range(100, 116))


def endpoint(gid: Any, name: str = "teleop", namespace: str = "/") -> Any:
    return SimpleNamespace(endpoint_gid=gid, node_name=name, node_namespace=namespace)


def test_the_own_publisher_is_known_by_its_id() -> None:
    """Another node may have this node's name."""
    assert other_publishers([endpoint(OWN)], OWN) == {}
    assert other_publishers([endpoint(OWN), endpoint(THEIRS)], OWN) == {THEIRS: "/teleop"}


def test_ids_of_every_distribution_are_equal() -> None:
    padded = [*THEIRS, *bytes(8)]  # rclpy gives numbers; Humble pads them
    assert gid_of(padded) == gid_of(THEIRS) == gid_of(memoryview(THEIRS)) == THEIRS
    assert other_publishers([endpoint([*OWN, *bytes(8)]), endpoint(padded)], OWN) == {THEIRS: "/teleop"}


def test_publishers_of_unknown_nodes_count() -> None:
    for name in ("", "_NODE_NAME_UNKNOWN_", "_CREATED_BY_BARE_DDS_APP_"):
        found = other_publishers([endpoint(THEIRS, name, name)], OWN, ["/teleop"])
        assert found == {THEIRS: ""}
        assert name_nodes(found) == f"an unknown node (gid {THEIRS.hex('.')})"


def test_nodes_that_may_share_the_topic_do_not_count() -> None:
    there = [endpoint(OWN), endpoint(THEIRS, "mux", "/arm"), endpoint(THEIRS[::-1], "teleop")]
    assert name_nodes(other_publishers(there, OWN)) == "/arm/mux and /teleop"
    assert name_nodes(other_publishers(there, OWN, ["/arm/mux"])) == "/teleop"
    assert other_publishers(there, OWN, ["*"]) == {}


def test_two_sources_are_named_by_their_nodes() -> None:
    two = DataSource(OWN, "a"), DataSource(THEIRS, "b")
    there = [endpoint(OWN, "robot"), endpoint(THEIRS, "leftover", "/old"), endpoint(THEIRS[::-1], "gripper")]
    text = "/old/leftover and /robot publish j1 on /joint_states in turn"
    assert describe_competing(CompetingSources("j1", *two), "/joint_states", there) == (text, True)
    text = "/old/leftover and /robot publish on /image in turn"
    assert describe_competing(CompetingSources("/image", *two), "/image", there) == (text, True)
    for late in ([endpoint(OWN, "robot")], [endpoint(OWN, "robot"), endpoint(THEIRS, "_NODE_NAME_UNKNOWN_")]):
        assert not describe_competing(CompetingSources("j1", *two), "/joint_states", late)[1]


def test_unknown_ids_name_all_publishers_of_the_topic() -> None:
    two = DataSource(b"\x01" * 8), DataSource(b"\x02" * 8)
    there = [endpoint(OWN, "robot"), endpoint(THEIRS, "leftover")]
    assert describe_competing(CompetingSources("j1", *two), "/joint_states", there)[0].startswith(
        "/leftover and /robot publish j1"
    )
    assert describe_competing(CompetingSources("j1", *two), "/joint_states", [])[0].startswith("nobody known")


def test_a_publisher_of_two_kinds_is_named_with_both() -> None:
    relay = [endpoint(OWN, "relay")]
    kinds = DataSource(OWN, "64x48 'rgb8'"), DataSource(OWN, "32x24 'rgb8'")
    found = describe_competing(CompetingSources("/image", *kinds), "/image", relay)[0]
    assert found == "/relay publishes 64x48 'rgb8' and 32x24 'rgb8' in turn on /image"
    found = describe_competing(
        CompetingSources("j1", DataSource(OWN, 0), DataSource(OWN, 1)), "/joint_states", relay
    )[0]
    assert found == "/relay publishes two positions of j1 that no velocity limit allows, in turn on /joint_states"
