import itertools
import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vla_ros.control.mode import Mode
from vla_ros.control.reasons import OF_PERSON, Level, Reason
from vla_ros.control.safety import Event, Safety, State

HOLDS = [reason for reason in Reason if reason.level is Level.HOLD]
STOPS = [reason for reason in Reason if reason.level is Level.STOP]


def armed() -> Safety:
    safety = Safety()
    assert safety.arm()
    return safety


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.value)
def test_a_report_does_what_the_reasons_level_says(reason: Reason) -> None:
    safety = armed()
    if reason in OF_PERSON:
        safety.take_over(Mode.CORRECTING)
    safety.react(reason, "what was found")
    expected = {Level.COUNT: State.ARMED, Level.HOLD: State.HOLDING, Level.STOP: State.STOPPED}
    assert safety.state is expected[reason.level]
    assert safety.counters == {reason.value: 1}
    status = safety.status
    assert status.holds == ({reason: "what was found"} if reason.level is Level.HOLD else {})
    assert (status.stopped_by, status.detail) == ((reason, "what was found") if reason in STOPS else (None, ""))


def test_the_first_stop_wins_and_later_ones_are_counted() -> None:
    safety = armed()
    assert safety.stop(Reason.OPERATOR_STOP, "first") is True
    assert safety.stop(Reason.DRIVER_GONE, "second") is False
    assert (safety.status.stopped_by, safety.status.detail) == (Reason.OPERATOR_STOP, "first")
    assert safety.counters == {"operator_stop": 1, "driver_gone": 1}


def test_an_arm_moves_after_the_last_hold_and_repeated_holds_count_once() -> None:
    safety = armed()
    for _ in range(3):
        safety.hold(Reason.CAMERA_STALE, "x")
    safety.hold(Reason.NO_INSTRUCTION)
    safety.clear(Reason.CAMERA_STALE)
    assert safety.state is State.HOLDING
    safety.clear(Reason.NO_INSTRUCTION)
    safety.clear(Reason.NO_INSTRUCTION)
    assert safety.state is State.ARMED
    assert safety.counters == {"camera_stale": 1, "no_instruction": 1}


@pytest.mark.parametrize("reason", [Reason.CAMERA_STALE, Reason.IMAGE_INVALID])
def test_a_reason_of_another_level_does_not_stop(reason: Reason) -> None:
    with pytest.raises(ValueError, match="not to stop"):
        armed().stop(reason)
    with pytest.raises(ValueError, match="not to hold"):
        armed().hold(Reason.OPERATOR_STOP)


def test_follow_clears_only_holds_of_the_watchdog() -> None:
    safety = armed()
    safety.hold(Reason.NO_INSTRUCTION)
    safety.follow({Reason.CAMERA_STALE: "a", Reason.JOINT_STATE_STALE: "b"})
    assert set(safety.status.holds) == {Reason.NO_INSTRUCTION, Reason.CAMERA_STALE, Reason.JOINT_STATE_STALE}
    safety.follow({Reason.CAMERA_STALE: "c"})
    assert safety.status.holds == {Reason.NO_INSTRUCTION: "", Reason.CAMERA_STALE: "c"}
    safety.follow({})
    assert set(safety.status.holds) == {Reason.NO_INSTRUCTION}


def test_a_commander_whose_name_is_known_later_is_reported_again() -> None:
    safety, events = armed(), []
    safety.listen(lambda event: events.append((event.kind, event.detail)))
    for detail in ("an unknown node", "an unknown node", "/leftover", "/leftover"):
        safety.follow({Reason.COMMAND_CONTESTED: detail})
    assert events == [("stop", "an unknown node"), ("block", "/leftover")]
    assert (safety.status.stopped_by, safety.status.detail) == (Reason.COMMAND_CONTESTED, "/leftover")
    assert safety.counters == {"command_contested": 1}


def test_an_active_reason_to_stop_stops_once_and_prevents_arming() -> None:
    safety = Safety()
    lost = {Reason.HEARTBEAT_LOST: "none for 2 s"}
    safety.follow(lost)
    assert safety.state is State.DISARMED
    assert not safety.arm()
    assert "heartbeat_lost (none for 2 s)" in safety.explain()
    safety.follow({})
    assert safety.arm()
    for _ in range(5):
        safety.follow(lost)
    assert safety.status.stopped_by is Reason.HEARTBEAT_LOST
    assert safety.counters == {"heartbeat_lost": 1}
    safety.reset()
    assert not safety.arm(), "the heartbeat is still lost"


def test_explain_names_the_state_its_reasons_and_the_next_step() -> None:
    safety = Safety()
    assert safety.explain() == "disarmed"
    safety.hold(Reason.NO_INSTRUCTION)
    assert safety.explain() == "disarmed; waiting for: no_instruction (there is no instruction to follow)"
    safety.arm()
    assert safety.explain().startswith("holding: no_instruction")
    safety.clear(Reason.NO_INSTRUCTION)
    assert safety.explain() == "armed"
    safety.stop(Reason.OPERATOR_STOP, "button")
    assert safety.explain() == "stopped by operator_stop (button); fix the cause, reset, then arm"


def test_events_of_a_motion_are_delivered_after_it() -> None:
    safety, heard = armed(), list[Event]()
    safety.listen(heard.append)
    with safety.sending() as allowed:
        assert allowed
        safety.hold(Reason.SUSPENDED, "2.5 s")
        assert not safety.may_move
        assert not heard, "a listener may send a hold, which must not come in between"
    assert [event.reason for event in heard] == [Reason.SUSPENDED]


def test_listeners_get_every_event_in_order_and_may_call_back() -> None:
    ticks = itertools.count(10)
    safety = Safety(clock=lambda: next(ticks))
    heard: list[Event] = []

    def on_event(event: Event) -> None:
        heard.append(event)
        if event.kind == "hold":
            safety.stop(Reason.OPERATOR_STOP, "the listener said so")

    safety.listen(on_event)
    safety.arm()
    safety.hold(Reason.CAMERA_STALE, "dark")
    found = [(event.kind, event.before.value, event.after.value, event.reason) for event in heard]
    assert found == [
        ("arm", "disarmed", "armed", None),
        ("hold", "armed", "holding", Reason.CAMERA_STALE),
        ("stop", "holding", "stopped", Reason.OPERATOR_STOP),
    ]
    assert [event.stamp for event in heard] == [10, 11, 12]
    assert heard[1].detail == "dark"


def test_a_failing_listener_does_not_prevent_a_stop(caplog) -> None:
    safety = armed()
    heard: list[str] = []

    def broken(event: Event) -> None:
        raise RuntimeError("broken listener")

    safety.listen(broken)
    safety.listen(lambda event: heard.append(event.kind))
    assert safety.stop(Reason.OPERATOR_STOP)
    assert heard == ["stop"]
    assert "broken listener" in caplog.text


def test_once_stop_has_returned_no_motion_is_sent() -> None:
    """A thread sends motions as fast as it can while another one stops, fifty times."""
    for _ in range(50):
        safety, sent, done = armed(), [0], threading.Event()

        def mover(safety: Safety = safety, sent: list[int] = sent, done: threading.Event = done) -> None:
            while not done.is_set():
                with safety.sending() as allowed:
                    if allowed:
                        sent[0] += 1

        thread = threading.Thread(target=mover)
        thread.start()
        deadline = time.monotonic() + 10
        while sent[0] < 20 and time.monotonic() < deadline:
            time.sleep(0)
        safety.stop(Reason.OPERATOR_STOP)
        at_stop = sent[0]
        done.set()
        thread.join(10)
        assert sent[0] == at_stop
        assert at_stop >= 20


def test_listeners_get_events_of_many_threads_once_and_in_order() -> None:
    ticks = itertools.count()
    safety = Safety(clock=lambda: next(ticks))
    heard: list[int] = []
    safety.listen(lambda event: heard.append(event.stamp))
    reasons = HOLDS[:4]

    def toggle(reason: Reason) -> None:
        for _ in range(200):
            safety.hold(reason)
            safety.clear(reason)

    threads = [threading.Thread(target=toggle, args=(reason,)) for reason in reasons]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert heard == list(range(len(reasons) * 400))


class Machine(RuleBasedStateMachine):
    """Compares random sequences of calls with a model."""

    def __init__(self) -> None:
        super().__init__()
        self.safety = Safety()
        self.armed = False
        self.stopped: Reason | None = None
        self.held: set[Reason] = set()  # by hold()
        self.found: set[Reason] = set()  # by follow()
        self.blocked: set[Reason] = set()
        self.armings = 0
        self.before = (False, 0)  # whether it might move, and interruptions

    @rule()
    def arm(self) -> None:
        expected = self.stopped is None and not self.blocked
        assert self.safety.arm() is expected
        self.armings += expected and not self.armed
        self.armed = self.armed or expected

    @rule()
    def disarm(self) -> None:
        self.safety.disarm()
        self.armed = False

    @rule(reason=st.sampled_from(HOLDS))
    def hold(self, reason: Reason) -> None:
        self.safety.hold(reason)
        self.held.add(reason)

    @rule(reason=st.sampled_from(HOLDS))
    def report(self, reason: Reason) -> None:
        self.safety.react(reason)
        self.found.add(reason)

    @rule(reason=st.sampled_from(HOLDS))
    def clear(self, reason: Reason) -> None:
        self.safety.clear(reason)
        self.held.discard(reason)

    @rule(reason=st.sampled_from(STOPS))
    def stop(self, reason: Reason) -> None:
        assert self.safety.stop(reason) is (self.stopped is None)
        self.stopped = self.stopped or reason
        self.armed = False

    @rule(active=st.sets(st.sampled_from([*HOLDS, *STOPS]), max_size=4))
    def follow(self, active: set[Reason]) -> None:
        self.safety.follow(dict.fromkeys(sorted(active, key=str), ""))
        self.found = {reason for reason in active if reason.level is Level.HOLD}
        self.blocked = {reason for reason in active if reason.level is Level.STOP}
        if self.armed and self.blocked:
            self.stopped, self.armed = min(self.blocked, key=str), False

    @property
    def holds(self) -> set[Reason]:
        return (self.held | self.found) - OF_PERSON  # the policy moves the arm

    @rule()
    def reset(self) -> None:
        assert self.safety.reset() is (self.stopped is not None)
        self.stopped = None

    @invariant()
    def it_moves_only_when_all_is_well(self) -> None:
        expected = self.armed and self.stopped is None and not self.holds
        assert self.safety.may_move == expected
        with self.safety.sending() as allowed:
            assert allowed == expected
        assert self.safety.armings == self.armings
        moved, interruptions = self.before
        assert self.safety.interruptions > interruptions or expected or not moved, "an interruption is not counted"
        self.before = expected, self.safety.interruptions

    @invariant()
    def the_state_is_the_models(self) -> None:
        status = self.safety.status
        if self.stopped is not None:
            assert status.state is State.STOPPED
        elif not self.armed:
            assert status.state is State.DISARMED
        else:
            assert status.state is (State.HOLDING if self.holds else State.ARMED)
        assert status.stopped_by is self.stopped
        assert set(status.holds) == self.holds


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase
