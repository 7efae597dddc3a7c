import math
import time

import pytest

from vla_ros.control.clock import Clock, SimulatedClock
from vla_ros.control.suspension import Suspension

SECOND = 1_000_000_000


class Scene(Clock):
    """A process whose time a test sets, and a publisher whose clock is ahead by ``ahead`` seconds."""

    def __init__(self, ahead: float = 0.0) -> None:
        super().__init__()
        self.now_s, self.ahead = 100.0, ahead - 100.0 + time.time()
        self.suspension = Suspension(self)

    def awake(self) -> float:
        return self.now_s

    def run(self, seconds: float, arrival: float = 0.001) -> None:
        """Notice and receive fifty times a second; messages take ``arrival`` seconds."""
        for _ in range(round(50 * seconds)):
            self.now_s += 0.02
            self.suspension.notice()
            self.receive(self.now_s - arrival)

    def receive(self, published: float) -> float:
        """What is said of a message that arrives now."""
        return self.suspension.note_arrival(b"driver", round((published + self.ahead) * SECOND))


def test_only_a_pause_longer_than_any_delay_is_a_suspension() -> None:
    scene = Scene()
    scene.run(1.0)
    scene.now_s += 0.2
    scene.suspension.notice()
    assert scene.suspension.resumed == -math.inf
    scene.now_s += 0.3
    scene.suspension.notice()
    assert (scene.suspension.resumed, scene.suspension.lasted) == (scene.now_s, pytest.approx(0.3))


def test_lost_messages_are_waited_for_after_a_suspension_in_which_messages_get_lost() -> None:
    scene = Scene()
    for pause, waits in ((0.3, False), (2.0, True), (0.3, True)):
        scene.run(0.1)
        scene.now_s += pause
        scene.suspension.notice()
        assert (scene.suspension.settled > scene.now_s + 2.5) is waits
        assert scene.suspension.settled > scene.now_s + 0.1, "a stop that waited has not been processed yet"


@pytest.mark.parametrize("ahead", [0.0, 5.0, -5.0])
def test_messages_that_waited_are_told_from_new_ones_whatever_the_publishers_clock(ahead: float) -> None:
    scene = Scene(ahead)
    scene.run(5.0)
    slept = scene.now_s
    scene.now_s += 2.0
    scene.suspension.notice()
    for waited in (0.1, 1.0, 1.95):
        assert scene.receive(slept + waited) < scene.suspension.resumed
    scene.now_s += 0.005
    assert scene.receive(scene.now_s - 0.001) >= scene.suspension.resumed


def test_a_publisher_whose_clock_was_set_back_is_believed_again_after_two_hundred_messages() -> None:
    scene = Scene()
    scene.run(5.0)
    scene.ahead -= 3600.0
    scene.run(4.1)
    assert scene.receive(scene.now_s - 0.001) == pytest.approx(scene.now_s - 0.001, abs=0.01)


def test_a_message_without_a_stamp_counts_as_a_second_old() -> None:
    scene = Scene()
    assert scene.suspension.note_arrival(b"", 0) == scene.now_s - 1.0


def test_a_simulated_clock_is_never_suspended() -> None:
    clock = SimulatedClock()
    suspension = Suspension(clock)
    for _ in range(3):
        suspension.notice()
        clock.sleep(10.0)
    assert suspension.resumed == -math.inf
