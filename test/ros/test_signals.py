"""Signals in every state: no hang, no stale command, a clear last line; and what happens when a partner dies.

Regressions pinned: a second SIGINT (a terminal and `ros2 launch` both send one) that breaks into the last hold; a
node that is killed and comes back armed.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from lifecycle_msgs.msg import Transition

pytestmark = pytest.mark.ros

STATES = {
    "unconfigured": (),
    "inactive": (Transition.TRANSITION_CONFIGURE,),
    "active": (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE),
    "finalized": (Transition.TRANSITION_UNCONFIGURED_SHUTDOWN,),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_node_in_order(robot, policy, state: str, number: signal.Signals) -> None:
    node = policy("autostart:=false")
    robot.drive()
    for transition in STATES[state]:
        assert robot.change(transition)
    assert robot.state() == state
    if state == "active":
        assert robot.enable()[0]
        robot.wait(lambda: len(robot.commands) >= 3, "commands")
    node.process.send_signal(number)
    assert node.end(number) == 0
    assert node.output.strip().splitlines()[-1].endswith(f"ended by {number.name}: the arm holds")
    assert "Traceback" not in node.output
    told = len(robot.commands)
    sent = len(robot.stamps)
    robot.wait(lambda: len(robot.stamps) > sent + 5, "more frames")
    assert len(robot.commands) == told


def test_a_killed_node_sends_nothing_more_and_comes_back_disarmed(robot, policy) -> None:
    node = policy()
    robot.drive()
    robot.wait(lambda: robot.actions, "an action")
    assert robot.enable()[0]
    robot.wait(lambda: len(robot.commands) >= 3, "commands")
    node.process.kill()
    node.process.wait()
    ended = time.monotonic()
    shown = len(robot.actions)
    policy()
    robot.wait(lambda: len(robot.actions) >= shown + 5, "actions of the restarted node", 40)
    late = [at for at, _ in robot.commands if at > ended + 0.5]
    assert not late, "nothing is commanded until somebody arms again"


def test_a_driver_that_dies_stops_the_arm(robot, policy) -> None:
    node = policy("control.armed:=true", "timeouts.driver:=0.3")
    robot.drive()
    robot.wait(lambda: len(robot.commands) >= 3, "commands")
    robot.node.destroy_subscription(
        next(one for one in robot.node.subscriptions if one.topic_name == "/arm/joint_command")
    )
    node.wait_for("driver_gone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_process_that_ends_makes_the_arm_hold(
    robot, robot_process: Callable[[], Any], policy, number: signal.Signals
) -> None:
    driver = robot_process()
    node = policy("control.armed:=true", "timeouts.joint_state:=0.5", "timeouts.camera:=0.5")
    robot.wait(lambda: len(robot.commands) >= 3, "commands")
    driver.process.send_signal(number)
    driver.process.wait(5)
    node.wait_for("armed -> holding (")
    robot.wait(lambda: any("armed -> holding (" in line for line in robot.log), "the line on /rosout")
    told = len(robot.commands)
    heard = time.monotonic()
    robot.wait(lambda: time.monotonic() > heard + 1.0, "a second in which nothing may be commanded")
    assert len(robot.commands) <= told + 1, "nothing but the hold that was on its way"
    assert node.end(signal.SIGINT) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_a_signal_during_start_ends_the_node_quietly(robot, policy, number: signal.Signals, delay: float) -> None:
    node = policy()
    status = Path(f"/proc/{node.process.pid}/status")

    def handles_signals() -> bool:
        caught = int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    robot.wait(handles_signals, "the node's handlers")
    time.sleep(delay)  # somewhere in its imports or in configure: wherever it is, it must end in order
    assert node.end(number) == 0, node.output
    assert "Traceback" not in node.output
    assert re.search(f"ended by {number.name}: (the arm holds|nothing was started)$", node.output.strip())


SLOW_NODE = """
import time
from vla_ros.node import lifecycle_main, lifecycle_node

class Slow:
    def __init__(self, **options):
        print("creation begins", flush=True)
        {wait}

lifecycle_node.VlaPolicyNode = Slow
raise SystemExit(lifecycle_main.main([]))
"""
WAITS = {
    "anywhere": "time.sleep(60)",
    "in exec": "exec('time.sleep(60)')",
    "in an import": "exec('try: time.sleep(60)\\nfinally: raise ImportError')",
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_signal_while_the_node_is_created_is_answered(program, wait: str) -> None:
    node = program(sys.executable, "-c", SLOW_NODE.format(wait=WAITS[wait]))
    node.wait_for("creation begins")
    assert node.end(signal.SIGINT) == 0, node.output
    assert node.output.strip().endswith("ended by SIGINT: nothing was started")


SLOW_POLICY = """
import time
from vla_ros.policies.hold import HoldPolicy

class Slow(HoldPolicy):
    def load(self, progress=None):
        print("loading begins", flush=True)
        for step in range(600):
            {step}
"""
LOADS = {
    "that tells its progress": "progress(step / 600, 'weights'); time.sleep(0.1)",
    "that says nothing": "time.sleep(0.1)",
    "inside one long call": "time.sleep(60)",
}


@pytest.mark.parametrize("load", LOADS)
def test_a_signal_during_a_long_load_ends_it(robot, policy, load: str, tmp_path, monkeypatch) -> None:
    """A policy of a third party, found as any other: by its entry point."""
    (tmp_path / "slow_policy.py").write_text(SLOW_POLICY.format(step=LOADS[load]))
    metadata = tmp_path / "slow_policy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-policy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vla_ros.policies]\nslow = slow_policy:Slow\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    node = policy("policy.name:=slow")
    robot.drive()
    node.wait_for("loading begins")
    assert node.end(signal.SIGINT) == 0
    assert node.output.strip().splitlines()[-1].endswith("ended by SIGINT: the arm holds")
    assert "Traceback" not in node.output
    assert not robot.commands
