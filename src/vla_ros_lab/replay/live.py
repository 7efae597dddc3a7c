"""Shows a recording to the live node on a simulated clock, in place of an environment."""

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from vla_ros.config import Config
from vla_ros.control.clock import SimulatedClock
from vla_ros.execution.context import Sink
from vla_ros.execution.source import ActionSource
from vla_ros.node.pipeline import ActionPipeline
from vla_ros.types import JointState
from vla_ros_lab.eval.port import SIMULATED, NodePort
from vla_ros_lab.replay.series import Recording, Table, TopicSeries
from vla_ros_lab.replay.storage import Record

_BEFORE = 1_000_000_000  # ns; joint states and state topics are used from this long before the first frame

_Event = tuple[int, Callable[[], None]]


class LiveRun:
    """Runs the node, armed, on a recording.

    Messages arrive at their recorded times; inference takes as long as on this machine, multiplied by ``speed``.
    The age of stamps is not checked, because stamps may be from any clock, and a stop is reset at once. ``sink``
    receives each step and the outcome of each frame. ``episode`` is called with the time of each frame of the first
    camera and returns the instruction if the frame starts an episode.
    """

    def __init__(
        self,
        config: Config,
        source: ActionSource,
        pipeline: ActionPipeline,
        recording: Recording,
        records: Iterator[Record],
        speed: float,
        sink: Sink,
        episode: Callable[[int], str | None],
    ) -> None:
        timeouts = replace(config.timeouts, frame_age=0.0)
        watched = replace(config, timeouts=replace(timeouts, joint_state_age=0.0, heartbeat=0.0))
        cameras = {topic: index for index, topic in enumerate(config.camera.topics)}
        self._pipeline, self._episode = pipeline, episode
        first = next(records, None)
        begin = first.time if first is not None else 0
        events = _messages(recording.joints, begin, self._accept)
        for key, series in recording.state.items():
            events += _messages(series, begin, partial(self._set_state, key))
        events.append(self._frames(first, records, cameras))
        self._clock = SimulatedClock(begin, heapq.merge(*events, key=lambda event: event[0]), speed)
        options, clock = replace(config, timeouts=timeouts), self._clock
        self.port = NodePort(options, source, SIMULATED, time=clock, pipeline=pipeline, sink=sink, watched=watched)
        self._node = self.port.node

    def run(self, enough: Callable[[], bool]) -> None:
        """Run until the recording has ended or ``enough`` returns True."""
        safety, waiting = self._node.safety, self._node.mailboxes[self._pipeline.binding.lead]
        safety.arm()
        while not enough():
            if not self.port.run_once():
                safety.reset()
                safety.arm()
            wants_frame = self._pipeline.schedule.wants_chunk and not waiting.waiting
            if self.port.idle and wants_frame and self._clock.exhausted:
                break

    def _frames(
        self, first: Record | None, records: Iterator[Record], cameras: Mapping[str, int]
    ) -> Iterator[_Event]:
        for record in itertools.chain([first] if first else [], records):
            # Copied, because the view of the file may be invalid when the frame is used.
            yield record.time, partial(self._receive, cameras[record.topic], record.time, bytes(record.data))

    def _receive(self, camera: int, time: int, data: bytes) -> None:
        if camera == 0 and (instruction := self._episode(time)) is not None:
            self.port.instruct(instruction)
            self._pipeline.controller.reset()
        self._node.cameras.receive(camera, data)

    def _accept(self, state: JointState) -> None:
        for arm in self._pipeline.controller.arms:
            self._node.states.accept(state, state.stamp, arm.name)
        self._pipeline.controller.assume(state)

    def _set_state(self, key: str, state: JointState) -> None:
        self._node.inputs.set_state(key, state)


def _messages(
    series: TopicSeries | None, begin: int, receive: Callable[[JointState], None]
) -> list[Iterator[_Event]]:
    """Return iterators, one per table, of events that pass each message to ``receive``."""

    def events(table: Table) -> Iterator[_Event]:
        for row in range(max(table.newest(begin - _BEFORE), 0), len(table.times)):
            yield int(table.times[row]), partial(receive, table.joint_state(row))

    return [events(table) for table in series.tables] if series is not None else []
