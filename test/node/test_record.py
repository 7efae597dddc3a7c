"""The recorder beside a running node: what it writes; the node goes on when it is killed or its disk is full."""

import json
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from vla_ros.graph.messages import message_types
from vla_ros.replay.bag import Bag
from vla_ros.vision.messages import image_stamp

EVENT = "/vla_policy/event"
PATIENCE = 60.0  # s; a process starts, on a machine with other work


def recorder() -> int:
    """The process id of the recorder, the only child of this process; 0 if there is none."""
    children = [file.read_text().split() for file in Path("/proc/self/task").glob("*/children")]
    found = [int(child) for each in children for child in each]
    alive = []
    for child in found:
        with suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
            alive += [child] if b"record" in Path(f"/proc/{child}/cmdline").read_bytes() else []
    assert len(alive) <= 1
    return alive[0] if alive else 0


def texts(bag: Bag) -> list[dict[str, Any]]:
    types = message_types()
    cls = types.message("std_msgs/msg/String")
    return [json.loads(types.deserialize(bytes(record.data), cls).data) for record in bag.records([EVENT])]


def bags(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/metadata.yaml"))


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    return [f"record.folder:={tmp_path}", "timeouts.driver:=0.5"]


def test_an_episode_is_recorded_with_its_label(
    robot, inside: Callable[..., Any], options: list[str], tmp_path: Path
) -> None:
    label = robot.node.create_publisher(
        robot.graph.message("std_msgs/msg/String"), "/vla_policy/label", robot.graph.qos("command")
    )
    node = inside("record.what:=episodes", *options)
    robot.until(lambda: robot.says("recording episodes", "recording"), robot.send_frame, PATIENCE)
    before = int(robot.diagnostics["recording"]["messages"])
    robot.until(lambda: int(robot.diagnostics["recording"]["messages"]) > before + 50, robot.send_frame, PATIENCE)
    label.publish(robot.graph.message("std_msgs/msg/String")(data="success"))
    robot.until(lambda: bags(tmp_path), robot.send_frame, PATIENCE)
    with Bag(bags(tmp_path)[0]) as bag:
        found = {topic: list(bag.records([topic])) for topic in bag.topics}
        assert texts(bag)[-1]["event"] == "episode_end"
        assert texts(bag)[-1]["label"] == "success"
        assert any(each["instruction"] == "go on" for each in texts(bag))
        assert not bag.losses
    stamps = [image_stamp(record.data) for record in found["/camera/image_raw"]]
    assert len(set(stamps)) == len(stamps) >= 20
    assert set(stamps) <= robot.sent
    assert len(found["/arm/joint_command"]) >= 10
    assert len(found["/vla_policy/action"]) >= 10
    # The recorder is a subscriber of the commands, but no driver.
    robot.node.destroy_subscription(robot.driver)
    robot.until(lambda: robot.status.get("stopped_by") == "driver_gone", robot.send_frame, PATIENCE)
    node.reset()


def test_a_killed_recorder_loses_a_second_at_most_and_the_arm_goes_on(
    robot, inside: Callable[..., Any], options: list[str], tmp_path: Path
) -> None:
    inside("record.what:=all", *options)
    robot.until(
        lambda: int(robot.diagnostics.get("recording", {}).get("messages", 0)) > 50, robot.send_frame, PATIENCE
    )
    victim, killed = recorder(), robot.now()
    commands = len(robot.commands)
    os.kill(victim, signal.SIGKILL)
    robot.until(lambda: recorder() not in (0, victim) and bags(tmp_path), robot.send_frame, PATIENCE)
    robot.until(lambda: len(robot.commands) > commands + 20, robot.send_frame, PATIENCE)
    assert not robot.status["stopped_by"]
    with Bag(bags(tmp_path)[0]) as bag:
        assert not bag.losses
        last = max(record.time for record in bag.records(["/camera/image_raw"]))
    assert killed - last < 1_000_000_000
    # The disk is full: recording stops with a reason, and nothing else.
    robot.until(lambda: robot.says("recording all", "recording"), robot.send_frame, PATIENCE)
    resource.prlimit(recorder(), resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    robot.until(lambda: robot.says("recording has stopped", "recording"), robot.send_frame, PATIENCE)
    commands = len(robot.commands)
    robot.until(lambda: len(robot.commands) > commands + 20, robot.send_frame, PATIENCE)
    assert robot.status["state"] == "armed"
