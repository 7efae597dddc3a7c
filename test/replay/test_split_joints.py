from pathlib import Path

import numpy as np
import pytest

from vla_ros.config import Config, build, load
from vla_ros.control.clock import Clock
from vla_ros.control.inputs import Inputs
from vla_ros.control.joints import JointStateMerger
from vla_ros.graph.origin import stamp_of
from vla_ros.node.receiver import joint_state_of
from vla_ros_lab.replay import series
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.storage import BagError
from vla_ros_lab.replay.topics import select_topics

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo_config():
    return load([ROOT / "config" / "demo.yaml"])


def test_at_every_moment_the_joints_are_those_of_the_live_node(write_bag, make, demo_config):
    """Random publishers of parts, some late, some silent for a while: against the live node's own objects."""
    rng = np.random.default_rng(4)
    groups = [["a", "b"], ["c"], ["finger"], ["b", "c"]]
    needed, timeout, time = ("a", "b", "c"), 0.1, make.start
    messages, live, expected = [], JointStateMerger(needed), []
    inputs = Inputs(Clock())
    for _ in range(300):
        time += int(rng.choice([3, 5, 20, 150], p=[0.4, 0.4, 0.17, 0.03])) * 1_000_000
        names = groups[rng.choice(4, p=[0.4, 0.3, 0.2, 0.1])]
        stamp = 0 if rng.random() < 0.1 else time - int(rng.integers(0, 8)) * 1_000_000
        message = make.joints(stamp, rng.normal(size=len(names)), names)
        messages.append((time, "/joint_states", message))
        whole = live.add(joint_state_of(message, time), stamp_of(message), time, timeout)
        if whole is not None and set(needed) <= set(whole.joints.names):  # as PolicyNode: else it is refused
            inputs.set_joints(whole.joints)
        expected.append((time, inputs.snapshot.joints))
    messages.append((make.start, "/camera/image_raw", make.image(make.start, np.zeros((4, 4, 3), np.uint8))))
    with Bag(write_bag("parts", sorted(messages, key=lambda item: item[0]))) as bag:
        feed = series.read_recording(bag, select_topics(bag.topics, demo_config, {}), needed, timeout).joints
    compared = 0
    for time, joints in expected:
        found = feed.newest(time)
        if joints is None:
            assert found is None
            continue
        assert dict(zip(found.names, found.positions, strict=True)) == dict(
            zip(joints.names, joints.positions, strict=True)
        )
        assert found.stamp == joints.stamp
        compared += 1
    assert compared > 200


def test_joints_that_are_never_known_together_stay_as_recorded(write_bag, make, demo_config):
    messages = [(make.start, "/camera/image_raw", make.image(make.start, np.zeros((4, 4, 3), np.uint8)))]
    messages += [(make.start + i, "/joint_states", make.joints(make.start, [0.0], ["a"])) for i in range(3)]
    with Bag(write_bag("half", messages)) as bag:
        feed = series.read_recording(bag, select_topics(bag.topics, demo_config, {}), ("a", "b")).joints
    assert feed.main.names == ("a",)
    assert len(feed.main.times) == 3


def test_arms_on_topics_of_their_own_are_read_together(write_bag, make):
    config = build(
        {
            "robot.arms": ["left", "right"],
            "left.joint_states": "/left/joints",
            "right.joint_states": "/right/joints",
        }
        | {"left.command": "/left/command", "right.command": "/right/command"}
    )
    messages = [(make.start, "/camera/image_raw", make.image(make.start, np.zeros((4, 4, 3), np.uint8)))]
    for step in range(5):
        at = make.start + step * 10_000_000
        messages += [(at, "/left/joints", make.joints(at, [float(step)], ["a"]))]
        messages += [(at + 1, "/right/joints", make.joints(at, [-float(step)], ["b"]))]
    with Bag(write_bag("two", messages)) as bag:
        selection = select_topics(bag.topics, config, {})
        assert selection.joint_states == ("/left/joints", "/right/joints")
        assert select_topics(bag.topics, Config(), {"joint_states": "/left/joints,/right/joints"}) == selection
        feed = series.read_recording(bag, selection, ("a", "b")).joints
        with pytest.raises(BagError, match="/left/joints and /right/joints have the same names"):
            series.read_recording(bag, selection, ("a", "a"))
    found = feed.newest(make.start + 40_000_002)
    assert dict(zip(found.names, found.positions, strict=True)) == {"a": 4.0, "b": -4.0}


def test_velocities_and_efforts_are_read_where_a_publisher_gives_them(write_bag, make, demo_config):
    def joints(time, names, **more):
        message = make.joints(time, [0.1] * len(names), names)
        for field, numbers in more.items():
            setattr(message, field, np.array(numbers))
        return time, "/joint_states", message

    messages = [
        (make.start, "/camera/image_raw", make.image(make.start, np.zeros((4, 4, 3), np.uint8))),
        joints(make.start, ["a", "b"], velocity=[1.0, 2.0]),
        joints(make.start + 1000, ["c"], effort=[3.0]),
        joints(make.start + 2000, ["a", "b"], velocity=[4.0]),
    ]
    with Bag(write_bag("dynamic", messages)) as bag:
        recording = series.read_recording(bag, select_topics(bag.topics, demo_config, {}), ("a", "b", "c"))
        plain = series.read_recording(bag, select_topics(bag.topics, demo_config, {})).joints
    found = recording.inputs(make.start + 1500, "go").joints
    assert found.names == ("a", "b", "c")
    np.testing.assert_array_equal(found.velocities, [1.0, 2.0, np.nan])
    np.testing.assert_array_equal(found.efforts, [np.nan, np.nan, 3.0])
    assert plain.newest(make.start + 500).velocities.tolist() == [1.0, 2.0]
    assert not len(plain.newest(make.start + 3000).velocities), "one number for two joints"
