import pytest

from vla_ros.errors import ConfigError

IMAGE = "sensor_msgs/msg/Image"
JOINTS = "sensor_msgs/msg/JointState"
STRING = "std_msgs/msg/String"


# --- the graph seen from outside -----------------------------------------------------------------------------


def test_endpoints_are_seen_from_outside_with_their_profiles(graph, peer, spin_until):
    node = graph.create_node("vla_policy", "/left")
    node.create_publisher(graph.message(JOINTS), "/arm/joint_command", graph.qos("command"))
    node.create_subscription(graph.message(IMAGE), "/camera/image_raw", print, graph.qos("camera"), raw=True)
    node.create_subscription(graph.message(STRING), "~/instruction", print, graph.qos("instruction"))
    found = {}

    def complete():
        found["command"] = peer.ask("publishers_info", topic="/arm/joint_command")
        found["camera"] = peer.ask("subscriptions_info", topic="/camera/image_raw")
        found["text"] = peer.ask("subscriptions_info", topic="/left/vla_policy/instruction")
        return all(items and items[0]["node"] == "vla_policy" for items in found.values())

    spin_until(graph, complete)
    common = {"node": "vla_policy", "namespace": "/left"}
    volatile = {**common, "durability": "VOLATILE", "depth": 1}
    for (seen,) in found.values():
        # DDS does not announce the depth: Cyclone adds it, Fast-DDS shows 0.
        cyclone = graph.backend == "dds" or "rmw_cyclonedds_cpp" in graph.describe()
        assert seen["depth"] in ((1,) if cyclone else (0, 1))
        seen["depth"] = 1
    assert found["command"] == [{**volatile, "type": JOINTS, "reliability": "RELIABLE"}]
    assert found["camera"] == [{**volatile, "type": IMAGE, "reliability": "BEST_EFFORT"}]
    assert found["text"] == [
        {**common, "type": STRING, "reliability": "RELIABLE", "durability": "TRANSIENT_LOCAL", "depth": 1}
    ]


def test_node_sees_others_and_counts_publishers(graph, peer, spin_until):
    node = graph.create_node("vla_policy")
    assert node.count_publishers("/camera/image_raw") == 0
    peer.ask("publisher", topic="/camera/image_raw", type_name=IMAGE, qos="camera")
    spin_until(graph, lambda: node.count_publishers("/camera/image_raw") == 1)
    spin_until(graph, lambda: node.get_publishers_info_by_topic("/camera/image_raw")[0].node_name == "peer")
    assert node.get_publishers_info_by_topic("/camera/image_raw")[0].topic_type == IMAGE
    assert {"peer", "vla_policy"} <= set(node.get_node_names())


def test_publisher_of_a_process_that_died_leaves_the_count(graph, start_peer, spin_until):
    node = graph.create_node("vla_policy")
    peer = start_peer()
    peer.ask("publisher", topic="/camera/image_raw", type_name=IMAGE, qos="camera")
    spin_until(graph, lambda: node.count_publishers("/camera/image_raw") == 1)
    assert peer.close() == 0
    spin_until(graph, lambda: node.count_publishers("/camera/image_raw") == 0)
    spin_until(graph, lambda: "peer" not in node.get_node_names())


def test_destroyed_node_leaves_the_graph(graph, peer, wait_until):
    graph.create_node("stays")
    node = graph.create_node("goes", "/ns")
    publisher = node.create_publisher(graph.message(STRING), "text", graph.qos("default"))
    wait_until(lambda: ["goes", "/ns"] in peer.ask("nodes"))
    wait_until(lambda: len(peer.ask("publishers_info", topic="/ns/text")) == 1)
    node.destroy_node()
    wait_until(lambda: ["goes", "/ns"] not in peer.ask("nodes"))
    wait_until(lambda: not peer.ask("publishers_info", topic="/ns/text"))
    assert ["stays", "/"] in peer.ask("nodes")
    with pytest.raises(Exception, match=r"destroy|[Ii]nvalid|cannot use"):
        publisher.publish(graph.message(STRING)(data="too late"))


# --- names ---------------------------------------------------------------------------------------------------


def test_names_are_expanded(graph):
    node = graph.create_node("vla_policy", "/left")
    assert (node.get_name(), node.get_namespace()) == ("vla_policy", "/left")
    assert node.get_fully_qualified_name() == "/left/vla_policy"
    assert node.resolve_topic_name("~/action") == "/left/vla_policy/action"
    assert node.resolve_topic_name("camera/image_raw") == "/left/camera/image_raw"
    assert node.resolve_topic_name("/diagnostics") == "/diagnostics"


@pytest.mark.parametrize(("name", "namespace"), [("1st", None), ("a/b", None), ("", None), ("ok", "/bad//ns")])
def test_wrong_names_are_refused(graph, name, namespace):
    with pytest.raises(ConfigError):
        graph.create_node(name, namespace)


def test_malformed_remap_is_refused(open_here):
    with pytest.raises(ConfigError):
        open_here("--ros-args", "-r", "/camera/image_raw:/wrist/image")
