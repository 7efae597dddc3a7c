"""Nothing legal is rejected: commands of the node's own controllers, with another stream of joint states.

``VLA_ROS_EXAMPLES=20000`` sets the number of examples.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from cell import legal
from demo_arm import FINGERS
from harness import Harness
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_promise import EXAMPLES, MOTIONS, Trial, any_action, begin, disturb

from vla_ros.control.command import Command
from vla_ros.types import JointState

LOST, LATE = 0.05, 0.15
"""Shares of the joint states that get lost on their way to the guard, or arrive later."""


@dataclass
class Stream:
    """The joint states that the guard gets: others are lost or late than at the node."""

    rng: np.random.Generator
    guard: Harness
    late: list[JointState] = field(default_factory=list)
    newest: JointState | None = None
    steady: int = 0  # joint states that arrive surely from now on

    def hear(self, joints: JointState, *, surely: bool = False) -> None:
        """Pass a joint state on, unless it was passed on already; ``surely`` without a loss."""
        last = self.newest
        if last and joints.stamp == last.stamp and np.array_equal(joints.positions, last.positions):
            return
        self.newest = joints
        jumped = (
            last is not None and abs(joints.stamp - last.stamp) > 5e8
        )  # the clock: the node holds until it is new
        fate = 1.0 if surely or jumped or self.steady else self.rng.random()
        self.steady = 3 if jumped else max(0, self.steady - 1)
        if fate < LOST:
            return
        if fate < LOST + LATE:
            self.late.append(joints)
            return
        self.guard.joints(joints)
        self.late = [each for each in self.late if each.stamp != joints.stamp]
        while self.late:  # behind a newer one
            self.guard.joints(self.late.pop())


@dataclass
class GuardedTrial(Trial):
    """An arm of test_promise whose commands pass a guard."""

    def start(self) -> None:
        self.guard, self.known = Harness(self.config), self.config
        self.stream = Stream(self.rng, self.guard)
        self.stream.hear(self.joints, surely=True)
        self.accepted = 0

    def wait(self, seconds: float) -> None:
        slices = max(1, round(seconds / 0.02))
        for _ in range(slices):
            super().wait(seconds / slices)
            self.guard.now += round(seconds / slices * 1e9)
            self.stream.hear(self.joints)

    def send(self, command: Command, kind: str = "step") -> None:
        self._pass(command)
        super().send(command, kind)

    def hold(self) -> None:
        super().hold()
        command = replace(self.held_command, limited_by=(self.stamp, b""))
        self._pass(command)

    def check(self, kind: str, command: Command, dt: float) -> None:
        super().check(kind, command, dt)
        if kind == "hold":
            self.held_command = command

    def _pass(self, command: Command) -> None:
        if self.known is not self.config:
            self.known = self.config
            self.guard.configure(self.config)
        self.stream.hear(self.joints, surely=bool(np.any(self.glitch)) or self.rng.random() > LOST)
        if command.hold:
            self.guard.propose(command, FINGERS)
        else:
            self.guard.propose(replace(command, limited_by=(self.stamp, b"")), FINGERS, lifetime=60_000_000_000)
        self.accepted += 1
        assert self.guard.guard.stopped is None, self.guard.guard.stopped


@settings(max_examples=EXAMPLES, deadline=None)
@example(seed=167878, motion="arm.tip_delta + arm.gripper")  # a stamp comes again after a clock was set back
@given(seed=st.integers(0, 2**32 - 1), motion=st.sampled_from(list(MOTIONS)))
def test_positions_of_any_policy_and_any_arm_pass(seed: int, motion: str) -> None:
    trial = begin(seed, motion)
    trial.__class__ = GuardedTrial
    assert isinstance(trial, GuardedTrial)
    trial.start()
    for _ in range(12):
        period = 1 / trial.config.control.rate_hz
        disturb(trial, period)
        trial.do_step(any_action(trial, motion), period, int(trial.rng.choice([1, 1, 4, 10])))
    trial.decelerate(1 / trial.config.control.rate_hz)
    trial.stream.hear(replace(trial.joints, stamp=trial.stamp + 1), surely=True)
    assert trial.guard.guard.stopped is None, trial.guard.guard.stopped
    assert trial.accepted
    assert trial.guard.sent, "nothing reached the driver"
    assert np.array_equal(trial.guard.commands[-1].positions[:7], trial.driver), "another command was sent last"


def test_commands_of_all_robots_and_outputs_over_links_of_their_own_pass() -> None:
    """``python benchmarks/guard.py --commands 1000000`` runs more of them."""
    counts = Counter[str]()
    for seed in range(EXAMPLES // 3):
        _, counted, stopped = legal(seed, 60)
        assert not stopped, f"{seed}: {stopped}"
        counts += counted
    assert counts["sent"] > 10 * EXAMPLES


def test_a_hold_that_cannot_be_made_forgets_no_command() -> None:
    """Joint states are missing for 0.12 s: the next command goes on from the last one, not from the arm."""
    counts = Counter[str]()
    for seed in (50_000_218, 50_000_363):
        _, counted, stopped = legal(seed, 4000)
        assert not stopped, stopped
        counts += counted
    assert counts["sent"]


def test_a_step_from_a_motion_that_was_left_out_is_no_faster_than_it_was() -> None:
    """Two motions arrive together; the node accelerates on from the second, which began at the first."""
    _, counted, stopped = legal(410_003_336, 300)
    assert not stopped, stopped
    assert counted["sent"]


def test_options_of_every_robot_can_be_read_by_a_guard() -> None:
    from pathlib import Path

    from vla_ros.config import load
    from vla_ros.guard.arm import parse_options
    from vla_ros.node.guard_client import options_text

    folder = Path(__file__).parents[2] / "config"
    files = [*folder.glob("robots/*.yaml"), folder / "demo.yaml", folder / "demo_two_arms.yaml"]
    assert len(files) > 3
    for file in files:
        config = load([file], ["policy.name:=hold"])
        read = parse_options(options_text(config, lambda name: f"/resolved{name}"))
        for ours, theirs in zip(config.arms, read.arms, strict=True):
            assert (theirs.robot, theirs.limits, theirs.output) == (ours.robot, ours.limits, ours.output)
            assert theirs.command == f"/resolved{ours.command}"
        assert read.timeouts == config.timeouts
