"""What a stranger sees on the wire: a process that knows the cyclonedds library and nothing of this package."""

from __future__ import annotations

import pytest

JOINTS = "sensor_msgs/msg/JointState"
IMAGE = "sensor_msgs/msg/Image"
STRING = "std_msgs/msg/String"

# What rclpy puts on the wire is not ours.
pytestmark = pytest.mark.parametrize("backend", ["dds"], indirect=True)


@pytest.fixture
def node(graph):
    return graph.create_node("vla_policy")


def test_bytes_on_the_wire_are_the_reference_cdr(graph, node, plain, spin_until, golden):
    """The message that rclpy wrote into test/data/cdr, built from the same fields."""
    publisher = node.create_publisher(graph.message(JOINTS), "/arm/joint_command", graph.qos("command"))
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
