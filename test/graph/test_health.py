from types import SimpleNamespace

import pytest

from vla_ros.graph.health import TopicHealth, Watched

IMAGE = "sensor_msgs/msg/Image"
STRING = "std_msgs/msg/String"


def test_no_publisher_is_reported_after_the_timeout_and_cleared(graph, peer, spin_until):
    node = graph.create_node("vla_policy")
    now = [0.0]
    health = TopicHealth(
        node, [Watched("/camera/image_raw", graph.qos("camera"))], publisher_timeout=5.0, clock=lambda: now[0]
    )
    now[0] = 4.9
    assert health.check() == ()
    now[0] = 5.1
    (finding,) = health.check()
    assert (finding.kind, finding.topic) == ("no_publisher", "/camera/image_raw")
    assert "5 s" in finding.text
    assert "ROS_DOMAIN_ID" in finding.text
    assert health.check() == (finding,)

    peer.ask("publisher", topic="/camera/image_raw", type_name=IMAGE, qos="camera")
    spin_until(graph, lambda: node.count_publishers("/camera/image_raw") == 1)
    assert health.check() == ()


def test_publisher_that_leaves_is_missed_after_the_timeout_again(graph, start_peer, spin_until):
    node = graph.create_node("vla_policy")
    now = [0.0]
    health = TopicHealth(
        node, [Watched("/text", graph.qos("default"))], publisher_timeout=5.0, clock=lambda: now[0]
    )
    peer = start_peer()
    peer.ask("publisher", topic="/text", type_name=STRING, qos="default")
    spin_until(graph, lambda: node.count_publishers("/text") == 1)
    now[0] = 100.0
    assert health.check() == ()
    peer.close()
    spin_until(graph, lambda: node.count_publishers("/text") == 0)
    assert health.check() == ()
    now[0] = 105.1
    assert [finding.kind for finding in health.check()] == ["no_publisher"]


def test_an_optional_topic_needs_no_publisher(graph):
    node = graph.create_node("vla_policy")
    now = [0.0]
    watched = Watched("/vla_policy/stop", graph.qos("command"), required=False)
    health = TopicHealth(node, [watched], publisher_timeout=5.0, clock=lambda: now[0])
    now[0] = 100.0
    assert health.check() == ()


def test_incompatible_qos_names_publisher_policy_and_fix(graph, peer, spin_until):
    node = graph.create_node("vla_policy")
    got = []
    node.create_subscription(graph.message(STRING), "~/instruction", got.append, graph.qos("instruction"))
    peer.ask("publisher", topic="/vla_policy/instruction", type_name=STRING, qos="camera")
    health = TopicHealth(
        node, [Watched(node.resolve_topic_name("~/instruction"), graph.qos("instruction"))], publisher_timeout=5.0
    )
    spin_until(graph, lambda: any("/peer" in finding.text for finding in health.check()))
    (finding,) = health.check()
    assert finding.kind == "incompatible_qos"
    for word in ("/vla_policy/instruction", "/peer", "RELIABLE", "BEST_EFFORT", "TRANSIENT_LOCAL", "VOLATILE"):
        assert word in finding.text
    assert got == []


JOINTS, TRAJECTORY = "sensor_msgs/msg/JointState", "trajectory_msgs/msg/JointTrajectory"


def test_a_driver_that_takes_another_type_is_named_until_it_takes_the_right_one(graph, start_peer, spin_until):
    node, topic = graph.create_node("vla_policy"), "/arm/joint_command"
    node.create_publisher(graph.message(JOINTS), topic, graph.qos("command"))
    health = TopicHealth(
        node, [Watched(topic, graph.qos("command"), type_name=JOINTS, published=True)], publisher_timeout=0.0
    )
    assert health.check() == ()  # that nobody listens is the watchdog's matter
    driver = start_peer()
    driver.ask("subscribe", topic=topic, type_name=TRAJECTORY, qos="command")
    spin_until(graph, lambda: any("/peer" in finding.text for finding in health.check()))
    (finding,) = health.check()
    assert (finding.kind, finding.topic) == ("wrong_type", topic)
    assert f"nothing on {topic}: it subscribes to {TRAJECTORY}, this node publishes {JOINTS}" in finding.text
    assert "control.output" in finding.text
    driver.close()
    spin_until(graph, lambda: not health.check())
    start_peer().ask("subscribe", topic=topic, type_name=JOINTS, qos="camera")
    spin_until(graph, lambda: node.count_subscribers(topic) == 1)
    assert health.check() == ()


def test_a_driver_that_asks_for_more_than_is_offered_is_named(graph, peer, spin_until):
    node, topic = graph.create_node("vla_policy"), "/arm/joint_command"
    node.create_publisher(graph.message(JOINTS), topic, graph.qos("command"))
    watched = Watched(topic, graph.qos("command"), type_name=JOINTS, published=True)
    health = TopicHealth(node, [watched], publisher_timeout=5.0)
    peer.ask("subscribe", topic=topic, type_name=JOINTS, qos="instruction")
    spin_until(graph, lambda: any("/peer" in finding.text for finding in health.check()))
    (finding,) = health.check()
    assert finding.kind == "incompatible_qos"
    for word in ("/peer", topic, "TRANSIENT_LOCAL", "VOLATILE"):
        assert word in finding.text


def test_a_publisher_of_another_type_is_named(graph, peer, spin_until):
    node = graph.create_node("vla_policy")
    watched = Watched("/camera/image_raw", graph.qos("camera"), type_name=IMAGE)
    health = TopicHealth(node, [watched], publisher_timeout=5.0)
    peer.ask("publisher", topic="/camera/image_raw", type_name="sensor_msgs/msg/CompressedImage", qos="camera")
    spin_until(graph, lambda: node.count_publishers("/camera/image_raw") == 1)
    (finding,) = health.check()
    assert finding.kind == "wrong_type"
    assert "sensor_msgs/msg/CompressedImage, this node subscribes to sensor_msgs/msg/Image" in finding.text
    assert "camera.transport" in finding.text


@pytest.mark.parametrize(
    "kind", ["foxglove_msgs/msg/CompressedVideo", "ffmpeg_image_transport_msgs/msg/FFMPEGPacket"]
)
def test_a_camera_that_publishes_video_is_told_what_to_set(graph, kind):
    """A stub of the node: the types are those of packages that need not be installed."""
    camera = SimpleNamespace(
        node_namespace="/", node_name="camera", topic_type=kind, qos_profile=graph.qos("camera")
    )
    node = SimpleNamespace(get_publishers_info_by_topic=lambda topic: [camera])
    watched = Watched("/camera/h264", graph.qos("camera"), type_name="sensor_msgs/msg/CompressedImage")
    (finding,) = TopicHealth(node, [watched], publisher_timeout=5.0).check()
    assert finding.kind == "wrong_type"
    assert f"it publishes {kind}, a video stream" in finding.text
    assert "image_transport to compressed or raw" in finding.text
