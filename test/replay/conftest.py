"""Bags on demand, written by rosbags, with what a test needs in them."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from vla_ros.graph.messages import message_types
from vla_ros.policies import Policy

ROOT = Path(__file__).resolve().parents[2]
START = 1_790_002_000_000_000_000


@pytest.fixture(scope="session")
def store():
    return get_typestore(Stores.ROS2_JAZZY)


@pytest.fixture(scope="session")
def make():
    message = message_types("jazzy").message

    def header(stamp, frame="camera"):
        time = message("builtin_interfaces/msg/Time")(sec=stamp // 10**9, nanosec=stamp % 10**9)
        return message("std_msgs/msg/Header")(stamp=time, frame_id=frame)

    def image(stamp, pixels):
        height, width, _ = pixels.shape
        return message("sensor_msgs/msg/Image")(
            header=header(stamp), height=height, width=width, encoding="rgb8", step=3 * width, data=pixels
        )

    def joints(stamp, positions, names=None):
        names = names or [f"joint_{index + 1}" for index in range(len(positions))]
        return message("sensor_msgs/msg/JointState")(header=header(stamp, ""), name=names, position=positions)

    def array(values):
        return message("std_msgs/msg/Float64MultiArray")(data=values)

    def text(words):
        return message("std_msgs/msg/String")(data=words)

    return SimpleNamespace(image=image, joints=joints, array=array, text=text, start=START)


@pytest.fixture
def write_bag(store, tmp_path):
    """``write_bag(name, [(time, topic, message), ...], storage="mcap", compress="")`` gives the bag's folder."""

    def write(name, messages, storage="mcap", compress=""):
        plugin = StoragePlugin.MCAP if storage == "mcap" else StoragePlugin.SQLITE3
        writer = Writer(tmp_path / name, version=9, storage_plugin=plugin)
        if compress:
            writer.set_compression(getattr(CompressionMode, compress.upper()), CompressionFormat.ZSTD)
        with writer:
            connections = {}
            for at, topic, message in messages:
                if topic not in connections:
                    connections[topic] = writer.add_connection(topic, message.TYPE, typestore=store)
                writer.write(connections[topic], at, message_types("jazzy").serialize(message))
        return tmp_path / name

    return write


HOME = [0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0]


def episode(make, begin, instruction):
    """Two seconds at 10 Hz that a policy can answer from the image's brightness."""
    messages = [(begin, "/vla_policy/instruction", make.text(instruction))]
    for step in range(20):
        stamp = begin + step * 100_000_000
        pixels = np.full((48, 64, 3), 5 * step, np.uint8)
        action = [0.01, -0.002 * step, 0.0, 0.0, 0.0, 0.0, float(step < 10)]
        messages += [  # two drivers publish the joints
            (stamp, "/joint_states", make.joints(stamp, HOME[:4])),
            (stamp, "/joint_states", make.joints(stamp, HOME[4:], ["joint_5", "joint_6", "joint_7"])),
            (stamp + 1_000_000, "/camera/image_raw", make.image(stamp, pixels)),
            (stamp + 21_000_000, "/vla_policy/action", make.array(action)),
        ]
    return messages


@pytest.fixture
def small_recording(make):
    """One episode: camera, joint states, actions, an instruction."""
    return episode(make, make.start, "pick up the red cube")


@pytest.fixture
def recording(make, small_recording):
    return small_recording + episode(make, make.start + 2_000_000_000, "pick up the blue ball")


@pytest.fixture(scope="session")
def jpeg_bag():
    """A bag by rosbag2 of Jazzy; see test/data/bags/README.md."""
    return ROOT / "test" / "data" / "bags" / "mcap_jpeg"


class BrightnessPolicy(Policy):
    """Knows the answer to ``small_recording``: it reads the step from the image's brightness."""

    def __init__(self, gain=1.0, seconds=0.0, flip_gripper=False, horizon=1):
        from vla_ros.contract.spec import PolicySpec

        self.spec = PolicySpec(horizon=horizon)
        self.gain, self.seconds, self.flip, self.horizon = gain, seconds, flip_gripper, horizon
        self.asked = []

    def infer(self, session, observation):
        from vla_ros.types import ActionChunk

        self.asked.append((observation.stamp, observation.instruction, observation.state))
        time.sleep(self.seconds)
        step = round(float(observation.images["image"].mean()) / 5)
        is_open = (step < 10) != self.flip
        action = np.array([0.01, -0.002 * step, 0.0, 0.0, 0.0, 0.0, float(is_open)])
        action[:3] *= self.gain
        return ActionChunk(
            np.repeat(action[None], self.horizon, 0), observation.stamp, np.clip(action * 20, -1, 1)[None]
        )


@pytest.fixture
def brightness_policy():
    return BrightnessPolicy


@pytest.fixture
def replay_config():
    """The simulation's arm, the bag's joints, no orientation fix."""
    from vla_ros.config import build

    return build(
        {
            "robot.urdf": "demo",
            "robot.tip_frame": "tool",
            "control.rate_hz": 10.0,
            "limits.max_translation_step": 0.1,
        }
    )


@pytest.fixture
def play(replay_config):
    """``play(path, policy, options, **more)`` gives the outcome of one bag."""
    from vla_ros_lab.replay import evaluate
    from vla_ros_lab.replay.play import ReplayOptions

    def run(path, policy, options=None, *, config=None, partial=None):
        policy.load()
        return evaluate.play(
            evaluate.BagJob(path, config or replay_config, options or ReplayOptions(), partial), lambda: policy
        )

    return run
