"""Mistakes in the section ``takeover``, and the files for common devices."""

import pytest

from vla_ros.config import build, load
from vla_ros.config.files import config_file
from vla_ros.errors import ConfigError

LEADER = {"takeover.input": "leader", "takeover.leader": "/leader/joint_states"}
JOY = {
    "takeover.input": "joy",
    "takeover.joy": "/joy",
    "takeover.buttons": ["deadman = 4"],
    "takeover.axes": ["x = 1"],
}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (LEADER | {"takeover.joints": ["a = b * "]}, "takeover.joints: found .* expected JOINT = LEADER_JOINT"),
        (LEADER | {"takeover.joints": ["a = b", "a = c"]}, "takeover.joints: found a twice"),
        (LEADER | {"takeover.joints": ["a = b", "c = b"]}, "of the leader.*: found b twice"),
        (LEADER | {"takeover.joints": ["a = b * 0"]}, "takeover.joints: found a scale of 0"),
        (
            LEADER | {"takeover.gripper": "g = 1..1"},
            "takeover.gripper: found 'g = 1..1', expected .* ends",
        ),
        (LEADER | {"takeover.leader": ""}, "takeover.leader: found no topic"),
        (LEADER | {"takeover.leader": "/joint_states"}, "takeover.leader: found the joint states of 'arm' itself"),
        (LEADER | {"takeover.topic": "/twist"}, "takeover.topic: found a value with takeover.input leader"),
        (LEADER | {"takeover.axes": ["x = 1"]}, "takeover.axes: found a value with takeover.input leader"),
        (LEADER | {"takeover.allow_reach": True}, "takeover.allow_reach: expected .* a button reach"),
        (
            LEADER | {"takeover.lost_distance": 0.1},
            "lost_distance: found 0.1, expected more than takeover.tolerance",
        ),
        (JOY | {"takeover.leader": "/leader"}, "takeover.leader: found a value with takeover.input joy"),
        (JOY | {"takeover.buttons": ["correct = 5"]}, "expected a Joy with a button deadman"),
        (
            JOY | {"takeover.buttons": ["deadman = 4", "jump = 5"]},
            "takeover.buttons: .* NAME = INDEX",
        ),
        (JOY | {"takeover.axes": ["x = 1 * 0"]}, "takeover.axes: found a scale of 0"),
        (JOY | {"takeover.axes": ["forward = 1"]}, "takeover.axes: found .* of x, y, z"),
        (JOY | {"takeover.axes": []}, "takeover.axes: found none"),
        (JOY | {"takeover.arm": "left"}, "takeover.arm: found 'left'"),
        (JOY | {"node.clock": "inputs"}, "takeover.input: found joy with node.clock inputs"),
        (
            {"takeover.input": "twist", "takeover.joy": "/joy", "takeover.buttons": ["deadman = 4"]},
            "takeover.topic",
        ),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(options)


@pytest.mark.parametrize(
    ("device", "robot"),
    [("leader_so101", "so101"), ("leader_gello", "fr3"), ("leader_aloha", "aloha"), ("pad", "fr3")],
)
def test_the_files_for_common_devices_fit_their_robots(device: str, robot: str) -> None:
    config = load([config_file(robot), config_file(device)], [])
    takeover = config.takeover
    assert takeover.input == ("joy" if device == "pad" else "leader")
    for arm in config.arms:
        mapped = [joint.name for joint in takeover.parsed_joints]
        assert mapped in ([], list(arm.robot.joint_names))
        assert bool(arm.leader) == (takeover.input == "leader")
