"""What docs/safety.md promises of every command, searched for a counter-example on arms that sag, lag and stick.

``VLA_ROS_EXAMPLES=20000`` sets the number of examples.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_arm import ARM, FINGERS, configure, spec_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from real_arm import Faults, RealArm
from test_command_limits import test_whatever_a_policy_says_no_command_is_outside_any_limit

from vla_ros.config import Config, LimitsConfig, build
from vla_ros.control.arm import ArmController
from vla_ros.control.command import Command
from vla_ros.control.reasons import Level, Reason, Refused
from vla_ros.errors import ConfigError
from vla_ros.kinematics.rotations import rotation_angle, rotation_vector
from vla_ros.person.source import person_config
from vla_ros.types import FloatArray, JointState

PAGE = Path(__file__).parent.parent.parent / "docs" / "safety.md"
EXAMPLES = int(os.environ.get("VLA_ROS_EXAMPLES", "60"))
HOME = np.array([0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0])
SLACK, _BENT = 1e-6, 1e-3  # m; how far a way in joint space bends
SAG, ORDINARY = 0.02, 0.2  # rad; share of the following error
BOX = ((0.25, -0.42, 0.008), (0.80, 0.42, 0.60))
MOTIONS = {
    "arm.joint_position + arm.gripper": 8,
    "arm.joint_delta + arm.gripper": 8,
    "arm.joint_velocity[1] + arm.gripper": 8,
    "arm.tip_delta + arm.gripper": 7,
    "arm.tip_position + arm.tip_rotation[rotation_vector] + arm.gripper": 7,
}


@dataclass
class Sent:
    """A command, and everything on which the promise of it depends."""

    kind: str  # ``step``, ``between``, ``deceleration`` or ``hold``
    command: Command
    config: Config
    measured: FloatArray  # the newest
    last: FloatArray | None  # the last command that was sent; None after a hold
    held: FloatArray | None  # where the arm was held since then
    sagged: FloatArray  # where it would rest from there
    before: FloatArray  # velocity of the last command
    dt: float
    begun: FloatArray  # command at which the step began
    reach: FloatArray  # how far the step may lead from the arm
    tip_reach: float  # the same of the tip, m
    turn_reach: float  # and rad
    goal: FloatArray  # where the step ends
    step: float  # largest step of a joint when it began
    finger: float  # where the fingers were told to be
    gave: bool  # an earlier command of the step gave way
    gave_way: bool  # this one does: otherwise, it would be too far from the arm

    @property
    def positions(self) -> FloatArray:
        return self.command.positions[:7]

    @property
    def limits(self) -> LimitsConfig:
        return self.config.limits

    @property
    def moves(self) -> bool:
        return self.kind != "hold"

    @property
    def origin(self) -> FloatArray:
        """Where the command starts."""
        if self.last is not None:
            return self.last
        return self.held if self.held is not None and self.only_sagged else self.measured

    @property
    def only_sagged(self) -> bool:
        """Since it was held, the arm has done nothing but sag."""
        away = self.measured - self.held
        low, high = np.minimum(self.sagged, 0.0) - SAG, np.maximum(self.sagged, 0.0) + SAG
        return bool(np.all((away >= low) & (away <= high)))

    @property
    def inside(self) -> FloatArray:
        """Which joints start within their limits; others return as fast as they may."""
        margin, starts = self.limits.joint_margin + SLACK, np.array([self.origin, self.begun])
        within = (starts > ARM.position_low + margin) & (starts < ARM.position_high - margin)
        inside: FloatArray = within.all(axis=0)
        return inside

    @property
    def ahead(self) -> float:
        """How far the tip of the command is from the measured tip, m."""
        return float(np.linalg.norm(tip(self.positions) - tip(self.measured)))

    @property
    def turned(self) -> float:
        """The same of its rotation, rad."""
        return turned(self.positions, self.measured)


def tip(positions: FloatArray) -> FloatArray:
    return ARM.forward(positions).position


def turned(first: FloatArray, second: FloatArray) -> float:
    return rotation_angle(ARM.forward(first).rotation @ ARM.forward(second).rotation.T)


# The promise: one function for each row of the table


def numbers(sent: Sent) -> None:
    assert sent.command.names == (*ARM.joint_names, *FINGERS)
    assert np.isfinite(sent.command.positions).all()


def joint_positions(sent: Sent) -> None:
    margin = sent.limits.joint_margin
    low, high = ARM.position_low + margin, ARM.position_high - margin
    if sent.moves:
        assert np.all(sent.positions >= np.minimum(low, sent.origin) - SLACK)
        assert np.all(sent.positions <= np.maximum(high, sent.origin) + SLACK)


def step_of_a_joint(sent: Sent) -> None:
    if sent.moves:
        assert np.all(np.abs(sent.positions - sent.origin) <= sent.limits.max_joint_step + SLACK)


def joint_velocities(sent: Sent) -> None:
    limits, fastest = sent.limits, ARM.velocity_limits * sent.limits.velocity_scale
    if sent.moves:
        allowed = np.minimum(fastest, limits.max_joint_velocity or np.inf)
        if limits.max_joint_acceleration:  # slowing down to a lower limit takes its time
            slowed = np.abs(sent.before) - limits.max_joint_acceleration * sent.dt
            allowed = np.minimum(fastest, np.maximum(allowed, slowed))
        assert np.all(np.abs(sent.positions - sent.origin) <= allowed * sent.dt + SLACK)


def joint_accelerations(sent: Sent) -> None:
    change = sent.limits.max_joint_acceleration * sent.dt
    if sent.moves and change and not sent.gave_way:
        speed = np.abs(sent.positions - sent.origin) / sent.dt
        assert np.all((speed <= np.abs(sent.before) + change + SLACK / sent.dt) | ~sent.inside)


def step_of_the_tip(sent: Sent) -> None:
    if sent.moves:
        moved = float(np.linalg.norm(tip(sent.positions) - tip(sent.origin)))
        assert moved <= sent.limits.max_translation_step * 1.01 + 1e-4 + SLACK
        assert turned(sent.positions, sent.origin) <= sent.limits.max_rotation_step * 1.01 + 1e-4 + SLACK


def workspace_box(sent: Sent) -> None:
    if sent.moves and sent.limits.box:
        for least, most, was, now in zip(*sent.limits.box, tip(sent.origin), tip(sent.positions), strict=True):
            assert min(least, was) - SLACK <= now <= max(most, was) + SLACK


def distance_from_the_arm(sent: Sent) -> None:
    if sent.moves:
        allowed = sent.limits.following_error
        assert np.all(np.abs(sent.positions - sent.measured) <= allowed + SLACK)
        assert np.all(np.abs(sent.origin - sent.measured) < allowed)


def commands_between_two_steps(sent: Sent) -> None:
    if sent.kind in ("between", "deceleration"):
        assert np.all(np.abs(sent.positions - sent.measured) <= sent.reach + SLACK)
        if sent.config.control.delta_from == "measured":
            assert sent.ahead <= sent.tip_reach * 1.01 + 1e-4 + SLACK
            assert sent.turned <= sent.turn_reach * 1.01 + 1e-4 + SLACK
    if sent.kind == "between":
        beyond = np.maximum(
            np.minimum(sent.begun, sent.goal) - sent.positions, sent.positions - np.maximum(sent.begun, sent.goal)
        )
        gave, eases = sent.gave or sent.gave_way, sent.limits.max_joint_acceleration > 0
        assert eases or np.all((beyond <= (2 * sent.step if gave else 0.0) + SLACK) | ~sent.inside)


def deceleration(sent: Sent) -> None:
    if sent.kind == "deceleration":
        assert np.all(np.abs(sent.positions - sent.goal) <= 3 * sent.step + SLACK)
        towards = np.abs(sent.positions - sent.origin) / sent.dt
        if not sent.gave_way and np.all(np.abs(sent.origin - sent.goal) <= sent.step):
            assert np.all(np.abs(sent.positions - sent.goal) <= sent.step + SLACK)
            assert np.all((towards <= np.abs(sent.before) + SLACK / sent.dt) | ~sent.inside)


def hold(sent: Sent) -> None:
    if sent.kind == "hold":
        still = sent.held is not None and sent.only_sagged
        assert np.array_equal(sent.positions, sent.held if still else sent.measured)


def fingers(sent: Sent) -> None:
    gripper = sent.config.gripper
    for position in sent.command.positions[7:]:
        assert gripper.closed_position - SLACK <= position <= gripper.open_position + SLACK
        if sent.kind == "step" and gripper.max_speed:
            assert abs(position - sent.finger) <= gripper.max_speed * sent.dt + SLACK


def check(name: str, promised: Callable[[Sent], None], sent: Sent) -> None:
    try:
        promised(sent)
    except AssertionError as error:
        raise AssertionError(f"{name} of a {sent.kind}: {error}") from None


OF_A_COMMAND: dict[str, Callable[[Sent], None]] = {
    "numbers": numbers,
    "joint positions": joint_positions,
    "step of a joint": step_of_a_joint,
    "joint velocities": joint_velocities,
    "joint accelerations": joint_accelerations,
    "step of the tip": step_of_the_tip,
    "workspace box": workspace_box,
    "distance from the arm": distance_from_the_arm,
    "commands between two steps": commands_between_two_steps,
    "deceleration": deceleration,
    "hold": hold,
    "fingers": fingers,
}


@dataclass
class Trial:
    """An arm, a controller and what has been sent, with everything checked."""

    rng: np.random.Generator
    config: Config
    controller: ArmController
    arm: RealArm
    stamp: int = 1_000_000_000_000
    driver: FloatArray = field(default_factory=lambda: HOME.copy())  # what the driver was told last
    last: FloatArray | None = None
    held: FloatArray | None = None
    sagged: FloatArray = field(default_factory=lambda: np.zeros(7))
    before: FloatArray = field(default_factory=lambda: np.zeros(7))
    glitch: FloatArray = field(default_factory=lambda: np.zeros(7))
    begun: FloatArray = field(default_factory=lambda: HOME.copy())
    goal: FloatArray = field(default_factory=lambda: HOME.copy())
    reach: FloatArray = field(default_factory=lambda: np.zeros(7))
    tip_reach: float = 0.0
    turn_reach: float = 0.0
    step: float = 0.0
    gave: bool = False
    finger: float = 0.04
    commands: list[FloatArray] = field(default_factory=list)
    gave_way: list[bool] = field(default_factory=list)  # of each command
    refused: list[Refused] = field(default_factory=list)

    @property
    def measured(self) -> FloatArray:
        return np.clip(self.arm.measured + self.glitch, ARM.position_low, ARM.position_high)

    @property
    def joints(self) -> JointState:
        positions = np.array([*self.measured, self.finger, self.finger])
        return JointState((*ARM.joint_names, *FINGERS), positions, self.stamp)

    def wait(self, seconds: float) -> None:
        self.arm.move(self.driver, seconds)
        self.stamp += round(seconds * 1e9)
        self.glitch = np.zeros(7)

    def sent(self, kind: str, command: Command, dt: float) -> Sent:
        return Sent(
            kind, command, self.config, self.measured, self.last, self.held, self.sagged, self.before, dt,
            self.begun, self.reach, self.tip_reach, self.turn_reach, self.goal, self.step, self.finger,
            self.gave, self.gives_way(kind),
        )  # fmt: skip

    def gives_way(self, kind: str) -> bool:
        return kind in ("between", "deceleration") and self.controller._following.gave_way

    def check(self, kind: str, command: Command, dt: float) -> None:
        sent = self.sent(kind, command, dt)
        self.gave = (self.gave and kind != "step") or sent.gave_way
        for name, promised in OF_A_COMMAND.items():
            check(name, promised, sent)

    def make(self, kind: str, make: Callable[[], Command | None], dt: float) -> Command | None:
        """Return a command that was checked, or None after a hold."""
        refused = None
        try:
            command = make()
        except Refused as error:
            refused = error
        if refused is not None:
            self.refused.append(refused)
            assert refused.reason.level is Level.HOLD, refused
            if refused.reason is Reason.FOLLOWING_ERROR:
                assert "kept its position" in refused.detail or "apart, allowed" in refused.detail
            if self.last is not None or self.held is None:  # the node holds once
                self.hold()
            return None
        if command is None:
            return None
        if kind == "step":
            origin, limits = self.sent(kind, command, dt).origin, self.config.limits
            self.begun, self.step, self.goal = origin, limits.max_joint_step, command.positions[:7]
            ordinary = ORDINARY * limits.following_error
            self.reach = np.maximum(np.abs(origin - self.measured) + self.step, ordinary)
            far = float(np.linalg.norm(tip(origin) - tip(self.measured)))
            self.tip_reach = far + limits.max_translation_step
            self.turn_reach = turned(origin, self.measured) + limits.max_rotation_step
        self.check(kind, command, dt)
        return command

    def send(self, command: Command, kind: str = "step") -> None:
        positions = command.positions[:7]
        origin = positions - command.velocity * command.duration
        self.before = (positions - origin) / command.duration
        self.controller.sent()
        self.last = self.driver = positions
        self.commands.append(positions)
        self.gave_way.append(kind != "step" and self.gives_way(kind))
        if self.held is not None and np.any(np.abs(positions - self.held) > SAG):
            self.held = None
        self.finger = float(command.positions[7])

    def hold(self) -> None:
        if self.last is not None:
            sag, ordinary = self.measured - self.last, ORDINARY * self.config.limits.following_error
            self.sagged = np.where(np.abs(sag) <= ordinary, sag, 0.0)
        command = self.controller.hold(self.joints)
        self.check("hold", command, 0.0)
        self.held = self.driver = command.positions[:7]
        self.last, self.before = None, np.zeros(7)

    def do_step(self, action: FloatArray, period: float, between: int) -> None:
        """Execute a step of a policy or a person, and what is between it and the next one."""
        command = self.make("step", lambda: self.controller.command(action, self.joints, 1, period), period)
        if command is None:
            self.wait(period)
            return
        if between == 1:
            self.send(command)
            self.wait(period)
            return
        dt = period / between
        for index in range(between):
            left = period - index * dt
            command = self.make("between", partial(self.controller.interpolate, self.joints, dt, left, dt), dt)
            if command is None:
                self.wait(dt)
                return
            self.send(command, "between")
            self.wait(dt)

    def decelerate(self, dt: float) -> None:
        for _ in range(40):
            if not self.controller.is_moving:
                return
            command = self.make("deceleration", lambda: self.controller.interpolate(self.joints, dt, 0.0, dt), dt)
            if command is None:
                return
            self.send(command, "deceleration")
            self.wait(dt)


def any_options(rng: np.random.Generator) -> dict[str, Any]:
    """Limits that an operator may set, also while the arm moves."""
    return {
        "limits.max_joint_step": float(rng.choice([0.03, 0.1, 0.2, 0.4])),
        "limits.max_translation_step": float(rng.choice([0.01, 0.03, 0.05])),
        "limits.max_rotation_step": float(rng.choice([0.05, 0.3])),
        "limits.velocity_scale": float(rng.choice([0.2, 0.5, 1.0])),
        "limits.max_joint_acceleration": float(rng.choice([0.0, 2.0, 8.0])),
        "limits.max_joint_velocity": float(rng.choice([0.0, 0.5])),
        "limits.following_error": float(rng.choice([0.15, 0.3, 0.5])),
    }


def begin(seed: int, motion: str, **changes: Any) -> Trial:
    rng = np.random.default_rng(seed)
    box = {"limits.workspace_low": list(BOX[0]), "limits.workspace_high": list(BOX[1])}
    values = {
        **any_options(rng),
        **(box if rng.random() < 0.5 else {}),
        "control.delta_from": str(rng.choice(["measured", "commanded"])),
        "control.rate_hz": float(rng.choice([2.0, 5.0, 10.0, 20.0, 50.0])),
        "gripper.max_speed": 0.1,
        "limits.joint_margin": 0.02,
        **changes,
    }
    config = build(values, base=configure())
    controller = ArmController(config, spec_of(motion, MOTIONS[motion]).columns({"arm": 7}), ARM)
    faults = Faults.draw(rng)
    arm = RealArm(faults, HOME - faults.sag, ARM.velocity_limits)
    return Trial(rng, config, controller, arm)


def any_action(trial: Trial, motion: str) -> FloatArray:
    rng, wild = trial.rng, float(trial.rng.choice([0.2, 1.0, 30.0]))
    if "joint_position" in motion:
        numbers = HOME + wild * rng.normal(size=7)
    elif "tip_position" in motion:
        numbers = np.concatenate([tip(trial.driver) + 0.1 * wild * rng.normal(size=3), rng.normal(size=3)])
    elif "joint" in motion:
        numbers = wild * 0.1 * rng.normal(size=7)
    else:
        numbers = wild * 0.05 * rng.normal(size=6)
    return np.array([*numbers, rng.random()])


def disturb(trial: Trial, period: float) -> None:
    """Something happens to the arm, its joint states, its options or its clock, or nothing."""
    rng, arm = trial.rng, trial.arm
    arm.push = np.zeros(7)
    match int(rng.integers(0, 12)):
        case 0 | 1:  # somebody pushes it, within its speed
            arm.push = rng.uniform(-1, 1, 7) * ARM.velocity_limits * float(rng.choice([0.3, 1.0]))
        case 2:
            arm.blocked = not arm.blocked
        case 3:  # an encoder glitch that the joint could have reached
            trial.glitch = rng.uniform(-1, 1, 7) * ARM.velocity_limits * 0.05
        case 4:
            trial.config = build(any_options(rng), base=trial.config)
            trial.controller.configure(trial.config)
        case 5:  # the ROS clock jumps
            trial.stamp += int(rng.choice([-100, -1, 1, 100])) * 1_000_000_000
        case 6:
            trial.hold()
            trial.wait(float(rng.choice([0.02, 0.3, 1.5])))
        case 7:  # disarmed, moved by hand, armed again
            trial.hold()
            arm.push = rng.uniform(-1, 1, 7)
            trial.wait(0.3)
            arm.push = np.zeros(7)
            trial.controller.restart()
            trial.held, trial.last, trial.sagged = None, None, np.zeros(7)
            trial.driver = arm.measured
        case 8:
            trial.decelerate(period / 4)
        case _:
            pass


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), motion=st.sampled_from(list(MOTIONS)), person=st.booleans())
@example(seed=225, motion="arm.joint_position + arm.gripper", person=False)
def test_no_command_of_any_kind_is_further_than_promised(seed: int, motion: str, person: bool) -> None:
    trial = begin(seed, motion)
    for count in range(8):
        if person and count == 4:  # a person takes over with a pad, from the last command on
            config, motion = person_config(trial.config), "arm.tip_delta[rotation_vector] + arm.gripper"
            other = ArmController(config, spec_of(motion, 7).columns({"arm": 7}), ARM)
            other.continue_from(trial.controller)
            trial.controller, trial.config = other, config
        period = 1 / trial.config.control.rate_hz
        disturb(trial, period)
        trial.do_step(any_action(trial, motion), period, int(trial.rng.choice([1, 1, 4, 10])))
    trial.decelerate(1 / trial.config.control.rate_hz)


def standing(seed: int, motion: str, **more: Any) -> Trial:
    """An arm at rest that was commanded to be at home."""
    rate = float(np.random.default_rng(seed).choice([5.0, 10.0, 20.0]))
    own = {"limits.following_error": 0.5, "control.delta_from": "commanded", "control.rate_hz": rate}
    return begin(seed, motion, **{**own, **more})


def sometimes_held(trial: Trial) -> bool:
    """Hold the arm for a while, one time in eight."""
    if trial.rng.integers(0, 8):
        return False
    trial.hold()
    trial.wait(float(trial.rng.choice([0.02, 0.3, 1.0])))
    return True


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tip_moves=st.booleans(), holds=st.booleans())
@example(seed=190, tip_moves=True, holds=False)
@example(seed=190, tip_moves=False, holds=False)
@example(seed=146, tip_moves=True, holds=True)
def test_a_constant_target_is_never_left_by_more_than_the_offset(seed: int, tip_moves: bool, holds: bool) -> None:
    """No command leads away from the target, and the arm comes to rest as near to it as its offset allows.

    With a limit of acceleration, commands may pass the target, by less than the distance from which they came.
    """
    motion = list(MOTIONS)[4 if tip_moves else 0]
    trial = standing(seed, motion)
    offset, there = trial.arm.faults.offset, ARM.forward(HOME)
    target = np.array([*HOME, 1.0])
    if tip_moves:
        target = np.array([*there.position, *rotation_vector(there.rotation), 1.0])
    period, between = 1 / trial.config.control.rate_hz, int(trial.rng.choice([1, 1, 5]))
    passes = trial.config.limits.max_joint_acceleration > 0
    began, count = trial.measured, 0
    for index in range(round(4.0 / period)):
        if holds and count < 3 and index < 1.5 / period and sometimes_held(trial):
            count += 1
            continue
        if trial.last is None:
            began = trial.sent("step", Command((), HOME, 0), period).origin
        begun = len(trial.commands)
        trial.do_step(target, period, between)
        assert not trial.refused, trial.refused
        path, gives = np.array([trial.begun, *trial.commands[begun:]]), np.array(trial.gave_way[begun:], np.bool_)
        if tip_moves:
            far = np.array([np.linalg.norm(tip(each) - there.position) for each in path])
            assert passes or np.all((np.diff(far) <= _BENT) | gives), f"leads away: {far}"
        else:
            far = np.abs(path - HOME)
            leads_away = far > np.abs(began - HOME) + SLACK if passes else np.diff(far, axis=0) > SLACK
            leads_away[-len(gives) :][gives] = False
            assert not leads_away.any(), f"leads away: {far}"
            away = (2 + count) * offset  # it sagged, and sags once more when it starts, and at a hold
            assert np.all(np.abs(trial.arm.measured - HOME) <= away + SLACK)
    for _ in range(round(60.0 / period)):
        reached = trial.commands[-1]
        far = np.linalg.norm(tip(reached) - there.position) if tip_moves else np.abs(reached - HOME).max()
        if far < (1e-3 if tip_moves else 1e-6):
            break
        trial.do_step(target, period, between)
    assert far < 1e-3
    for seconds in (3.0, 0.01, 0.01):  # the arm follows, comes to rest, and its joint states arrive
        trial.wait(seconds)
    assert tip_moves or np.all(np.abs(trial.arm.measured - HOME) <= offset + 1e-4)


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tip_moves=st.booleans(), holds=st.booleans())
def test_a_delta_of_zero_moves_no_arm(seed: int, tip_moves: bool, holds: bool) -> None:
    """Not even one that is held: at each hold, it gives way by its sag at most."""
    motion = list(MOTIONS)[3 if tip_moves else 1]
    trial = standing(seed, motion)
    action = np.array([*[0.0] * (MOTIONS[motion] - 1), 1.0])
    period, between = 1 / trial.config.control.rate_hz, int(trial.rng.choice([1, 1, 5]))
    began, count = trial.measured, 0
    for _ in range(round(2.0 / period)):
        if holds and count < 3 and sometimes_held(trial):
            count += 1
            continue
        trial.do_step(action, period, between)
        assert not trial.refused, trial.refused
        # A hold is where the arm is measured, perhaps before it has sagged to rest.
        most = (1 + count) * trial.arm.faults.offset + SAG if count else np.full(7, SLACK)
        assert np.all(np.abs(trial.commands[-1] - began) <= most), trial.commands[-1] - began


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), armed=st.booleans(), by=st.floats(0.03, 1.0))
@example(seed=266178759, armed=False, by=1.0)
def test_the_first_command_starts_where_the_arm_is(seed: int, armed: bool, by: float) -> None:
    """After a hold or an arming, though the arm was pushed or moved by hand meanwhile."""
    trial = begin(seed, list(MOTIONS)[int(seed % 4)])
    trial.arm = RealArm(Faults.draw(trial.rng, largest=0.0), HOME, ARM.velocity_limits)
    period = 1 / trial.config.control.rate_hz
    for _ in range(4):
        trial.do_step(any_action(trial, "tip_delta" if seed % 4 == 3 else "joint"), period, 1)
    trial.hold()
    trial.arm.push = by * np.sign(trial.rng.normal(size=7))
    trial.wait(1.0)
    trial.arm.push = np.zeros(7)
    trial.driver = trial.arm.measured  # the driver was told so, or its controller was started anew
    trial.wait(0.5)
    if armed:
        trial.controller.restart()
    action = any_action(trial, list(MOTIONS)[int(seed % 4)])
    try:
        command = trial.controller.command(action, trial.joints, 1, period)
    except Refused as refused:
        assert refused.reason is Reason.FOLLOWING_ERROR, refused  # noqa: PT017
        assert trial.refused, "it was held because it did not follow, and has been moved since"
        assert not armed
        return
    step = min(trial.config.limits.max_joint_step, float(np.max(ARM.velocity_limits)) * period)
    moved = trial.held is None or np.any(np.abs(trial.measured - trial.held) > SAG + np.abs(trial.sagged))
    if armed or moved:
        assert np.all(np.abs(command.positions[:7] - trial.measured) <= step + SLACK)


def test_an_arm_too_weak_for_its_load_stays_held_and_does_not_sink_from_hold_to_hold() -> None:
    """It sags by more than the allowed following error, slowly: right after a hold it has not sunk yet."""
    trial = standing(3, next(iter(MOTIONS)))
    sag = 0.7 * np.eye(7)[0]
    trial.arm = RealArm(Faults(0.4, sag, 0.0, 0.0, 0.0, 0), HOME, ARM.velocity_limits)
    lowest = []
    for _ in range(300):
        trial.do_step(np.array([*HOME, 1.0]), 0.1, 1)
        lowest.append(float(trial.arm.measured[0]))
    assert {refused.reason for refused in trial.refused} == {Reason.FOLLOWING_ERROR}
    assert len(trial.refused) > 250, "it stays held"
    assert lowest[-1] == pytest.approx(lowest[100], abs=1e-3), "it sinks on"


def test_an_arm_that_is_blocked_is_held_without_force_and_goes_on_when_it_is_free() -> None:
    trial = standing(5, next(iter(MOTIONS)))
    trial.arm = RealArm(Faults(0.1, np.zeros(7), 0.0, 0.0, 0.0, 0), HOME, ARM.velocity_limits)
    trial.arm.blocked = True
    target = np.array([*(HOME + 0.9 * np.eye(7)[0]), 1.0])
    most = 0.0
    for _ in range(200):
        trial.do_step(target, 0.1, 1)
        most = max(most, float(np.abs(trial.driver - trial.arm.measured).max()))
    assert trial.refused
    assert most <= trial.config.limits.following_error + SLACK
    trial.arm.blocked = False
    for _ in range(200):
        trial.do_step(target, 0.1, 1)
    np.testing.assert_allclose(trial.arm.measured, target[:7], atol=0.01)


def test_a_following_error_below_what_a_held_arm_may_sag_is_refused_and_the_smallest_one_ends() -> None:
    """Below it, an arm that sags by a degree is held for ever: it never keeps its position to half of it."""
    for name, least in (("following_error", 0.04), ("following_error_prismatic", 0.006)):
        with pytest.raises(ConfigError, match=f"limits.{name}: found .*, expected .*from {least:g}"):
            build({f"limits.{name}": 0.9 * least}, base=configure())
    trial = standing(3, next(iter(MOTIONS)), **{"limits.following_error": 0.04})
    sag = 0.015 * np.eye(7)[1]
    trial.arm = RealArm(Faults(0.1, sag, 0.002, 0.0, 0.0, 1), HOME - sag, ARM.velocity_limits)
    for count in range(100):
        trial.arm.push = np.full(7, 0.5) if 10 < count < 15 else np.zeros(7)
        trial.do_step(np.array([*HOME, 1.0]), 0.1, 1)
    assert trial.refused
    np.testing.assert_allclose(trial.arm.measured, HOME, atol=0.02)


OF_THE_ARM = {
    "first command": test_the_first_command_starts_where_the_arm_is,
    "constant target": test_a_constant_target_is_never_left_by_more_than_the_offset,
    "delta of zero": test_a_delta_of_zero_moves_no_arm,
    "velocity": test_whatever_a_policy_says_no_command_is_outside_any_limit,
    "changed limits": test_no_command_of_any_kind_is_further_than_promised,
}


def of_the_page() -> dict[str, str]:
    """The rows of the table of the promise, by their first cell."""
    section = PAGE.read_text(encoding="utf-8").split("## Limits on every command\n")[1].split("\n## ")[0]
    rows = section.split("| Test |\n|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def test_the_page_and_these_tests_are_one_list() -> None:
    page = of_the_page()
    tests = dict.fromkeys(OF_A_COMMAND, test_no_command_of_any_kind_is_further_than_promised) | OF_THE_ARM
    assert list(page) == list(tests)
    for name, test in tests.items():
        assert f"::{test.__name__}`" in page[name], f"{name} is checked by {test.__name__}"
