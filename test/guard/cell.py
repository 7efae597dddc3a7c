"""A robot, a node and its guard in one process, on a clock of their own: two streams of the same joint states.

Node and guard are the real ones without their threads: the node's controller and merger of joint states, the frames
of its client, and the guard. Each gets the joint states over a link of its own, which delays, loses and reorders
them; what the node proposes is legal, so that no frame may be rejected.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from harness import Harness
from real_arm import Faults, RealArm
from test_promise import any_options

from vla_ros.config import Config, build, load
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.command import Command, lifetime
from vla_ros.control.joints import JointStateMerger
from vla_ros.control.reasons import Refused
from vla_ros.control.robot import RobotController, make_kinematics
from vla_ros.guard.frames import GuardFrame, Kind
from vla_ros.node.guard_client import _HOLDS, frame_of
from vla_ros.types import FloatArray, JointState

SECOND, LIFETIME = 1_000_000_000, 1.0
ROBOTS = (*sorted((Path(__file__).parents[2] / "config" / "robots").glob("*.yaml")), "demo", "demo", "demo")
_TWO = Path(__file__).parents[2] / "config" / "demo_two_arms.yaml"
POSITIONS = ("joint_state", "float64_multi_array", "joint_trajectory", "joint_group_command")
VELOCITIES = ("joint_velocity", "joint_velocity_state", "twist_stamped")


@cache
def base(robot: Path | str) -> Config:
    if robot == "demo":
        return build({"robot.urdf": "demo", "robot.gripper_joint_names": ["finger_left", "finger_right"]})
    return load([Path(robot)], ["policy.name:=hold"])


@cache
def kinematics_of(robot: Path | str) -> Mapping[str, Any]:
    return make_kinematics(base(robot))


class Link:
    """How joint states reach a process: seconds of delay and jitter, and the shares that get lost or are slow."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._delay, self._jitter = float(rng.choice([0.0, 0.002, 0.01])), float(rng.choice([0.0005, 0.003, 0.02]))
        self._lost, self._slow = float(rng.choice([0.0, 0.02, 0.1])), float(rng.choice([0.0, 0.01]))

    def delay(self) -> float | None:
        if self._rng.random() < self._lost:
            return None
        slow = float(self._rng.choice([0.1, 0.7])) if self._rng.random() < self._slow else 0.0
        return self._delay + slow + float(self._rng.exponential(self._jitter))


class Cell:
    """One robot with a random policy, limits, arms, links and disturbances.

    Attributes:
        proposed: Motions and holds that the node has proposed.
        guard: The guard, whose ``counts`` say what became of them.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        robot = ROBOTS[seed % len(ROBOTS)] if seed % 10 else _TWO
        own, motion = self._choose(robot)
        self.config = build({**any_options(rng), **own}, base=base(robot))
        several = len(self.config.arms) > 1
        kinematics, parts = kinematics_of(robot), list[str]()
        for arm in self.config.arms:
            has = arm.gripper.mode != "none" and arm.robot.gripper_joint_names
            prefix = arm.name if several else "arm"
            parts += [f"{prefix}.{part}" for part in (*motion, *(["gripper"] if has else []))]
        names = {
            a.name: kinematics[a.name].joint_names if kinematics else a.robot.joint_names for a in self.config.arms
        }
        components = parse_components(" + ".join(parts), action=True)
        self._size = sum(part.size(len(next(iter(names.values())))) for part in components)
        self.node = RobotController(self.config, PolicySpec(action=components, dimension=self._size), kinematics)
        self.guard, self.now, self.offset = Harness(self.config), 1_000 * SECOND, 0
        self.guard._send = self._drive
        self.proposed, self._events, self._count = 0, list[tuple[int, int, Callable[[], None]]](), 0
        self._arms, self._targets, self._speeds = (
            dict[str, RealArm](),
            dict[str, FloatArray](),
            dict[str, FloatArray](),
        )
        self._names = names
        for arm in self.config.arms:
            self._add_arm(arm.name, kinematics.get(arm.name))
        fingers = {a.name: (*names[a.name], *a.measured_fingers) if several else () for a in self.config.arms}
        self._mergers = {
            arm.name: JointStateMerger(arm.joint_names, arm.joint_speeds, fingers[arm.name])
            for arm in self.node.arms
        }
        self._links = Link(rng), Link(rng)
        self._known, self._seen = dict[str, JointState](), dict[str, int]()
        self._holds, self._armed, self._hung, self._arrives = True, True, 0, 0
        self._wild, self._kept_alive = float(rng.choice([0.2, 1.0, 30.0])), 0
        self._contested = False
        self._stamped = rng.random() > 0.1
        rate = float(rng.choice([1.0, 2.0], p=[0.8, 0.2])) * max(50.0, self.config.control.rate_hz)
        self._at(0.0, lambda: self._publish(b"driver", 1 / rate, 0.0))
        self._at(0.3, self._tick)

    def _choose(self, robot: Path | str) -> tuple[dict[str, Any], list[str]]:
        rng = self.rng
        motions = [["joint_position"], ["joint_delta"]]
        own: dict[str, Any] = {
            "control.rate_hz": float(rng.choice([10.0, 50.0, 125.0, 250.0], p=[0.05, 0.25, 0.35, 0.35]))
        }
        own["control.delta_from"] = str(rng.choice(["measured", "commanded"]))
        if robot == "demo":
            own["control.output"] = output = str(rng.choice(POSITIONS + VELOCITIES))
            if rng.random() < 0.5 or output not in POSITIONS[:3]:
                own |= {"robot.gripper_joint_names": [], "gripper.mode": "none"}
            own["limits.joint_margin"] = 0.02
            motions.append(["joint_velocity[1]"])
            # Kinematics of the tip take most of the time.
            if output == "twist_stamped" or rng.random() < 0.1:
                motions = [["tip_delta"]]
        return own, motions[int(rng.integers(0, len(motions)))]

    def _add_arm(self, name: str, kinematics: Any) -> None:
        rng, count = self.rng, len(self._names[name])
        speeds, start = np.full(count, 2.0), rng.uniform(-0.5, 0.5, count)
        if kinematics is not None:
            speeds, low, high = kinematics.velocity_limits, kinematics.position_low, kinematics.position_high
            start = rng.uniform(low, high)
            if rng.random() < 0.3:  # outside of its range
                start[int(rng.integers(0, count))] = (high + 0.05)[0] if rng.random() < 0.5 else (low - 0.05)[0]
                start = np.clip(start, low - 0.05, high + 0.05)
        faults = Faults.draw(rng, count, 0.05)
        self._arms[name] = RealArm(faults, start, speeds)
        self._targets[name], self._speeds[name] = start + faults.sag, np.zeros(count)

    # Time

    def _at(self, seconds: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + round(seconds * 1e9), self._count, do))

    def run(self, commands: int) -> None:
        """Run until so many motions and holds were proposed, a minute at most."""
        until = self.now + 60 * SECOND
        while self.proposed < commands and self.guard.guard.stopped is None and self.now < until:
            due = self.guard.guard.due(self.now)
            if due <= self._events[0][0]:
                self.now = self.guard.now = max(due, self.now + 100_000)
                self.guard.guard.look(self.now)
                continue
            at, _, do = heapq.heappop(self._events)
            self.now = self.guard.now = max(self.now, at)
            do()

    # The robot

    def _drive(self, command: Command) -> None:
        self.guard.sent.append((self.now, command)) if not self.guard.sent else None
        count = len(self._names[command.arm])
        if command.velocities is not None:
            self._speeds[command.arm] = np.array([*command.velocities.values()])
        elif command.twist is None:
            self._targets[command.arm] = command.positions[:count]
        else:  # whatever Servo makes of it
            self._speeds[command.arm] = np.resize(np.concatenate(command.twist), count)

    def _publish(self, publisher: bytes, period: float, shift: float) -> None:
        for arm in self.config.arms:
            real, names = self._arms[arm.name], self._names[arm.name]
            if publisher == b"driver":
                self._targets[arm.name] = self._targets[arm.name] + self._speeds[arm.name] * period
                if np.any(self._speeds[arm.name]):
                    self._targets[arm.name] = np.clip(
                        self._targets[arm.name], real.measured - 0.2, real.measured + 0.2
                    )
                real.move(self._targets[arm.name], period)
            fingers = arm.measured_fingers
            positions = np.array([*(real.measured + shift), *[0.02] * len(fingers)])
            stamp = self.now + self.offset
            message = JointState((*names, *fingers), positions, stamp, publisher=publisher)
            for link, hear in zip(self._links, (self._node_hears, self._guard_hears), strict=True):
                delay = link.delay()
                if delay is not None:
                    self._at(delay, lambda hear=hear, arm=arm, message=message: hear(arm, message))
        if publisher == b"driver" or self._contested:
            jitter = period * float(self.rng.uniform(0.8, 1.2))
            self._at(jitter, lambda: self._publish(publisher, period, shift))

    def _guard_hears(self, arm: Any, message: JointState) -> None:
        message = message if self._stamped else replace(message, stamp=self.now + self.offset)
        self.guard.guard.joints(arm.joint_states, message, message.publisher, self.now, stamped=self._stamped)
        self.guard.guard.look(self.now)
        if not self._count % 64:
            self.guard.guard.merge()

    # The node

    def _node_hears(self, arm: Any, message: JointState) -> None:
        for other, controller in zip(self.config.arms, self.node.arms, strict=True):
            if other.joint_states != arm.joint_states:
                continue
            message = message if self._stamped else replace(message, stamp=self.now + self.offset)
            merger = self._mergers[other.name]
            merger.keep_trajectory(self._armed)
            whole = merger.add(
                message,
                message.stamp * self._stamped,
                self.now,
                self.config.timeouts.joint_state,
                message.publisher,
            )
            if whole is None or abs(self.now + self.offset - whole.joints.stamp) > SECOND:
                continue  # the watchdog does not use it
            try:
                controller.check_joints(whole.joints)
            except Refused:
                continue
            self._known[other.name], self._seen[other.name] = whole.joints, self.now

    @property
    def _fresh(self) -> dict[str, JointState]:
        oldest = self.now - self.config.timeouts.joint_state * SECOND
        return {name: joints for name, joints in self._known.items() if self._seen[name] >= oldest}

    def _tick(self) -> None:
        """One step of the control thread, and what an operator or the world does meanwhile."""
        period = 1 / self.config.control.rate_hz
        self._at(period * float(self.rng.uniform(0.9, 1.1)), self._tick)
        if self.now < self._hung:
            return
        if self.now - self._kept_alive > SECOND // 100:
            self._kept_alive = self.now
            for index in range(len(self.config.arms)):
                self._send(GuardFrame(Kind.KEEPALIVE, arm=index))
        if any(event in _HOLDS for event, _ in self.guard.events):
            self._hold()
        self.guard.events.clear()
        if self.rng.random() < min(0.2, 2 * period):
            self._disturb()
        if not self._armed:
            return
        contested = any(merger.competing(self.now) for merger in self._mergers.values())
        try:
            if contested or len(self._fresh) < len(self.config.arms):
                raise LookupError
            action = self._wild * 0.1 * self.rng.normal(size=self._size)
            fine = period >= 0.02 and self.config.arms[0].output not in VELOCITIES
            between = int(self.rng.choice([1, 1, 4])) if fine else 1
            commands = self.node.command(action, self._fresh, self.now, period)
            if between > 1:
                commands = self.node.interpolate(self._fresh, period / between, period, period / between)
        except (Refused, LookupError):
            self._hold()
            return
        self._propose(commands)
        self.node.sent()
        self._holds = False

    def _hold(self) -> None:
        if not self._holds:
            held, refused = self.node.hold(self._fresh)
            self._propose(held)
            self._holds = not refused

    def _propose(self, commands: tuple[Command, ...]) -> None:
        for index, arm in enumerate(self.config.arms):
            for command in commands:
                if command.arm == arm.name:
                    self.proposed += 1
                    frame = frame_of(command, index, arm.robot.gripper_joint_names)
                    self._send(frame, moves_on=command.moves_on)

    def _send(self, frame: GuardFrame, *, moves_on: bool = False) -> None:
        """Let a frame arrive, behind those before it."""
        seconds = lifetime(self.config) if moves_on else self.config.timeouts.inference + LIFETIME
        made = frame._replace(time=self.now, lifetime=round(1e9 * seconds), armings=1)
        late = float(self.rng.choice([0.0002, 0.001, 0.03], p=[0.8, 0.19, 0.01]))
        self._arrives = max(self._arrives, self.now + round(late * 1e9))
        self._at((self._arrives - self.now) / 1e9, lambda: self.guard.guard.take([made], self.now))

    def _disturb(self) -> None:
        rng = self.rng
        for arm in self._arms.values():
            arm.push, arm.blocked = np.zeros(len(arm.push)), False
        self._contested = False
        if not self._armed:
            self._armed = True
            self.node.restart()
        match int(rng.integers(0, 9)):
            case 0 | 1:
                for arm in self._arms.values():
                    arm.push = rng.uniform(-1, 1, len(arm.push)) * float(rng.choice([0.3, 1.0]))
            case 2:
                for arm in self._arms.values():
                    arm.blocked = True
            case 3:
                self.config = build(any_options(rng), base=self.config)
                self.node.configure(self.config)
                config = self.config
                self._at((max(self._arrives, self.now) - self.now) / 1e9, lambda: self.guard.configure(config))
            case 4:
                self._hold()
            case 5:  # the control thread hangs, and the guard holds
                self._hung = self.now + round(float(rng.choice([0.1, 4.0])) * 1e9)
            case 6:  # another publisher of the same joints, for a while
                self._contested, shift = True, float(rng.choice([0.0, 0.01, 0.3]))
                self._at(0.0, lambda: self._publish(b"other", 0.01, shift))
            case 7:  # disarmed until the next disturbance
                self._hold()
                self._armed = False
            case 8 if rng.random() < 0.2:  # the ROS clock jumps: nothing from before counts
                self.offset += int(rng.choice([-100, -1, 1, 100])) * SECOND
                self._known.clear()
                for merger in self._mergers.values():
                    merger.forget()


def legal(seed: int, commands: int) -> tuple[int, Counter[str], str]:
    """Return how many frames one cell has proposed, what the guard counted, and why it has stopped, or ""."""
    cell = Cell(seed)
    cell.run(commands)
    stopped = cell.guard.guard.stopped
    return cell.proposed, cell.guard.guard.counts, "" if stopped is None else f"{stopped[0].value}: {stopped[1]}"
