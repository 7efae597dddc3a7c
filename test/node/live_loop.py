"""The live parts of the node on a simulated clock, without graph or threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from vla_ros.config import LiveConfig, build
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.command import Command
from vla_ros.control.inputs import Inputs
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.outcome import FrameOutcome, StepResult
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import Safety
from vla_ros.control.watchdog import WATCHED, Watchdog
from vla_ros.node.context import Context, ThrottledLogger
from vla_ros.node.control_loop import ControlLoop, Did
from vla_ros.node.receiver import Frame, FrameReceiver, StateReceiver
from vla_ros.node.stepper import Stepper
from vla_ros.policies.base import Policy
from vla_ros.telemetry.stats import Stats
from vla_ros.types import ActionChunk, JointState, Observation
from vla_ros.vision.messages import encode_image

EPOCH = 1_700_000_000_000_000_000
NAMES = tuple(f"joint_{number}" for number in range(1, 8))
POSITIONS = np.array([0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0])


class TimedPolicy(Policy):
    """Moves 5 mm along x at each step. ``during`` is called while it infers, and may let time pass."""

    def __init__(self, horizon: int = 1, image_keys: tuple[str, ...] = ("image",)) -> None:
        self.spec = PolicySpec(horizon=horizon, images=tuple(map(ImageFeature, image_keys)))
        self.during: Callable[[], Any] = lambda: None
        self.asked: list[Observation] = []
        self.last = 0.0  # number of the last entry

    def infer(self, session: Any, observation: Observation) -> ActionChunk:
        self.asked.append(observation)
        self.during()
        actions = np.tile([0.005, 0, 0, 0, 0, 0, 1.0 + self.last], (self.spec.horizon, 1))
        return ActionChunk(actions, observation.stamp)


class LiveLoop:
    """An armed node without a graph. Its driver is there; frames and joint states come when a test says so.

    The arm stays at ``positions``, or ``follows`` every command at once.
    """

    def __init__(
        self,
        policy: TimedPolicy | None = None,
        events: Iterable[tuple[float, Callable[[LiveLoop], Any]]] = (),
        **options: Any,
    ) -> None:
        values = {name.replace("__", "."): value for name, value in options.items()}
        fixed = {"robot.urdf": "demo", "policy.instruction": "go", "timeouts.inference": 1.0}
        config = build({"control.rate_hz": 10.0} | fixed | values)
        self.policy = policy or TimedPolicy()
        self.options = LiveConfig(config)
        self.clock = SimulatedClock(
            EPOCH, ((EPOCH + round(at * 1e9), partial(action, self)) for at, action in events)
        )
        self.outcomes: list[FrameOutcome] = []
        self.steps: list[StepResult] = []
        self.made: list[float] = []  # when
        self.sent: list[tuple[float, Command]] = []
        safety, inputs = Safety(self.clock.ros), Inputs(self.clock, config.policy.instruction)
        watchdog = Watchdog(self.options, config.camera.topics, tuple(arm.name for arm in config.arms))
        self.silent: set[str] = set()
        self.positions, self.follows = POSITIONS, False
        logger = logging.getLogger("live_loop")
        self.context = Context(
            self.options, self.clock, inputs, safety, watchdog, Stats(), self, ThrottledLogger(logger), logger
        )
        self.stepper = Stepper(config, self.policy)
        self.stepper.load()
        self.mailboxes = [Mailbox[Frame](self.clock) for _ in config.camera.topics]
        self.receiver = FrameReceiver(self.context, self.mailboxes)
        self.states = StateReceiver(self.context, self.stepper.controller)
        self.supervised: Callable[[], Any] = lambda: None
        self.loop = ControlLoop(self.context, self.stepper, self.mailboxes, self.prepare, self.supervise)
        self.joints()
        safety.arm()

    # The sink, the driver and the supervisor

    def step(self, step: StepResult) -> None:
        self.steps.append(step)
        self.made.append(self.clock.steady())

    def frame(self, outcome: FrameOutcome) -> None:
        self.outcomes.append(outcome)

    def prepare(self, commands: Sequence[Command]) -> Callable[[], None]:
        def send() -> None:
            self.sent.extend((self.clock.steady(), command) for command in commands)
            if self.follows:
                self.positions = commands[0].positions[: len(NAMES)]
                self.clock.after(0.001, self.joints)

        return send

    def supervise(self) -> None:
        now = self.clock.now()
        self.context.watchdog.driver(1, now)
        self.context.safety.follow(self.context.watchdog.active(now), WATCHED)
        self.supervised()

    # The robot

    def joints(self) -> None:
        for arm in self.options.current.arms:
            if arm.name not in self.silent:
                self.states.accept(JointState(NAMES, self.positions, self.clock.ros()), self.clock.ros(), arm.name)

    def camera(self, index: int = 0, age: float = 0.0, data: bytes | None = None) -> int:
        """Joint state and frame come; the frame's stamp."""
        self.joints()
        stamp = self.clock.ros() - round(age * 1e9)
        image = np.random.default_rng(stamp % 2**32).integers(90, 160, (12, 16, 3), dtype=np.uint8)
        self.receiver.receive(index, encode_image(image, stamp, "camera") if data is None else data)
        return stamp

    def run(self, seconds: float) -> list[Did]:
        """Run the loop until so much time has passed; what each iteration did."""
        until, did = self.clock.steady() + seconds, []
        while self.clock.steady() < until:
            did.append(self.loop.run_once())
        return did

    @property
    def results(self) -> list[str]:
        return [outcome.outcome for outcome in self.outcomes]

    @property
    def state(self) -> tuple[str, set[Reason]]:
        status = self.context.safety.status
        return status.state.value, set(status.holds)

    @property
    def under_way(self) -> int:
        """Frames that were received and have no outcome yet."""
        return int(self.context.stats.frames()["received"]) - len(self.outcomes)


def every(period: float, count: int) -> list[tuple[float, Callable[[LiveLoop], Any]]]:
    """Frames of the first camera, ``count`` of them."""
    return [(number * period, LiveLoop.camera) for number in range(1, count + 1)]
