"""Hands an arm in MuJoCo over between policy and person at random moments, and measures jumps and late commands.

    python benchmarks/takeover.py [--handovers 1000] [--seed 0] [--requests 250] [--json FILE]

In simulated time: ``--handovers`` in each direction, shared by policies with single steps, chunks, RTC and commands
at 250 Hz, each with a leader arm and with a pad. A command is *late* if it is the policy's after a person's request
was answered, or a person's after the release; a deceleration, in which no joint becomes faster, is nobody's. Over
the graph: ``--requests`` in each direction to a running node in a process of its own, at 50 Hz.
"""

import argparse
import json
import os
import platform
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from benchmarks.takeover_graph import measure_requests
from vla_ros.config import build
from vla_ros.contract.components import Component
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.command import Command
from vla_ros.control.mode import Mode
from vla_ros.control.outcome import FrameOutcome, StepResult
from vla_ros.control.safety import State
from vla_ros.execution.source import PolicySource
from vla_ros.node.pipeline import build_pipeline
from vla_ros.node.simulated import SimulatedNode
from vla_ros.policies.base import Policy, Session
from vla_ros.types import ActionChunk, Observation
from vla_ros.vision.messages import encode_image
from vla_ros_lab.sim.arm import HOME
from vla_ros_lab.sim.world import TIMESTEP, TableTop, WorldOptions

_COUNT = len(HOME)
_ACCELERATION = 8.0  # rad/s^2
_ROUNDING = 1e-6
_CAMERA, _HAND = 1 / 30, 0.02  # s
_OPTIONS: dict[str, Any] = {
    "robot.urdf": "demo",
    "robot.tip_frame": "tool",
    "robot.gripper_joint_names": ["finger_left", "finger_right"],
    "policy.instruction": "wave",
    "limits.max_joint_acceleration": _ACCELERATION,
    "limits.max_joint_step": 0.3,
    # A limit of the pose may brake harder than the acceleration allows.
    "limits.max_translation_step": 1.0,
    "limits.max_rotation_step": 3.0,
    "camera.width": 16,
    "camera.height": 12,
    "timeouts.inference": 1.0,
    "control.delta_from": "commanded",
}
_LEADER = {"takeover.input": "leader", "takeover.leader": "/leader", "takeover.tolerance": 0.15}
_PAD = {
    "takeover.input": "joy",
    "takeover.joy": "/joy",
    "takeover.buttons": ["deadman = 0"],
    "takeover.axes": ["x = 0", "y = 1", "z = 2", "yaw = 3"],
}


@dataclass(frozen=True)
class Kind:
    """A policy and the way in which its actions are executed."""

    name: str
    options: dict[str, Any]
    horizon: int = 1
    seconds: float = 0.02  # of an inference
    continues: bool = False  # RTC
    steps: bool = False  # steps of the tip instead of joint positions


KINDS = (
    Kind("single steps", {"control.rate_hz": 20.0}, steps=True),
    Kind("chunks", {"control.rate_hz": 20.0, "control.schedule": "blend"}, 12, 0.15),
    Kind("RTC", {"control.rate_hz": 20.0, "control.schedule": "rtc"}, 12, 0.2, continues=True),
    Kind("chunks at 250 Hz", {"control.rate_hz": 20.0, "control.command_rate_hz": 250.0}, 12, 0.15),
    Kind(
        "single steps at 250 Hz", {"control.rate_hz": 20.0, "control.command_rate_hz": 250.0}, 1, 0.03, steps=True
    ),
)


class Swinging(Policy):
    """Swings every joint about its start, faster than a person may; or moves the tip in random steps."""

    def __init__(self, kind: Kind, clock: SimulatedClock, rng: np.random.Generator) -> None:
        self._kind, self._clock, self._rng = kind, clock, rng
        motion = Component("arm", *(("tip_delta", "euler_xyz") if kind.steps else ("joint_position", "rad")))
        self.spec = PolicySpec(
            images=(ImageFeature("image"),),
            action=(motion, Component("arm", "gripper", "0..1")),
            dimension=(6 if kind.steps else _COUNT) + 1,
            horizon=kind.horizon,
            continues_chunks=kind.continues,
        )

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        self._clock.sleep(self._kind.seconds * self._rng.uniform(0.5, 1.5))
        if self._kind.steps:
            size = np.array([0.01, 0.01, 0.01, 0.05, 0.05, 0.05, 1.0])
            to_and_fro = np.cos(4.0 * observation.stamp / 1e9 + np.arange(7)) + 0.2 * self._rng.normal(size=7)
            return ActionChunk((size * to_and_fro)[np.newaxis], observation.stamp)
        times = observation.stamp / 1e9 + np.arange(self._kind.horizon)[:, np.newaxis] / 20.0
        angles = HOME + 0.2 * np.sin(5.0 * times + np.arange(_COUNT))
        return ActionChunk(np.hstack([angles, np.ones_like(times)]), observation.stamp)


@dataclass
class Figures:
    """What was found; ratios are to what is allowed."""

    takeovers: int = 0
    releases: int = 0
    jump: float = 0.0
    acceleration: float = 0.0
    late: list[str] = field(default_factory=list)
    commands: Counter[str] = field(default_factory=Counter)


class Cell:
    """The simulated node, the arm in MuJoCo, and a person with a leader arm or a pad."""

    def __init__(self, kind: Kind, hand: dict[str, Any], seed: int, figures: Figures) -> None:
        self._rng, self.figures, self._kind = np.random.default_rng(seed), figures, kind
        self.clock = SimulatedClock(1_000_000_000)
        config = build({**_OPTIONS, **kind.options, **hand})
        source = PolicySource(Swinging(kind, self.clock, self._rng))
        source.load()
        pipeline = build_pipeline(config, source.spec)
        self.node = SimulatedNode(config, source, pipeline, self.clock, self, self._obey)
        arm = pipeline.arms["arm"].kinematics
        assert arm is not None
        margin = config.limits.joint_margin
        self._low, self._high = arm.position_low + margin, arm.position_high - margin
        self._fastest = arm.velocity_limits * config.limits.velocity_scale
        self._limits = config.limits
        self._world = TableTop(WorldOptions(rate_hz=max(50.0, config.control.command_rate_hz)))
        self._last, self._velocity = self._world.joint_positions()[:_COUNT], np.zeros(_COUNT)
        self._owner, self._since, self._mover = "policy", 0, "policy"  # who may move it, since when; who last did
        self._moved: tuple[bool, float] | None = None  # by a command whose mover is not known: slowed, milliseconds
        self._hand, self._drift, self._sent = self._last.copy(), np.zeros(_COUNT), 0.0
        self._centre = self._last if kind.steps else HOME
        self._tick()
        self._show()
        self._say()
        self.node.inputs.set_instruction("wave")
        self.node.safety.arm()

    def hand_over(self, seconds: Callable[[], float], pairs: int) -> None:
        """Take over and hand back ``pairs`` times, after ``seconds()`` each."""
        left = pairs

        def take() -> None:
            assert self.node.person is not None
            self.node.person.begin()
            answer = self.node.safety.take_over(Mode.CORRECTING)
            assert not answer, answer
            self._own("person")
            self.figures.takeovers += 1
            self._hand = self._last + self._rng.uniform(-0.12, 0.12, _COUNT)
            self.clock.after(seconds(), give)

        def give() -> None:
            if self.node.person is not None and self.node.person.input == "joy" and self._rng.random() < 0.5:
                self._press([0])  # lets go, then hands back
                self._own("nobody")
                self.clock.after(0.5 * seconds(), back)
            else:
                back()

        def back() -> None:
            nonlocal left
            answer = self.node.safety.take_over(Mode.AUTONOMOUS)
            assert not answer, answer
            self._own("policy")
            self.figures.releases += 1
            left -= 1
            if left:
                self.clock.after(seconds(), take)

        self.clock.after(seconds(), take)
        until = None
        while until is None or self.clock.steady() < until:
            self.node.loop.run_once()
            status = self.node.safety.status
            assert status.state is not State.STOPPED, self.node.safety.explain()
            if not left and until is None:
                until = self.clock.steady() + 1.0

    # The robot

    def _tick(self) -> None:
        self.clock.after(self._world.substeps * TIMESTEP, self._tick)
        self._world.advance(self._world.substeps)
        [state] = self._world.joint_states(self.clock.ros())
        self.node.states.accept(state, state.stamp, "arm")
        self.node.gate.supervise()

    def _show(self) -> None:
        self.clock.after(_CAMERA, self._show)
        image = self._rng.integers(90, 160, (12, 16, 3), dtype=np.uint8)
        self.node.cameras.receive(0, encode_image(image, self.clock.ros(), "camera"))

    def _obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._world.command_named(command.names, command.positions)
            if command.hold:
                self._last, self._velocity = command.positions[:_COUNT], np.zeros(_COUNT)
            else:
                self._judge(command)

    # The person

    def _say(self) -> None:
        person = self.node.person
        assert person is not None
        self.clock.after(_HAND, self._say)
        if person.input == "joy":
            self._press([int(self._owner == "person")])
            return
        self._drift = 0.95 * self._drift + self._rng.normal(size=_COUNT) * 0.004
        self._hand = np.clip(self._hand + self._drift, self._last - 0.14, self._last + 0.14)
        low, high = np.minimum(self._centre - 0.25, self._last), np.maximum(self._centre + 0.25, self._last)
        self._hand = np.clip(self._hand, low, high)  # above the table
        [(_, _, line, _)] = person.followed_topics()
        line.hear(self._hand, self.clock.steady(), b"hand")

    def _press(self, buttons: list[int]) -> None:
        assert self.node.person is not None
        axes = self._rng.uniform(-1.0, 1.0, 4)
        _, released = self.node.person.buttons.hear(buttons, axes, self.clock.steady(), b"hand")
        if released:
            self.node.safety.release()

    # The judge

    def _own(self, owner: str) -> None:
        self._name_mover()
        self._owner, self._since, self._mover = owner, self.clock.ros(), "nobody"

    def on_step(self, step: StepResult) -> None:
        """Note who moves the arm: the sink of the node's steps, each of which follows its first command."""
        if self._sent < self.clock.steady():
            self._name_mover()
        if step.refused is None:
            self._mover = "person" if step.by_person else "policy"
            if self._mover == "policy" and self._owner == "policy" and step.stamp < self._since:
                self._mover = "policy's old plan"
        self._name_mover()

    def on_outcome(self, outcome: FrameOutcome) -> None: ...

    def _judge(self, command: Command) -> None:
        self._name_mover()
        figures, positions = self.figures, command.positions[:_COUNT]
        moved = positions - self._last
        velocity = moved / command.duration
        step = np.minimum(self._fastest * command.duration, self._limits.max_joint_step)
        figures.jump = max(figures.jump, float(np.max(np.abs(moved) / step)))
        gap, self._sent = self.clock.steady() - self._sent, self.clock.steady()
        seconds = min(max(gap, command.duration), 1.25 * command.duration)  # a command may come a little late
        change = np.abs(velocity - self._velocity) / (_ACCELERATION * seconds)
        # Limits of position, and of the distance from an arm that touches the table, brake harder.
        ahead = np.abs(positions - self._world.joint_positions()[:_COUNT])
        inside = np.minimum(positions - self._low, self._high - positions) > _ROUNDING
        inside &= ahead < 0.9 * self._limits.following_error
        figures.acceleration = max(figures.acceleration, float(change[inside].max(initial=0.0)))
        slows = bool(np.all(np.abs(velocity) <= np.abs(self._velocity) + _ROUNDING))
        slows &= bool(np.all(velocity * self._velocity >= -_ROUNDING))
        self._moved = slows, (self.clock.ros() - self._since) / 1e6
        self._last, self._velocity = positions, velocity

    def _name_mover(self) -> None:
        """Count the last command for whoever moved the arm with it, once that is known."""
        moved, self._moved = self._moved, None
        if moved is None:
            return
        slowed, at = moved
        if self._mover == self._owner:
            self.figures.commands[self._owner] += 1
        elif slowed:
            self.figures.commands["decelerating"] += 1
        else:
            self.figures.late.append(
                f"{self._kind.name}: by {self._mover} {at:.1f} ms after {self._owner} got the arm"
            )


def measure(handovers: int, seed: int) -> dict[str, Figures]:
    """Return the figures of each kind of policy and hand; a process for each, as many at a time as processors."""
    hands = (("leader", _LEADER), ("pad", _PAD))
    cases = [(f"{kind.name}, {name}", kind, hand) for kind in KINDS for name, hand in hands]
    ends = [handovers * index // len(cases) for index in range(len(cases) + 1)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [
            pool.submit(_measure, kind, hand, seed + index, ends[index + 1] - ends[index])
            for index, (_, kind, hand) in enumerate(cases)
        ]
        return {name: each.result() for (name, _, _), each in zip(cases, found, strict=True)}


def _measure(kind: Kind, hand: dict[str, Any], seed: int, pairs: int) -> Figures:
    figures, rng = Figures(), random.Random(seed)

    def seconds() -> float:
        """One in ten follows at once, also within the deceleration."""
        return rng.uniform(0.0, 0.1) if rng.random() < 0.1 else rng.uniform(0.3, 1.2)

    if pairs:
        Cell(kind, hand, seed, figures).hand_over(seconds, pairs)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--handovers", type=int, default=1000, help="in each direction (default: 1000)")
    parser.add_argument(
        "--requests", type=int, default=250, help="over the graph, in each direction (default: 250)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    given = parser.parse_args()
    cases = measure(given.handovers, given.seed)
    print(f"{'policy and input':<32}{'handovers':>10}{'jump':>8}{'accel.':>8}{'late':>6}  commands")
    for name, each in cases.items():
        counts = ", ".join(f"{count} {who}" for who, count in sorted(each.commands.items()))
        both = f"{each.takeovers}+{each.releases}"
        print(f"{name:<32}{both:>10}{each.jump:8.3f}{each.acceleration:8.3f}{len(each.late):6}  {counts}")
        for text in each.late[:5]:
            print(f"    {text}")
    requests = measure_requests(given.requests) if given.requests else {}
    for text in requests.pop("late_commands", []):
        print(f"late over the graph: {text}")
    found = {
        "handovers": [sum(getattr(e, w) for e in cases.values()) for w in ("takeovers", "releases")],
        "largest_jump_ratio": round(max(each.jump for each in cases.values()), 9),
        "largest_acceleration_ratio": round(max(each.acceleration for each in cases.values()), 9),
        "late_commands": sum(len(each.late) for each in cases.values()) + requests.pop("late", 0),
        **requests,
        "seed": given.seed,
        "load": os.getloadavg()[0],
        "machine": f"{os.cpu_count()} x {platform.machine()}, Python {platform.python_version()}",
    }
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
