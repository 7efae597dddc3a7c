"""`ros2 bag play` of a recorded bag drives the node: every frame is answered or counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from vla_ros.vision.messages import encode_image

pytestmark = pytest.mark.ros


def write_bag(folder: Path, frames: int, rate: float) -> None:
    """A camera and joint states, as `ros2 bag record` leaves them, a year ago."""
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    began = 1_730_000_000_000_000_000
    header, stamp, joints = (
        store.types[name]
        for name in ("std_msgs/msg/Header", "builtin_interfaces/msg/Time", "sensor_msgs/msg/JointState")
    )
    names = [f"joint_{number}" for number in range(1, 8)]
    home = np.array([0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0])
    empty = np.zeros(0)
    with Writer(folder, version=9, storage_plugin=StoragePlugin.SQLITE3) as writer:
        camera = writer.add_connection("/camera/image_raw", "sensor_msgs/msg/Image", typestore=store)
        arm = writer.add_connection("/joint_states", "sensor_msgs/msg/JointState", typestore=store)
        for index in range(frames):
            at = began + int(index * 1e9 / rate)
            when = stamp(sec=at // 10**9, nanosec=at % 10**9)
            state = joints(
                header=header(stamp=when, frame_id=""), name=names, position=home, velocity=empty, effort=empty
            )
            writer.write(arm, at, store.serialize_cdr(state, joints.__msgtype__))
            picture = np.full((48, 64, 3), index, np.uint8)
            writer.write(camera, at, bytes(encode_image(picture, at, "camera")))


@pytest.mark.skipif(shutil.which("ros2") is None, reason="the ros2 command is not installed")
def test_a_recorded_bag_drives_the_node(
    robot: Any, policy: Callable[..., Any], program: Callable[..., Any], tmp_path: Path
) -> None:
    write_bag(tmp_path / "bag", frames=40, rate=20.0)
    policy("use_sim_time:=true")
    robot.wait(lambda: any("is ready" in line for line in robot.log), "the node")
    play = program("ros2", "bag", "play", str(tmp_path / "bag"), "--clock", "100", "--delay", "2")
    assert play.process.wait(60) == 0, play.output
    robot.wait(lambda: len(robot.actions) >= 38, f"40 actions, {len(robot.actions)} came")
