import numpy as np

from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import DeltaTimestamp, ImageFeature, PolicySpec, StateFeature
from vla_ros.kinematics.solver import Kinematics
from vla_ros.policies import Policy, Session
from vla_ros.types import ActionChunk, Observation

STATE = "arm.tip_position + arm.joint_velocity + topic.pose + topic.force + topic.array + topic.other"
TOPICS = ("pose=/p:PoseStamped", "force=/f:WrenchStamped", "array=/a:Float64MultiArray", "other=/o")


class Watching(Policy):
    """Keeps what it was asked last."""

    spec = PolicySpec(
        (ImageFeature("image", delta_timestamps=(DeltaTimestamp(seconds=-0.2), DeltaTimestamp())),),
        (StateFeature("all", parse_components(STATE)),),
    )

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        observation.images["image"]
        self.seen.append(observation)
        return ActionChunk(np.zeros((1, 7)), observation.stamp)


def test_what_other_nodes_publish_reaches_the_policy(robot, inside) -> None:
    policy = Watching()
    inside(f"robot.state_topics:={list(TOPICS)}", policy=policy)
    make, qos = robot.graph.message, robot.graph.qos("state_publisher")
    kinds = {
        "/p": "geometry_msgs/msg/PoseStamped",
        "/f": "geometry_msgs/msg/WrenchStamped",
        "/a": "std_msgs/msg/Float64MultiArray",
        "/o": "sensor_msgs/msg/JointState",
    }
    senders = {topic: robot.node.create_publisher(make(kind), topic, qos) for topic, kind in kinds.items()}
    messages = {topic: make(kind)() for topic, kind in kinds.items()}
    messages["/p"].pose.position.x, messages["/p"].pose.orientation.w = 0.5, 1.0
    messages["/f"].wrench.force.z, messages["/f"].wrench.torque.x = -9.0, 0.25
    messages["/a"].data = [1.0, 2.0, 3.0]
    messages["/o"].name, messages["/o"].position = ["lift"], [0.75]

    def send() -> None:
        for topic, sender in senders.items():
            sender.publish(messages[topic])
        joints = robot.joint_state(robot.names, robot.positions)
        joints.velocity = [0.1] * len(robot.names)
        robot.joint_publisher.publish(joints)
        robot.send_frame(joints=False)

    robot.until(lambda: len(policy.seen) > 5, send)
    found = policy.seen[-1]
    tip = Kinematics.from_urdf("demo").forward(np.array(robot.positions[:7])).position
    np.testing.assert_allclose(found.state["all"][:3], tip, atol=1e-9)
    np.testing.assert_array_equal(found.state["all"][3:10], 0.1)
    expected = [0.5, 0, 0, 0, 0, 0, 1, 0, 0, -9, 0.25, 0, 0, 1, 2, 3, 0.75]
    np.testing.assert_array_equal(found.state["all"][10:], expected)
    assert found.images["image"].shape[0] == 2
