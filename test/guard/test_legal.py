"""Nothing legal is rejected: commands of the node's own controllers, with another stream of joint states.

``VLA_ROS_EXAMPLES=20000`` sets the number of examples.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from demo_arm import ARM, FINGERS, configure, spec_of
from harness import Harness, state
from hypothesis import given, settings
from hypothesis import strategies as st
from real_arm import Faults, RealArm
from test_promise import EXAMPLES, HOME, MOTIONS, Trial, any_action, any_options, begin, disturb

from vla_ros.config import build
from vla_ros.control.arm import ArmController
from vla_ros.control.command import Command
from vla_ros.control.reasons import Refused
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
            self.guard.propose(replace(command, limited_by=(self.stamp, b"")), FINGERS, holds=60_000_000_000)
        self.accepted += 1
        assert self.guard.guard.stopped is None, self.guard.guard.stopped


@settings(max_examples=EXAMPLES, deadline=None)
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


VELOCITIES = {
    "joint_velocity": "arm.joint_velocity[1] + arm.gripper",
    "joint_velocity_state": "arm.joint_position + arm.gripper",
    "twist_stamped": "arm.tip_delta + arm.gripper",
}


@pytest.mark.parametrize("output", list(VELOCITIES))
@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_velocities_and_twists_pass(output: str, seed: int) -> None:
    rng, motion = np.random.default_rng(seed), VELOCITIES[output]
    rate = float(rng.choice([2.0, 5.0, 10.0, 20.0]))
    own = {"control.output": output, "control.rate_hz": rate, "robot.gripper_joint_names": []}
    own["gripper.mode"] = "none"
    config = build({**any_options(rng), "limits.joint_margin": 0.02, **own}, base=configure())
    controller = ArmController(config, spec_of(motion, MOTIONS[motion]).columns({"arm": 7}), ARM)
    low, high = ARM.position_low, ARM.position_high
    inside = rng.random() < 0.5
    arm = RealArm(Faults.draw(rng, largest=0.0), HOME if inside else rng.uniform(low, high), ARM.velocity_limits)
    guard, stamp, trial = Harness(config), 1_000_000_000_000, None
    stream = Stream(rng, guard)
    for count in range(15):
        measured = np.clip(arm.measured, low - 0.05, high + 0.05)
        joints = state(ARM.joint_names, measured, stamp)
        stream.hear(joints, surely=not count)
        trial = Trial(rng, config, controller, arm)
        trial.driver = measured
        if rng.random() < 0.1:
            config = build(any_options(rng), base=config)
            controller.configure(config)
            guard.configure(config)
        dt = float(rng.choice([1.0, 0.4])) / rate
        try:
            command = controller.command(any_action(trial, motion), joints, stamp, dt)
        except Refused:
            command = controller.hold(joints)
        controller.sent()
        command = replace(command, limited_by=(stamp, b"driver"))
        guard.propose(command, holds=round(2e9 / rate))
        assert guard.guard.stopped is None, guard.guard.stopped
        moved = measured if command.velocities is None else measured + np.array([*command.velocities.values()]) * dt
        for _ in range(slices := max(1, round(dt / 0.02))):
            arm.move(np.clip(moved, low, high), dt / slices)
            stamp += round(dt / slices * 1e9)
            guard.wait(dt / slices)
            stream.hear(state(ARM.joint_names, np.clip(arm.measured, low - 0.05, high + 0.05), stamp))
    assert any(not command.hold for command in guard.commands)


def test_options_of_every_robot_can_be_read_by_a_guard() -> None:
    from pathlib import Path

    from vla_ros.config import load
    from vla_ros.guard.guard import parse_options
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
