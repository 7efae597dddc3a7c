import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros.control.clock import SimulatedClock
from vla_ros.graph.origin import Origin
from vla_ros.node.beside import BesideThread
from vla_ros.node.lockstep import LockstepWiring
from vla_ros.vision.messages import encode_compressed

SECOND = 1_000_000_000


class Backend:
    """Keeps the callback of each topic, so that a test chooses the order of messages."""

    def __init__(self) -> None:
        self.callbacks = {}

    def message(self, name):
        return name

    qos = message

    def subscribe_raw(self, node, kind, topic, callback, profile):
        self.callbacks[topic] = callback
        return SimpleNamespace(destroy=lambda: None)


class Robot:
    """Two arms on one topic of joint states, and a camera; the loop takes 50 ms of the clock each time."""

    def __init__(self) -> None:
        self.backend, self.said = Backend(), list[str]()
        node = SimpleNamespace(resolve_topic_name=lambda topic: topic)
        self.gate = LockstepWiring(self.backend, node, load([config_file("demo_two_arms")]))
        for topic in ("/joint_states", "/camera/image_raw"):
            self.gate.subscribe_raw("sensor_msgs/msg/Any", topic, self.heard(topic), "camera")
        self.gate.subscribe_raw("std_msgs/msg/Float64MultiArray", "/force", self.heard("/force"), "state")
        self.gate.begin(self.run_once, lambda: self.said.append("supervise"), [lambda: self.said.append("reset")])

    def heard(self, topic):
        return lambda message, origin: self.said.append(f"{topic} {self.gate.clock.ros() / SECOND:g}")

    def run_once(self) -> None:
        self.said.append("run")
        self.gate.clock.sleep(0.05)

    def send(self, stamp, *topics) -> list[str]:
        self.said.clear()
        for topic in topics:
            self.backend.callbacks[topic](encode_compressed(b"", stamp, "x"), Origin())
        return list(self.said)


INPUTS = ("/joint_states", "/joint_states", "/camera/image_raw")


@pytest.mark.parametrize("order", sorted(set(itertools.permutations(INPUTS))))
def test_the_loop_runs_once_all_inputs_have_arrived_whatever_their_order(order):
    robot = Robot()
    expected = ["/joint_states 7", "/joint_states 7", "/camera/image_raw 7", "supervise", "run"]
    assert robot.send(7 * SECOND, *order) == expected
    assert robot.gate.clock.ros() == 7 * SECOND + 1_000_000, "it does not wait beyond its step"
    assert robot.gate.clock.steady() == 0.001


def test_a_repeated_or_incomplete_step_does_nothing():
    robot = Robot()
    robot.send(7 * SECOND, *INPUTS)
    assert robot.send(7 * SECOND, *INPUTS) == []
    assert robot.send(8 * SECOND, *INPUTS[1:]) == []
    assert robot.send(9 * SECOND, *INPUTS[1:]) == [], "one message of each of two steps are not two of one"
    assert "run" in robot.send(9 * SECOND, "/joint_states")
    assert robot.send(9 * SECOND, "/force") == ["/force 9.001"], "a message without a stamp is not held back"


def test_a_world_that_was_reset_leaves_out_time():
    robot = Robot()
    for stamp in (7 * SECOND, 8 * SECOND):
        assert "reset" not in robot.send(stamp, *INPUTS)
    assert robot.send(11 * SECOND, *INPUTS)[0] == "reset"
    robot.gate.end()
    assert robot.send(12 * SECOND, *INPUTS) == []


def test_a_thread_beside_the_node_rests_while_the_time_of_the_simulation_stands_still() -> None:
    """It has more work at once: half of the machine's time stays to others."""
    context, ended = SimpleNamespace(clock=SimulatedClock()), []
    wiring, done = SimpleNamespace(on_close=ended.append), threading.Event()
    begun, count = time.monotonic(), 0

    def work() -> None:
        nonlocal count
        count += 1
        thread.wake()
        time.sleep(0.02)
        if time.monotonic() > begun + 0.5:
            done.set()

    thread = BesideThread(context, wiring, "beside", 0.05, work)
    assert done.wait(20.0)
    [close] = ended
    close()
    assert count <= 15
