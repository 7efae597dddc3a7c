import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from vla_ros.control.clock import SimulatedClock
from vla_ros.control.publishers import CompetingSources, DataSource
from vla_ros.control.reasons import Reason
from vla_ros.errors import ConfigError
from vla_ros.execution.claim import DUPLICATE_PATIENCE, Claim, claim_name, count_duplicates, wait_until_alone
from vla_ros.execution.graph_watch import GraphWatch
from vla_ros.graph import open_graph
from vla_ros.graph.wiring import Wiring

CAMERAS = (("a", b"1"), ("b", b"2"))
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
    assert (count_duplicates(node), watch.found, watch.servers("~/reset")) == (0, {}, "")
    theirs.create_node("vla_policy", "/left")
    until(lambda: count_duplicates(node) == 1)
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
    watch.close()
    another = GraphWatch(node, {"/command": gid}, ())
    another.look(at_once=True)
    another.close()
    assert another.found == {Reason.COMMAND_CONTESTED: expected}


def test_a_commander_whose_node_leaves_before_its_publisher_counts_without_a_gap(graphs: tuple[Any, Any]) -> None:
    node = graphs[0].create_node("vla_policy")
    other = SimpleNamespace(node_name="teleop", node_namespace="/", endpoint_gid=[7] * 16, topic_type=JOINTS)
    node.get_publishers_info_by_topic = lambda topic: [other]
    watch = GraphWatch(node, {"/command": b"1" * 16}, ())
    for name in ("teleop", "", ""):
        other.node_name = name
        watch.look()
        assert Reason.COMMAND_CONTESTED in watch.found
    watch.close()


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
    assert clock.steady() > DUPLICATE_PATIENCE


@pytest.fixture
def here() -> dict[str, str]:
    return {"ROS_DOMAIN_ID": f"test {os.getpid()}"}


def test_a_name_is_held_once_per_host_and_graph_until_it_is_freed(here: dict[str, str]) -> None:
    first = claim_name("/vla_policy", here)
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        claim_name("/vla_policy", here)
    claim_name("/other", here).close()
    claim_name("/vla_policy", {**here, "CYCLONEDDS_URI": "another"}).close()
    first.close()
    claim_name("/vla_policy", here).close()


def test_the_first_of_two_simultaneous_nodes_keeps_its_name(here: dict[str, str], monkeypatch) -> None:
    competitors = []

    def claim_and_compete(*arguments: Any) -> Claim:
        claim = Claim(*arguments)
        competitors.append(Claim(*arguments))
        return claim

    monkeypatch.setattr("vla_ros.execution.claim.Claim", claim_and_compete)
    with closing(claim_name("/vla_policy", here)) as first, closing(competitors[0]) as second:
        assert first.is_held
        assert not second.is_held


def test_claimants_know_each_other_until_they_leave(here: dict[str, str]) -> None:
    """The one that comes first holds the claim; when it leaves, another takes it, and still knows the third."""
    first, second, third = (Claim("command /arm", name, here) for name in ("/a", "/b", "/c"))
    elsewhere = Claim("command /arm", "/d", {**here, "ROS_DOMAIN_ID": "another"})

    def known(*claims: Claim) -> list[set[str]]:
        return [{each.name for each in claim.update()} for claim in claims]

    known(first, second, third)
    assert known(first, second, third, elsewhere) == [{"/b", "/c"}, {"/a"}, {"/a"}, set()]
    assert {each.pid for each in first.update() + second.update()} == {os.getpid()}
    first.close()
    until(lambda: known(second, third) == [{"/c"}, {"/b"}])
    second.close()
    until(lambda: known(third) == [set()])
    for claim in (third, elsewhere):
        claim.close()


@pytest.mark.parametrize("first", [True, False])
def test_a_process_that_is_killed_frees_its_claim(here: dict[str, str], first: bool) -> None:
    """Whether it was the holder or waited; a suspended one keeps it."""
    program = (
        "import sys, time\nfrom vla_ros.execution.claim import Claim\n"
        f"claim = Claim('command /arm', '/other', {here!r})\nprint(flush=True)\n"
        "while True:\n    claim.update()\n    time.sleep(0.05)"
    )
    ours = None if first else Claim("command /arm", "/ours", here)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        claim = ours or Claim("command /arm", "/ours", here)
        until(lambda: [str(each) for each in claim.update()] == [f"/other (process {other.pid})"])
        other.send_signal(signal.SIGSTOP)
        assert claim.update()
        other.kill()
        until(lambda: not claim.update())
    claim.close()


def test_text_from_an_unknown_claimant_is_not_shown(here: dict[str, str]) -> None:
    claim = Claim("command /arm", "/ours", here)
    stranger = Claim("command /arm", "two\nlines " + "x" * 9000, here)
    assert [str(each) for each in claim.update()] == [f"a node (process {os.getpid()})"]
    for each in (claim, stranger):
        each.close()


def test_a_claim_counts_before_discovery_and_is_named_once_with_it(graphs: tuple[Any, Any]) -> None:
    ours, theirs = graphs
    node, gid = ours.create_node("vla_policy"), b"7" * 16
    watch = GraphWatch(node, {"/command": gid}, ())
    expected = f"/second (process {os.getpid()}) publishes on /command, too"
    second = Claim("command /command", "/second")
    watch.look(at_once=True)
    assert watch.found == {Reason.COMMAND_CONTESTED: expected}
    another = theirs.create_node("second")
    another.create_publisher(theirs.message(JOINTS), "/command", theirs.qos("command"))
    until(lambda: node.get_publishers_info_by_topic("/command"))
    for _ in range(2):
        watch.look()
        assert watch.found == {Reason.COMMAND_CONTESTED: expected}
    watch.close()
    until(lambda: not second.update())  # now it is the holder
    for allowed in (["/second"], ["*"]):
        sharing = GraphWatch(node, {"/command": gid}, allowed)
        sharing.look(at_once=True)
        assert sharing.found == {}  # its name has not come yet
        second.update()
        sharing.look()
        assert sharing.found == {}
        sharing.close()
    second.close()


def test_a_source_without_a_name_is_reported_at_the_second_look(graphs: tuple[Any, Any]) -> None:
    node = graphs[0].create_node("vla_policy")
    contest = CompetingSources("/image", DataSource(b"1" * 16), DataSource(b"2" * 16))
    watch = GraphWatch(node, {}, (), lambda: [(Reason.CAMERA_CONTESTED, "/image", contest)])
    both = [SimpleNamespace(node_name=name, node_namespace="/", endpoint_gid=gid * 16) for name, gid in CAMERAS]
    known = [both[:1], both[:1], both, both[:1], both[:1]]  # the second one comes, and leaves
    node.get_publishers_info_by_topic = lambda topic: known.pop(0)
    said = []
    for _ in range(5):
        watch.look()
        said.append(watch.found.get(Reason.CAMERA_CONTESTED))
    named = "/a and /b publish on /image in turn"
    assert said == [None, "/a publish on /image in turn", named, named, named]
