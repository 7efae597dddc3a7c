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

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")
pytest.importorskip("mcap", reason="the library mcap is not installed (extra 'replay')")

from vla_ros.config import load
from vla_ros.errors import VlaRosError
from vla_ros.graph.messages import message_types
from vla_ros.graph.wiring import Wiring
from vla_ros.record.process import record
from vla_ros.vision.messages import image_stamp
from vla_ros_lab.replay.bag import Bag

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


class Sender:
    """Sends frames and keeps them."""

    def __init__(self, robot: Any, height: int = 48, width: int = 64) -> None:
        self._robot, self._size = robot, (height, width)
        self.sent: dict[int, bytes] = {}

    def __call__(self) -> None:
        stamp = self._robot.now()
        self.sent[stamp] = self._robot.noise(stamp, *self._size)
        self._robot.send_frame(self.sent[stamp])


def lost(robot: Any) -> int:
    return int(robot.diagnostics["recording"].get("dropped//camera/image_raw", 0))


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
    node, send = inside("record.what:=episodes", *options), Sender(robot)
    robot.until(lambda: robot.says("recording episodes", "recording"), send, PATIENCE)
    before = int(robot.diagnostics["recording"]["messages"])
    robot.until(lambda: int(robot.diagnostics["recording"]["messages"]) > before + 50, send, PATIENCE)
    heard = [one.node_name for one in robot.node.get_subscriptions_info_by_topic("/camera/image_raw")]
    assert heard == ["vla_policy"], "images are received once"
    label.publish(robot.graph.message("std_msgs/msg/String")(data="success"))
    robot.until(lambda: bags(tmp_path), send, PATIENCE)
    with Bag(bags(tmp_path)[0]) as bag:
        found = {topic: list(bag.records([topic])) for topic in bag.topics}
        assert texts(bag)[-1]["event"] == "episode_end"
        assert texts(bag)[-1]["label"] == "success"
        assert any(each["instruction"] == "go on" for each in texts(bag))
        assert not bag.losses
    images = {image_stamp(record.data): record for record in found["/camera/image_raw"]}
    assert len(images) == len(found["/camera/image_raw"]) >= 20
    assert all(bytes(record.data) == send.sent[stamp] for stamp, record in images.items())
    assert all(stamp <= record.time for stamp, record in images.items())
    assert [record.time for record in images.values()] == sorted(record.time for record in images.values())
    assert len(found["/arm/joint_command"]) >= 10
    assert len(found["/vla_policy/action"]) >= 10
    # The recorder is no driver.
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
    robot.diagnostics.clear()
    with Bag(bags(tmp_path)[0]) as bag:
        assert not bag.losses
        last = max(record.time for record in bag.records(["/camera/image_raw"]))
    assert killed - last < 1_000_000_000
    # What came while another recorder started has waited for it.
    robot.until(lambda: robot.says("recording all", "recording"), robot.send_frame, PATIENCE)
    with Bag(Path(robot.diagnostics["recording"]["bag"])) as bag:
        assert min(record.time for record in bag.records(["/camera/image_raw"])) - last < 1_000_000_000
    # The disk is full: recording stops with a reason, and nothing else.
    robot.until(lambda: robot.says("recording all", "recording"), robot.send_frame, PATIENCE)
    resource.prlimit(recorder(), resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    robot.until(lambda: robot.says("recording has stopped", "recording"), robot.send_frame, PATIENCE)
    commands = len(robot.commands)
    robot.until(lambda: len(robot.commands) > commands + 20, robot.send_frame, PATIENCE)
    assert robot.status["state"] == "armed"


def test_a_recorder_that_cannot_start_is_refused_at_the_start(robot) -> None:
    wiring, config = Wiring(robot.graph, robot.node), load([], ["record.what:=all"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # no file can have the shared memory's size
    try:
        with pytest.raises(VlaRosError, match=r"all: no recorder starts: .*File too large"):
            record(config, robot.node, wiring)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_a_stopped_recorder_misses_is_counted_and_the_arm_goes_on(
    robot, inside: Callable[..., Any], options: list[str]
) -> None:
    inside("record.what:=all", "record.memory:=16", *options)
    send = Sender(robot, 480, 640)
    robot.until(lambda: robot.says("recording all", "recording"), send, PATIENCE)
    commands, before = len(robot.commands), lost(robot)  # while it started
    os.kill(recorder(), signal.SIGSTOP)
    robot.until(lambda: len(robot.commands) > commands + 100, send, PATIENCE)  # 92 MB
    os.kill(recorder(), signal.SIGCONT)
    robot.until(lambda: lost(robot) > before + 20, send, PATIENCE)
    assert robot.says(f"recording all; {lost(robot)} messages were lost", "recording")
    assert not robot.status["stopped_by"]


def test_the_bag_of_a_killed_node_is_finished(
    robot, start: Callable[..., Any], options: list[str], tmp_path: Path
) -> None:
    chosen = ("record.what:=all", "control.armed:=true", "policy.instruction:=go on", *options)
    node = start(*(word for option in chosen for word in ("-p", option)))
    robot.until(
        lambda: int(robot.diagnostics.get("recording", {}).get("messages", 0)) > 50, robot.send_frame, PATIENCE
    )
    killed = robot.now()
    node.signal(signal.SIGKILL)
    robot.until(lambda: bags(tmp_path), robot.send_frame, PATIENCE)
    with Bag(bags(tmp_path)[0]) as bag:
        assert not bag.losses
        last = max(record.time for record in bag.records(["/camera/image_raw"]))
    assert killed - last < 500_000_000


def test_the_last_seconds_are_saved_when_a_person_asks(
    robot, inside: Callable[..., Any], options: list[str], tmp_path: Path
) -> None:
    inside("record.what:=last", "record.seconds:=2.0", *options)
    robot.until(lambda: robot.says("waiting (last)", "recording"), robot.send_frame, PATIENCE)
    kind, began = robot.graph.service("std_srvs/srv/SetBool"), robot.now()
    ask = robot.node.create_client(kind, "/vla_policy_recorder/record")
    robot.until(lambda: ask.service_is_ready() and robot.now() > began + 3e9, robot.send_frame, PATIENCE)
    asked = robot.now()
    for data in (True, False):
        answer = ask.call_async(kind.Request(data=data))
        robot.until(answer.done, robot.send_frame, PATIENCE)
        assert answer.result().success
    robot.until(lambda: bags(tmp_path), robot.send_frame, PATIENCE)
    with Bag(bags(tmp_path)[0]) as bag:
        times = [record.time - asked for record in bag.records(["/camera/image_raw"])]
    assert -2.5e9 < min(times) < -1e9
    assert len(times) > 10


def test_a_recorder_that_still_starts_when_the_node_ends_records_what_waits(
    robot, inside: Callable[..., Any], options: list[str], tmp_path: Path
) -> None:
    node = inside("record.what:=all", *options)
    for _ in range(5):
        robot.send_frame()
    robot.until(lambda: len(robot.commands) > 2, robot.send_frame)
    node.cleanup()
    assert len(bags(tmp_path)) == 1
