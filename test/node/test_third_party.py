import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from test.command import VLA_ROS, vla_ros
from vla_ros.vision.messages import encode_image

PACKAGE = Path(__file__).parents[1] / "data" / "two_eyes"
CAMERAS = ("-p", "camera.topics:=[/camera/image_raw, /wrist]", "-p", "camera.keys:=[front, wrist]")
SIZES = ("-p", "camera.width:=[64, 32]", "-p", "camera.height:=[48, 40]")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is importable, and its entry point found, in processes that start from here."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), *sys.path]))


def image(height: int, width: int, level: int, stamp: int) -> bytes:
    return encode_image(np.full((height, width, 3), level, np.uint8), stamp, "camera")


def test_its_options_are_checked_and_printed() -> None:
    text = vla_ros("config", "-p", "policy.name:=two_eyes", "-p", "policy.gain:=0.002").stdout
    assert "# Metres per level of brightness. A number from 0 to 0.1 (m); may change while running." in text
    assert "gain: 0.002" in text
    assert " checkpoint:" not in text.split("camera:")[0]
    for words, said in (
        ("policy.gian:=1.0", "policy.gian: no such parameter; did you mean 'policy.gain'?"),
        ("policy.gain:=1.0", "policy.gain: found 1.0 (float), expected a number from 0 to 0.1 (m)"),
        ("policy.checkpoint:=x", "policy.checkpoint: the policy 'two_eyes' (policy.name) runs no checkpoint"),
    ):
        assert said in vla_ros("config", "-p", "policy.name:=two_eyes", "-p", words, status=1).stderr


def test_a_checkpoint_that_it_claims_is_run_by_it(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"type": "two_eyes", "input_features": {}}')  # LeRobot could run it, too
    program = "import sys; from vla_ros.policies.base import policy_of; print(policy_of(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "two_eyes\n"


def test_it_runs_in_the_node_with_two_cameras_and_a_session(robot, start) -> None:
    graph = robot.graph
    wrist = robot.node.create_publisher(graph.message("sensor_msgs/msg/Image"), "/wrist", graph.qos("camera"))
    options = ("-p", "policy.name:=two_eyes", "-p", "policy.gain:=0.002", "-p", "policy.instruction:=look")
    start(*options, *CAMERAS, *SIZES, "-p", "control.execute_steps:=1", script=(*VLA_ROS, "run"))
    level = iter(range(100, 10_000))

    def send() -> None:
        robot.send_joints()
        stamp = robot.now()
        wrist.publish(image(40, 32, 50, stamp))
        robot.send_frame(image(48, 64, next(level) % 200, stamp))

    # One level brighter from frame to frame: what the session remembers of this robot.
    robot.until(lambda: any(np.isclose(one.data[0], 0.002) for one in robot.actions), send, patience=60)
    (first, *_) = robot.actions
    assert first.data[0] == 0.0, "a session begins without a memory"
    assert all(np.isclose(one.data[1], 50e-5) for one in robot.actions)


def test_it_is_replayed(tmp_path) -> None:
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    with Writer(tmp_path / "bag", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        kind = "sensor_msgs/msg/Image"
        front, wrist = (writer.add_connection(topic, kind, typestore=store) for topic in ("/front", "/wrist"))
        action = writer.add_connection("/action", "std_msgs/msg/Float64MultiArray", typestore=store)
        layout = store.types["std_msgs/msg/MultiArrayLayout"](dim=[], data_offset=0)
        for step in range(20):
            stamp = 1_790_000_000_000_000_000 + step * 100_000_000
            writer.write(wrist, stamp, image(40, 32, 50, stamp))
            writer.write(front, stamp, image(48, 64, 100 + step, stamp))
            data = np.array([0.001, 5e-4, 0, 0, 0, 0, 1.0])
            message = store.types["std_msgs/msg/Float64MultiArray"](layout=layout, data=data)
            writer.write(action, stamp, store.serialize_cdr(message, "std_msgs/msg/Float64MultiArray"))
    options = ("-p", "policy.name:=two_eyes", "-p", "policy.instruction:=look", "-p", "control.rate_hz:=10.0")
    cameras = ("-p", "camera.topics:=[/front, /wrist]", "-p", "camera.keys:=[front, wrist]")
    words = [str(tmp_path / "bag"), *options, *cameras, "--json", str(tmp_path / "result.json"), "--no-trials"]
    vla_ros("replay", *words, "--topics", "truth=/action")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["frames"]["compared"] == 20
    assert result["mae"] < 2e-5, "without a memory, each step would be off by 1 mm in x"


def test_it_is_measured(tmp_path) -> None:
    words = ("--policy", "two_eyes", "-p", "policy.side:=16", *CAMERAS, *SIZES, "--steps", "5")
    text = vla_ros("bench", *words, "--json", str(tmp_path / "bench.json")).stdout
    assert "policy 'two_eyes': 5 steps, 2 action(s) of 7 numbers" in text
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["chunk"] == [2, 7]
    assert 0 < result["stages_ms"]["preprocess"] <= result["total_ms"]["p50"] <= result["total_ms"]["p99"]
