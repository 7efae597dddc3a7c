import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from live_loop import POSITIONS, LiveLoop, TimedPolicy, every

from vla_ros.config import build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.reasons import Reason
from vla_ros.errors import ConfigError
from vla_ros.types import ActionChunk, Observation

RATE, HORIZON, DELAY, ACCELERATION = 20.0, 16, 0.29, 2.0
STEP = 0.02  # rad; 0.4 rad/s


class Turns(TimedPolicy):
    """Turns the first joint, at a constant speed or (``wild``) as no limit allows."""

    def __init__(self, wild: int | None = None, horizon: int = HORIZON) -> None:
        super().__init__(horizon)
        self.spec = PolicySpec(action=parse_components("arm.joint_delta", action=True), horizon=horizon)
        self._random = None if wild is None else np.random.default_rng(wild)

    def infer(self, session: Any, observation: Observation) -> ActionChunk:
        self.asked.append(observation)
        self.during()
        actions = np.zeros((self.spec.horizon, 7))
        actions[:, 0] = STEP
        if self._random is not None:
            actions = self._random.normal(0, 1, actions.shape) ** 3
        return ActionChunk(actions, observation.stamp)


def turning(wild: int | None = None, horizon: int = HORIZON, **options: Any) -> LiveLoop:
    """An arm that follows, with a policy that takes 0.29 s; 0.03 s where it returns single steps."""
    fixed = {
        "control__rate_hz": RATE,
        "control__schedule": "append",
        "limits__max_joint_acceleration": ACCELERATION,
        "timeouts__joint_state": 5.0,
        "timeouts__camera": 5.0,
    }
    live = LiveLoop(Turns(wild, horizon), every(1 / 30, 240), **(fixed | options))
    live.follows = True
    live.policy.during = lambda: live.clock.sleep(DELAY if horizon > 1 else DELAY / 10)
    return live


def path(live: LiveLoop, since: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """When commands were sent [n], and their positions [n, 7]."""
    sent = live.sent[since:]
    return np.array([at for at, _ in sent]), np.array([command.positions for _, command in sent])


def accelerations(live: LiveLoop, since: int = 0) -> np.ndarray:
    """Of a driver that takes each command's time to go there."""
    took = np.array([[command.duration] for _, command in live.sent[since:]])
    return np.abs(np.diff(np.diff(path(live, since)[1], axis=0) / took[1:], axis=0) / took[2:])


def run_dry(live: LiveLoop) -> None:
    live.run(1.5)
    live.policy.during = lambda: live.clock.sleep(0.9)


@pytest.mark.parametrize("rate", [0.0, 100.0])
def test_an_arm_whose_plan_runs_out_comes_to_rest_within_its_acceleration_and_goes_on(rate: float) -> None:
    live = turning(control__command_rate_hz=rate)
    run_dry(live)
    live.run(2.5)
    assert live.context.safety.counters["plan_empty"] >= 1
    at, positions = path(live)
    rests = np.flatnonzero(np.diff(at) > 0.1)
    assert len(rests), "it did not rest"
    speed = np.diff(positions[:, 0]) / np.diff(at)
    before = rests[at[rests] > 1.0][0]
    assert speed[before - 1] == pytest.approx(0, abs=1e-6), "it stopped at once"
    assert accelerations(live)[5 : before - 1].max() <= ACCELERATION * 1.02
    assert at[before + 1 :].size, "it did not go on"
    assert np.diff(at).min() >= 0.9 / max(rate, RATE) - 1e-9, "a command had not had its time"


def fails(live: LiveLoop) -> None:
    raise RuntimeError("the server is gone")


@pytest.mark.parametrize(
    ("what", "reason"),
    [(fails, Reason.INFERENCE_ERROR), (lambda live: setattr(live.policy, "_random", Nan()), Reason.ACTION_INVALID)],
    ids=["fails", "NaN"],
)
def test_an_arm_whose_policy_fails_comes_to_rest_and_then_holds(what, reason: Reason) -> None:
    live = turning()
    live.run(1.5)
    asked, sent = len(live.policy.asked), len(live.sent)
    live.policy.during = lambda: (live.clock.sleep(DELAY), what(live))
    while len(live.policy.asked) == asked:
        live.loop.run_once()
    live.run(DELAY + 0.4)
    assert live.state == ("holding", {reason})
    assert accelerations(live, sent - 2).max() <= ACCELERATION * 1.02
    at, positions = path(live, sent)
    assert np.diff(positions[-2:, 0]) / np.diff(at[-2:]) == pytest.approx(0, abs=1e-6)


class Nan:
    def normal(self, *_: Any) -> np.ndarray:
        return np.full((HORIZON, 7), np.nan)


@pytest.mark.parametrize(
    ("act", "moves"),
    [
        (lambda live: live.context.safety.stop(Reason.OPERATOR_STOP), False),
        (lambda live: live.context.safety.disarm(), False),
        (lambda live: live.context.safety.hold(Reason.NO_INSTRUCTION), False),
        (lambda live: live.context.inputs.set_instruction("another"), True),
    ],
    ids=["stop", "disarm", "hold", "instruction"],
)
@pytest.mark.parametrize("dry", [False, True], ids=["between steps", "coming to rest"])
@pytest.mark.parametrize(("rate", "horizon"), [(0.0, HORIZON), (250.0, HORIZON), (250.0, 1)])
def test_nothing_follows_a_stop_and_an_instruction_voids_the_plan(
    act: Callable[[LiveLoop], Any], moves: bool, dry: bool, rate: float, horizon: int
) -> None:
    live = turning(horizon=horizon, control__command_rate_hz=rate)
    live.run(1.5)
    if dry:
        live.policy.during = lambda: live.clock.sleep(0.9)
        while live.clock.steady() < live.made[-1] + 1 / RATE + 0.01:
            live.loop.run_once()
    live.run(0.013)
    sent, asked = len(live.sent), len(live.policy.asked)
    goal = live.positions[0] + STEP
    act(live)
    live.run(0.25)
    at, positions = path(live, sent)
    if not moves:
        assert not len(at)
        return
    assert len(live.policy.asked) == asked or live.policy.asked[-1].instruction == "another"
    new = (len(live.policy.asked) - asked) * STEP  # steps for the other instruction
    assert positions[-1, 0] < goal + new + 0.4**2 / (2 * ACCELERATION), "the old plan goes on"
    assert accelerations(live, sent - 2).max() <= ACCELERATION * 1.02
    assert np.diff([live.sent[sent - 1][0], *at]).min() >= 0.9 / max(rate, RATE) - 1e-9


def test_late_commands_do_not_lengthen_the_way_to_rest() -> None:
    live = turning(control__command_rate_hz=240.0, timeouts__inference=10.0)
    live.run(1.5)
    live.policy.during = lambda: live.clock.sleep(5.0)
    live.gate.supervised = lambda: live.clock.sleep(0.02)
    while not live.context.safety.counters.get("plan_empty"):
        live.loop.run_once()
    sent, began = len(live.sent), live.clock.steady()
    live.run(0.6)
    at, positions = path(live, sent)
    assert at[-1] - began < 0.4 / ACCELERATION + 0.1
    assert len(at) < 20
    assert np.diff(positions[-2:, 0]) == pytest.approx(0, abs=1e-9)


def test_steps_that_take_longer_to_make_are_begun_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    live = turning(control__command_rate_hz=100.0)
    controller = live.loop._executor._controller
    make, interpolate = controller.make_step, controller.interpolate
    seconds = itertools.cycle((0.004, 0.001, 0.002))

    def takes(seconds: float, what: Any, *given: Any) -> Any:
        live.clock.sleep(seconds)
        return what(*given)

    monkeypatch.setattr(controller, "make_step", lambda *given: takes(next(seconds), make, *given))
    monkeypatch.setattr(controller, "interpolate", lambda *given: takes(0.001, interpolate, *given))
    live.run(5.0)
    at, _ = path(live)
    gaps, learned = np.diff(at), at[1:] > at[0] + 2.5
    assert gaps[~learned].max() > 0.0115, "the first steps were not late"
    assert gaps[learned] == pytest.approx(0.01, abs=5e-4)


@pytest.mark.parametrize("rate", [60.0, 240.0])
def test_commands_between_steps_lead_straight_from_one_to_the_next(rate: float) -> None:
    plain, fine = (
        turning(limits__max_joint_acceleration=0.0),
        turning(limits__max_joint_acceleration=0.0, control__command_rate_hz=rate),
    )
    for live in (plain, fine):
        live.run(3.0)
    at, positions = path(fine)
    settled = at > 1.5
    np.testing.assert_allclose(np.diff(at[settled]), 1 / rate, atol=1e-6)
    np.testing.assert_allclose(np.diff(positions[settled, 0]), STEP * RATE / rate, rtol=1e-6)
    assert positions[-1, 0] == pytest.approx(path(plain)[1][-1, 0], abs=2 * STEP)
    assert len(fine.steps) == pytest.approx(len(plain.steps), abs=1)


@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.06])
def test_commands_between_single_steps_lead_straight_from_one_to_the_next(seconds: float) -> None:
    """The policy infers beside them: at the rate of steps where it is fast enough, and at its own where not."""
    live = turning(horizon=1, limits__max_joint_acceleration=0.0, control__command_rate_hz=200.0)
    live.policy.during = lambda: live.clock.sleep(seconds)
    live.run(3.0)
    at = path(live)[0]
    steps = np.diff(live.made)[10:]
    assert steps.mean() == pytest.approx(max(1 / RATE, seconds), rel=0.35 if seconds > 1 / RATE else 0.02)
    assert steps.min() >= 0.9 / RATE - 1e-9
    if seconds < 1 / RATE:
        np.testing.assert_allclose(np.diff(at[at > 1.0]), 1 / 200, atol=0.1 / RATE)
    assert not live.context.safety.counters.get("plan_empty")
    frames = [outcome for outcome in live.outcomes if outcome.outcome == "command"]
    assert len(frames) == pytest.approx(len(live.made), abs=1)


@pytest.mark.parametrize("acceleration", [0.0, ACCELERATION])
def test_nothing_is_sent_between_single_steps_once_the_command_rate_is_zero(acceleration: float) -> None:
    live = turning(horizon=1, limits__max_joint_acceleration=acceleration, control__command_rate_hz=200.0)
    live.run(1.52)
    config = live.options.current
    live.options.current = replace(config, control=replace(config.control, command_rate_hz=0.0))
    made = len(live.made)
    while len(live.made) < made + 1:
        live.loop.run_once()
    sent = len(live.sent)
    live.run(1.5)
    at = path(live, sent)[0]
    assert len(at) == len(live.made) - made - 1 > 20
    assert np.diff(at).min() > 0.5 / RATE


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("acceleration", [0.0, 3.0])
@pytest.mark.parametrize("horizon", [1, HORIZON])
def test_no_command_between_steps_breaks_a_limit(seed: int, acceleration: float, horizon: int) -> None:
    live = turning(
        seed,
        horizon,
        control__command_rate_hz=240.0,
        limits__max_joint_acceleration=acceleration,
        limits__max_joint_step=0.05,
        limits__velocity_scale=0.5,
    )
    live.run(3.0)
    at, positions = path(live)
    assert len(at) > 400
    arm = live.pipeline.controller.arms[0]
    high = np.array([arm.joint_speeds[name] for name in arm.joint_names]) * 0.5
    moved = np.abs(np.diff(np.vstack([POSITIONS, positions]), axis=0))
    assert (moved <= high / 240 * 1.001 + 1e-9).all()
    if acceleration:
        steady = np.diff(at) < 1.1 / 240
        assert accelerations(live)[steady[1:] & steady[:-1]].max() <= acceleration * 1.02


@pytest.mark.parametrize("other", [("control.output", "twist_stamped"), ("control.rate_hz", 0.0)])
def test_a_command_rate_is_refused_where_steps_last_until_the_next(other: tuple[str, Any]) -> None:
    with pytest.raises(ConfigError, match="command_rate_hz: found 250 with"):
        build({"control.command_rate_hz": 250.0, "robot.urdf": "demo", **dict([other])})
