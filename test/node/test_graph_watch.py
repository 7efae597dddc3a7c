"""Who else is on the graph, as two participants see each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vla_ros.control.clock import SimulatedClock
from vla_ros.control.reasons import Reason
from vla_ros.errors import ConfigError
from vla_ros.graph import open_graph
from vla_ros.graph.wiring import Wiring
from vla_ros.node.graph_watch import GraphWatch
from vla_ros.node.namesake import PATIENCE, NameClaim, namesakes, wait_until_alone

JOINTS, SERVICE = "sensor_msgs/msg/JointState", "std_srvs/srv/SetBool"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    monkeypatch.setenv("ROS_DOMAIN_ID", str(101 + os.getpid() % 120))
    tag = f"<Tag>vla_ros_watch_{os.getpid()}</Tag>"
    monkeypatch.setenv("CYCLONEDDS_URI", f"<CycloneDDS><Domain><Discovery>{tag}</Discovery></Domain></CycloneDDS>")
    with open_graph("dds") as ours, open_graph("dds") as theirs:
        yield ours, theirs


def until(ready: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_service_of_two_servers_is_named_and_of_one_is_not(graphs: tuple[Any, Any]) -> None:
    ours, theirs = graphs
    node, other = ours.create_node("vla_policy"), theirs.create_node("supervisor")
    node.create_service(ours.service(SERVICE), "~/enable", lambda request, response: response)
    watch = GraphWatch(node, {}, ())
    until(lambda: ("supervisor", "/") in node.get_node_names_and_namespaces())
    assert watch.servers("~/enable") == ""
    mine = ("/vla_policy/enable", ["std_srvs/srv/SetBool"])
    assert node.get_service_names_and_types_by_node("vla_policy", "/") == [mine]
    server = other.create_service(theirs.service(SERVICE), "/vla_policy/enable", lambda request, response: response)
    until(lambda: watch.servers("~/enable") == "/supervisor")
    assert watch.servers("~/reset") == ""
    other.destroy_service(server)
    until(lambda: watch.servers("~/enable") == "")


def test_a_namesake_counts_as_a_server_and_is_found(graphs: tuple[Any, Any]) -> None:
    ours, theirs = graphs
    node, watch = (made := ours.create_node("vla_policy", "/left")), GraphWatch(made, {}, ())
    theirs.create_node("vla_policy", "/right")
    until(lambda: len(node.get_node_names_and_namespaces()) == 2)
    watch.look()
    assert (namesakes(node), watch.found, watch.servers("~/reset")) == (0, {}, "")
    theirs.create_node("vla_policy", "/left")
    until(lambda: namesakes(node) == 1)
    watch.look()
    assert watch.found == {Reason.NAME_CONTESTED: "another node is called /left/vla_policy, too"}
    assert watch.servers("~/reset") == "another node called /left/vla_policy"


def test_a_publisher_without_a_node_counts_from_the_second_look_and_for_arming_at_once(
    graphs: tuple[Any, Any],
) -> None:
    ours = graphs[0]
    node = ours.create_node("vla_policy")
    publisher, gid = Wiring(ours, node).publisher_and_gid(JOINTS, "/command", "command")
    assert gid == publisher.writer_guid
    watch = GraphWatch(node, {"/command": gid}, ())
    watch.look(at_once=True)
    assert watch.found == {}
    bare = SimpleNamespace(
        node_name="_CREATED_BY_BARE_DDS_APP_", node_namespace="", endpoint_gid=[7] * 16, topic_type=JOINTS
    )
    seen = node.get_publishers_info_by_topic("/command")
    node.get_publishers_info_by_topic = lambda topic: [*seen, bare]
    watch.look()
    assert watch.found == {}
    watch.look()
    expected = f"an unknown node (gid {'.'.join(['07'] * 16)}) publishes on /command, too"
    assert watch.found == {Reason.COMMAND_CONTESTED: expected}
    another = GraphWatch(node, {"/command": gid}, ())
    another.look(at_once=True)
    assert another.found == {Reason.COMMAND_CONTESTED: expected}


class Graph:
    """What a node is told by discovery, one answer after the other."""

    def __init__(self, others: list[int]) -> None:
        self._others = others

    def get_name(self) -> str:
        return "vla_policy"

    def get_namespace(self) -> str:
        return "/"

    def get_fully_qualified_name(self) -> str:
        return "/vla_policy"

    def get_node_names_and_namespaces(self) -> list[tuple[str, str]]:
        count = self._others.pop(0) if len(self._others) > 1 else self._others[0]
        return [("vla_policy", "/"), ("talker", "/")] + count * [("vla_policy", "/")]


def test_a_node_waits_for_its_namesake_to_leave_and_then_refuses() -> None:
    said: list[str] = []
    logger = SimpleNamespace(warning=said.append)
    clock = SimulatedClock()
    wait_until_alone(Graph([0]), logger, lambda fraction, text: None, clock)
    assert said == []
    wait_until_alone(Graph([1, 1, 1, 0]), logger, lambda fraction, text: None, clock)
    assert len(said) == 1
    assert "another node is called /vla_policy" in said[0]
    with pytest.raises(ConfigError, match="another node on the graph is called /vla_policy"):
        wait_until_alone(Graph([1]), logger, lambda fraction, text: None, clock)
    assert clock.steady() > PATIENCE


def test_a_name_is_held_once_per_host_and_graph_until_it_is_freed() -> None:
    here = {"ROS_DOMAIN_ID": f"test {os.getpid()}"}
    first = NameClaim("/vla_policy", here)
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        NameClaim("/vla_policy", here)
    NameClaim("/other", here).close()
    NameClaim("/vla_policy", {**here, "CYCLONEDDS_URI": "another"}).close()
    first.close()
    NameClaim("/vla_policy", here).close()
