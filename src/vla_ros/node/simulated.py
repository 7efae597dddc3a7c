"""The node's parts without a graph, mostly on a simulated clock: for replay, the demo and evaluation."""

import logging
from collections.abc import Callable, Sequence

from vla_ros.config import Config, LiveConfig
from vla_ros.contract.binding import with_rate
from vla_ros.control.clock import Clock
from vla_ros.control.command import Command, StandingVelocities
from vla_ros.control.inputs import Inputs
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.safety import Safety
from vla_ros.control.suspension import Suspension
from vla_ros.control.watchdog import Watchdog
from vla_ros.execution.camera_frames import Frame
from vla_ros.execution.context import Context, Sink, ThrottledLogger
from vla_ros.execution.gate import CommandGate
from vla_ros.execution.source import ActionSource
from vla_ros.node.control_loop import ControlLoop
from vla_ros.node.pipeline import ActionPipeline
from vla_ros.node.receiver import FrameReceiver, StateReceiver
from vla_ros.person.loop import PersonLoop
from vla_ros.person.source import PersonSource
from vla_ros.telemetry.stats import Stats

_LOG = logging.getLogger(__name__)


class SimulatedNode:
    """Receivers, watchdog, safety and control loop around a loaded source; a driver always counts as present.

    ``sink`` receives each step and the outcome of each frame; ``driver`` receives the commands of all arms.
    ``watched`` has the watchdog's options if they differ from ``config``. ``arms`` names the arms that need joint
    states.
    """

    gate_type, mailbox_type = CommandGate, Mailbox[Frame]

    def __init__(
        self,
        config: Config,
        source: ActionSource,
        pipeline: ActionPipeline,
        clock: Clock,
        sink: Sink,
        driver: Callable[[Sequence[Command]], None],
        watched: Config | None = None,
    ) -> None:
        self.clock, self.stats, self.options = clock, Stats(), LiveConfig(with_rate(config, pipeline.binding.spec))
        self.inputs, self.safety = Inputs(clock, config.policy.instruction), Safety(clock.ros)
        self.arms = tuple(arm.name for arm in pipeline.controller.arms if arm.joint_names)
        checked = LiveConfig(watched) if watched else self.options
        watchdog = Watchdog(checked, pipeline.binding.camera_topics, self.arms)
        logger, suspension = ThrottledLogger(_LOG), Suspension(clock)
        self.context = context = Context(
            self.options, clock, self.inputs, self.safety, suspension, watchdog, self.stats, sink, logger, _LOG
        )
        if pipeline.controller.collision is not None:
            pipeline.controller.collision.steady = clock.steady
        self.mailboxes = [self.mailbox_type(clock) for _ in config.camera.topics]
        self.cameras = FrameReceiver(context, self.mailboxes, pipeline.observer, pipeline.binding.used)
        self.states = StateReceiver(context, pipeline.controller)
        self._driver, self._standing = driver, StandingVelocities(clock, self.options)
        self.gate = self.gate_type(context, self._prepare, pipeline.controller, self._standing.expired)
        self.person: PersonSource | None = None
        person_loop = None
        if config.takeover.input != "none":
            self.person = PersonSource(self.options, clock, pipeline.arms, pipeline.controller)
            person_loop = PersonLoop(context, self.person, pipeline.controller, self.gate)
        self.loop = ControlLoop(context, source, pipeline, self.mailboxes, self.gate, person_loop)

    def _prepare(self, commands: Sequence[Command]) -> Callable[[], None]:
        def write() -> None:
            self._driver(commands)
            self._standing.send({command.arm: command for command in commands})

        return write
