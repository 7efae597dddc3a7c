"""The node: wires the graph to the control loop. No torch, no model, no arithmetic on actions.

Its methods are the transitions of a managed ROS 2 node: ``configure`` loads, ``activate`` runs, ``deactivate``
holds, ``cleanup`` frees. `vla-ros run` and the rclpy lifecycle node both call them.
"""

from functools import partial
from typing import Any

from vla_ros.config import Config, LiveConfig, node_topics
from vla_ros.config.control import ENVIRONMENT
from vla_ros.contract.binding import state_message_type, with_rate
from vla_ros.control.clock import Clock
from vla_ros.control.inputs import Inputs, why_refused
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.outcome import BEFORE_ARMING
from vla_ros.control.publishers import CompetingSources
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import Event, Safety, State
from vla_ros.control.suspension import Suspension
from vla_ros.control.watchdog import Watchdog
from vla_ros.errors import VlaRosError
from vla_ros.execution import graph_watch
from vla_ros.execution.camera_frames import Frame
from vla_ros.execution.claim import claim_name, wait_until_alone
from vla_ros.execution.context import Context, ThrottledLogger
from vla_ros.execution.gate import DriverGate
from vla_ros.execution.graph_watch import GraphWatch
from vla_ros.execution.outputs import Outputs
from vla_ros.execution.source import ActionSource, PolicySource
from vla_ros.graph.node import Backend, Node, printable_logger, say
from vla_ros.graph.wiring import Wiring
from vla_ros.middleware.checks import middleware_watch
from vla_ros.node.control_loop import ControlLoop
from vla_ros.node.depth import join_depth
from vla_ros.node.guard_client import GuardClient, start_guard
from vla_ros.node.lockstep import LockstepWiring
from vla_ros.node.pipeline import ActionPipeline, build_pipeline
from vla_ros.node.receiver import FrameReceiver, StateReceiver
from vla_ros.node.run_policy import RunPolicy, has_run_policy
from vla_ros.node.scene import join_collision
from vla_ros.person.loop import PersonLoop
from vla_ros.person.source import PersonSource
from vla_ros.person.takeover import Takeover
from vla_ros.policies.base import Progress, create, no_progress, selection
from vla_ros.record.process import record
from vla_ros.telemetry.stats import Stats
from vla_ros.telemetry.telemetry import Telemetry
from vla_ros.vision.messages import IMAGE_TYPES

SUPERVISION_PERIOD = 0.02
"""Seconds between checks of the watchdog: a stale input is detected at most this late."""

_LAST_HOLD = 2.0  # s; longest wait for a joint state to hold the arm at the end


class PolicyNode:
    """Runs a policy on the graph.

    ``graph`` provides message classes and QoS profiles. ``node`` is an rclpy node or one from
    ``graph.create_node``; callbacks run on the thread that spins it.
    """

    def __init__(self, graph: Backend, node: Node, config: Config) -> None:
        self._graph = graph
        self._node = node
        self._options = LiveConfig(config)
        self._lockstep = LockstepWiring(graph, node, config) if config.node.clock == "inputs" else None
        self._wiring = self._lockstep or Wiring(graph, node)
        real = Clock(lambda: int(node.get_clock().now().nanoseconds))
        self._clock = self._lockstep.clock if self._lockstep else real
        self.safety = Safety(self._clock.ros)
        self.safety.listen(self._on_event)
        self.stats = Stats()
        self.inputs = Inputs(self._clock, config.policy.instruction)
        self._logger = printable_logger(node.get_logger())
        graph.on_error = self.fail
        self._source: ActionSource | None = None
        self._pipeline: ActionPipeline | None = None
        self._gate: DriverGate | None = None
        self._guard: GuardClient | None = None
        self._loop: ControlLoop | None = None
        self._telemetry: Telemetry | None = None
        self._person: PersonSource | None = None
        self._takeover: Takeover | None = None
        self._throttled = ThrottledLogger(self._logger)

    @property
    def config(self) -> Config:
        """The options in force; :meth:`reconfigure` changes the live ones."""
        return self._options.current

    @property
    def wiring(self) -> Wiring:
        """Endpoints of the node; taps of them are set before :meth:`configure`."""
        return self._wiring

    # The life of a managed node

    def configure(self, progress: Progress = no_progress, source: ActionSource | None = None) -> None:
        """Load the source and create the endpoints; nothing moves. Without ``source``, ``policy.name`` acts.

        Raises VlaRosError if the source does not load, does not fit the robot and the options, or another node has
        this node's name. Partial work is undone.
        """
        if source is None:
            self._logger.info(selection(self.config))
            source = PolicySource(create(self.config))
        try:
            record(self.config, self._node, self._wiring)
            self._wiring.on_close(claim_name(self._node.get_fully_qualified_name()).close)
            self._guard = start_guard(self.config, self._node, self._wiring)
            source.load(progress)
            pipeline = build_pipeline(self.config, source.spec)
            wait_until_alone(self._node, self._logger, progress, Clock())
            self._source, self._pipeline = source, pipeline
            self._options.current = pipeline.binding.config
            self._mailboxes = [Mailbox[Frame](self._clock) for _ in self.config.camera.topics]
            self._join(pipeline, source)
        except BaseException:
            self.cleanup()
            source.close()
            raise
        self._logger.info(f"{pipeline.summary} by {self._graph.backend}")
        self._logger.info(f"features:\n{pipeline.describe()}")
        for warning in pipeline.warnings:
            self._logger.warning(warning)

    def activate(self) -> None:
        """Start inferring on frames. The arm moves after ``~/enable``, or at once with ``control.armed``."""
        assert self._source is not None, "configure() comes first"
        assert self._pipeline is not None
        assert self._gate is not None
        person_loop = None
        if self._gate.controller is not self._pipeline.controller:  # deactivated while a person had the arm
            self._gate.hand_over(self._pipeline.controller)
        if self._person is not None and self._takeover is not None:
            tell = self._takeover.tell
            person_loop = PersonLoop(self._context, self._person, self._pipeline.controller, self._gate, tell)
        self._loop = ControlLoop(
            self._context, self._source, self._pipeline, self._mailboxes, self._gate, person_loop
        )
        if self._lockstep:
            reset = self._states.forget, self._pipeline.controller.reset
            self._lockstep.begin(self._loop.run_once, self._gate.supervise, reset)
        else:
            self._loop.start()
        if self.config.control.armed:
            armed, why = self.enable(True)
            if not armed:
                self._logger.error(f"not armed: {why}")
        else:
            self._logger.info("disarmed: only actions are published; call ~/enable to move (vla-ros arm)")

    def deactivate(self) -> bool:
        """Hold and stop inferring; everything stays loaded.

        Returns False if an inference did not end in time; it is abandoned, and its command is not sent.
        """
        self.safety.disarm()
        if self._lockstep:
            self._lockstep.end()
        if self._gate is not None:
            self._gate.finish_holds(min(self.config.timeouts.joint_state, _LAST_HOLD))
        loop, self._loop = self._loop, None
        ended = loop is None or loop.stop(self.config.timeouts.inference + 1.0)
        if not ended:
            self._logger.error("the inference did not end in time and was abandoned; its result will not be sent")
        return ended

    def cleanup(self) -> None:
        """Destroy the endpoints and free the policy. Safe to call in any state."""
        self.deactivate()
        self._throttled.flush()
        self._telemetry = self._gate = self._guard = self._person = self._takeover = None
        self._wiring.close()
        source, self._source, self._pipeline = self._source, None, None
        if source is not None:
            source.close()

    @property
    def lost(self) -> bool:
        """True if new processes can no longer reach the node; its process should be restarted."""
        return Reason.MIDDLEWARE_GONE in self.safety.status.blocks

    @property
    def is_active(self) -> bool:
        """True between :meth:`activate` and :meth:`deactivate`."""
        return self._loop is not None

    def fail(self, where: str, error: BaseException) -> None:
        """Stop the arm, because code of the node has failed with an error that nothing expects."""
        self._logger.error(f"{where} has failed: {type(error).__name__}: {error}")
        self.safety.stop(Reason.THREAD_DIED, f"{where}: {type(error).__name__}: {error}")

    # Requests from a person

    def enable(self, armed: bool) -> tuple[bool, str]:
        """Arm or disarm; return whether that succeeded, and a sentence for the caller."""
        if not armed:
            self.safety.disarm()
            return True, "disarmed: the arm holds"
        if self._loop is None or self._gate is None:
            return False, "not active: nothing can be commanded yet"
        if not self._loop.alive and not self._lockstep:
            return False, "the control thread has ended with an error (see the log): start the node again"
        for waiting in filter(None, [mailbox.take() for mailbox in self._mailboxes]):
            self._context.report(waiting.outcome(BEFORE_ARMING))
        self._gate.look(at_once=True)
        self._gate.supervise()  # missing inputs hold from the start
        if self._telemetry is not None:
            self._telemetry.look_at_boxes()
        return self.safety.arm(), self.safety.explain()

    def reset(self) -> tuple[bool, str]:
        """End a stop, discard the plan and disarm; return True and a sentence for the caller."""
        if self._guard is not None and (why := self._guard.reset()):
            return False, f"not reset: {why}"
        self.inputs.new_epoch()
        if self._pipeline is not None:
            self._pipeline.controller.reset()
            self._pipeline.observer.depth.transforms.accept()
        if self._gate is not None:
            self._gate.forget_holds()
        if self.safety.reset():
            return True, "no longer stopped; disarmed: call ~/enable to move (vla-ros arm)"
        return True, "the node was not stopped; the plan is discarded"

    def stop(self, detail: str = "true on the stop topic") -> None:
        self.safety.stop(Reason.OPERATOR_STOP, detail)

    def instruct(self, instruction: str) -> tuple[bool, str]:
        """Set the instruction; return whether it was accepted, and a sentence for the caller.

        An instruction that is too long, empty or has control characters is ignored.
        """
        text = instruction.strip()
        refused = why_refused(text)
        if refused:
            return False, refused
        return True, f"instruction: {text}" if self._set_instruction(text) else ""

    def _set_instruction(self, text: str) -> bool:
        """Set the instruction; unless empty, it clears ``no_instruction``. Return True if it changed."""
        changed = self.inputs.set_instruction(text)
        if text:
            self.safety.clear(Reason.NO_INSTRUCTION)
        if changed and self._telemetry is not None:
            self._telemetry.changed()
        if changed and self._takeover is not None:
            self._takeover.instructed()
        return changed

    def reconfigure(self, config: Config) -> None:
        """Apply changed options at once; only live ones (``Option.live``) may change while running."""
        changed = config.policy.instruction != self.config.policy.instruction
        for was, now in zip(self.config.arms, config.arms, strict=True):
            old, new = was.limits.box, now.limits.box
            if old != new:
                text = f"workspace box of '{now.name}': {new or 'none'}, until now {old or 'none'}"
                say(self._logger, text, "info" if new else "warning")
        self._options.current = config if self._pipeline is None else with_rate(config, self._pipeline.binding.spec)
        if changed:  # an empty text withdraws the instruction
            self._set_instruction(config.policy.instruction.strip())

    # Wiring

    def _join(self, pipeline: ActionPipeline, source: ActionSource) -> None:
        middleware = middleware_watch(self._graph.backend)
        if gone := middleware():  # iceoryx would abort the process at the first publisher
            raise VlaRosError(gone)
        config, topics, wiring = self.config, self.config.topics, self._wiring
        known = (self.safety, self.stats, self.inputs, self._guard.report if self._guard else dict)
        self._telemetry = Telemetry(wiring, self._options, pipeline.binding.spec, pipeline.controller, *known)
        self._watchdog = Watchdog(
            self._options,
            pipeline.binding.camera_topics,
            tuple(arm.name for arm in pipeline.controller.arms if arm.joint_names),
            simulated=bool(getattr(self._node.get_clock(), "ros_time_is_active", False)),  # a system clock has none
        )
        self._context = Context(
            self._options,
            self._clock,
            self.inputs,
            self.safety,
            Suspension(self._clock),
            self._watchdog,
            self.stats,
            self._telemetry,
            self._throttled,
            self._logger,
        )
        self._scene = join_collision(self._context, wiring, pipeline.controller.collision)
        outputs = Outputs(self._context, wiring, self._guard and self._guard.open(self._context, wiring))
        self._telemetry.sent = lambda: outputs.sent
        observer, used = pipeline.observer, pipeline.binding.used
        transforms = observer.depth.transforms
        self._states = states = StateReceiver(self._context, pipeline.controller, transforms)
        self._telemetry.poses = lambda: transforms.used
        receiver = FrameReceiver(self._context, self._mailboxes, observer, used, source.page_locked)
        join_depth(self._context, wiring, observer.depth)
        self._cameras = receiver.sources
        self._watch = GraphWatch(self._node, outputs.gids, topics.command_shared_with, self._competing, middleware)
        wiring.on_close(self._watch.close)
        kind, hear = "sensor_msgs/msg/JointState", states.joints
        inputs = [wiring.subscribe_from(kind, one, partial(hear, one), "joint_states") for one in states.topics]

        def poll() -> None:
            for each in inputs:
                each.poll()

        self._gate = gate = DriverGate(self._context, pipeline.controller, outputs, self._watch, poll)
        for each in config.robot.parsed_state_topics:
            wiring.subscribe_from(
                state_message_type(each.type), each.topic, partial(states.state_topic, each.name), "state"
            )
        wiring.subscribe("std_msgs/msg/String", node_topics.INSTRUCTION, self._on_instruction, "instruction")
        wiring.subscribe("std_msgs/msg/Bool", topics.stop, self._on_stop, "request")
        wiring.subscribe("std_msgs/msg/Empty", node_topics.HEARTBEAT, self._on_heartbeat, "state")
        for index, one in enumerate(config.camera.each):
            wiring.subscribe_raw(IMAGE_TYPES[one.transport], one.topic, partial(receiver.receive, index), "camera")
        wiring.service("std_srvs/srv/SetBool", "~/enable", self._on_enable)
        wiring.service("std_srvs/srv/Trigger", "~/reset", self._on_reset)
        if not self._lockstep and not any(arm.output == ENVIRONMENT for arm in config.arms):
            self._person = PersonSource(self._options, self._clock, pipeline.arms, pipeline.controller)
        self._takeover = Takeover(self._context, wiring, self._person)
        if has_run_policy(self._graph):
            RunPolicy(self._context, wiring, self.instruct, lambda: pipeline.schedule.left_until_inference)
        wiring.timer(SUPERVISION_PERIOD, gate.supervise)
        wiring.timer(1.0, self._throttled.flush)
        wiring.timer(graph_watch.PERIOD, gate.look)

    # Inputs

    def _competing(self) -> list[tuple[Reason, str, CompetingSources]]:
        """Return each topic for which publishers compete, with its two sources."""
        steady = self._clock.now().steady
        camera = self._cameras.competing(steady)
        found = [(Reason.CAMERA_CONTESTED, camera.subject, camera)] if camera is not None else []
        scene = self._scene.competing() if self._scene is not None else None
        if scene is not None:
            found.append((Reason.SCENE_CONTESTED, scene.subject, scene))
        joints = self._states.competing(steady)
        return found + [(Reason.JOINT_STATE_CONTESTED, topic, sources) for topic, sources in joints]

    def _on_instruction(self, message: Any) -> None:
        taken, text = self.instruct(message.data)
        if text:
            self._throttled.log("instruction", text, "info" if taken else "warning")

    def _on_stop(self, message: Any) -> None:
        if message.data:
            self.stop()

    def _on_heartbeat(self, message: Any) -> None:
        self._watchdog.see_heartbeat(self._clock.now())

    def _on_enable(self, request: Any, response: Any) -> Any:
        # Every node that receives a call to disarm obeys it.
        refused = (self._ambiguous("~/enable") or self._context.suspension.void) if request.data else ""
        response.success, response.message = (False, refused) if refused else self.enable(bool(request.data))
        return response

    def _on_reset(self, request: Any, response: Any) -> Any:
        refused = self._ambiguous("~/reset")
        response.success, response.message = (False, refused) if refused else self.reset()
        return response

    def _ambiguous(self, service: str) -> str:
        """Return why a call is refused if another node also serves ``service`` and received it, else ""."""
        who = self._watch.servers(service)
        if who:
            who = f"refused: {who} serves {service} as well and received this call, too; end or rename that node"
            self._logger.error(who)
        return who

    # Outputs

    def _on_event(self, event: Event) -> None:
        """Send a hold when motion ends, and log each change of state."""
        if event.kind == "stop" and self._guard is not None:
            self._guard.stop()
        if event.after is not State.ARMED and self._gate is not None:
            self._gate.send_due_holds()
        if event.after is not event.before:
            why = f" ({event.reason.value}: {event.detail or event.reason.description})" if event.reason else ""
            text = f"{event.before.value} -> {event.after.value}{why}"
            say(self._logger, text, "error" if event.after is State.STOPPED else "info")
        if event.kind == "block" and event.reason is not None:
            self._logger.warning(f"cannot be armed: {event.reason.value}: {event.detail}")
        if event.kind == "hold" and event.reason is Reason.CLOCK_JUMP:
            self._states.forget()  # stamps may repeat
        if event.kind == "source":
            status = self.safety.status
            self._logger.info(f"{status.mode.value}: {status.source} moves the arm")
        if self._telemetry is not None:
            self._telemetry.changed()
        if self._takeover is not None:
            self._takeover.on_event(event)
