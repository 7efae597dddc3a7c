"""Publishes the node's diagnostics, status, actions, debug image, metrics and trace.

Nothing here makes decisions or delays a command: expensive work runs on the graph thread a few times a second, and
only for topics that have subscribers.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

from vla_ros.collision.checker import Clearance
from vla_ros.config import LiveConfig, node_topics
from vla_ros.config.sections import GRIPPER_ACTIONS
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.command import Command, message_type
from vla_ros.control.inputs import Inputs
from vla_ros.control.outcome import FrameOutcome, StepResult
from vla_ros.control.robot import RobotController
from vla_ros.control.safety import Safety
from vla_ros.errors import ConfigError
from vla_ros.graph.health import TopicHealth, Watched
from vla_ros.graph.node import printable_logger, say
from vla_ros.graph.wiring import Wiring
from vla_ros.middleware.checks import Problem, check_profile, receive_buffer
from vla_ros.middleware.profiles import FrameLoad, sourced_distribution
from vla_ros.telemetry import diagnostics
from vla_ros.telemetry.frame_trace import FrameTrace
from vla_ros.telemetry.resources import gpu_memory, process_resources
from vla_ros.telemetry.stats import Stats
from vla_ros.types import JointState
from vla_ros.vision.messages import IMAGE_TYPES, encode_image

_DEBUG_PERIOD = 0.2  # s; the debug image is for people
_VIEW_PERIOD = 0.1  # s


class Telemetry:
    """Everything that the node publishes or records about itself."""

    def __init__(
        self,
        wiring: Wiring,
        options: LiveConfig,
        spec: PolicySpec,
        controller: RobotController,
        safety: Safety,
        stats: Stats,
        inputs: Inputs,
        guard: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        config = options.current
        self._options, self._spec, self._controller = options, spec, controller
        self._safety, self._stats, self._inputs, self._guard = safety, stats, inputs, guard
        self._graph, self._node = wiring.graph, wiring.node
        self._logger = printable_logger(self._node.get_logger())
        self._trace = FrameTrace(config.node.trace, self._logger.error) if config.node.trace else None
        if self._trace is not None:
            wiring.on_close(self._trace.close)
        if config.node.metrics_port:
            from vla_ros.telemetry.metrics import MetricsServer  # prometheus_client is an extra

            server = MetricsServer(config.node.metrics_address, config.node.metrics_port, self._metrics)
            wiring.on_close(server.close)
            self._logger.info(f"metrics: http://{config.node.metrics_address}:{server.port}/metrics")
        self._action = wiring.publisher("std_msgs/msg/Float64MultiArray", node_topics.ACTION, "command")
        self._person_action = wiring.publisher(
            "std_msgs/msg/Float64MultiArray", node_topics.PERSON_ACTION, "command"
        )
        self._diagnostics = wiring.teller(
            "diagnostic_msgs/msg/DiagnosticArray", node_topics.DIAGNOSTICS, "diagnostics"
        )
        self._status = wiring.teller("std_msgs/msg/String", node_topics.STATUS, "instruction")
        self._debug = wiring.teller("sensor_msgs/msg/Image", node_topics.DEBUG_IMAGE, "diagnostics")
        self._view = wiring.teller("std_msgs/msg/String", node_topics.ROBOT_VIEW, "state_publisher")
        self.sent: Callable[[], Mapping[str, Command]] = dict  # each arm's last command; assign it
        self.poses: Callable[[], Mapping[str, str]] = dict  # where each frame's pose is from; assign it
        self._unsent = ""  # why an action was not published
        self._debug_wanted = self._view_wanted = False
        self._to_draw: StepResult | None = None
        self._published: tuple[str, ...] = ()  # state and blocks
        self._answer: Mapping[str, Any] = {}
        self._outside, self._outside_said = 0, 0
        self._health = TopicHealth(self._node, self._watched(), config.timeouts.publisher)
        self._wrong: Mapping[str, str] = {}
        self._nearest: Clearance | None = None  # smallest distance in the last second
        if self._graph.lost_checks:
            self._logger.warning(f"checks are lost: {self._graph.lost_checks}")
        if any(one.transport == "raw" for one in config.camera.each):
            self._say_transport()
        # In turns that are short, because a thread that sends commands waits for each.
        self._figures: dict[str, Mapping[str, Any]] = {}
        turns: tuple[Callable[[], None], ...] = (
            self._look,
            self.look_at_boxes,
            partial(self._read, "latency", stats.latency_ms),
            partial(self._read, "execution", stats.execution.summary),
            partial(self._read, "process", self._resources),
            self._report,
            self.changed,
        )
        self._turns = cycle(turns)
        wiring.timer(1.0 / len(turns), lambda: next(self._turns)())
        wiring.timer(_DEBUG_PERIOD, self._draw)
        wiring.timer(_VIEW_PERIOD, self._show)

    # Called by the control loop and the receivers

    def on_step(self, step: StepResult) -> None:
        """Publish ``~/action`` for a step, whether or not the arm may move; a person's is ``~/person_action``."""
        make = self._graph.message
        layout = make("std_msgs/msg/MultiArrayLayout")(dim=[], data_offset=0)
        publisher = self._person_action if step.by_person else self._action
        try:
            publisher.publish(make("std_msgs/msg/Float64MultiArray")(layout=layout, data=step.action.tolist()))
        except Exception as error:  # a write of the middleware that failed is no reason not to move
            if str(error) != self._unsent:
                self._unsent = str(error)
                self._logger.error(f"an action was not published: {error}")
        if step.chunk is not None:
            self._answer = step.chunk.info
            self._outside += int(step.chunk.info.get("outside_bins", 0))
        if self._debug_wanted and step.observation is not None:
            self._to_draw = step

    def on_outcome(self, outcome: FrameOutcome) -> None:
        if self._trace is not None:
            self._trace.on_outcome(outcome)

    def changed(self) -> None:
        """Publish ``~/status`` when the state or its reasons change."""
        snapshot, status = self._inputs.snapshot, self._safety.status
        content = {
            "stamp": int(self._node.get_clock().now().nanoseconds),
            "state": status.state.value,
            "mode": status.mode.value,
            "source": status.source,
            "stopped_by": status.stopped_by.value if status.stopped_by else "",
            "detail": status.detail,
            "holds": {reason.value: detail for reason, detail in status.holds.items()},
            "blocks": {reason.value: detail for reason, detail in status.blocks.items()},
            "explanation": self._safety.explain(),
            "instruction": snapshot.instruction,
            "view": self._spec.view,
            "counters": dict(self._safety.counters),
            "frames": self._stats.frames(),
            "collision": self._collision(),
            "guard": self._guard(),
            "poses": dict(self.poses()),
        }
        self._status.publish(self._graph.message("std_msgs/msg/String")(data=json.dumps(content)))
        if (status.state, status.mode, *status.blocks) != self._published:
            self._published = (status.state, status.mode, *status.blocks)
            self._diagnose([self._state_part()])

    # On the thread that spins

    def look_at_boxes(self) -> None:
        """Say if a tip is outside its workspace box: nothing holds the arm, but it hardly moves."""
        before, text = self._safety.remark, self._controller.outside_boxes(self._inputs.snapshot.arms)
        self._safety.remark = text
        if bool(text) != bool(before):
            say(self._logger, text or "the tip is inside limits.workspace_*", "warning" if text else "info")

    def _report(self) -> None:
        """Publish diagnostics."""
        if (check := self._controller.collision) is not None:
            self._nearest = check.closest
        outside = self._outside
        parts = [
            self._state_part(),
            diagnostics.frames_part(self._stats.frames()),
            diagnostics.latency_part(self._figures["latency"]),
            diagnostics.execution_part(self._figures["execution"]),
            diagnostics.collision_part(self._why_not, self._nearest),
            diagnostics.guard_part(self._guard()),
            diagnostics.topics_part(self._wrong),
            diagnostics.graph_part(self._graph.lost_checks),
            diagnostics.policy_part(self._answer, outside - self._outside_said, self._spec.view),
            diagnostics.process_part(self._figures["process"]),
        ]
        self._outside_said = outside
        self._diagnose(parts)
        self._debug_wanted = self._debug.get_subscription_count() > 0
        self._view_wanted = self._view.get_subscription_count() > 0

    def _read(self, name: str, figures: Callable[[], Mapping[str, Any]]) -> None:
        self._figures[name] = figures()

    def _state_part(self) -> diagnostics.PartStatus:
        return diagnostics.state_part(self._safety.status, self._counters(), self._inputs.snapshot.instruction)

    def _diagnose(self, parts: Sequence[diagnostics.PartStatus]) -> None:
        name, stamp = self._node.get_fully_qualified_name(), int(self._node.get_clock().now().nanoseconds)
        self._diagnostics.publish(diagnostics.diagnostic_array(parts, name, stamp, self._graph.message))

    def _look(self) -> None:
        """Log new problems with topics."""
        wrong = {f"{finding.kind} {finding.topic}": finding.text for finding in self._health.check()}
        for text in wrong.values():
            if text not in self._wrong.values():
                self._logger.warning(text)
        self._wrong = wrong

    def _draw(self) -> None:
        step, self._to_draw = self._to_draw, None
        if step is None or step.observation is None:
            return
        from vla_ros.telemetry.debug_image import annotate, beside

        config = self._options.current
        first, *others = (step.observation.images[key] for key in self._spec.image_keys)
        image = annotate(
            first,
            step.observation.instruction,
            step.action,
            self._spec,
            config.control.translation_scale,
            self._safety.explain(),
        )
        self._debug.publish(encode_image(beside(image, others), step.stamp, config.camera.keys[0]))

    def _show(self) -> None:
        if not self._view_wanted:
            return
        config, arms, sent = self._options.current, self._inputs.snapshot.arms, self.sent()
        content = {
            "cameras": self._images(),
            "takeover": config.takeover.input,
            "arms": {name: _joints(state, sent.get(name)) for name, state in arms.items()},
        }
        self._view.publish(self._graph.message("std_msgs/msg/String")(data=json.dumps(content)))

    def _counters(self) -> Mapping[str, int]:
        """Return the counters of reasons, of limits that changed a command, and of invalid action tokens."""
        return {**self._controller.counters, "outside_bins": self._outside, **self._safety.counters}

    @property
    def _why_not(self) -> str:
        """Why nothing is checked for collisions, or ""."""
        check = self._controller.collision
        return "an environment is no robot" if check is None else check.why_not

    def _collision(self) -> Mapping[str, Any]:
        """Return whether commands are checked, and the nearest two bodies, for ``~/status``."""
        nearest = self._nearest
        found = {"distance": round(nearest.distance, 4), "bodies": nearest.bodies} if nearest else {}
        return {"checked": not self._why_not, "why_not": self._why_not, **found}

    def _resources(self) -> Mapping[str, int]:
        lost = {"trace_lines_lost": self._trace.lost} if self._trace is not None else {}
        return {**process_resources(), **gpu_memory(), **lost}

    def _metrics(self) -> Iterable[Any]:
        from vla_ros.telemetry.metrics import families

        stats = self._stats
        nearest = {"collision_distance_metres": self._nearest.distance} if self._nearest else {}
        return families(
            self._safety.state,
            self._counters(),
            stats.frames(),
            stats.latency_ms(),
            stats.execution.summary(),
            {**self._resources(), **nearest},
        )

    def _images(self) -> Mapping[str, str]:
        """Return the types of the cameras' topics."""
        each = self._options.current.camera.each
        return {self._node.resolve_topic_name(one.topic): IMAGE_TYPES[one.transport] for one in each}

    def _watched(self) -> list[Watched]:
        """Return the topics whose other ends are checked; the stop topic and others need no publisher."""
        config, resolve, qos = self._options.current, self._node.resolve_topic_name, self._graph.qos
        topics = config.topics
        watched = [Watched(topic, qos("camera"), True, kind) for topic, kind in self._images().items()]
        if self._controller.joint_names:
            watched += [
                Watched(resolve(topic), qos("joint_states"), True, "sensor_msgs/msg/JointState")
                for topic in dict.fromkeys(arm.joint_states for arm in config.arms)
            ]
        outputs = {
            topic: output
            for arm in config.arms
            for topic, output in ((arm.command, arm.output), (arm.gripper_topic, arm.gripper.output))
            if topic
        }
        watched += [
            Watched(resolve(topic), qos("command"), type_name=message_type(output), published=True)
            for topic, output in outputs.items()
            if output not in GRIPPER_ACTIONS
        ]
        may_be_silent = (
            (topics.stop, "request"),
            (node_topics.INSTRUCTION, "instruction"),
            (node_topics.HEARTBEAT, "state"),
        )
        return watched + [Watched(resolve(topic), qos(name), required=False) for topic, name in may_be_silent]

    def _say_transport(self) -> None:
        """Log whether the middleware carries raw frames of the configured size."""
        config = self._options.current
        frames = FrameLoad.of(config)
        if self._graph.backend == "dds":
            for finding in receive_buffer(frames):
                if isinstance(finding, Problem):
                    self._logger.warning(f"{finding.found}. To fix it: {finding.fix}, or use CompressedImage")
            return
        try:
            report = check_profile("default", frames, sourced_distribution())
        except ConfigError as error:  # an unknown distribution
            self._logger.info(str(error))
            return
        say(self._logger, f"middleware: {report.summary}", "info" if report.active else "warning")


def _joints(state: JointState, command: Command | None) -> Mapping[str, Mapping[str, float]]:
    """Return an arm's joints: measured, and as last commanded, in rad or m, and rad/s or m/s."""
    joints = {"measured": dict(zip(state.names, state.positions.tolist(), strict=True))}
    if command is not None and command.velocities is None:
        joints["commanded"] = dict(zip(command.names, command.positions.tolist(), strict=True))
    elif command is not None:
        joints["velocity"] = dict(command.velocities or {})
    return joints
