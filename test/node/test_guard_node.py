"""A node with a guard: what the driver gets, also from a node or a guard that is killed, suspended or hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_ros.guard.frames import GuardFrame, Kind
from vla_ros.node.policy_node import PolicyNode

pytestmark = pytest.mark.filterwarnings("error")

GUARDED = "guard.process:=true"
TWIST = "/servo/delta_twist_cmds"
SERVO = ["control.output:=twist_stamped", f"topics.command:={TWIST}", "control.rate_hz:=10.0"]
COMMAND = "/arm/joint_command"


def guard_of(process: int) -> int:
    """The process id of a node's guard."""
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        for child in file.read_text().split():
            if b"vla_ros.guard" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError("the node has no guard")


def moved(robot: Any, more: int = 3) -> None:
    """Wait until the arm has got some more commands."""
    before = len(robot.commands)
    robot.until(lambda: len(robot.commands) >= before + more, lambda: follow(robot))


def follow(robot: Any) -> None:
    """Let the arm be where it was commanded to be, and send a frame."""
    if robot.commands:
        robot.positions = robot.command_positions().tolist()
    robot.send_frame()


def is_hold(robot: Any, index: int = -1) -> bool:
    return robot.command_stamp(index) not in robot.sent


def test_the_guard_sends_what_the_node_proposes_and_the_node_has_no_publisher(robot, inside) -> None:
    node = inside(GUARDED)
    moved(robot, 10)
    names = [each.node_name for each in robot.node.get_publishers_info_by_topic(COMMAND)]
    assert names == ["vla_policy_guard"]
    robot.until(lambda: not any(is_hold(robot, index) for index in range(-5, 0)), lambda: follow(robot))
    robot.until(lambda: robot.status.get("guard", {}).get("counts", {}).get("sent", 0) >= 10, robot.send_frame)
    assert robot.status["guard"]["state"] == "moving"
    robot.until(lambda: robot.says("moving", "guard"), robot.send_frame)
    node.enable(False)
    robot.until(lambda: is_hold(robot), robot.send_joints)


@pytest.mark.causes("guard_lost")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guard_that_is_killed_or_hangs_stops_the_node_which_says_how_to_restart(robot, inside, how) -> None:
    node = inside(GUARDED)
    moved(robot)
    guard = guard_of(os.getpid())
    os.kill(guard, how)
    robot.until(lambda: robot.status.get("stopped_by") == "guard_lost", robot.send_frame)
    assert "restart the node" in robot.status["detail"]
    count = len(robot.commands)
    assert not node.enable(True)[0]
    node.reset()
    assert not node.enable(True)[0]
    robot.until(lambda: len(robot.sent) > 5, robot.send_frame)
    assert len(robot.commands) == count, "the node cannot send by itself"
    with contextlib.suppress(ProcessLookupError):
        os.kill(guard, signal.SIGKILL)


@pytest.mark.causes("guard_rejected")
def test_a_fault_in_the_node_is_rejected_and_the_arm_held_until_a_reset(robot, inside) -> None:
    node: PolicyNode = inside(GUARDED)
    moved(robot)
    client: Any = node._guard
    stamp = robot.command_stamp()
    far = np.array([*robot.positions, np.nan, np.nan]) + 3.0
    client._send(GuardFrame(Kind.POSITIONS, values=far[:7], duration=0.1, stamp=stamp, joints=stamp))
    robot.until(lambda: robot.status.get("stopped_by") == "guard_rejected", robot.send_joints)
    robot.until(lambda: is_hold(robot), robot.send_joints)
    assert np.abs(np.array([robot.command_positions(index) for index in range(-len(robot.commands), 0)])).max() < 3
    assert not node.enable(True)[0]
    assert node.reset()[0]
    robot.until(lambda: node.enable(True)[0], robot.send_frame)
    moved(robot)
    assert not is_hold(robot)


def test_a_stop_and_a_reset_pass_through_both(robot, inside) -> None:
    node = inside(GUARDED)
    moved(robot)
    robot.stop()
    robot.until(lambda: robot.status.get("stopped_by") == "operator_stop", robot.send_joints)
    robot.until(lambda: is_hold(robot), robot.send_joints)
    robot.until(lambda: robot.status["guard"]["state"] == "stopped", robot.send_joints)
    count = len(robot.commands)
    for _ in range(5):
        robot.send_frame()
        time.sleep(0.03)
    assert len(robot.commands) == count
    assert node.reset()[0]
    robot.until(lambda: node.enable(True)[0], robot.send_frame)
    moved(robot)


def hear(robot: Any, kind: str, topic: str) -> list[tuple[float, Any]]:
    heard: list[tuple[float, Any]] = []
    graph = robot.graph
    robot.node.create_subscription(
        graph.message(kind), topic, lambda message: heard.append((time.monotonic(), message)), graph.qos("command")
    )
    return heard


def speed(message: Any) -> float:
    linear, angular = message.twist.linear, message.twist.angular
    return float(np.linalg.norm([linear.x, linear.y, linear.z, angular.x, angular.y, angular.z]))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_twist_of_a_node_that_is_killed_or_suspended_ends_in_time(robot, start, how) -> None:
    twists = hear(robot, "geometry_msgs/msg/TwistStamped", TWIST)
    words = [*SERVO, GUARDED, "control.armed:=true", "policy.instruction:=go on"]
    node = start(*(word for each in words for word in ("-p", each)))
    robot.until(lambda: len(twists) > 5 and speed(twists[-1][1]) > 0, robot.send_frame)
    guard = guard_of(node.process.pid)
    os.kill(node.process.pid, how)
    robot.until(lambda: speed(twists[-1][1]) == 0, robot.send_joints, 5.0)
    moving = max(at for at, message in twists if speed(message) > 0)
    assert twists[-1][0] - moving < 0.2 + 0.15, "two periods, and a message on its way on a busy machine"
    if how == signal.SIGKILL:
        robot.until(lambda: not Path(f"/proc/{guard}").exists() or zombie(guard), robot.send_joints, 5.0)
    else:
        robot.stop()
        robot.until(lambda: True, robot.send_joints)
        os.kill(node.process.pid, signal.SIGCONT)
        robot.until(lambda: robot.status.get("stopped_by") == "operator_stop", robot.send_frame)
    count = len(twists)
    for _ in range(10):
        robot.send_frame()
        time.sleep(0.03)
    assert not any(speed(message) for _, message in twists[count:])


def zombie(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_the_arm_of_a_killed_node_is_held_where_it_is_measured(robot, start) -> None:
    words = [GUARDED, "control.armed:=true", "policy.instruction:=go on"]
    node = start(*(word for each in words for word in ("-p", each)))
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    os.kill(node.process.pid, signal.SIGKILL)
    robot.until(lambda: is_hold(robot), robot.send_joints, 5.0)
    assert np.abs(robot.command_positions() - robot.positions).max() < 0.02
    count = len(robot.commands)
    for _ in range(30):
        robot.send_joints()
        time.sleep(0.03)
    assert len(robot.commands) == count, "one hold"


def test_a_control_thread_that_hangs_is_ended_by_the_guard(robot, inside) -> None:
    node: PolicyNode = inside(GUARDED, "timeouts.inference:=0.5")
    moved(robot)
    loop: Any = node._loop
    ended = threading.Event()
    wait = loop._wait
    loop._wait = lambda *given: (ended.wait(60), wait(*given))
    robot.until(lambda: is_hold(robot), lambda: follow(robot), 10.0)
    ended.set()
    loop._wait = wait
    robot.until(lambda: robot.status["guard"]["counts"].get("lapsed"), robot.send_frame)
    moved(robot)
    assert robot.status["state"] == "armed", "the arm goes on after a hold of the node"


def test_the_kernel_ends_a_node_before_its_guard_where_memory_runs_out(robot, start) -> None:
    node = start("-p", GUARDED)
    robot.until(lambda: robot.status.get("guard", {}).get("state") == "holding", robot.send_joints)
    guard = guard_of(node.process.pid)

    def score(process: int) -> int:
        return int(Path(f"/proc/{process}/oom_score").read_text())

    robot.until(lambda: score(node.process.pid) > score(guard), robot.send_joints)


def test_a_heartbeat_can_be_checked_from_outside(robot, inside) -> None:
    beats = hear(robot, "std_msgs/msg/UInt32MultiArray", "/vla_policy/guard_heartbeat")
    inside(GUARDED)
    robot.until(lambda: len(beats) > 20, robot.send_frame)
    counters = []
    for _, message in beats:
        counter, state, seal = (int(value) for value in message.data)
        assert seal == zlib.crc32(counter.to_bytes(4, "little") + state.to_bytes(4, "little"))
        assert state in (0, 1)
        counters.append(counter)
    assert counters == sorted(set(counters))
    assert beats[20][0] - beats[0][0] < 3.0


def test_changed_limits_reach_the_guard(robot, inside) -> None:
    from vla_ros.config import build

    node: PolicyNode = inside(GUARDED)
    moved(robot)
    for scale in (0.1, 1.0, 0.3):
        node.reconfigure(build({"limits.velocity_scale": scale, "limits.max_joint_step": scale}, base=node.config))
        moved(robot, 8)
    assert robot.status["state"] == "armed"
