"""A recorder that was killed: after the repair, ros2 bag reads and plays what it wrote."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

pytestmark = pytest.mark.ros


@pytest.mark.usefixtures("ros2_bag")
def test_ros2_bag_reads_and_plays_a_repaired_bag(robot, policy, program, tmp_path: Path) -> None:
    policy("policy.name:=hold").wait_for("is ready")
    options = "-p", "record.what:=all", "-p", f"record.folder:={tmp_path}", "-p", "node.backend:=rclpy"
    recorder = program(sys.executable, "-m", "vla_ros.cli", "record", *options)

    def written() -> list[Path]:
        robot.send()
        return [file for file in tmp_path.glob("*/*.mcap") if file.stat().st_size > 200_000]

    robot.wait(written, "recording")
    os.kill(recorder.process.pid, signal.SIGKILL)
    bag = written()[0].parent
    assert not (bag / "metadata.yaml").exists()
    subprocess.run([sys.executable, "-m", "vla_ros.cli", "record", "--repair", str(bag)], check=True, timeout=60)
    info = ["ros2", "bag", "info", str(bag)]
    shown = subprocess.run(info, check=True, capture_output=True, text=True, timeout=60)
    assert "/camera/image_raw | Type: sensor_msgs/msg/Image" in shown.stdout, shown.stdout
    played = program("ros2", "bag", "play", str(bag), "--rate", "10", "--remap", "/camera/image_raw:=/played")
    assert played.process.wait(60) == 0, played.output
