"""The guard's process, in this process: what it hears, and the time at which it decides."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from demo_arm import ARM, HOME, configure

from vla_ros.control.reasons import Reason
from vla_ros.graph import Graph, open_graph
from vla_ros.graph.origin import Origin
from vla_ros.guard.channel import Channel, socket_pair
from vla_ros.guard.frames import GuardFrame, Kind, packet_of
from vla_ros.guard.process import GuardProcess
from vla_ros.process import SharedText

MESSAGES = 60


class OneAtATime:
    """A subscription that only the executor reads, one message at a time, as rclpy's public interface has it."""

    def __init__(self, subscription: Any) -> None:
        self._subscription, self.destroy = subscription, subscription.destroy

    def poll(self) -> None:
        pass


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    monkeypatch.setenv("ROS_DOMAIN_ID", "99")
    tag = f"<Tag>vla_ros_guard_{os.getpid()}</Tag>"
    monkeypatch.setenv("CYCLONEDDS_URI", f"<CycloneDDS><Domain><Discovery>{tag}</Discovery></Domain></CycloneDDS>")
    with open_graph("dds") as opened:
        yield opened


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket_pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def process_on(graph: Graph, channel: Channel) -> GuardProcess:
    config = configure(robot={"gripper_joint_names": []}, gripper={"mode": "none"}, control={"rate_hz": 10.0})
    told, beats = SharedText(os.memfd_create("told")), ["/heartbeat", "/guard_heartbeat"]
    return GuardProcess(graph, graph.create_node("guard"), channel, told, config, beats)


def joint_state(graph: Graph, number: int) -> Any:
    stamp = graph.message("builtin_interfaces/msg/Time")(sec=number + 1, nanosec=0)
    header = graph.message("std_msgs/msg/Header")(stamp=stamp, frame_id="")
    none = np.zeros(0)
    make = graph.message("sensor_msgs/msg/JointState")
    return make(header=header, name=list(ARM.joint_names), position=HOME, velocity=none, effort=none)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_where_only_the_executor_reads_every_look_reads_many_messages(graph, ends, monkeypatch) -> None:
    """One callback each time that the executor was spun was 50 joint states a second."""
    waiting, subscribe = deque[Callable[[], None]](), graph.subscribe_raw

    def subscribe_raw(node: Any, cls: Any, topic: str, callback: Any, qos: Any) -> OneAtATime:
        made = subscribe(node, cls, topic, lambda *said: waiting.append(lambda: callback(*said)), qos)
        return OneAtATime(made)

    monkeypatch.setattr(graph, "subscribe_raw", subscribe_raw)
    process = process_on(graph, ends[1])
    publisher = graph.create_node("driver").create_publisher(
        graph.message("sensor_msgs/msg/JointState"), "/joint_states", graph.qos("command")
    )
    until(lambda: publisher.get_subscription_count() == 1)
    spin_once = graph.spin_once
    for number in range(MESSAGES):
        publisher.publish(joint_state(graph, number))
        before = len(waiting)
        until(lambda before=before: bool(spin_once()) or len(waiting) > before)
    monkeypatch.setattr(graph, "lost_checks", "rclpy's public interface")
    monkeypatch.setattr(graph, "spin_once", lambda: waiting.popleft()() if waiting else None)
    looks = 0
    while waiting:
        process._look()
        looks += 1
    assert process._heard == MESSAGES
    assert looks <= MESSAGES / 2
    process._wiring.close()


class Says:
    """A subscription on which messages arrive that the test appends."""

    def __init__(self, callback: Callable[[Any, Origin], None]) -> None:
        self.messages, self._callback = list[bytes](), callback

    def poll(self) -> None:
        while self.messages:
            self._callback(self.messages.pop(0), Origin())

    def destroy(self) -> None:
        pass


def test_a_damaged_message_is_counted_and_is_no_stop_and_the_stop_behind_it_is_heard(
    graph, ends, monkeypatch
) -> None:
    """One on the stop topic once ended the guard."""
    made = dict[str, Says]()
    monkeypatch.setattr(
        graph, "subscribe_raw", lambda node, cls, topic, callback, qos: made.setdefault(topic, Says(callback))
    )
    process = process_on(graph, ends[1])
    stop = graph.serialize(graph.message("std_msgs/msg/Bool")(data=True))
    topic = next(topic for topic in made if topic.endswith("stop"))
    for damaged in (b"", stop[:4], stop[:2]):
        made[topic].messages = [damaged]
        made["/joint_states"].messages = [damaged]
        process._look()
    assert process.guard.counts["unreadable"] == 6
    assert process.guard.stopped is None
    made[topic].messages = [stop[:4], stop]
    process._look()
    process._look()
    assert process.guard.stopped is not None
    assert process.guard.stopped[0] is Reason.OPERATOR_STOP


def test_a_frame_that_is_sent_while_the_channel_is_read_is_not_from_the_future(graph, ends, monkeypatch) -> None:
    ours, theirs = ends
    process, frames = process_on(graph, theirs), theirs.frames

    def read_slowly() -> Any:
        time.sleep(0.01)
        frame = GuardFrame(Kind.POSITIONS, values=HOME, duration=0.1)
        ours.send(packet_of(frame._replace(counter=1, time=time.monotonic_ns(), lifetime=10**9)))
        return frames()

    monkeypatch.setattr(theirs, "frames", read_slowly)
    process._look()
    assert process.guard.stopped is None
    process._wiring.close()
