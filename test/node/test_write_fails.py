"""Writes that fail, options that are refused, and code that fails: what the arm does, and what is said.

The node is the real one, on its participant; the middleware refuses what a test says it does.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_node import SPIN_FAILS, ScriptedPolicy, spin_fails

from tools.faults.hand import NAME, Hand
from vla_ros.config import build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.errors import VlaRosError
from vla_ros.graph.dds.action import DdsActionClient
from vla_ros.graph.dds.endpoints import DdsPublisher
from vla_ros.policies import Session
from vla_ros.policies.base import Progress, no_progress
from vla_ros.types import ActionChunk, Observation

pytestmark = pytest.mark.filterwarnings("error", "ignore::pytest.PytestUnhandledThreadExceptionWarning")

COMMAND = "/arm/joint_command"
Refusals = dict[str, int]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusals]:
    """By topic, how many of the next messages the middleware does not take, as a writer whose queue is full."""
    left, publish = Refusals(), DdsPublisher.publish

    def refuse(publisher: DdsPublisher, message: Any) -> None:
        if left.get(publisher.topic_name, 0) > 0:
            left[publisher.topic_name] -= 1
            raise VlaRosError(f"{publisher.topic_name} could not be sent: timeout")
        publish(publisher, message)

    monkeypatch.setattr(DdsPublisher, "publish", refuse)
    yield left
    left.clear()


def is_hold(robot: Any, message: Any) -> bool:
    stamp = message.header.stamp
    return int(stamp.sec) * 1_000_000_000 + int(stamp.nanosec) not in robot.sent


@pytest.fixture
def commands(robot) -> list[Any]:
    """Every command, also those that come while this process is busy; robot.commands has the newest ones."""
    heard: list[Any] = []
    kind = robot.graph.message("sensor_msgs/msg/JointState")
    robot.node.create_subscription(kind, COMMAND, heard.append, robot.graph.qos("request"))
    return heard


@pytest.mark.causes("driver_write")
@pytest.mark.parametrize("failures", [1, 2])
def test_a_command_that_cannot_be_written_is_followed_by_a_hold_and_the_arm_goes_on(
    robot, inside, commands: list[Any], refused: Refusals, failures: int
) -> None:
    inside("control.rate_hz:=10")
    robot.until(lambda: len(commands) > 5, robot.send_frame)
    before = len(commands)
    refused[COMMAND] = failures  # the motion, and perhaps the hold
    robot.until(lambda: "driver_write" in robot.reported, robot.send_frame)
    robot.until(lambda: len(commands) > before + 6, robot.send_frame)
    held = [is_hold(robot, command) for command in commands[before:]]
    assert held.count(True) == 1, "one hold, as soon as it could be written"
    assert "driver_unreachable" not in robot.reported
    robot.until(lambda: robot.status["state"] == "armed", robot.send_frame)


@pytest.mark.causes("driver_unreachable")
def test_a_driver_that_takes_nothing_stops_the_arm_and_gets_its_hold_later(
    robot, inside, refused: Refusals
) -> None:
    node = inside()
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    refused[COMMAND] = 10**9
    robot.until(lambda: robot.status.get("stopped_by") == "driver_unreachable", robot.send_frame)
    before = len(robot.commands)
    time.sleep(0.2)
    assert len(robot.commands) == before
    refused.clear()
    robot.until(lambda: len(robot.commands) > before, robot.send_joints)
    assert is_hold(robot, robot.commands[before])
    robot.until(lambda: robot.command_positions() == pytest.approx(robot.positions), robot.send_joints)
    node.reset()
    node.enable(True)
    robot.until(lambda: not is_hold(robot, robot.commands[-1]), robot.send_frame)


@pytest.mark.causes("driver_write")
def test_a_gripper_goal_that_cannot_be_written_holds_as_a_command_does(robot, inside, monkeypatch) -> None:
    hand, left, send = Hand(robot.graph), [1], DdsActionClient.send_goal_async

    def refuse(client: DdsActionClient, goal: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise VlaRosError("the goal could not be sent: timeout")
        return send(client, goal)

    monkeypatch.setattr(DdsActionClient, "send_goal_async", refuse)
    fingers = "robot.gripper_joint_names:=[finger_left, finger_right]"
    node = inside(f"topics.gripper:={NAME}", "gripper.output:=gripper_command", fingers)
    robot.until(lambda: "driver_write" in robot.reported, robot.send_frame)
    robot.until(lambda: hand.goals and robot.status["state"] == "armed", robot.send_frame)
    assert any(is_hold(robot, command) for command in robot.commands)
    assert node.safety.status.stopped_by is None
    left[0] = 10**9
    robot.instruct("close it")
    robot.until(lambda: robot.status.get("stopped_by") == "driver_unreachable", robot.send_frame)
    assert NAME in robot.status["detail"]


def test_what_one_of_two_arms_got_counts_as_sent_and_both_are_held(robot, inside, refused: Refusals) -> None:
    names = {"left": [f"left_{number}" for number in range(7)], "right": [f"right_{number}" for number in range(7)]}
    graph, heard = robot.graph, {arm: list[Any]() for arm in names}
    publishers = {}
    for arm in names:
        kind = graph.message("sensor_msgs/msg/JointState")
        publishers[arm] = robot.node.create_publisher(kind, f"/{arm}/joint_states", graph.qos("state_publisher"))
        robot.node.create_subscription(kind, f"/{arm}/command", heard[arm].append, graph.qos("request"))

    def send() -> None:
        for arm, publisher in publishers.items():
            publisher.publish(robot.joint_state(names[arm], [0.1] * 7))
        robot.send_frame(joints=False)

    options = [
        text
        for arm, joints in names.items()
        for text in (
            f"{arm}.joint_names:=[{', '.join(joints)}]", f"{arm}.command:=/{arm}/command",
            f"{arm}.joint_states:=/{arm}/joint_states",
        )
    ]  # fmt: skip
    action = "features.action:=[left.joint_delta, right.joint_delta]"
    inside("robot.urdf:=", "robot.arms:=[left, right]", "gripper.mode:=none", action, *options, policy=TwoArmed())
    robot.until(lambda: all(len(each) > 5 for each in heard.values()), send)
    counts = {arm: len(each) for arm, each in heard.items()}
    refused["/right/command"] = 2
    robot.until(lambda: "driver_write" in robot.reported, send)
    robot.until(lambda: all(len(heard[arm]) > counts[arm] + 4 for arm in names), send)
    for arm in names:
        since = [is_hold(robot, message) for message in heard[arm][counts[arm] :]]
        assert since.count(True) == 1, f"{arm} was held {since.count(True)} times"
        assert since.index(True) <= 2
    assert robot.status["state"] == "armed"


def test_what_nobody_commands_by_may_fail_to_be_told(robot, inside, refused: Refusals) -> None:
    """``~/action`` is published on the control thread, ``~/status`` and events on the one that has the news."""
    inside()
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    for topic in ("/vla_policy/action", "/vla_policy/status", "/vla_policy/event", "/diagnostics"):
        refused[topic] = 3
    before = len(robot.commands)
    robot.until(lambda: len(robot.commands) > before + 10, robot.send_frame)
    robot.stop()
    robot.until(lambda: robot.status.get("stopped_by") == "operator_stop", robot.send_frame)
    assert is_hold(robot, robot.commands[-1])


class TwoArmed(ScriptedPolicy):
    """Moves every joint of two arms by 5 mrad."""

    spec = PolicySpec(
        (ImageFeature("image"),),
        action=parse_components("left.joint_delta + right.joint_delta", action=True),
        dimension=14,
    )

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        return ActionChunk(np.full((1, 14), 0.005), observation.stamp)


class Choosy(ScriptedPolicy):
    """Accepts the options of the start, and later only those with the instruction 'wave'."""

    def __init__(self) -> None:
        self.starts = True

    def load(self, progress: Progress = no_progress) -> None: ...

    def configure(self, options: Any) -> None:
        if not self.starts and options.instruction != "wave":
            raise KeyError("no such temperature")


@pytest.mark.causes("options_refused")
def test_options_that_the_policy_refuses_leave_the_old_ones_and_hold_it(robot, inside) -> None:
    policy = Choosy()
    node = inside(policy=policy)
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    policy.starts, accepted = False, node.config
    node.reconfigure(build({"policy.instruction": "bow", "limits.max_joint_step": 0.01}, accepted))
    robot.until(lambda: "options_refused" in robot.status.get("holds", {}), robot.send_frame)
    assert "no such temperature" in robot.status["holds"]["options_refused"]
    assert node.config.limits == accepted.limits
    assert node.config.policy == accepted.policy
    before = len(robot.commands)
    for _ in range(5):
        robot.send_frame()
        time.sleep(0.03)
    assert all(is_hold(robot, command) for command in robot.commands[before:])
    node.reconfigure(build({"policy.instruction": "wave"}, node.config))
    robot.until(lambda: not is_hold(robot, robot.commands[-1]), robot.send_frame)
    assert node.config.policy.instruction == "wave"


@pytest.mark.causes("thread_died")
def test_a_callback_that_fails_stops_the_arm_and_its_request_is_answered(robot, inside, monkeypatch) -> None:
    node = inside()
    client = robot.node.create_client(robot.graph.service("std_srvs/srv/Trigger"), "/vla_policy/reset")
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)

    def fail() -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(node, "reset", fail)
    robot.until(client.service_is_ready, robot.send_frame)
    answer = client.call_async(robot.graph.service("std_srvs/srv/Trigger").Request())
    robot.until(answer.done, robot.send_frame)
    assert not answer.result().success
    assert "a mistake of ours" in answer.result().message
    robot.until(lambda: robot.status.get("stopped_by") == "thread_died", robot.send_frame)
    robot.until(lambda: is_hold(robot, robot.commands[-1]), robot.send_joints)


@pytest.mark.causes("thread_died")
def test_a_dead_graph_thread_ends_the_process_after_a_hold(robot, start, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SPIN_FAILS, str(tmp_path / "fails"))
    node = start("-p", "control.armed:=true", "-p", "policy.instruction:=go on", main=spin_fails)
    robot.until(lambda: len(robot.commands) > 10, robot.send_frame)
    (tmp_path / "fails").touch()
    robot.until(lambda: node.process.poll() is not None, robot.send_frame)
    assert node.process.poll() == 1
    robot.until(lambda: robot.status.get("stopped_by") == "thread_died")
    assert is_hold(robot, robot.commands[-1])
    assert "the wait set is gone" in node.log.read_text()


def test_a_hold_that_cannot_be_written_keeps_no_other_arm_from_its_hold(robot, inside, refused: Refusals) -> None:
    inside("topics.gripper:=/gripper/command", "gripper.output:=joint_state",
           "robot.gripper_joint_names:=[finger_left, finger_right]", "control.rate_hz:=5")  # fmt: skip
    fingers: list[Any] = []
    kind = robot.graph.message("sensor_msgs/msg/JointState")
    robot.node.create_subscription(kind, "/gripper/command", fingers.append, robot.graph.qos("command"))
    robot.until(lambda: len(robot.commands) > 3 and fingers, robot.send_frame)
    refused["/gripper/command"] = 2
    robot.until(lambda: "driver_write" in robot.reported, robot.send_frame)
    told = len(fingers)
    robot.until(lambda: len(fingers) > told and robot.status["state"] == "armed", robot.send_frame)


def test_a_stop_is_not_lost_to_what_the_button_sends_next(robot, start) -> None:
    """A button that is pressed for less time than the node takes to look: true, and then false again and again."""
    node = start("-p", "control.armed:=true", "-p", "policy.instruction:=go on")
    robot.until(lambda: len(robot.commands) > 10, robot.send_frame)
    node.signal(signal.SIGSTOP)
    time.sleep(0.05)
    robot.stop()
    for _ in range(100):
        robot.stop_publisher.publish(robot.graph.message("std_msgs/msg/Bool")(data=False))
    node.signal(signal.SIGCONT)
    robot.until(lambda: robot.status.get("stopped_by") == "operator_stop", robot.send_frame)
