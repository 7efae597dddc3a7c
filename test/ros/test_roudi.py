"""RouDi is missing, is killed, hangs, or ends, while the node exchanges its messages through iceoryx.

Regressions pinned: a node that waits for RouDi and cannot be interrupted; an arm that goes on moving where no new
process can stop it, because RouDi was killed and another runs in its place; a node that is configured then and
aborts; one that waits 60 s for a RouDi that does not answer, deaf to signals, and aborts.
"""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from vla_ros.middleware.checks import check_profile
from vla_ros.middleware.daemons import roudi_is_up
from vla_ros.middleware.profiles import FrameLoad, select_profile, sourced_distribution, write_profile

pytestmark = [
    pytest.mark.ros,
    pytest.mark.skipif(shutil.which("iox-roudi") is None, reason="iox-roudi is not installed"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of the profile, and its environment for everything that the test starts."""
    if roudi_is_up():
        pytest.skip("another RouDi runs on this host, and there can be only one")
    profile = select_profile("iceoryx", FrameLoad(64, 48), sourced_distribution(), "lo")
    write_profile(profile, tmp_path)
    for name, value in profile.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    report = check_profile("iceoryx", profile.frames, profile.distribution)
    if report.fatal:
        pytest.skip(str(report))
    return tmp_path


@pytest.fixture
def roudi(program: Callable[..., Any], folder: Path) -> Any:
    return start_roudi(program, folder)


def start_roudi(program: Callable[..., Any], folder: Path) -> Any:
    """Start RouDi as the launch files do, and wait until it is up."""
    started = program("iox-roudi", "-m", "off", "-c", str(folder / "roudi.toml"))
    started.wait_for("RouDi is ready for clients")
    return started


def commands(robot: Any) -> int:
    return max(map(int, re.findall(r"commands: (\d+)\n", robot.output)), default=0)


def wait_for_commands(robot: Any, node: Any, more: int) -> None:
    enough, deadline = commands(robot) + more, time.monotonic() + 30
    while commands(robot) < enough:
        assert time.monotonic() < deadline, node.output + robot.output[-500:]
        time.sleep(0.05)
    assert node.process.poll() is None, node.output


@pytest.mark.parametrize("again", [False, True], ids=["killed", "killed and restarted"])
def test_an_armed_node_whose_roudi_is_gone_stops_and_ends_with_a_status(
    roudi, policy, robot_process: Callable[[], Any], program, folder: Path, again: bool
) -> None:
    node, robot = policy("control.armed:=true"), robot_process()
    node.wait_for("RouDi is up with chunks up to")
    wait_for_commands(robot, node, 3)
    roudi.process.kill()
    roudi.process.wait()
    killed = time.monotonic()
    if again:
        start_roudi(program, folder)
    node.wait_for("armed -> stopped (middleware_gone: RouDi has ended or was restarted")
    assert time.monotonic() - killed < 1.0
    assert node.process.wait(10) == 1, node.output
    assert "ended: the arm holds" in node.output, "iceoryx may complain after it"
    assert "Traceback" not in node.output
    sent = commands(robot)
    time.sleep(0.5)  # that nothing more comes has no event to wait for
    assert commands(robot) <= sent + 2


def test_a_node_whose_roudi_was_replaced_refuses_to_configure(
    roudi, program, folder: Path, quick: Callable[..., list[str]]
) -> None:
    refused = """
import rclpy, sys
from vla_ros.node.lifecycle_node import VlaPolicyNode
rclpy.init(args=sys.argv)
node = VlaPolicyNode()
print("made", flush=True)
open(sys.argv[1]).read()
node.trigger_configure()
print("failure:", node.failure, flush=True)
"""
    fifo = folder / "go"
    os.mkfifo(fifo)
    node = program(sys.executable, "-c", refused, str(fifo), *quick("autostart:=false"))
    node.wait_for("made")
    roudi.process.kill()
    roudi.process.wait()
    start_roudi(program, folder)
    fifo.write_text("go")
    node.wait_for("failure: configure: RouDi has ended or was restarted")


def test_a_suspended_node_continues(roudi, policy, robot_process: Callable[[], Any]) -> None:
    """With monitoring RouDi removes a process after 1.5 s of silence, and the process aborts without a hold."""
    node, robot = policy("control.armed:=true"), robot_process()
    wait_for_commands(robot, node, 3)
    node.process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)  # longer than RouDi would wait
    node.process.send_signal(signal.SIGCONT)
    wait_for_commands(robot, node, 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminated_roudi_shuts_the_node_down_cleanly(
    roudi, policy, robot_process: Callable[[], Any], number: signal.Signals
) -> None:
    node, robot = policy("control.armed:=true"), robot_process()
    wait_for_commands(robot, node, 3)
    roudi.process.send_signal(number)
    assert node.process.wait(20) == 0, node.output
    assert "ended by SIGTERM: the arm holds" in node.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_waiting_for_roudi_is_reported_and_can_be_interrupted(policy, number: signal.Signals) -> None:
    node = policy()
    node.wait_for("waiting for RouDi: none runs on this host")
    assert node.end(number) == 0
    assert node.output.strip().splitlines()[-1] == f"vla_policy_node: ended by {number.name}: nothing was started"


def test_vla_ros_run_waits_for_roudi_and_can_be_interrupted(program) -> None:
    waiting = program(sys.executable, "-m", "vla_ros.cli", "run", "-p", "robot.urdf:=demo")
    waiting.wait_for("waiting for RouDi: none runs on this host")
    assert waiting.end(signal.SIGINT) == 130
    assert "Traceback" not in waiting.output


def test_vla_ros_run_also_exits_with_an_error(
    roudi, robot_process: Callable[[], Any], program, quick: Callable[..., list[str]]
) -> None:
    node = program(sys.executable, "-m", "vla_ros.cli", "run", *quick("control.armed:=true"))
    robot = robot_process()
    wait_for_commands(robot, node, 3)
    roudi.process.kill()
    assert node.process.wait(20) == 1, node.output
    assert "stopped (middleware_gone" in node.output


def test_a_waiting_node_starts_with_roudi(policy, program, folder: Path) -> None:
    node = policy()
    node.wait_for("waiting for RouDi")
    start_roudi(program, folder)
    node.wait_for("is ready")
