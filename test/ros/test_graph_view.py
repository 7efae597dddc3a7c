import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from rclpy.qos import DurabilityPolicy, ReliabilityPolicy

pytestmark = pytest.mark.ros

BEST_EFFORT, RELIABLE = ReliabilityPolicy.BEST_EFFORT, ReliabilityPolicy.RELIABLE
VOLATILE, TRANSIENT_LOCAL = DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL

PROMISED = {
    "/camera/image_raw": ("in", "sensor_msgs/msg/Image", BEST_EFFORT, VOLATILE),
    "/joint_states": ("in", "sensor_msgs/msg/JointState", BEST_EFFORT, VOLATILE),
    "/vla_policy/instruction": ("in", "std_msgs/msg/String", RELIABLE, TRANSIENT_LOCAL),
    "/vla_policy/stop": ("in", "std_msgs/msg/Bool", RELIABLE, VOLATILE),
    "/arm/joint_command": ("out", "sensor_msgs/msg/JointState", RELIABLE, VOLATILE),
    "/vla_policy/action": ("out", "std_msgs/msg/Float64MultiArray", RELIABLE, VOLATILE),
    "/diagnostics": ("out", "diagnostic_msgs/msg/DiagnosticArray", RELIABLE, VOLATILE),
}


def test_topics_types_and_qos_as_promised(robot, policy) -> None:
    policy().wait_for("is ready")
    for topic, (direction, kind, reliability, durability) in PROMISED.items():
        ask = (
            robot.node.get_subscriptions_info_by_topic
            if direction == "in"
            else robot.node.get_publishers_info_by_topic
        )
        found = robot.wait(lambda ask=ask, t=topic: [e for e in ask(t) if e.node_name == "vla_policy"], topic)
        assert len(found) == 1, topic
        assert found[0].topic_type == kind
        assert found[0].qos_profile.reliability == reliability, topic
        assert found[0].qos_profile.durability == durability, topic
    services = dict(robot.node.get_service_names_and_types_by_node("vla_policy", "/"))
    assert services["/vla_policy/enable"] == ["std_srvs/srv/SetBool"]
    assert services["/vla_policy/reset"] == ["std_srvs/srv/Trigger"]
    assert services["/vla_policy/change_state"] == ["lifecycle_msgs/srv/ChangeState"]


def test_a_publisher_whose_qos_cannot_match_is_named(robot, policy) -> None:
    from rclpy.qos import QoSProfile
    from std_msgs.msg import String

    policy()
    robot.drive()
    robot.wait(lambda: robot.actions, "an action")
    robot.node.create_publisher(String, "/vla_policy/instruction", QoSProfile(depth=1))
    robot.wait(
        lambda: any("/instruction'" in line and "incompatible QoS" in line for line in robot.log), "the warning"
    )
