"""The live parts of the node on a simulated clock, without graph or threads."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from vla_ros.config import build
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.command import Command
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.outcome import FrameOutcome, StepResult
from vla_ros.control.reasons import Reason
from vla_ros.execution.camera_frames import Frame
from vla_ros.execution.gate import CommandGate
from vla_ros.execution.source import ActionSource, PolicySource
from vla_ros.node.control_loop import LoopResult
from vla_ros.node.pipeline import build_pipeline
from vla_ros.node.simulated import SimulatedNode
from vla_ros.policies.base import Policy
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


class LiveGate(CommandGate):
    """Calls ``supervised`` after each look at the inputs, and ``late`` before it opens."""

    supervised: Callable[[], Any] = staticmethod(lambda: None)
    late: Callable[[], Any] = staticmethod(lambda: None)

    def supervise(self) -> None:
        super().supervise()
        self.supervised()

    @contextmanager
    def sending(self) -> Iterator[bool]:
        self.late()
        with super().sending() as may_move:
            yield may_move


class LiveMailbox(Mailbox[Frame]):
    """Calls ``taken`` when a frame was taken, and ``found`` when the wait for one has ended well."""

    taken: Callable[[], Any] = staticmethod(lambda: None)
    found: Callable[[], Any] = staticmethod(lambda: None)

    def take(self, timeout: float = 0.0) -> Frame | None:
        frame = super().take(timeout)
        if frame is not None:
            self.taken()
        return frame

    def wait(self, timeout: float) -> bool:
        found = super().wait(timeout)
        if found:
            self.found()
        return found


class LiveLoop(SimulatedNode):
    """An armed node without a graph. Its driver is there; frames and joint states come when a test says so.

    The arm stays at ``positions``, however far commands lead it, or ``follows`` every command at once.
    """

    gate_type, mailbox_type = LiveGate, LiveMailbox

    def __init__(
        self,
        policy: TimedPolicy | None = None,
        events: Iterable[tuple[float, Callable[..., Any]]] = (),
        source: ActionSource | None = None,
        clock_type: type[SimulatedClock] = SimulatedClock,
        **options: Any,
    ) -> None:
        values = {name.replace("__", "."): value for name, value in options.items()}
        fixed = {"robot.urdf": "demo", "policy.instruction": "go", "timeouts.inference": 1.0}
        fixed["limits.following_error"] = 6.4
        config = build({"control.rate_hz": 10.0} | fixed | values)
        self.policy = policy or TimedPolicy()
        timed = ((EPOCH + round(at * 1e9), partial(action, self)) for at, action in events)
        self.outcomes: list[FrameOutcome] = []
        self.steps: list[StepResult] = []
        self.made: list[float] = []  # when
        self.sent: list[tuple[float, Command]] = []
        self.silent: set[str] = set()
        self.positions, self.follows = POSITIONS, False
        source = source or PolicySource(self.policy)
        source.load()
        self.pipeline = build_pipeline(config, source.spec)
        super().__init__(config, source, self.pipeline, clock_type(EPOCH, timed), self, self.obey)
        self.joints()
        self.safety.arm()

    # The sink and the driver

    def on_step(self, step: StepResult) -> None:
        self.steps.append(step)
        self.made.append(self.clock.steady())

    def on_outcome(self, outcome: FrameOutcome) -> None:
        self.outcomes.append(outcome)

    def obey(self, commands: Sequence[Command]) -> None:
        self.sent.extend((self.clock.steady(), command) for command in commands)
        if self.follows and commands:
            self.positions = commands[0].positions[: len(NAMES)]
            self.clock.after(0.001, self.joints)

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
        self.cameras.receive(index, encode_image(image, stamp, "camera") if data is None else data)
        return stamp

    def run(self, seconds: float) -> list[LoopResult]:
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


def every(period: float, count: int) -> list[tuple[float, Callable[..., Any]]]:
    """Frames of the first camera, ``count`` of them."""
    return [(number * period, LiveLoop.camera) for number in range(1, count + 1)]
