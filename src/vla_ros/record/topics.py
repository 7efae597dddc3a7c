"""The topics of a node that are recorded."""

from collections.abc import Callable
from typing import NamedTuple

from vla_ros.config import Config, node_topics
from vla_ros.config.control import ENVIRONMENT
from vla_ros.config.sections import GRIPPER_ACTIONS, STATE_TOPIC_TYPES
from vla_ros.control.command import message_type
from vla_ros.vision.messages import IMAGE_TYPES

EVENT_QOS, LATCHED = "event", ("instruction", "event")
"""Profiles of ``~/event``, and of topics whose last message is part of the state."""

CAMERA_INFO, TRANSFORM = "sensor_msgs/msg/CameraInfo", "tf2_msgs/msg/TFMessage"
TRANSFORMS = ("/tf", "/tf_static")
"""Topics of transforms; of the second, all messages are part of the state, because each has other frames."""

_JOINTS, _ARRAY, _TEXT = "sensor_msgs/msg/JointState", "std_msgs/msg/Float64MultiArray", "std_msgs/msg/String"
_INPUTS = {"twist": "Twist", "twist_stamped": "TwistStamped", "pose": "PoseStamped"}


class Topic(NamedTuple):
    """A topic of a bag."""

    name: str  # fully qualified
    type: str  # ``pkg/msg/Type``
    qos: str = "state_publisher"  # profile that a player offers, a name in :data:`~vla_ros.graph.qos.PROFILES`


class Recorded(NamedTuple):
    """A message of a bag."""

    time: int  # ns, when it was received or sent
    published: int  # ns, when it was published
    topic: str
    data: bytes | memoryview  # CDR with its header


def recorder_name(node: str) -> str:
    """Return the full name of the recorder of the node with this full name."""
    return f"{node}_recorder"


def recorded_topics(config: Config, resolve: Callable[[str], str]) -> list[Topic]:
    """Return the topics that a node reads and publishes; ``resolve`` returns the full name of one."""
    takeover = config.takeover
    named = [(one.topic, IMAGE_TYPES[one.transport]) for one in config.camera.each]
    named += [(arm.joint_states, _JOINTS) for arm in config.arms]
    named += [
        (each.topic, f"{STATE_TOPIC_TYPES[each.type]}/msg/{each.type}") for each in config.robot.parsed_state_topics
    ]
    for arm in config.arms:
        outputs = (arm.command, arm.output), (arm.gripper_topic, arm.gripper.output)
        named += [
            (topic, message_type(output))
            for topic, output in outputs
            if topic and output not in (ENVIRONMENT, *GRIPPER_ACTIONS)
        ]
    named += [(topic, _ARRAY) for topic in (node_topics.ACTION, node_topics.PERSON_ACTION)]
    named += [(topic, "sensor_msgs/msg/Joy") for topic in (takeover.joy,) if topic]
    if takeover.input == "leader":
        named += [(arm.leader, _JOINTS) for arm in config.arms if arm.leader]
    elif takeover.input in _INPUTS:
        named.append((takeover.topic, f"geometry_msgs/msg/{_INPUTS[takeover.input]}"))
    found = [Topic(resolve(topic), kind) for topic, kind in named]
    found += [Topic(resolve(topic), CAMERA_INFO, "instruction") for topic in config.camera.info if topic]
    found += [
        Topic(resolve(topic), _TEXT, "instruction") for topic in (node_topics.INSTRUCTION, node_topics.STATUS)
    ]
    found.append(Topic(resolve(node_topics.EVENT), _TEXT, EVENT_QOS))
    if any(config.camera.info):
        found += [Topic(resolve(TRANSFORMS[0]), TRANSFORM), Topic(resolve(TRANSFORMS[1]), TRANSFORM, EVENT_QOS)]
    return list({topic.name: topic for topic in found}.values())
