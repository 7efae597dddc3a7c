"""The live parts of the node on a simulated clock: receivers, control loop and safety, without graph or threads.

Pinned here: every frame has one outcome; the newest wins; what is late, old, void or forbidden is never sent;
chunks and frames keep the rate; options apply to whole steps.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from hypothesis import given
from hypothesis import strategies as st
from live_loop import EPOCH, POSITIONS, LiveLoop, TimedPolicy, every

from vla_ros.config import build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.reasons import Reason
from vla_ros.execution.gate import DriverGate
from vla_ros.execution.outputs import Outputs
from vla_ros.graph.messages import message_types
from vla_ros.types import ActionChunk, Observation
from vla_ros.vision.messages import encode_image


def test_the_newest_frame_wins_and_the_rate_is_kept() -> None:
    live = LiveLoop(events=every(1 / 30, 100))
    live.run(3.0)
    times = [at for at, _ in live.sent]
    assert np.diff(times).min() >= 0.09 - 1e-9
    assert 28 <= len(times) <= 32
    received = live.context.stats.frames()["received"]
    assert live.results.count("replaced") == received - len(times) - live.under_way
    assert all(EPOCH + at * 1e9 - command.stamp < 34e6 for at, command in live.sent)


def test_the_loop_waits_for_a_frame_that_is_about_to_come() -> None:
    live = LiveLoop(events=[(at, LiveLoop.camera) for at in (0.1, 0.13, 0.195)])
    live.run(0.4)
    # The second frame may be answered from 0.19 on; the third comes 5 ms after that, and is taken instead.
    assert live.results == ["command", "replaced", "command"]
    assert live.sent[1][0] == pytest.approx(0.195)


def test_a_chunk_is_executed_a_period_apart_without_further_inference() -> None:
    live = LiveLoop(TimedPolicy(horizon=4), every(0.05, 20), control__schedule="sync")
    live.policy.during = lambda: live.clock.sleep(0.04)
    live.run(0.45)
    times = [at for at, _ in live.sent[:5]]
    assert np.diff(times[:4]) == pytest.approx([0.1] * 3)
    assert [step.index for step in live.steps[:5]] == [0, 1, 2, 3, 0]
    assert len(live.policy.asked) == 2
    assert live.context.stats.frames()["commands"] == len(live.sent)


def test_a_hold_forgets_the_plan() -> None:
    live = LiveLoop(TimedPolicy(horizon=8), every(0.1, 3))
    live.run(0.35)
    moved = len(live.sent)
    assert moved >= 3
    live.context.safety.hold(Reason.NO_INSTRUCTION, "test")
    live.run(0.3)
    assert live.pipeline.schedule.wants_chunk
    assert len(live.sent) == moved
    live.camera()
    live.run(0.05)
    assert live.steps[-1].index == 0, "the frame was inferred on, not the old plan continued"
    assert live.results[-1] == "shown"


def test_a_hold_between_two_steps_of_a_chunk_discards_the_rest() -> None:
    live = LiveLoop(TimedPolicy(horizon=8), every(0.1, 3))
    live.run(0.35)
    made, asked = len(live.steps), len(live.policy.asked)
    live.context.safety.hold(Reason.NO_INSTRUCTION, "test")
    live.context.safety.clear(Reason.NO_INSTRUCTION)
    live.camera()
    live.run(0.3)
    assert live.steps[made].index == 0, "the old plan is continued"
    assert len(live.policy.asked) == asked + 1


def test_a_step_inferred_during_a_hold_is_not_sent_after_it() -> None:
    live = LiveLoop()
    live.context.safety.hold(Reason.NO_INSTRUCTION, "test")
    live.camera()
    live.loop.run_once()
    live.context.safety.clear(Reason.NO_INSTRUCTION)
    live.run(0.3)
    assert live.results == ["shown"]
    assert not live.sent


@pytest.mark.parametrize(
    ("meanwhile", "outcome"),
    [
        (lambda live: live.context.inputs.set_instruction("another"), "task_changed"),
        (lambda live: live.context.inputs.new_epoch(), "task_changed"),
        (lambda live: (live.context.safety.disarm(), live.context.safety.arm()), "task_changed"),
        (lambda live: live.context.safety.disarm(), "task_changed"),
        (lambda live: live.context.safety.stop(Reason.OPERATOR_STOP), "task_changed"),
        (lambda live: live.context.safety.hold(Reason.NO_INSTRUCTION), "task_changed"),
        (lambda live: live.clock.sleep(1.1), "inference_late"),
        (lambda live: live.loop.stop(), "shown"),
    ],
)
def test_an_answer_is_not_sent_if_its_task_changed_during_the_inference(
    meanwhile: Callable[[LiveLoop], Any], outcome: str
) -> None:
    live = LiveLoop(TimedPolicy(horizon=4), control__schedule="sync")
    live.camera()
    live.policy.during = lambda: meanwhile(live)
    live.loop.run_once()
    assert (live.results, live.sent) == ([outcome], [])
    if outcome in {"task_changed", "inference_late"}:
        assert live.pipeline.schedule.wants_chunk, "the answer must not be executed later either"


def test_a_frame_taken_before_an_arming_does_not_move_the_arm() -> None:
    live = LiveLoop(events=every(0.1, 5))
    live.context.safety.disarm()
    live.mailboxes[0].taken = lambda: live.policy.asked or live.context.safety.arm()
    live.run(0.45)
    first, *others = [observation.stamp for observation in live.policy.asked]
    assert live.results[0] == "task_changed"
    assert [command.stamp for _, command in live.sent] == others
    assert first not in others


def test_the_loop_recovers_from_a_late_inference() -> None:
    live = LiveLoop(events=every(0.1, 40))
    live.policy.during = lambda: live.clock.sleep(1.1 if len(live.policy.asked) == 1 else 0.0)
    live.run(1.3)
    assert live.results[0] == "replaced"
    assert "inference_late" in live.results
    live.run(1.0)
    assert live.results[-1] == "command"
    assert live.state == ("armed", set())


def test_a_command_on_a_frame_that_became_too_old_is_not_sent() -> None:
    """As after a suspension of the process: the frame was fresh when it came."""
    live = LiveLoop(timeouts__inference=60.0, timeouts__joint_state=60.0, timeouts__camera=60.0)
    live.camera()
    live.options.current = build({"timeouts.frame_age": 1.0}, live.options.current)
    live.clock.sleep(61.5)
    live.joints()
    live.loop.run_once()
    assert (live.results, live.sent) == (["frame_old"], [])
    assert Reason.FRAME_OLD in live.state[1]


@pytest.mark.parametrize(("delay", "result"), [(0.1, "command"), (0.3, "shown")])
def test_the_watchdog_is_asked_again_if_the_thread_is_late_and_old_commands_are_not_sent(
    delay: float, result: str
) -> None:
    live = LiveLoop()
    asked: list[float] = []
    live.gate.supervised = lambda: asked.append(live.clock.steady())
    live.gate.late = lambda: live.clock.sleep(delay if len(asked) == 1 else 0.0)
    live.camera()
    live.loop.run_once()
    assert asked == [0.0, pytest.approx(delay)]
    assert live.results == [result]


def test_options_that_change_during_an_inference_apply_to_its_command() -> None:
    free, limited = LiveLoop(), LiveLoop()
    limited.policy.during = lambda: setattr(
        limited.options, "current", build({"limits.max_translation_step": 0.001}, limited.options.current)
    )
    for live in (free, limited):
        live.camera()
        live.loop.run_once()
    moved = [np.abs(live.sent[0][1].positions[:7] - POSITIONS).max() for live in (free, limited)]
    assert moved[1] < 0.5 * moved[0]


class Straight(TimedPolicy):
    """Moves 40 mm along x at each step."""

    def infer(self, session: Any, observation: Observation) -> ActionChunk:
        chunk = super().infer(session, observation)
        chunk.actions[:, 0] = 0.04
        return chunk


@pytest.mark.parametrize("before", [0.01, 0.05, 0.09])
@pytest.mark.parametrize("between", [0.0, 50.0])
def test_limits_that_change_while_a_plan_is_executed_apply_to_its_next_step(before: float, between: float) -> None:
    live = LiveLoop(
        Straight(horizon=16),
        every(1 / 30, 400),
        control__rate_hz=5.0,
        control__schedule="sync",
        control__command_rate_hz=between,
    )
    live.follows = True
    live.run(0.9)
    steps = [at for at, _ in live.sent] if not between else live.made
    due = steps[-1] + 0.2 - live.clock.steady()
    tightened = build({"limits.max_translation_step": 0.005}, live.options.current)
    live.clock.after(max(0.001, due - before), lambda: setattr(live.options, "current", tightened))
    live.run(due - 1e-3)
    assert live.options.current is tightened
    begun = len(live.sent)
    live.run(0.19)
    tip = live.pipeline.controller.kinematics["arm"].forward
    places = [tip(command.positions[:7]).position for _, command in live.sent[begun - 1 :]]
    assert len(places) > 1
    assert np.linalg.norm(places[-1] - places[0]) <= 0.0052


def test_another_rate_applies_to_the_next_step() -> None:
    live = LiveLoop(events=every(0.02, 100))
    live.run(1.0)
    slow = len(live.sent)
    live.options.current = build({"control.rate_hz": 25.0}, live.options.current)
    live.run(1.0)
    assert slow == pytest.approx(10, abs=1)
    assert len(live.sent) - slow == pytest.approx(25, abs=1)


def test_the_frames_of_two_cameras_share_the_outcome_of_their_step() -> None:
    keys = ("image", "wrist")
    live = LiveLoop(TimedPolicy(image_keys=keys), camera__topics=["/front", "/wrist"], camera__keys=list(keys))
    live.camera(0)
    live.loop.run_once()
    assert live.results == ["input_missing"]
    live.clock.sleep(0.2)
    first = live.camera(1)
    live.camera(0, data=encode_image(np.zeros((8, 8, 2), np.uint8), live.clock.ros(), "camera", "16UC1"))
    live.loop.run_once()
    assert live.results[1:] == ["image_invalid"], "the wrist's frame is still good"
    live.clock.sleep(0.2)
    stamp = live.camera(0)
    live.loop.run_once()
    assert [(each.camera, each.stamp, each.outcome) for each in live.outcomes[2:]] == [
        ("/front", stamp, "command"),
        ("/wrist", first, "command"),
    ]
    live.clock.sleep(0.2)
    live.camera(1)
    live.camera(1, age=-0.001)
    assert live.results[-1] == "replaced"
    assert live.under_way == 1


FRAMES = st.sampled_from(["good", "good", "good", "undecodable", "cut", "old", "ahead", "repeated", "unstamped"])


@given(st.lists(st.tuples(FRAMES, st.floats(0.001, 0.4), st.booleans(), st.booleans()), max_size=40))
def test_every_received_frame_has_exactly_one_outcome(script: list[tuple[str, float, bool, bool]]) -> None:
    live = LiveLoop(timeouts__inference=0.3)
    last = 0
    for kind, pause, runs, slow in script:
        live.clock.sleep(pause)
        now = live.clock.ros()
        live.policy.during = lambda slow=slow: live.clock.sleep(0.31 if slow else 0.02)  # type: ignore[misc]
        image = np.zeros((8, 8, 3), np.uint8)
        stamps = {"old": now - 10**11, "ahead": now + 10**11, "repeated": last or now, "unstamped": 0}
        stamp = stamps.get(kind, now)
        data = encode_image(image[..., :2], stamp, "c", "16UC1") if kind == "undecodable" else None
        data = b"\0\1\0\0xx" if kind == "cut" else data or encode_image(image, stamp, "camera")
        live.camera(data=data)
        last = stamp if kind in {"good", "undecodable"} else last
        if runs:
            live.loop.run_once()
    frames = live.context.stats.frames()
    assert frames["received"] == len(script)
    assert live.under_way == (live.mailboxes[0].take() is not None)
    assert frames["used"] + sum(frames["dropped"].values()) == len(live.outcomes)
    assert frames["commands"] == live.results.count("command") == len(live.sent)
    arrivals = [each.received for each in live.outcomes]
    assert len(set(arrivals)) == len(arrivals), "a frame was reported twice"


class Wires:
    """Publishers that keep what they publish."""

    graph = SimpleNamespace(message=message_types("jazzy").message, serialize=lambda message: message)
    node = None  # looked at only where a recorder may be known

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def publisher_and_gid(self, type_name: str, topic: str, qos: str) -> tuple[Any, bytes]:
        return SimpleNamespace(topic_name=topic, publish=lambda message: self.sent.append((topic, message))), b""


def gate_of(live: LiveLoop, wires: Wires) -> DriverGate:
    """The gate of a driver on ``wires``, beside which nobody else commands."""
    alone = SimpleNamespace(found={}, look=lambda *, at_once: None)
    outputs = Outputs(live.context, wires)  # type: ignore[arg-type]
    controller = live.pipeline.controller
    return DriverGate(live.context, controller, outputs, alone, lambda: None)  # type: ignore[arg-type]


def speed(message: Any) -> float:
    if hasattr(message, "twist"):
        return abs(float(message.twist.linear.x))
    return float(np.abs(message.data if hasattr(message, "data") else message.velocity).max())


@pytest.mark.parametrize(
    ("output", "urdf", "timeout", "expected"),
    [
        ("twist_stamped", "demo", 0.0, 0.2),
        ("twist_stamped", "", 0.0, 0.2),
        ("twist_stamped", "", 0.1, 0.1),
        ("joint_velocity", "demo", 0.0, 0.2),
        ("joint_velocity_state", "demo", 0.1, 0.1),
    ],
)
def test_a_velocity_expires_after_its_timeout_or_two_periods(
    output: str, urdf: str, timeout: float, expected: float
) -> None:
    live = LiveLoop(robot__urdf=urdf, control__output=output, timeouts__velocity=timeout)
    wires = Wires()
    gate = gate_of(live, wires)

    def speeds() -> list[float]:
        return [speed(message) for _, message in wires.sent]

    live.camera()
    live.loop.run_once()
    (_, command), *_ = live.sent
    for _ in range(3):  # velocities that follow each other in time
        gate.prepare([command])()
        live.clock.sleep(0.9 * expected)
        gate.end_expired_velocities()
    assert min(speeds()) > 0
    live.clock.sleep(0.2 * expected)
    gate.end_expired_velocities()
    gate.end_expired_velocities()
    assert len(wires.sent) == 4
    assert speeds()[-1] == 0
    if output == "twist_stamped":
        assert wires.sent[-1][1].header.frame_id == wires.sent[0][1].header.frame_id
    assert live.context.safety.counters["velocity_expired"] == 1


@pytest.mark.parametrize(
    ("output", "urdf"), [("joint_velocity", "demo"), ("twist_stamped", "demo"), ("twist_stamped", "")]
)
def test_on_a_simulated_clock_too_a_velocity_expires_and_ends_at_a_hold(output: str, urdf: str) -> None:
    """The simulated arm moved on with it for ever."""
    live = LiveLoop(robot__urdf=urdf, control__output=output)

    def speed() -> float:
        command = live.sent[-1][1]
        values = [*(command.velocities or {}).values(), *np.ravel(command.twist or ())]
        return max(map(abs, values))

    live.camera()
    live.loop.run_once()
    assert speed() > 0
    live.run(0.19)  # of two periods
    assert speed() > 0
    live.run(0.15)
    assert speed() == 0
    assert (len(live.sent), live.safety.counters["velocity_expired"]) == (2, 1)
    live.camera()
    live.loop.run_once()
    assert speed() > 0
    live.safety.hold(Reason.DRIVER_MISSING, "by the test")
    live.gate.supervise()
    assert (len(live.sent), speed()) == (4, 0)


def test_joint_states_that_cannot_be_read_are_named_beside_a_hold_that_cannot_be_sent(caplog) -> None:
    live = LiveLoop()
    gate = gate_of(live, Wires())

    def fails() -> None:
        raise ZeroDivisionError("by the test")

    gate._poll = fails
    live.clock.sleep(5.0)  # no joint state is new enough for a hold
    live.context.safety.hold(Reason.DRIVER_MISSING, "by the test")
    gate.send_due_holds()
    live.context.throttled.flush()
    assert "joint states could not be read: ZeroDivisionError: by the test" in caplog.text
    assert "no hold could be sent yet" in caplog.text


BOTH = parse_components("left.joint_delta + right.joint_delta", action=True)


class TwoArmed(TimedPolicy):
    """Moves every joint of two arms by 5 mrad."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = PolicySpec(action=BOTH, dimension=14)

    def infer(self, session: Any, observation: Observation) -> ActionChunk:
        return ActionChunk(np.full((1, 14), 0.005), observation.stamp)


def two_arms(outputs: tuple[str, str] = ("joint_state", "joint_state"), **options: Any) -> LiveLoop:
    own = {
        f"{arm}__{leaf}": f"/{arm}/{leaf}" for arm in ("left", "right") for leaf in ("command", "joint_states")
    } | {"left__output": outputs[0], "right__output": outputs[1]}
    return LiveLoop(TwoArmed(), robot__arms=["left", "right"], **own, **options)


def test_two_arms_move_together_and_hold_together() -> None:
    live = two_arms()
    live.camera()
    live.loop.run_once()
    assert [command.arm for _, command in live.sent] == ["left", "right"]
    live.silent = {"right"}
    for _ in range(8):
        live.clock.sleep(0.1)
        live.camera()
        live.loop.run_once()
    status = live.context.safety.status
    assert status.holds[Reason.JOINT_STATE_STALE].startswith("right: ")
    last = max(at for at, _ in live.sent)
    assert last <= 0.5 + 0.1, "timeouts.joint_state, and a period"
    live.silent = set()
    live.clock.sleep(0.1)
    live.camera()
    live.loop.run_once()
    assert live.state == ("armed", set())
    assert [command.arm for _, command in live.sent[-2:]] == ["left", "right"]


def test_an_arm_may_hold_alone_where_the_options_say_so() -> None:
    live = two_arms(control__arms_hold_alone=True)
    live.camera()
    live.loop.run_once()
    live.silent = {"right"}
    for _ in range(8):
        live.clock.sleep(0.1)
        live.camera()
        live.loop.run_once()
    assert live.state == ("armed", set())
    assert [(command.arm, command.hold) for _, command in live.sent[-2:]] == [("left", False), ("left", False)]
    (held,) = [command for _, command in live.sent if command.hold]
    assert held.arm == "right"
    np.testing.assert_array_equal(held.positions, POSITIONS)
    assert live.context.safety.counters["joint_state_stale"] >= 1
    live.silent = {"left", "right"}
    for _ in range(6):
        live.clock.sleep(0.1)
        live.camera()
        live.loop.run_once()
    assert Reason.JOINT_STATE_STALE in live.state[1]


def test_an_arm_holds_alone_with_commands_between_steps_as_well() -> None:
    """A stale joint state between two steps used to hold all arms."""
    live = two_arms(control__arms_hold_alone=True, control__command_rate_hz=50.0)
    for number in range(1, 13):
        if number == 3:
            live.silent = {"right"}
        live.camera()
        live.run(0.1)
    assert live.state == ("armed", set())
    after = [(command.arm, command.hold) for at, command in live.sent if at > 0.8]
    assert {arm for arm, _ in after} == {"left"}
    assert len(after) > 15, "commands between steps go on"
    assert sum(command.hold for _, command in live.sent) == 1
    assert live.context.safety.counters["joint_state_stale"] == 1


def test_a_suspension_is_noticed_by_the_first_write_after_it_and_by_one_during_which_it_began() -> None:
    slept = [0.0]

    class Suspended(SimulatedClock):
        def awake(self) -> float:
            return self.steady() + slept[0]

    live = LiveLoop(clock_type=Suspended)
    gate, safety = gate_of(live, Wires()), live.context.safety
    live.context.suspension.notice()
    with gate.sending() as may_move:
        assert may_move
        slept[0] = 2.5
    assert live.state == ("holding", {Reason.SUSPENDED}), "what was sent is corrected"
    assert "did not run for 2.5 s; the graph was not searched" in safety.explain()
    gate.look()
    with gate.sending() as may_move:
        assert not may_move
    assert "a stop that was sent meanwhile may still arrive" in safety.explain()
    live.clock.sleep(3.3)
    with gate.sending() as may_move:
        assert not may_move, "only supervision ends it"
    assert safety.counters["suspended"] == 1


def test_each_arm_has_its_own_command_topic_and_its_velocity_expires() -> None:
    live = two_arms(("joint_velocity_state", "joint_state"))
    wires = Wires()
    gate = gate_of(live, wires)
    live.camera()
    live.loop.run_once()
    gate.prepare([command for _, command in live.sent])()
    assert [topic for topic, _ in wires.sent] == ["/left/command", "/right/command"]
    assert speed(wires.sent[0][1]) == pytest.approx(0.05)
    live.clock.sleep(0.21)
    gate.end_expired_velocities()
    (topic, message) = wires.sent[-1]
    assert (topic, len(wires.sent), speed(message)) == ("/left/command", 3, 0.0)
