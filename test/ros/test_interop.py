"""The embedded participant among real ROS 2 processes, on each middleware that is installed.

Regressions pinned: nobody meets with default settings on one host; images lost or altered; commands that do not
arrive; a latched instruction that a late joiner misses; nodes and profiles that ``ros2 topic info`` cannot see;
a service that does not answer.
"""

import base64
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PEER = ROOT / "test" / "graph" / "peer.py"
IMAGE = "sensor_msgs/msg/Image"
JOINTS = "sensor_msgs/msg/JointState"
STRING = "std_msgs/msg/String"
RMWS = ("rmw_cyclonedds_cpp", "rmw_fastrtps_cpp")
REACH = ("ROS_LOCALHOST_ONLY", "ROS_AUTOMATIC_DISCOVERY_RANGE", "ROS_STATIC_PEERS", "CYCLONEDDS_URI")


def _graph_fixtures() -> Any:
    spec = importlib.util.spec_from_file_location("graph_fixtures", ROOT / "test" / "graph" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


helpers = _graph_fixtures()


def missing() -> str:
    return helpers.rclpy_missing() or helpers.dds_missing()


pytestmark = [pytest.mark.ros, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]


HUMBLE = os.environ.get("ROS_DISTRO") == "humble"
"""Its Cyclone DDS listens to multicast only, which never reaches a participant that stays on this host."""


def has_rmw(name: str) -> bool:
    prefixes = os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep)
    index = Path("share/ament_index/resource_index/rmw_typesupport")
    return any((Path(prefix) / index / name).exists() for prefix in prefixes if prefix)


@pytest.fixture(params=RMWS)
def rmw(request: pytest.FixtureRequest) -> str:
    if not has_rmw(request.param):
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Default reach on both sides: nothing is set but the domain."""
    for name in REACH:
        monkeypatch.delenv(name, raising=False)
    if HUMBLE:
        monkeypatch.setenv("ROS_LOCALHOST_ONLY", "1")
    monkeypatch.setenv("ROS_DOMAIN_ID", str(50 + os.getpid() % 51))


@pytest.fixture
def start_ros(rmw: str) -> Iterator[Callable[..., Any]]:
    started = []

    def make(**env: str) -> Any:
        command = [sys.executable, str(PEER), "rclpy"]
        process = helpers.Process(helpers.piped(command, {"RMW_IMPLEMENTATION": rmw, **env}))
        started.append(process)
        assert process.answer(60.0) == "ready"
        return process

    yield make
    for process in started:
        process.close()


@pytest.fixture
def graph() -> Iterator[Any]:
    """The embedded participant, although rclpy is there."""
    from vla_ros.graph import open_graph

    with open_graph("dds") as opened:
        yield opened


def spin_until(graph: Any, condition: Callable[[], Any], timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    graph.spin(lambda: bool(condition()) or time.monotonic() > end, period=0.05)
    assert condition(), f"did not happen in {timeout} s"


def encoded(cdr: bytes) -> str:
    return base64.b64encode(cdr).decode()


def vga(graph: Any) -> bytes:
    message = graph.message(IMAGE)(height=480, width=640, encoding="rgb8", step=1920, data=bytes(range(256)) * 3600)
    return bytes(graph.participant.types.serialize(message))


def test_camera_of_ros_reaches_us_whole(graph, start_ros):
    ros = start_ros()
    node = graph.create_node("vla_policy")
    got: list[bytes] = []
    node.create_subscription(graph.message(IMAGE), "/camera/image_raw", got.append, graph.qos("camera"), raw=True)
    cdr = vga(graph)
    ros.ask("publisher", topic="/camera/image_raw", type_name=IMAGE, qos="camera")
    ros.ask("stream", topic="/camera/image_raw", cdr=encoded(cdr), period=1 / 30)
    spin_until(graph, lambda: len(got) >= 30)
    assert all(raw[8 : len(cdr)] == cdr[8:] for raw in got)
    numbers = [int.from_bytes(raw[4:8], "little") for raw in got]
    assert numbers == sorted(set(numbers))
    # Frames may be dropped under load, yet not most of them.
    assert numbers[-1] - numbers[0] < 3 * len(numbers)


def test_command_reaches_ros(graph, start_ros):
    ros = start_ros()
    node = graph.create_node("vla_policy")
    publisher = node.create_publisher(graph.message(JOINTS), "/arm/joint_command", graph.qos("command"))
    ros.ask("subscribe", topic="/arm/joint_command", type_name=JOINTS, qos="command")
    spin_until(graph, lambda: publisher.get_subscription_count() == 1)
    message = graph.message(JOINTS)(name=["a", "b"], position=[0.5, -1.25])
    publisher.publish(message)
    spin_until(graph, lambda: ros.ask("received", topic="/arm/joint_command"))
    cdr = base64.b64decode(ros.ask("received", topic="/arm/joint_command")[0])
    assert graph.participant.types.deserialize(cdr, graph.message(JOINTS)) == message


@pytest.mark.parametrize("first", ["ros", "embedded"])
def test_default_settings_meet_whoever_starts_first(first, start_ros):
    """ROS uses the subnet by default, the embedded participant this host: they meet, and soon."""
    from vla_ros.graph import open_graph

    ros = start_ros() if first == "ros" else None
    with open_graph("dds") as graph:
        node = graph.create_node("vla_policy")
        spin_until(graph, lambda: "vla_policy" in node.get_node_names())
        ros = ros or start_ros()
        started = time.monotonic()
        spin_until(graph, lambda: "peer" in node.get_node_names(), 15.0)
        spin_until(graph, lambda: ["vla_policy", "/"] in ros.ask("nodes"), 15.0)
        assert time.monotonic() - started < 15.0


@pytest.mark.parametrize("reach", ["LOCALHOST", "SUBNET"])
def test_same_reach_on_both_sides_meets(reach, start_ros, monkeypatch):
    from vla_ros.graph import open_graph

    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", reach)
    ros = start_ros()
    with open_graph("dds") as graph:
        node = graph.create_node("vla_policy")
        spin_until(graph, lambda: "peer" in node.get_node_names())
        spin_until(graph, lambda: ["vla_policy", "/"] in ros.ask("nodes"))


def test_latched_instruction_both_ways(graph, start_ros):
    ros = start_ros()
    node = graph.create_node("vla_policy")
    ros.ask("publisher", topic="/vla_policy/instruction", type_name=STRING, qos="instruction")
    text = graph.participant.types.serialize(graph.message(STRING)(data="pick up the red cube ✓"))
    ros.ask("publish", topic="/vla_policy/instruction", cdr=encoded(text))
    got: list[Any] = []
    node.create_subscription(graph.message(STRING), "~/instruction", got.append, graph.qos("instruction"))
    spin_until(graph, lambda: got)
    assert [message.data for message in got] == ["pick up the red cube ✓"]

    publisher = node.create_publisher(graph.message(STRING), "~/latched", graph.qos("instruction"))
    publisher.publish(graph.message(STRING)(data="old"))
    publisher.publish(graph.message(STRING)(data="new"))
    ros.ask("subscribe", topic="/vla_policy/latched", type_name=STRING, qos="instruction")
    spin_until(graph, lambda: ros.ask("received", topic="/vla_policy/latched"))
    received = [base64.b64decode(item) for item in ros.ask("received", topic="/vla_policy/latched")]
    assert [cdr[8:11] for cdr in received] == [b"new"]


def test_ros_sees_our_endpoints_and_we_see_theirs(graph, start_ros):
    ros = start_ros()
    node = graph.create_node("vla_policy", "/left")
    node.create_publisher(graph.message(JOINTS), "/arm/joint_command", graph.qos("command"))
    node.create_subscription(graph.message(IMAGE), "/camera/image_raw", print, graph.qos("camera"), raw=True)
    ros.ask("publisher", topic="/camera/image_raw", type_name=IMAGE, qos="camera")
    seen: dict[str, Any] = {}

    def complete() -> bool:
        seen["ours"] = ros.ask("publishers_info", topic="/arm/joint_command")
        seen["reader"] = ros.ask("subscriptions_info", topic="/camera/image_raw")
        seen["theirs"] = node.get_publishers_info_by_topic("/camera/image_raw")
        return (
            any(item["node"] == "vla_policy" for item in seen["ours"])
            and any(item["node"] == "vla_policy" for item in seen["reader"])
            and any(item.node_name == "peer" for item in seen["theirs"])
        )

    spin_until(graph, complete)
    command, camera, theirs = seen["ours"][0], seen["reader"][0], seen["theirs"][0]
    assert (command["namespace"], command["type"]) == ("/left", JOINTS)
    assert (command["reliability"], command["durability"]) == ("RELIABLE", "VOLATILE")
    assert (camera["reliability"], camera["durability"]) == ("BEST_EFFORT", "VOLATILE")
    assert theirs.topic_type == IMAGE
    assert theirs.qos_profile.reliability.name == "BEST_EFFORT"
    assert theirs.topic_type_hash == ("" if HUMBLE else graph.participant.types.type_hash(IMAGE))


def test_incompatible_publisher_of_ros_is_found(graph, start_ros):
    from vla_ros.graph.health import TopicHealth, Watched

    ros = start_ros()
    node = graph.create_node("vla_policy")
    ros.ask("publisher", topic="/vla_policy/instruction", type_name=STRING, qos="camera")
    health = TopicHealth(node, [Watched("/vla_policy/instruction", graph.qos("instruction"))], 5.0)
    spin_until(graph, lambda: any("/peer" in finding.text for finding in health.check()))
    assert {finding.kind for finding in health.check()} == {"incompatible_qos"}


def test_service_answers_a_client_on_cyclone(graph, start_ros, rmw):
    if rmw != "rmw_cyclonedds_cpp":
        pytest.skip("services of rmw_fastrtps need RTPS headers that the cyclonedds library cannot write")
    settings = {}
    if os.environ.get("ROS_DISTRO") == "lyrical":  # whose clients compare types
        settings["CYCLONEDDS_URI"] = f"file://{ROOT / 'config' / 'cyclonedds_11.xml'}"
    node = graph.create_node("vla_policy")

    def enable(request: Any, response: Any) -> Any:
        response.success = request.data
        response.message = "armed"
        return response

    node.create_service(graph.service("std_srvs/srv/SetBool"), "~/enable", enable)
    ros = start_ros(**settings)
    ros.ask("call", service="/vla_policy/enable", type_name="std_srvs/srv/SetBool", request={"data": True})
    spin_until(graph, lambda: ros.ask("called", service="/vla_policy/enable"))
    assert ros.ask("called", service="/vla_policy/enable") == {"success": True, "message": "armed"}


def test_contract_of_the_graph_holds_on(rmw):
    """test/graph under rclpy on this middleware; a process can load only one."""
    if rmw == os.environ.get("RMW_IMPLEMENTATION", "rmw_fastrtps_cpp"):
        pytest.skip(f"test/graph itself runs on {rmw} here")
    suite = ["test/graph/test_contract.py", "test/graph/test_health.py"]
    # Jazzy's own pytest plug-ins do not load in pytest 9.
    plugins = ["-p", "no:launch_testing", "-p", "no:launch_ros", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "rclpy", *plugins, *suite],
        cwd=ROOT,
        # What colcon adds to pytest's options belongs to the pytest that it started.
        env={**os.environ, "RMW_IMPLEMENTATION": rmw, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
