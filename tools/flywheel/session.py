"""Episodes in which a scripted person may take over with a leader arm, recorded as the recorder records them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import Config, node_topics
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.command import Command, to_message
from vla_ros.control.mode import PERSON, Mode
from vla_ros.errors import VlaRosError
from vla_ros.execution.source import ActionSource
from vla_ros.graph.messages import message_types
from vla_ros.graph.origin import Origin
from vla_ros.person.takeover import Episodes
from vla_ros.record.bag import BagWriter
from vla_ros.record.topics import Recorded, recorded_topics
from vla_ros.types import FloatArray, JointState
from vla_ros_lab.eval.port import SIMULATED, Measure, NodePort, camera_message
from vla_ros_lab.eval.results import Score
from vla_ros_lab.eval.runner import EpisodeOptions, EpisodeRunner
from vla_ros_lab.replay.topics import live_name
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.environment import Measurements
from vla_ros_lab.sim.expert import RATE_HZ, Situation, plan
from vla_ros_lab.sim.scene import LIFT_HEIGHT
from vla_ros_lab.sim.table import TableEnvironment

LEADER = "/leader/joint_states"
OPTIONS = ("takeover.input:=leader", f"takeover.leader:={LEADER}", "takeover.gripper:=hand = 0..1")
"""Options of the node: a leader arm with the arm's joints, and ``hand``, which shows the opening."""

_PERIOD = 0.02  # s between the leader's messages
_DECISION = round(1 / RATE_HZ / _PERIOD)  # messages between two decisions of the person
_PATIENCE, _PROGRESS = 1.2, 0.005  # s without progress, and m of progress
_LIFTED = 0.03  # m; the person hands back once the object is this high
_GRIP = 0.25  # of the hand's range between two messages


class Session(NodePort):
    """One episode on a node of its own, and a person who watches it; written to the bag ``path``.

    A person who ``helps`` takes over when the tool has come no nearer to its goal for 1.2 s, and hands back when
    the object is lifted; taking over a second time, to the end. The expert decides where the leader arm goes; what
    the arm then does is up to the node.

    Attributes:
        takeovers: Number of takeovers.
    """

    def __init__(
        self,
        environment: TableEnvironment,
        config: Config,
        source: ActionSource,
        options: EpisodeOptions,
        path: Path,
        *,
        helps: bool,
    ) -> None:
        self._simulated = SimulatedClock(1_000_000_000)
        super().__init__(config, source, SIMULATED, time=self._simulated)
        self._runner = EpisodeRunner(environment, self, options)
        self._world, self._types = environment.world, message_types()
        self._helps, self.takeovers = helps, 0
        self._path, self._said = path, 0
        self._topics, self._arms = config.topics, config.arms
        self._recorded = list[Recorded]()
        self._record = recorded_topics(config, live_name)
        node = self.node
        self._episodes = Episodes(node.context, self._on_event)
        node.safety.listen(lambda event: self._episodes.look("source" if event.kind == "source" else "state"))

    def run(self, seed: int) -> Score:
        bag = BagWriter(self._path, self._record)
        try:
            result = self._runner.run(seed)
            self.node.safety.take_over(Mode.PAUSED)
            self._episodes.label("success" if result.success else "failure")
            return result
        finally:
            bag.write(self._recorded)
            bag.close()

    def begin(self, instruction: str, measure: Measure) -> None:
        super().begin(instruction, measure)
        self._height, self._best, self._since = float(self._place[2]), np.inf, 0.0
        self._command = dict(zip(self._world.joint_names, self._world.joint_positions().tolist(), strict=True))
        self._hand = self._commanded()
        self.node.safety.take_over(Mode.AUTONOMOUS)
        self._say()

    def instruct(self, text: str) -> None:
        super().instruct(text)
        self._write(live_name(node_topics.INSTRUCTION), self._text(text))
        self._episodes.look("instruction")

    # The person

    @property
    def _place(self) -> FloatArray:
        """Centre of the named object [3], metres."""
        return self._world.object_positions()[self._world.scene.task.target]

    def _say(self) -> None:
        """Look, decide, and publish the leader's joints."""
        self._simulated.after(_PERIOD, self._say)
        if self._runner.over:
            return
        safety = self.node.safety
        if safety.mode is Mode.AUTONOMOUS:
            self._hand = self._commanded()  # the leader's motors follow the arm
            self._said = 0
            if self._helps and self._has_stalled():
                self._ask(Mode.CORRECTING)
        elif safety.status.source == PERSON:
            self._move()
        self._publish_leader()

    def _has_stalled(self) -> bool:
        now, place = self.time.steady(), self._place
        lifted = float(place[2]) - self._height
        left = float(np.linalg.norm(place - self._world.tool_position())) + max(0.0, LIFT_HEIGHT - lifted)
        if left < self._best - _PROGRESS or not self._runner.steps:
            self._best, self._since = min(left, self._best), now
        return now - self._since > _PATIENCE

    def _move(self) -> None:
        lifted = float(self._place[2]) - self._height
        if lifted > _LIFTED and self.takeovers == 1:
            self._best = np.inf
            self._ask(Mode.AUTONOMOUS)
            return
        turn, self._said = self._said % _DECISION, self._said + 1
        if turn == 0:
            joints = self._world.joint_positions()
            now = Situation(joints[: len(arm.HOME)], float(joints[len(arm.HOME) :].mean()), self._place)
            [[*goal, self._opening]] = plan(self._world.scene.task, now, "joint_position").tolist()
            self._goal = np.array(goal)
        left = max(1, _DECISION - 1 - turn)  # there before the next image
        self._hand[:-1] += (self._goal - self._hand[:-1]) / left
        self._hand[-1] += np.clip(self._opening - self._hand[-1], -_GRIP, _GRIP)

    def _ask(self, mode: Mode) -> None:
        assert self.node.person is not None
        if mode is Mode.CORRECTING:
            self.node.person.begin()
            self.takeovers += 1
        if refused := self.node.safety.take_over(mode):
            raise VlaRosError(f"takeover: {refused}")

    def _publish_leader(self) -> None:
        assert self.node.person is not None
        [(_, topic, line, reader)] = self.node.person.followed_topics()
        message = self._joint_state(JointState((*arm.JOINT_NAMES, "hand"), self._hand, self.time.ros()))
        self.node.person.hear(message, line, reader, Origin(b"leader", self.time.ros()))
        self._write(topic, message)

    def _commanded(self) -> FloatArray:
        """Return the joints [7] and the opening that the arm was told last, or began with."""
        fingers = self._command[arm.FINGER_NAMES[0]] / arm.FINGER_TRAVEL
        return np.array([*(self._command[name] for name in arm.JOINT_NAMES), fingers])

    # What is recorded

    def receive(self, measured: Measurements, stamp: int) -> None:
        super().receive(measured, stamp)
        for own, state in zip(self._arms, measured.joints, strict=True):
            self._write(own.joint_states, self._joint_state(state))
        for topic, image in measured.images.items():
            self._write(topic, camera_message(image, stamp, topic, self._arms[0]))

    def obey(self, commands: Sequence[Command]) -> None:
        super().obey(commands)
        for command, own in zip(commands, self._arms, strict=True):
            self._command |= dict(zip(command.names, command.positions.tolist(), strict=True))
            self._write(own.command, to_message(command, own.output, self._types.message))

    def _on_event(self, content: dict[str, Any]) -> None:
        self._write(live_name(node_topics.EVENT), self._text(json.dumps(content)))

    def _joint_state(self, state: JointState) -> Any:
        command = Command(state.names, state.positions, state.stamp)
        return to_message(command, "joint_state", self._types.message)

    def _text(self, text: str) -> Any:
        return self._types.message("std_msgs/msg/String")(data=text)

    def _write(self, topic: str, message: Any) -> None:
        data = message if isinstance(message, bytes) else self._types.serialize(message)
        self._recorded.append(Recorded(self.time.ros(), self.time.ros(), topic, data))
