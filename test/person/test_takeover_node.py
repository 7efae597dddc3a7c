"""Takeover through the graph: services, leader, Joy, labels and events of the running node."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from vla_ros.control.mode import Mode
from vla_ros.control.reasons import Reason
from vla_ros.node.policy_node import PolicyNode

Inside = Callable[..., PolicyNode]
LEADER = (
    "takeover.input:=leader",
    "takeover.leader:=/leader",
    "takeover.frozen_after:=0.5",
    "takeover.stale_after:=0.3",
)
BUTTONS = 'takeover.buttons:=["deadman = 0", "pause = 1", "resume = 2", "success = 3"]'
TWIST = (
    "takeover.input:=twist",
    "takeover.topic:=/twist",
    "takeover.joy:=/joy",
    BUTTONS,
    "takeover.longest_press:=0.5",
)


class Hand:
    """Publishes as a person's devices do, and calls the node's services, on the robot's participant."""

    def __init__(self, robot: Any) -> None:
        self.robot, make, qos = robot, robot.graph.message, robot.graph.qos
        node = robot.node
        joints, self.away = make("sensor_msgs/msg/JointState"), 0.0
        self.leaders = [node.create_publisher(joints, "/leader", qos("state_publisher")) for _ in range(2)]
        self._joy = self.new_joy()
        self._twist = node.create_publisher(make("geometry_msgs/msg/Twist"), "/twist", qos("state_publisher"))
        self._label = node.create_publisher(make("std_msgs/msg/String"), "/vla_policy/label", qos("command"))
        self.events: list[dict[str, Any]] = []
        heard = make("std_msgs/msg/String")
        node.create_subscription(
            heard, "/vla_policy/event", lambda message: self.events.append(json.loads(message.data)), qos("event")
        )
        self.pressed: set[int] = set()
        self.leads = 1
        self.noise = 0.0

    def move(self) -> None:
        """Publish frame, joint state, leaders, Joy and twist once."""
        robot, make = self.robot, self.robot.graph.message
        robot.send_frame()
        self.noise = 1e-4 - self.noise
        for leader in self.leaders[: self.leads]:
            leader.publish(robot.joint_state(robot.names, [at + self.away + self.noise for at in robot.positions]))
        self.press(self.pressed, self._joy)
        still, slow = (make("geometry_msgs/msg/Vector3")(x=x, y=0.0, z=0.0) for x in (0.0, 0.02 + self.noise))
        self._twist.publish(make("geometry_msgs/msg/Twist")(linear=slow, angular=still))

    def new_joy(self) -> Any:
        kind = self.robot.graph.message("sensor_msgs/msg/Joy")
        return self.robot.node.create_publisher(kind, "/joy", self.robot.graph.qos("state_publisher"))

    def press(self, pressed: set[int], joy: Any) -> None:
        header = self.robot.joint_state([], []).header
        buttons = [int(index in pressed) for index in range(4)]
        joy.publish(self.robot.graph.message("sensor_msgs/msg/Joy")(header=header, axes=[0.0], buttons=buttons))

    def call(self, kind: str, name: str, **fields: Any) -> Any:
        service = self.robot.graph.service(kind)
        client = self.robot.node.create_client(service, f"/vla_policy/{name}")
        self.robot.until(client.service_is_ready, self.move)
        future = client.call_async(service.Request(**fields))
        self.robot.until(future.done, self.move)
        return future.result()

    def takes_over(self, wanted: bool) -> Any:
        return self.call("std_srvs/srv/SetBool", "takeover", data=wanted)

    def label(self, text: str) -> None:
        self._label.publish(self.robot.graph.message("std_msgs/msg/String")(data=text))

    def holds(self, reason: Reason) -> Callable[[], bool]:
        return lambda: reason.value in self.robot.status.get("holds", {})

    def source(self) -> str:
        return str(self.robot.status.get("source", ""))


@pytest.fixture
def hand(robot) -> Hand:
    return Hand(robot)


@pytest.mark.causes("person_far", "person_stale", "person_invalid", "person_contested", "person_frozen")
def test_a_leader_moves_the_arm_and_each_of_its_failures_holds_with_its_reason(robot, inside: Inside, hand) -> None:
    node = inside(*LEADER)
    robot.until(lambda: hand.source() == "policy", hand.move)
    hand.away = 0.3
    assert hand.takes_over(True).success
    robot.until(hand.holds(Reason.PERSON_FAR), hand.move)
    hand.away = 0.0
    robot.until(lambda: hand.source() == "person", hand.move)
    seen = len(robot.actions)
    robot.until(lambda: hand.source() == "person", hand.move)
    assert len(robot.actions) <= seen + 1, "the policy's actions"
    hand.leads = 0
    robot.until(hand.holds(Reason.PERSON_STALE), hand.move)
    hand.leaders[0].publish(robot.joint_state(["other_1"], [0.0]))
    robot.until(hand.holds(Reason.PERSON_INVALID), lambda: hand.leaders[0].publish(robot.joint_state(["o"], [0.0])))
    hand.leads = 2
    robot.until(hand.holds(Reason.PERSON_CONTESTED), hand.move)
    hand.leads = 1
    robot.until(lambda: hand.source() == "person", hand.move)
    same = list(robot.positions)

    def freeze() -> None:
        robot.send_frame()
        hand.leaders[0].publish(robot.joint_state(robot.names, same))

    robot.until(hand.holds(Reason.PERSON_FROZEN), freeze)
    assert node.safety.mode is Mode.CORRECTING
    assert hand.takes_over(False).success
    robot.until(lambda: hand.source() == "policy", hand.move)


@pytest.mark.causes("person_released", "person_stuck")
def test_a_dead_man_button_moves_and_its_release_does_not(robot, inside: Inside, hand) -> None:
    node = inside(*TWIST)
    robot.until(lambda: hand.source() == "policy", hand.move)
    assert hand.takes_over(True).success
    robot.until(hand.holds(Reason.PERSON_RELEASED), hand.move)
    hand.pressed = {0}
    robot.until(lambda: hand.source() == "person", hand.move)
    robot.until(hand.holds(Reason.PERSON_STUCK), hand.move)
    hand.pressed = set()
    robot.until(hand.holds(Reason.PERSON_RELEASED), hand.move)
    hand.pressed = {2}
    robot.until(lambda: hand.source() == "policy", hand.move)
    hand.pressed = {1}
    robot.until(lambda: node.safety.mode is Mode.PAUSED, hand.move)


def test_pause_labels_and_events_tell_the_episodes(robot, inside: Inside, hand) -> None:
    node = inside()
    robot.until(lambda: hand.source() == "policy", hand.move)
    refused = hand.takes_over(True)
    assert not refused.success
    assert "takeover.input" in refused.message
    hand.label("perhaps")
    hand.label("success")
    robot.until(lambda: any(event["event"] == "episode_end" for event in hand.events), hand.move)
    assert node.safety.mode is Mode.PAUSED
    before = node.stats.frames()
    robot.until(lambda: node.stats.frames()["received"] > before["received"] + 1, hand.move)
    before = node.stats.frames()  # a command may have been counted late
    robot.until(lambda: node.stats.frames()["received"] > before["received"] + 5, hand.move)
    assert node.stats.frames()["commands"] == before["commands"]
    assert hand.takes_over(False).success
    robot.until(lambda: hand.events[-1]["source"] == "policy", hand.move)
    robot.instruct("another")
    robot.until(lambda: hand.events[-1]["instruction"] == "another", hand.move)
    assert hand.call("std_srvs/srv/Trigger", "pause").success
    node.safety.disarm()
    assert not hand.takes_over(False).success
    robot.until(lambda: hand.events[-1]["state"] == "disarmed", hand.move)
    kinds = [(each["event"], each["episode"], each["label"]) for each in hand.events if "episode" in each["event"]]
    assert kinds == [
        ("episode_start", 1, ""),
        ("episode_end", 1, "success"),
        ("episode_start", 2, ""),
        ("episode_end", 2, "end"),
    ]


def test_a_storm_of_requests_leaves_one_state(robot, inside: Inside, hand) -> None:
    node = inside(*LEADER)
    robot.until(lambda: hand.source() == "policy", hand.move)
    errors: list[Exception] = []

    def storm(mode: Mode) -> None:
        try:
            for _ in range(300):
                node.safety.take_over(mode)
        except Exception as error:  # pragma: no cover - what the test is about
            errors.append(error)

    threads = [threading.Thread(target=storm, args=(mode,)) for mode in Mode]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        hand.move()
    assert not errors
    assert hand.takes_over(False).success
    robot.until(lambda: hand.source() == "policy", hand.move)
    assert node.safety.status.mode is Mode.AUTONOMOUS


@pytest.mark.parametrize("why", ["another publisher", "suspended"])
def test_pause_on_any_joy_counts(robot, inside: Inside, hand, why: str) -> None:
    node = inside(*TWIST)
    robot.until(lambda: hand.source() == "policy", hand.move)
    if why == "suspended":
        node._context.suspension.resumed = math.inf  # all that arrives was published before
    other = hand.new_joy()

    def press() -> None:
        if why == "suspended":
            hand.pressed = {1}
        else:
            hand.press({1, 2}, other)
        hand.move()

    robot.until(lambda: node.safety.mode is Mode.PAUSED, press)


def test_a_label_of_a_node_that_nobody_takes_over_leaves_its_reasons_in_force(robot, inside: Inside, hand) -> None:
    node = inside("node.clock:=inputs")
    robot.until(lambda: "episode_start" in [event["event"] for event in hand.events], hand.move)
    hand.label("success")
    robot.until(lambda: "episode_end" in [event["event"] for event in hand.events], hand.move)
    assert node.safety.mode is Mode.AUTONOMOUS


def test_a_node_that_was_deactivated_under_a_person_begins_where_the_person_left_the_arm(
    robot, inside: Inside, hand
) -> None:
    node = inside(*LEADER)
    robot.until(lambda: hand.source() == "policy", hand.move)
    assert hand.takes_over(True).success
    robot.until(lambda: hand.source() == "person", hand.move)
    node.deactivate()
    node.activate()
    robot.until(lambda: node.safety.status.mode is Mode.PAUSED, hand.move)
    robot.until(lambda: node._loop._person_loop.has_begun, hand.move)
    [(positions, _)] = node._gate.controller.next_start(node.inputs.snapshot.arms).values()
    assert positions.tolist() == robot.positions, "not where the policy was"


@pytest.mark.parametrize("meanwhile", ["nothing", "pause"])
def test_a_person_whose_arm_was_pushed_during_a_suspension(robot, start, hand, meanwhile: str) -> None:
    words = (*LEADER, "takeover.joy:=/joy", BUTTONS, "control.armed:=true", "policy.instruction:=go on")
    node = start(*(word for each in words for word in ("-p", each)))
    robot.until(lambda: hand.source() == "policy", hand.move)
    assert hand.takes_over(True).success
    robot.until(lambda: hand.source() == "person", hand.move)
    node.signal(signal.SIGSTOP)
    time.sleep(0.1)
    before, began, led = len(robot.commands), robot.positions[0], hand.leaders
    hand.leaders = []  # they stay behind
    for step in range(1, 21):
        robot.positions[0] = began + 0.4 * step / 20
        hand.pressed = {1} if meanwhile == "pause" and 5 < step < 15 else set()
        hand.move()
        time.sleep(0.02)
    hand.leaders, hand.away = led, -0.4
    slept = robot.now()
    node.signal(signal.SIGCONT)
    wanted = "paused" if meanwhile == "pause" else "person_far"
    robot.until(lambda: wanted in (robot.status["mode"], *robot.status["holds"]), hand.move)
    robot.until(lambda: len(robot.commands) > before, hand.move)
    assert list(robot.commands[before].position[:7]) == robot.positions, "the first one holds"
    assert robot.command_stamp(before) > slept
    robot.until(lambda: "suspended" not in robot.status["holds"], hand.move)
    hand.away = 0.0
    if meanwhile == "nothing":
        robot.until(lambda: hand.source() == "person", hand.move)
    for command in robot.commands[before:]:
        assert abs(command.position[0] - robot.positions[0]) < 0.1
    assert "suspended" in robot.reported
