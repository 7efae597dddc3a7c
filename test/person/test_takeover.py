"""A person takes over: the states, the handover, and every reason why an input does not move the arm."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from live_loop import NAMES, POSITIONS, LiveLoop, TimedPolicy, every

from vla_ros.control.mode import NOBODY, PERSON, POLICY, Mode
from vla_ros.control.reasons import Reason
from vla_ros.kinematics.solver import Kinematics
from vla_ros.person.source import OPENING
from vla_ros.person.takeover import Takeover
from vla_ros.types import FloatArray

LEADER = {"takeover.input": "leader", "takeover.leader": "/leader", "limits.max_joint_acceleration": 5.0}
JOY = {
    "takeover.input": "joy",
    "takeover.joy": "/joy",
    "takeover.buttons": ["deadman = 4", "open = 0", "close = 1"],
    "takeover.axes": ["x = 1", "yaw = 2 * -1"],
}


class Person(LiveLoop):
    """The loop with a person whose hand publishes fifty times a second what :attr:`hand` returns."""

    def __init__(self, options: dict[str, Any], policy: TimedPolicy | None = None, **more: Any) -> None:
        named = {name.replace(".", "__"): value for name, value in options.items()}
        super().__init__(policy, every(1 / 30, 400), **({"control__rate_hz": 10.0} | named | more))
        self.follows, self.lost = True, False
        self.publisher, self.stamp = b"hand", 0
        self.lag = self.offset = 0.0  # s: of the messages, and of the publisher's clock
        self.hand: Callable[[], FloatArray | None] = lambda: self.positions
        self.pressed: set[int] = set()
        self.axes = [0.0, 0.0, 0.0]
        self.clock.after(0.0, self._publish)

    def _publish(self) -> None:
        if not self.lost:
            self.say()
        self.clock.after(0.02, self._publish)

    def say(self) -> None:
        assert self.person is not None
        now = self.clock.steady()
        if self.person.input == "joy":
            buttons = [int(index in self.pressed) for index in range(6)]
            _, released = self.person.buttons.hear(buttons, np.array(self.axes), now, self.publisher)
            if released:
                self.safety.release()
            return
        numbers = self.hand()
        if numbers is not None:
            [(_, _, line, _)] = self.person.followed_topics()
            published = int(1e9 * (1000 + now - self.lag + self.offset))
            line.hear(np.array(numbers), now, self.publisher, self.stamp, "", published)

    def correct(self) -> None:
        assert self.person is not None
        self.person.begin()
        assert self.safety.take_over(Mode.CORRECTING) == ""

    def reasons(self) -> set[Reason]:
        return self.state[1]

    @property
    def source(self) -> str:
        return self.safety.status.source


def wobble(live: Person) -> Callable[[], FloatArray]:
    """A hand that moves 0.1 rad to and fro from where the arm is now."""
    start, began = live.positions.copy(), live.clock.steady()
    return lambda: start + 0.1 * np.sin(2 * (live.clock.steady() - began))


def led(options: dict[str, Any] = LEADER, **more: Any) -> Person:
    """A person moves the arm with a leader."""
    live = Person(options, **more)
    live.run(0.5)
    live.correct()
    live.hand = wobble(live)
    live.run(0.5)
    assert live.source == PERSON
    return live


def test_a_leader_moves_the_arm_once_it_is_where_the_arm_is() -> None:
    live = Person(LEADER)
    live.run(1.0)
    assert live.source == POLICY
    away = live.positions + 0.3
    live.hand = lambda: away + 1e-6 * live.clock.steady()
    live.correct()
    live.run(0.5)
    assert (live.source, live.reasons()) == (NOBODY, {Reason.PERSON_FAR})
    before = len(live.sent)
    live.run(0.5)
    assert len(live.sent) == before, "the arm waits for the leader"
    live.hand = wobble(live)
    live.run(1.0)
    assert live.source == PERSON
    np.testing.assert_allclose(live.sent[-1][1].positions[:7], live.hand(), atol=0.02)
    assert all(step.by_person for step in live.steps[-20:])


@pytest.mark.parametrize("speed", [1.0, 0.04])
def test_a_handover_never_jumps_and_back_to_the_policy_comes_a_new_chunk(speed: float) -> None:
    """Also if the policy is faster than a person may be: the arm slows down within its acceleration."""
    policy = TimedPolicy(horizon=10)
    live = Person(LEADER, policy, control__command_rate_hz=100.0, takeover__max_joint_speed=speed)
    live.run(1.03)
    asked = len(policy.asked)
    live.correct()
    live.hand = wobble(live)
    live.run(1.0)
    assert live.source == PERSON
    assert len(policy.asked) <= asked + 1, "nothing is asked while a person moves the arm"
    assert live.safety.take_over(Mode.AUTONOMOUS) == ""
    back = live.clock.steady()
    live.run(1.5)
    assert live.source == POLICY
    assert policy.asked[-1].stamp > back * 1e9
    times = np.array([at for at, _ in live.sent])
    numbers = np.array([command.positions[:7] for _, command in live.sent])
    gaps = np.diff(times)[:, None]
    speeds = np.diff(numbers, axis=0) / gaps
    accelerations = np.diff(speeds, axis=0) / (0.5 * (gaps[1:] + gaps[:-1]))
    assert gaps.min() > 0.0089
    assert np.abs(accelerations).max() < 5.0 * 1.2, "gaps differ by a twentieth"


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (Reason.PERSON_STALE, lambda live: None),
        (Reason.PERSON_INVALID, lambda live: np.where(np.arange(7) == 2, np.nan, live.positions)),
        (Reason.PERSON_FAR, lambda live: live.away + 1e-3 * live.clock.steady()),
        (Reason.PERSON_FROZEN, lambda live: live.last),
    ],
)
def test_a_leader_that_fails_rests_the_arm_and_the_policy_does_not_continue(reason: Reason, change: Any) -> None:
    live = led(takeover__frozen_after=0.5)
    live.last, live.away = live.positions.copy(), live.positions + 0.4
    live.hand = lambda: change(live)
    live.run(1.5)
    assert live.state == ("holding", {reason})
    assert live.source == NOBODY
    moved = [command.positions[:7] for at, command in live.sent if at > live.clock.steady() - 0.5]
    assert not moved
    live.hand = wobble(live)
    live.run(0.8)
    assert live.source == PERSON, "the leader is where the arm is again"


def test_two_leaders_hold_until_a_person_chooses() -> None:
    live = led()
    live.publisher = b"other"
    live.say()
    live.publisher = b"hand"
    live.run(0.5)
    assert live.state == ("holding", {Reason.PERSON_CONTESTED})
    live.hand = wobble(live)
    live.run(2.0)
    assert live.source == PERSON


def test_a_released_dead_man_ends_motion_at_once() -> None:
    live = Person(JOY, limits__max_joint_acceleration=5.0)
    live.run(0.3)
    live.correct()
    live.run(0.3)
    assert live.state == ("holding", {Reason.PERSON_RELEASED})
    live.pressed, live.axes = {4}, [0.0, 0.5, 0.0]
    live.run(0.5)
    assert live.source == PERSON
    assert live.positions[1] != POSITIONS[1]
    live.pressed = set()
    live.say()
    steps = len(live.steps)
    live.run(0.5)
    assert len(live.steps) == steps, "no step of a person after the release"
    assert live.state == ("holding", {Reason.PERSON_RELEASED})


def test_a_stuck_dead_man_is_bounded() -> None:
    live = Person(JOY, takeover__longest_press=1.0)
    live.correct()
    live.run(0.1)
    live.pressed = {4}
    live.axes = [0.0, 0.3, 0.0]
    live.run(1.8)
    assert live.state == ("holding", {Reason.PERSON_STUCK})
    live.pressed = set()
    live.run(0.1)
    live.pressed = {4}
    live.run(0.3)
    assert live.source == PERSON


def test_reasons_about_the_policy_do_not_hold_a_person_and_those_about_the_robot_do() -> None:
    live = Person(LEADER)
    live.correct()
    live.hand = wobble(live)
    live.safety.hold(Reason.SERVER_LOST, "gone")
    live.run(0.5)
    assert live.source == PERSON
    live.safety.hold(Reason.NAME_CONTESTED, "another")
    live.run(0.2)
    assert live.state == ("holding", {Reason.NAME_CONTESTED})
    live.safety.clear(Reason.NAME_CONTESTED)
    live.run(0.3)
    assert live.source == PERSON
    live.safety.take_over(Mode.AUTONOMOUS)
    live.run(0.05)
    assert live.state == ("holding", {Reason.SERVER_LOST})


def test_takeover_neither_arms_nor_ends_a_stop_and_a_stop_does_not_end_a_pause() -> None:
    live = Person(LEADER)
    live.safety.disarm()
    assert "disarmed" in live.safety.take_over(Mode.CORRECTING)
    live.safety.arm()
    live.correct()
    live.safety.stop(Reason.OPERATOR_STOP)
    assert "stopped" in live.safety.take_over(Mode.AUTONOMOUS)
    live.safety.reset()
    live.safety.arm()
    live.run(0.5)
    assert live.safety.mode is Mode.PAUSED, "the policy does not continue by itself"
    assert live.source == NOBODY
    assert not live.sent


@pytest.mark.parametrize("mode", [Mode.PAUSED, Mode.CORRECTING])
def test_an_arm_that_was_guided_by_hand_while_it_rested_does_not_jump_back(mode: Mode) -> None:
    """A pause, or a dead-man button that is not pressed: no command is sent, and the pendant guides the arm."""
    live = Person(JOY, limits__following_error=0.5)
    live.run(1.0)
    live.correct() if mode is Mode.CORRECTING else live.safety.take_over(mode)
    live.run(0.5)
    rested, sent = live.positions, len(live.sent)
    for _ in range(40):
        live.positions = live.positions + 0.01 * np.eye(7)[6]
        live.run(0.1)
    assert live.safety.take_over(Mode.AUTONOMOUS) == ""
    live.follows = False
    live.run(0.5)
    first = live.sent[sent][1].positions[:7]
    assert abs(first[6] - live.positions[6]) < 0.05, "the arm jumps back to where it was commanded to be"
    assert abs(first[6] - rested[6]) > 0.3


def test_a_takeover_right_after_an_arming_begins_where_the_arm_is() -> None:
    """Before the loop notices the arming: while disarmed, the arm was moved by less than it may sag."""
    live = Person(LEADER)
    live.run(1.0)
    live.safety.disarm()
    live.run(0.3)
    live.positions = live.positions + 0.015 * np.eye(7)[6]
    live.clock.sleep(0.05)
    live.joints()
    sent = len(live.sent)
    live.safety.arm()
    live.correct()
    live.hand, live.follows = wobble(live), False
    live.run(0.5)
    np.testing.assert_allclose(live.sent[sent][1].positions[:7], live.positions, atol=0.005)


def test_takeover_during_an_inference_drops_its_chunk() -> None:
    policy = TimedPolicy()
    live = Person(LEADER, policy)
    policy.during = lambda: live.clock.sleep(0.4) if len(policy.asked) == 3 else None
    while len(policy.asked) < 3:
        live.loop.run_once()
    live.correct()
    live.hand = wobble(live)
    sent = len(live.sent)
    live.run(0.3)
    assert live.source == PERSON
    assert len(live.sent) > sent
    live.run(0.4)
    assert "task_changed" in live.results


def test_a_frame_that_arrives_with_a_takeover_moves_nothing() -> None:
    """The loop, which waited for it, infers on it before it notices the takeover."""
    policy = TimedPolicy(horizon=10)
    live = Person(LEADER, policy, control__schedule="blend")
    policy.during = lambda: live.clock.sleep(0.2)
    since: list[int] = []

    def found() -> None:
        if not since:
            live.correct()
            since.append(len(live.steps))

    live.mailboxes[0].found = found
    live.run(1.0)
    assert since
    assert live.source == PERSON
    assert all(step.by_person for step in live.steps[since[0] :])


def test_the_leader_mapping_has_signs_and_zeros() -> None:
    mapped = [f"{name} = l_{name} * -2 + 0.5" for name in NAMES]
    live = Person({**LEADER, "takeover.joints": mapped})
    [(_, _, _, reader)] = live.person.followed_topics()
    names, positions = reader.target(POSITIONS, 1.0)
    assert names == [f"l_{name}" for name in NAMES]
    np.testing.assert_allclose(-2 * np.array(positions) + 0.5, POSITIONS)

    class Message:
        name, position = names[:-1], positions[:-1]

    _, wrong = reader.read(Message())
    assert "l_joint_7" in wrong


def test_joint_states_that_pause_hold_a_person_only_as_long() -> None:
    live = Person(LEADER)
    live.run(0.5)
    live.correct()
    live.hand = wobble(live)
    live.run(0.5)
    for _ in range(6):  # now a step finds them stale, now the watchdog
        live.silent.add("arm")
        live.run(0.6)
        assert live.state == ("holding", {Reason.JOINT_STATE_STALE})
        live.silent.clear()
        live.run(0.6)
        assert live.source == PERSON


def test_what_a_person_did_long_ago_is_not_followed_whatever_the_clock_of_the_publisher_says() -> None:
    live = Person(LEADER)
    live.offset = -5.0
    live.run(0.5)
    live.correct()
    live.hand = wobble(live)
    live.run(0.5)
    assert live.source == PERSON
    live.lag = 0.4  # as behind a radio link that has stalled
    live.run(0.2)
    assert live.state == ("holding", {Reason.PERSON_STALE})
    live.lag = 0.0
    live.run(0.5)
    assert live.source == PERSON


@pytest.mark.parametrize("lost", ["paused", "silent"])
def test_a_leader_that_was_lost_must_be_brought_to_the_arm_again(lost: str) -> None:
    live = led()
    away = live.positions + 0.3  # less than takeover.lost_distance

    def moved() -> FloatArray:
        return away + 1e-6 * live.clock.steady()

    if lost == "paused":
        live.safety.take_over(Mode.PAUSED)
        live.hand = moved
    else:
        live.hand = lambda: None
    live.run(0.5)
    sent, live.hand = len(live.sent), moved
    live.safety.take_over(Mode.CORRECTING)
    live.run(0.5)
    assert live.state == ("holding", {Reason.PERSON_FAR})
    assert len(live.sent) == sent


def test_a_joy_that_died_with_a_button_down_does_not_open_the_gripper() -> None:
    joy = {"takeover.joy": "/joy", "takeover.buttons": ["close = 0"]}
    live = led({**LEADER, **joy, "robot.gripper_joint_names": ["finger_left"]})
    for down in (0, 1, 1):
        live.person.buttons.hear([down], np.zeros(0), live.clock.steady(), b"joy")
        live.run(0.1)
    before = live.sent[-1][1].positions[7]
    live.run(0.3)
    after = live.sent[-1][1].positions[7]
    assert before > after > 0, "until takeover.stale_after"
    live.run(0.5)
    assert live.source == PERSON
    assert live.sent[-1][1].positions[7] == after


def test_what_is_down_in_the_first_message_of_a_joy_was_not_pressed() -> None:
    live = Person({**JOY, "takeover.buttons": ["deadman = 0", "resume = 1"]})
    hear, still = live.person.buttons.hear, np.zeros(3)
    assert hear([0, 1], still, 0.0, b"a") == (frozenset(), False)
    hear([0, 0], still, 0.1, b"a")
    assert hear([0, 1], still, 0.2, b"a") == ({"resume"}, False)
    live.person.begin()
    hear([0, 0], still, 0.3, b"a")
    live.person.begin()
    assert hear([0, 1], still, 0.4, b"b") == (frozenset(), False)


@pytest.mark.parametrize("publisher", [b"hand", b"restarted"])
def test_a_pad_that_comes_back_with_its_dead_man_pressed_moves_nothing(publisher: bytes) -> None:
    live = Person(JOY)
    live.run(0.2)
    live.correct()
    live.run(0.1)
    live.pressed, live.axes = {4}, [0.0, 0.5, 0.0]
    live.run(0.5)
    assert live.source == PERSON
    live.lost = True
    live.run(3.0)
    assert live.state == ("holding", {Reason.PERSON_STALE})
    live.lost, live.publisher = False, publisher
    if publisher != b"hand":
        live.person.begin()
    steps = len(live.steps)
    live.run(1.0)
    assert len(live.steps) == steps, "it is still pressed, or lies on something"
    assert live.state == ("holding", {Reason.PERSON_RELEASED})
    assert "release it, then press it" in live.safety.explain()
    live.pressed = set()
    live.run(0.1)
    live.pressed = {4}
    live.run(0.3)
    assert live.source == PERSON


@pytest.mark.parametrize(("away", "source"), [(0.05, PERSON), (0.3, NOBODY)])
def test_a_leader_that_comes_back_must_be_where_the_arm_is(away: float, source: str) -> None:
    live = led()
    live.lost = True
    live.run(3.0)
    assert live.state == ("holding", {Reason.PERSON_STALE})
    there = live.positions.copy()
    live.hand = lambda: there + away + 0.001 * np.sin(9 * live.clock.steady())
    live.lost = False
    live.run(0.3)
    assert live.source == source


def test_a_person_s_reason_that_comes_late_does_not_hold_the_policy() -> None:
    live = Person(LEADER)
    live.safety.hold(Reason.PERSON_FAR, "found just before the handover")
    live.run(0.5)
    assert live.source == POLICY
    assert live.sent


def test_a_person_at_a_wall_is_held_without_flapping_and_can_back_off() -> None:
    tip = Kinematics.from_urdf("demo").forward(POSITIONS).position
    wall = f"wall = box 0.2 2 2 at {tip[0] + 0.2} 0 1"
    live = Person({**JOY, "collision.check": True, "collision.deceleration": 20.0, "collision.obstacles": [wall]})
    events: list[str] = []
    live.safety.listen(lambda event: events.append(event.kind))
    live.run(0.1)
    live.correct()
    live.pressed, live.axes = {4}, [0.0, 1.0, 0.0]
    live.run(3.0)
    assert live.state == ("holding", {Reason.COLLISION_SCENE})
    events.clear()
    before = live.positions.copy()
    live.run(1.0)
    assert live.state == ("holding", {Reason.COLLISION_SCENE})
    assert not events
    np.testing.assert_allclose(live.positions, before, atol=1e-3)
    live.axes = [0.0, -1.0, 0.0]
    live.run(0.5)
    assert live.source == PERSON
    assert Kinematics.from_urdf("demo").forward(live.positions).position[0] < tip[0] + 0.1
    live.axes = [0.0, 1.0, 0.0]
    live.run(2.0)
    assert live.state == ("holding", {Reason.COLLISION_SCENE})
    live.safety.take_over(Mode.PAUSED)
    live.run(0.2)
    assert live.state == ("armed", set())


class Strict:
    """A message class of rclpy, whose setters refuse arrays."""

    get_fields_and_field_types = None

    def __init__(self, **fields: Any) -> None:
        assert not any(isinstance(value, np.ndarray) for value in fields.values())
        vars(self).update(fields)


def test_a_leader_with_motors_is_told_where_the_arm_is() -> None:
    live, told = Person(LEADER), list[Any]()
    publisher = SimpleNamespace(publish=told.append, get_subscription_count=lambda: 1)
    others = dict.fromkeys(("service", "subscribe", "subscribe_from", "on_close"), lambda *_: None)
    graph = SimpleNamespace(message=lambda name: Strict)
    wiring: Any = SimpleNamespace(graph=graph, teller=lambda *_: publisher, **others)
    Takeover(live.context, wiring, live.person).tell({"arm": POSITIONS, "arm" + OPENING: np.ones(1)})
    assert told[0].name == list(NAMES)
    assert told[0].position == POSITIONS.tolist()
