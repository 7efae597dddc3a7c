"""A recorder that was killed: after the repair, ros2 bag reads and plays what it wrote."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from vla_ros.vision.messages import encode_image, image_stamp
from vla_ros_lab.replay.bag import Bag

pytestmark = pytest.mark.ros


def child(process: int) -> int:
    """The recorder that a node has started."""
    (found,) = [
        word for file in Path(f"/proc/{process}/task").glob("*/children") for word in file.read_text().split()
    ]
    return int(found)


@pytest.mark.usefixtures("ros2_bag")
@pytest.mark.parametrize("own", [True, False], ids=["of the node", "of a person"])
def test_ros2_bag_reads_and_plays_a_repaired_bag(robot, policy, program, tmp_path: Path, own: bool) -> None:
    options = "record.what:=all", f"record.folder:={tmp_path}"
    node = policy("policy.name:=hold", "control.armed:=true", *(options if own else ()))
    node.wait_for("is ready")
    if not own:
        words = [word for option in (*options, "node.backend:=rclpy") for word in ("-p", option)]
        recorder = program(sys.executable, "-m", "vla_ros.cli", "record", *words).process.pid

    def written() -> list[Path]:
        """The bag, once it has images: a subscription to them may match long after the others."""
        robot.send()
        return [file for file in tmp_path.glob("*/*.mcap") if file.read_bytes().count(b"rgb8") > 20]

    robot.wait(written, "recording")
    if own:
        os.kill(node.process.pid, signal.SIGSTOP)  # it would start another one
        recorder = child(node.process.pid)
        assert robot.node.count_subscribers("/camera/image_raw") == 1
    os.kill(recorder, signal.SIGKILL)
    bag = written()[0].parent
    assert not (bag / "metadata.yaml").exists()
    subprocess.run([sys.executable, "-m", "vla_ros.cli", "record", "--repair", str(bag)], check=True, timeout=60)
    with Bag(bag) as content:
        images = {image_stamp(record.data): bytes(record.data) for record in content.records(["/camera/image_raw"])}
        if own:  # who subscribes may discover the node later than the robot
            assert len(list(content.records(["/arm/joint_command"]))) > 5
    assert len(images) > 10
    for number, stamp in enumerate(robot.stamps):
        sent = bytes(encode_image(np.full((48, 64, 3), number % 255, np.uint8), stamp, "camera"))
        assert images.get(stamp, sent)[: len(sent)] == sent
    assert set(images) <= set(robot.stamps)
    info = ["ros2", "bag", "info", str(bag)]
    shown = subprocess.run(info, check=True, capture_output=True, text=True, timeout=60)
    assert "/camera/image_raw | Type: sensor_msgs/msg/Image" in shown.stdout, shown.stdout
    played = program("ros2", "bag", "play", str(bag), "--rate", "10", "--remap", "/camera/image_raw:=/played")
    assert played.process.wait(60) == 0, played.output
