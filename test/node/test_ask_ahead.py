import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from live_loop import EPOCH, LiveLoop, TimedPolicy, every

from vla_ros.config import build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.clock import Clock
from vla_ros.control.mode import NO_TASK
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.schedule import resolve_schedule
from vla_ros.execution.source import PolicySource
from vla_ros.execution.states import InferenceRequest, RequestState
from vla_ros.node.inference import InferenceThread
from vla_ros.types import ActionChunk, Observation

HORIZON, RATE, DELAY = 16, 20.0, 0.29  # 6 steps
PERIOD = 1 / RATE
HOLD = Reason.NO_INSTRUCTION


class Clockwork(TimedPolicy):
    """Each action says for which time it is meant, in seconds since the beginning."""

    def __init__(self, *, continues: bool = False, action: str = "arm.joint_delta") -> None:
        super().__init__(HORIZON)
        parts = parse_components(f"{action} + unused[1]", action=True)
        self.spec = PolicySpec(action=parts, dimension=8, horizon=HORIZON, continues_chunks=continues)
        self.configured: list[Any] = []
        self.inferring = False

    def configure(self, config: Any) -> None:
        assert not self.inferring
        self.configured.append(config)

    def infer(self, session: Any, observation: Observation) -> ActionChunk:
        self.asked.append(observation)
        self.during()
        meant = (observation.stamp - EPOCH) / 1e9 + PERIOD * np.arange(HORIZON)
        actions = np.zeros((HORIZON, 8))
        actions[:, 0], actions[:, 7] = 0.001, meant
        if observation.previous is not None:
            actions[: len(observation.previous.actions)] = observation.previous.actions
        return ActionChunk(actions, observation.stamp)


def ahead(
    seconds: float = 8.0, *, continues: bool = False, action: str = "arm.joint_delta", **options: Any
) -> LiveLoop:
    """A loop whose policy takes 0.29 s, with frames at 30 Hz."""
    frames = every(1 / 30, round(30 * seconds))
    live = LiveLoop(
        Clockwork(continues=continues, action=action),
        frames,
        **{"control__rate_hz": RATE, "control__schedule": "rtc" if continues else "append", **options},
    )
    live.policy.during = lambda: live.clock.sleep(DELAY)
    return live


def tighten(live: LiveLoop) -> None:
    live.options.current = build({"limits.max_joint_step": 0.0005}, live.options.current)


def sent(live: LiveLoop) -> np.ndarray:
    return np.array([at for at, _ in live.sent])


def test_the_arm_does_not_stop_during_an_inference() -> None:
    """Synchronous it stands still for a third of the time; ahead no gap is longer than a period and a half."""
    waits, goes_on = ahead(control__schedule="sync"), ahead()
    for live in (waits, goes_on):
        live.run(3.9)
    gaps = {live: np.diff(sent(live)) for live in (waits, goes_on)}
    stalled = gaps[waits][gaps[waits] > 1.5 * PERIOD] - PERIOD
    assert stalled.sum() > 0.15 * 3.9
    assert gaps[goes_on].max() <= 1.5 * PERIOD
    assert len(goes_on.sent) > 1.2 * len(waits.sent)
    assert goes_on.context.safety.counters.get("plan_empty", 0) == 0
    shares = [live.context.stats.execution.summary()["stalled_share"] for live in (waits, goes_on)]
    assert shares[0] == pytest.approx(stalled.sum() / (sent(waits)[-1] - sent(waits)[0]), rel=0.01)
    assert shares[1] == 0


@pytest.mark.parametrize("continues", [False, True])
def test_an_answer_may_take_half_a_chunk(continues: bool) -> None:
    """Where a chunk comes so late that it is time for the next one, that is asked for at once, not a step later."""
    live = ahead(continues=continues)
    live.policy.during = lambda: live.clock.sleep(0.5 * HORIZON * PERIOD - 0.02)
    live.run(3.9)
    assert len(live.policy.asked) >= 8
    assert np.diff(sent(live)).max() <= 1.01 * PERIOD
    late = sent(live)[20:] - np.array([step.action[7] for step in live.steps])[20:]
    drift = late[-1] - late[0]
    assert abs(drift) <= PERIOD, "no step is repeated"


def test_a_task_that_begins_as_the_next_chunk_is_requested_skips_no_step() -> None:
    live = ahead(control__schedule="append")
    live.policy.during = lambda: live.clock.sleep(0.5 * HORIZON * PERIOD - 0.02)
    live.run(1.5)
    begun: list[int] = []

    def taken() -> None:
        if not begun and live.made[-1] == live.clock.steady():  # a chunk has just come
            begun.append(len(live.steps))
            live.context.inputs.set_instruction("another")

    live.mailboxes[0].taken = taken
    live.run(1.5)
    assert [step.index for step in live.steps[begun[0] :]][:3] == [0, 1, 2]


@pytest.mark.parametrize("schedule", ["append", "blend", "ensemble"])
def test_a_chunk_begins_at_the_step_that_is_due(schedule: str) -> None:
    """No step is repeated and none skipped but those that were executed while the policy inferred."""
    live = ahead(control__schedule=schedule)
    live.run(3.9)
    meant = np.array([step.action[7] for step in live.steps])
    seams = [number for number, step in enumerate(live.steps) if step.chunk is not None]
    settled = seams[1] + HORIZON  # the first chunk began when the arm stood still
    late = sent(live)[settled:] - meant[settled:]
    assert np.abs(late).max() <= 2 * PERIOD, "a chunk from its beginning would be 0.3 s late"
    assert np.all(np.diff(meant) > 0)
    assert np.diff(meant[settled:]).max() <= 2 * PERIOD + 1e-9
    first = [live.steps[number].index for number in seams]
    assert first[0] == 0
    assert min(first[1:]) >= DELAY / PERIOD - 1


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 10),  # 16, less those that the answer takes
        ({"control__execute_steps": 2}, 2 + 6),
        ({"control__refill_steps": 8}, 8),
        ({"control__schedule": "blend", "control__blend_steps": 3}, 8),
        ({"control__schedule": "ensemble"}, 6),
    ],
)
def test_a_chunk_is_requested_in_time(options: dict[str, Any], steps: int) -> None:
    """By the latency, after ``execute_steps``, or with ``refill_steps`` left: so many steps of each chunk."""
    live = ahead(**options)
    live.run(3.9)
    seams = [number for number, step in enumerate(live.steps) if step.chunk is not None]
    assert set(np.diff(seams[2:])) == {steps}


@pytest.mark.parametrize(
    ("schedule", "horizon", "continues", "kind"),
    [
        ("auto", 1, False, "sync"),
        ("auto", 1, True, "sync"),
        ("auto", 8, False, "blend"),
        ("auto", 8, True, "rtc"),
        ("rtc", 8, True, "rtc"),
        ("rtc", 8, False, "blend"),
        ("append", 8, True, "append"),
        ("ensemble", 1, False, "sync"),
        ("sync", 8, True, "sync"),
    ],
)
def test_the_schedule_follows_from_option_and_policy(
    schedule: str, horizon: int, continues: bool, kind: str
) -> None:
    assert resolve_schedule(schedule, PolicySpec(horizon=horizon, continues_chunks=continues)) == kind


def test_the_observation_contains_the_rest_of_the_plan_and_the_delay() -> None:
    live = ahead(continues=True)
    live.run(3.9)
    actions = np.array([step.action for step in live.steps])
    seams = [number for number, step in enumerate(live.steps) if step.chunk is not None]
    assert len(seams) > 4
    for number, observation in zip(seams, live.policy.asked, strict=False):
        previous = observation.previous
        if number == 0:
            assert previous is None
            continue
        assert previous is not None
        assert live.steps[number].index <= previous.delay <= live.steps[number].index + 1
        asked = number - live.steps[number].index  # the step that was due when the policy was asked
        assert len(previous.actions) > previous.delay
        np.testing.assert_array_equal(actions[asked : asked + previous.delay], previous.actions[: previous.delay])


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(0, 1), (0.0005, 1), (0.02, 1), (0.0499, 1), (0.0501, 2), (0.06, 2), (0.12, 3), (0.29, 6)],
)
@pytest.mark.parametrize("execute", [0, 5])
def test_the_stated_delay_is_what_is_executed_meanwhile(seconds: float, steps: int, execute: int) -> None:
    """The step due at the request is sent before any answer: half a millisecond and 49 ms cost one step of 50."""
    live = ahead(continues=True, control__execute_steps=execute)
    live.policy.during = lambda: live.clock.sleep(seconds)
    live.run(3.9)
    seams = [number for number, step in enumerate(live.steps) if step.chunk is not None]
    told = [one.previous.delay for one in live.policy.asked[: len(seams)] if one.previous is not None]
    assert len(told) >= 6
    assert set(told) == {steps}
    assert {live.steps[number].index for number in seams[1:]} == {steps}


@pytest.mark.parametrize("schedule", ["sync", "append"])
def test_a_delay_can_be_injected(schedule: str) -> None:
    live = ahead(control__schedule=schedule, control__inject_delay_ms=150.0)
    live.policy.during = lambda: None
    live.run(2.0)
    first = live.steps[0]
    assert first.stages_ms["inference"] >= 150
    assert live.sent[0][0] - 1 / 30 == pytest.approx(0.15, abs=1e-6)
    gaps = np.diff(sent(live))
    assert (gaps.max() > 0.15) == (schedule == "sync")


def test_the_arm_rests_when_the_plan_runs_out_and_then_continues() -> None:
    live = ahead(timeouts__inference=2.0, timeouts__camera=5.0)
    live.policy.during = lambda: live.clock.sleep(1.2)
    live.run(3.9)
    assert live.context.safety.counters["plan_empty"] >= 1
    assert live.state == ("armed", set())
    assert np.diff(sent(live)).max() > 2 * PERIOD


def test_a_chunk_that_comes_more_than_half_a_period_late_starts_where_the_arm_rests() -> None:
    """From one more step of the last motion, the arm would overshoot before it turned back to the chunk."""
    live = ahead(continues=True, action="arm.joint_position", timeouts__camera=5.0, control__blend_steps=4)
    live.policy.during = lambda: live.clock.sleep(0.6)
    live.run(3.9)
    seams = [number for number, step in enumerate(live.steps) if step.chunk is not None]
    late = [n for n in seams[1:] if live.made[n] - live.made[n - 1] > 1.5 * PERIOD]
    assert late
    for number in late:
        step = live.steps[number]
        assert step.chunk is not None
        blended = 0.8 * live.steps[number - 1].action + 0.2 * step.chunk.actions[step.index]
        np.testing.assert_allclose(step.action[7], blended[7])


def in_the_middle(live: LiveLoop) -> None:
    """Run until the policy is asked with a plan under way."""
    live.run(0.6)
    asked = len(live.policy.asked)
    while len(live.policy.asked) == asked:
        live.loop.run_once()


@pytest.mark.parametrize(
    "act",
    [
        lambda live: live.context.safety.stop(Reason.OPERATOR_STOP),
        lambda live: live.context.safety.disarm(),
        lambda live: live.context.safety.hold(Reason.NO_INSTRUCTION),
        lambda live: live.context.inputs.set_instruction("another"),
        lambda live: live.context.inputs.new_epoch(),
    ],
    ids=["stop", "disarm", "hold", "instruction", "reset"],
)
def test_nothing_of_an_old_plan_is_sent_while_the_policy_infers(act: Callable[[LiveLoop], Any]) -> None:
    live = ahead()
    live.run(0.6)
    seen: list[int] = []
    asked = len(live.policy.asked)

    def during() -> None:
        if len(live.policy.asked) == asked + 1:  # asked ahead: happens 0.1 s later, beside the plan
            live.clock.after(0.1, lambda: (seen.append(len(live.sent)), act(live)))

    live.policy.during = during
    live.run(0.3 + DELAY)
    assert seen, "the policy was not asked"
    old = live.policy.asked[asked].stamp
    later = [command.stamp for _, command in live.sent[seen[0] :]]
    assert all(stamp > old for stamp in later), "a plan from before goes on"


@pytest.mark.parametrize("continues", [True, False])
@pytest.mark.parametrize("interruption", [lambda s: (s.hold(HOLD), s.clear(HOLD)), lambda s: (s.disarm(), s.arm())])
def test_an_answer_to_a_frame_from_before_a_hold_is_dropped(
    interruption: Callable[[Any], Any], continues: bool
) -> None:
    live = ahead(continues=continues)
    live.run(2.0)
    asked = len(live.policy.asked)

    def during() -> None:
        live.clock.sleep(DELAY)
        if len(live.policy.asked) == asked + 1:
            live.clock.after(0.1, lambda: interruption(live.context.safety))

    live.policy.during = during
    live.run(1.5)
    before, after = live.policy.asked[asked : asked + 2]
    assert (before.previous is not None) == continues
    assert after.previous is None
    assert live.results.count("task_changed") == 1
    assert before.stamp not in {step.stamp for step in live.steps}


def test_a_late_answer_is_dropped_and_holds() -> None:
    live = ahead(timeouts__inference=0.25, timeouts__camera=5.0)
    live.run(2.0)
    assert live.state[1] == {Reason.INFERENCE_LATE}
    assert not live.sent


def test_a_policy_that_fails_in_the_middle_holds() -> None:
    live = ahead()
    live.run(0.6)
    before = len(live.sent)

    def fails() -> None:
        raise RuntimeError("the server is gone")

    live.policy.during = fails
    live.run(1.5)
    assert live.state[1] == {Reason.INFERENCE_ERROR}
    assert len(live.sent) - before <= HORIZON


def test_options_reach_the_policy_only_between_two_inferences() -> None:
    live = ahead()
    policy = live.policy
    assert isinstance(policy, Clockwork)
    live.run(0.6)

    def during() -> None:
        policy.inferring = True
        live.clock.after(0.1, lambda: tighten(live))
        live.clock.after(DELAY - 0.01, lambda: setattr(policy, "inferring", False))
        policy.during = lambda: live.clock.sleep(DELAY)
        live.clock.sleep(DELAY)

    known = len(policy.configured)
    policy.during = during
    live.run(1.0)
    assert len(policy.configured) == known + 1
    places = np.array([command.positions[:7] for _, command in live.sent[-4:]])
    assert np.abs(np.diff(places, axis=0)).max() <= 0.0005 + 1e-9, "limits hold at once"


def in_a_thread(live: LiveLoop) -> tuple[InferenceThread, threading.Condition]:
    """A thread on the real clock, with a request for a chunk."""
    changed, context = threading.Condition(), replace(live.context, clock=Clock())
    inference = InferenceThread(context, PolicySource(live.policy).start(), live.pipeline, changed)
    live.camera()
    frame = live.mailboxes[0].take()
    assert frame is not None
    request = InferenceRequest(frame, 0.0, 0, NO_TASK, 0, concurrent=True)
    inference.start(request, [frame.data], live.inputs.snapshot, PERIOD)
    return inference, changed


@pytest.mark.parametrize("fails", [False, True])
def test_an_inference_runs_on_its_own_thread(fails: bool) -> None:
    live, threads = LiveLoop(), list[threading.Thread]()

    def during() -> None:
        threads.append(threading.current_thread())
        if fails:
            raise ValueError("no")

    live.policy.during = during
    inference, changed = in_a_thread(live)
    with changed:
        assert changed.wait_for(lambda: inference.state is RequestState.FINISHED, 5.0)
    if fails:
        with pytest.raises(Refused, match="inference_error: ValueError: no"):
            inference.take()
    else:
        assert inference.take()[0].chunk.actions[0, 0] == 0.005
    assert inference.state is RequestState.NONE
    assert threads[0] is not threading.current_thread()
    assert inference.close(5.0)


def test_a_hanging_inference_is_abandoned() -> None:
    live, let = LiveLoop(), threading.Event()
    live.policy.during = lambda: let.wait(10)
    inference, _ = in_a_thread(live)
    began = time.monotonic()
    assert not inference.close(0.05)
    assert time.monotonic() - began < 5
    let.set()
    assert inference.close(5.0)
