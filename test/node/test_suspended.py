import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vla_ros.graph.origin import Origin

PUSHED = 0.4  # rad
STEP = 0.02 + 1e-6  # rad; by how much a motion of the scripted policy, 5 mm, may turn the first joint
GO = ("-p", "control.armed:=true", "-p", "policy.instruction:=go on", "-p", "timeouts.camera:=0.3")


def nothing(robot: Any, node: Any) -> None:
    robot.send_frame()


def stopped(robot: Any, node: Any) -> None:
    robot.send_frame()
    robot.stop()


def blind(robot: Any, node: Any) -> None:
    robot.send_joints()


def ended(robot: Any, node: Any) -> None:
    robot.send_frame()
    node.signal(signal.SIGTERM)


@pytest.mark.causes("suspended")
@pytest.mark.parametrize("meanwhile", [nothing, stopped, blind, ended])
def test_the_first_command_after_a_suspension_holds_the_arm_where_it_was_pushed(
    robot, start, meanwhile: Callable[[Any, Any], None]
) -> None:
    node = start(*GO)
    sent = sent_commands(robot)
    robot.until(lambda: len(robot.commands) > 10, robot.send_frame)
    wait_for_quiet(robot, sent)
    node.signal(signal.SIGSTOP)
    wait_until_stopped(node.process.pid)
    began = robot.positions[0]
    for step in range(1, 21):
        robot.positions[0] = began + PUSHED * step / 20
        robot.send_joints()
        time.sleep(0.02)
    meanwhile(robot, node)
    slept = robot.now()
    node.signal(signal.SIGCONT)
    each = robot.send_joints if meanwhile is blind else robot.send_frame

    def since() -> list[Any]:
        return [command for published, command in sent if published > slept]

    robot.until(lambda: bool(since()), each)
    hold = since()[0]
    assert list(hold.position[:7]) == robot.positions
    assert stamp_of(hold) > slept, "the hold is older than the end of the suspension"
    robot.until(lambda: "suspended" in robot.reported, each)
    if meanwhile is nothing:
        robot.until(lambda: stamp_of(since()[-1]) in robot.sent, each)
    for command in since():
        assert abs(command.position[0] - robot.positions[0]) < STEP


def sent_commands(robot: Any) -> list[tuple[int, Any]]:
    """Return every command from now on, with the time at which the node sent it: a busy robot reads it later."""
    graph, heard = robot.graph, list[tuple[int, Any]]()
    kind = graph.message("sensor_msgs/msg/JointState")

    def hear(cdr: Any, origin: Origin) -> None:
        heard.append((origin.published, graph.deserialize(cdr, kind)))

    graph.subscribe_raw(robot.node, kind, "/arm/joint_command", hear, graph.qos("request"))
    return heard


def stamp_of(command: Any) -> int:
    return int(command.header.stamp.sec) * 1_000_000_000 + int(command.header.stamp.nanosec)


def wait_for_quiet(robot: Any, sent: list[tuple[int, Any]]) -> None:
    """Send no frames until the node sends nothing: whatever it sends during a suspension would be sent after it."""
    known = -1
    while known != len(sent):
        known = len(sent)
        for _ in range(5):
            robot.send_joints()
            time.sleep(0.02)


def wait_until_stopped(process: int) -> None:
    """Wait until no thread of a process runs; on a busy machine, a signal takes its time."""
    tasks = Path(f"/proc/{process}/task")
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
        if set(states) <= {"T"}:
            return
        time.sleep(0.005)
    raise AssertionError(f"not suspended: {states}")


def test_a_request_to_arm_that_waited_while_the_process_slept_is_void(robot, start) -> None:
    node = start("-p", "policy.instruction:=go on")
    kind = robot.graph.service("std_srvs/srv/SetBool")
    client = robot.node.create_client(kind, "/vla_policy/enable")
    robot.until(lambda: client.service_is_ready() and robot.status, robot.send_frame)

    def ask() -> Any:
        future = client.call_async(kind.Request(data=True))
        robot.until(future.done, robot.send_frame)
        return future.result()

    node.signal(signal.SIGSTOP)
    wait_until_stopped(node.process.pid)
    waits = client.call_async(kind.Request(data=True))
    time.sleep(1.2)  # the process sleeps
    node.signal(signal.SIGCONT)
    robot.until(waits.done, robot.send_frame)
    assert not waits.result().success
    assert "this request may be old" in waits.result().message
    robot.until(lambda: ask().success, robot.send_frame)
    robot.until(lambda: robot.status["state"] in ("armed", "holding"), robot.send_frame)
