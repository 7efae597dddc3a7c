"""Bags on demand, written by rosbags, with what a test needs in them."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

ROOT = Path(__file__).resolve().parents[2]
START = 1_790_002_000_000_000_000


@pytest.fixture(scope="session")
def store():
    return get_typestore(Stores.ROS2_JAZZY)


@pytest.fixture(scope="session")
def make(store):
    """Messages by short names, with stamps in nanoseconds."""
    types = store.types

    def header(stamp, frame="camera"):
        time = types["builtin_interfaces/msg/Time"](sec=stamp // 10**9, nanosec=stamp % 10**9)
        return types["std_msgs/msg/Header"](stamp=time, frame_id=frame)

    def image(stamp, pixels):
        height, width, _ = pixels.shape
        return types["sensor_msgs/msg/Image"](
            header=header(stamp),
            height=height,
            width=width,
            encoding="rgb8",
            is_bigendian=0,
            step=3 * width,
            data=np.ascontiguousarray(pixels).reshape(-1),
        )

    def joints(stamp, positions, names=None):
        positions = np.asarray(positions, float)
        names = names or [f"joint_{index + 1}" for index in range(len(positions))]
        empty = np.zeros(0)
        return types["sensor_msgs/msg/JointState"](
            header=header(stamp, ""), name=list(names), position=positions, velocity=empty, effort=empty
        )

    def array(values):
        layout = types["std_msgs/msg/MultiArrayLayout"](dim=[], data_offset=0)
        return types["std_msgs/msg/Float64MultiArray"](layout=layout, data=np.asarray(values, float))

    def text(words):
        return types["std_msgs/msg/String"](data=words)

    def twist(stamp, linear, angular):
        vector = types["geometry_msgs/msg/Vector3"]
        body = types["geometry_msgs/msg/Twist"](
            linear=vector(*map(float, linear)), angular=vector(*map(float, angular))
        )
        return types["geometry_msgs/msg/TwistStamped"](header=header(stamp), twist=body)

    def trajectory(stamp, names, positions):
        duration = types["builtin_interfaces/msg/Duration"](sec=0, nanosec=0)
        empty = np.zeros(0)
        point = types["trajectory_msgs/msg/JointTrajectoryPoint"](
            positions=np.asarray(positions, float),
            velocities=empty,
            accelerations=empty,
            effort=empty,
            time_from_start=duration,
        )
        return types["trajectory_msgs/msg/JointTrajectory"](
            header=header(stamp), joint_names=list(names), points=[point]
        )

    return SimpleNamespace(
        image=image, joints=joints, array=array, text=text, twist=twist, trajectory=trajectory, start=START
    )


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
            for time, topic, message in messages:
                kind = message.__msgtype__
                if topic not in connections:
                    connections[topic] = writer.add_connection(topic, kind, typestore=store)
                writer.write(connections[topic], time, store.serialize_cdr(message, kind))
        return tmp_path / name

    return write


@pytest.fixture
def small_recording(make):
    """Two seconds at 10 Hz: camera, joint states, actions, an instruction."""
    messages = [(make.start, "/vla_policy/instruction", make.text("pick up the red cube"))]
    for step in range(20):
        stamp = make.start + step * 100_000_000
        pixels = np.full((48, 64, 3), 5 * step, np.uint8)
        action = [0.01, -0.002 * step, 0.0, 0.0, 0.0, 0.0, float(step < 10)]
        messages += [
            (stamp, "/joint_states", make.joints(stamp, np.full(7, 0.01 * step))),
            (stamp + 1_000_000, "/camera/image_raw", make.image(stamp, pixels)),
            (stamp + 21_000_000, "/vla_policy/action", make.array(action)),
        ]
    return messages


@pytest.fixture(scope="session")
def jpeg_bag():
    """A bag by rosbag2 of Jazzy; see test/data/bags/README.md."""
    return ROOT / "test" / "data" / "bags" / "mcap_jpeg"


@pytest.fixture(scope="session")
def golden_bags():
    """Folder of more bags by rosbag2, where it is at hand."""
    folder = Path(os.environ.get("VLA_ROS_GOLDEN", ROOT.parent / "shared" / "golden")) / "bags"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; set VLA_ROS_GOLDEN to where the golden data lie")
    return folder
