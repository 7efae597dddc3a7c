import base64
import struct
import threading
import time

import pytest

from vla_ros.errors import VlaRosError
from vla_ros.graph.wiring import Wiring

JOINTS, STRING = "sensor_msgs/msg/JointState", "std_msgs/msg/String"

pytestmark = pytest.mark.parametrize("backend", ["dds"], indirect=True)


@pytest.mark.parametrize("when", ["", "early"])
def test_service_answers_in_the_format_of_rmw_cyclonedds(open_here, plain, spin_until, when):
    """Also a client whose writer is discovered before its reader, to which a response would be lost."""
    graph = open_here()
    node = graph.create_node("vla_policy")
    asked = []

    def enable(request, response):
        asked.append(request.data)
        response.success = request.data
        response.message = "armed" if request.data else "disarmed"
        return response

    node.create_service(graph.service("std_srvs/srv/SetBool"), "~/enable", enable)
    client = plain("call", "/vla_policy/enable", *filter(None, [when]))
    spin_until(graph, lambda: len(asked) == 2)
    assert client.answer() == [0x1122334455667788, 0, True, "armed"]
    assert client.answer() == [0x1122334455667788, 1, False, "disarmed"]


def test_responses_keep_their_order(open_here, monkeypatch):
    """Also if the clients are discovered between two responses, the first of which waits for that."""
    graph = open_here()
    node = graph.create_node("vla_policy")
    kind = graph.service("std_srvs/srv/SetBool")
    service = node.create_service(kind, "~/enable", lambda request, response: response)
    written, discovered, ended = [], threading.Event(), threading.Event()

    def write(header, response):
        written.append(header)
        if len(written) == 2:
            ended.set()

    monkeypatch.setattr(service, "_reaches_all", discovered.is_set)
    monkeypatch.setattr(service, "_write", write)
    service._respond(b"first", kind.Response())
    discovered.set()
    service._respond(b"second", kind.Response())
    assert ended.wait(10.0)
    assert written == [b"first", b"second"]


@pytest.mark.parametrize("when", ["", "early"])
@pytest.mark.parametrize(
    ("fault", "error"), [("raises", "RuntimeError: no arm"), ("returns None", "AttributeError")]
)
def test_service_whose_callback_fails_keeps_answering(open_here, plain, spin_until, capfd, when, fault, error):
    graph = open_here()
    node = graph.create_node("vla_policy")
    asked = []

    def enable(request, response):
        asked.append(request.data)
        if request.data and fault == "raises":
            raise RuntimeError("no arm")
        return None if request.data else response

    node.create_service(graph.service("std_srvs/srv/SetBool"), "~/enable", enable)
    client = plain("call", "/vla_policy/enable", *filter(None, [when]))
    spin_until(graph, lambda: len(asked) == 2)
    assert client.answer()[1] == 1
    assert error in capfd.readouterr().err


def test_simulated_time_follows_the_clock_topic(open_here, start_peer, spin_until):
    graph = open_here("--ros-args", "-p", "use_sim_time:=true")
    node = graph.create_node("vla_policy")
    assert node.get_clock().now().nanoseconds == 0
    peer = start_peer()
    peer.ask("publisher", topic="/clock", type_name="rosgraph_msgs/msg/Clock", qos="default")
    cdr = struct.pack("<4sII", b"\0\1\0\0", 0, 500)
    peer.ask("stream", topic="/clock", cdr=base64.b64encode(cdr).decode(), period=0.02)
    spin_until(graph, lambda: node.get_clock().now().nanoseconds > 0)
    seconds, nanoseconds = divmod(node.get_clock().now().nanoseconds, 1_000_000_000)
    assert seconds >= 1
    assert nanoseconds == 500


def test_bytes_that_are_no_message_are_refused_when_published(open_here):
    graph = open_here()
    publisher = graph.create_node("a").create_publisher(graph.message(STRING), "/text", graph.qos("default"))
    with pytest.raises(VlaRosError, match=r"/text could not be sent \(12 bytes\)"):
        publisher.publish(b"\0\1\0\0" + struct.pack("<I", 4000) + b"abc\0")


def test_other_settings_for_a_domain_that_is_open_are_refused(open_here, monkeypatch):
    open_here()
    monkeypatch.setenv("ROS_LOCALHOST_ONLY", "0")  # the subnet
    with pytest.raises(VlaRosError, match="with other settings of ROS_AUTOMATIC"):
        open_here()


def test_configuration_that_cyclone_refuses_is_an_error_that_names_it(open_here, monkeypatch, capfd):
    monkeypatch.setenv("CYCLONEDDS_URI", "<CycloneDDS><Domain><Nonsense/></Domain></CycloneDDS>")
    with pytest.raises(VlaRosError, match="CYCLONEDDS_URI"):
        open_here()
    monkeypatch.delenv("CYCLONEDDS_URI")
    assert open_here().create_node("after").get_name() == "after"


def test_idle_graph_does_not_burn_the_processor(open_here):
    graph = open_here()
    graph.create_node("idle").create_timer(0.1, lambda: None)
    end = time.monotonic() + 1.0
    used = time.process_time()
    graph.spin(lambda: time.monotonic() > end)
    assert time.process_time() - used < 0.3


def test_a_message_is_received_after_its_publisher_has_left(open_here):
    graph, heard = open_here(), []
    text, profile, wiring = graph.message(STRING), graph.qos("default"), Wiring(graph, graph.create_node("a"))
    subscription = wiring.subscribe_from(STRING, "/text", lambda *received: heard.append(received), "default")
    sender = graph.create_node("b")
    publisher = sender.create_publisher(text, "/text", profile)
    publisher.publish(text(data="last words"))
    sender.destroy_publisher(publisher)
    subscription.poll()
    assert [(message.data, len(origin.publisher)) for message, origin in heard] == [("last words", 8)]
    wiring.close()


def test_endpoints_can_be_destroyed_one_by_one(open_here):
    graph = open_here()
    node = graph.create_node("a")
    publisher = node.create_publisher(graph.message(STRING), "/text", graph.qos("default"))
    subscription = node.create_subscription(graph.message(STRING), "/text", print, graph.qos("default"))
    timer = node.create_timer(0.01, lambda: None)
    assert node.destroy_publisher(publisher)
    assert node.destroy_subscription(subscription)
    assert node.destroy_timer(timer)
    assert not node.destroy_publisher(publisher)
    assert node.count_publishers("/text") == 0
    assert node.count_subscribers("/text") == 0
    node.destroy_node()
    node.destroy_node()
    with pytest.raises(VlaRosError, match="destroyed"):
        node.create_timer(1.0, print)


def test_bytes_on_the_wire_are_the_reference_cdr(graph, plain, spin_until, golden):
    """The message that rclpy wrote into test/data/cdr, built from the same fields."""
    publisher = graph.create_node("vla_policy").create_publisher(
        graph.message(JOINTS), "/arm/joint_command", graph.qos("command")
    )
    stranger = plain("watch", "/arm/joint_command")
    assert stranger.answer() == "ready"
    spin_until(graph, lambda: publisher.get_subscription_count() == 1)
    fields = golden[JOINTS]["fields"]
    stamp = graph.message("builtin_interfaces/msg/Time")(**fields["header"]["stamp"])
    header = graph.message("std_msgs/msg/Header")(stamp=stamp, frame_id=fields["header"]["frame_id"])
    publisher.publish(graph.message(JOINTS)(**{**fields, "header": header}))
    answer = stranger.answer()
    assert answer["position"] == fields["position"]
    sent, reference = bytes.fromhex(answer["cdr"]), golden[JOINTS]["cdr"]
    assert len(sent) == 128
    # Alignment: after the frame id, after two names, and before the velocities. rclpy leaves what was in memory.
    alignment = {21, 22, 23, 39, 63, 96, 97, 98, 99}
    assert all(sent[index] == 0 for index in alignment)
    for index in set(range(128)) - alignment:
        assert sent[index] == reference[index], index
