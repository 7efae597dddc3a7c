"""The guard's process: its endpoints on the graph, its priority, and its loop of one thread."""

import json
import math
import os
import select
import signal
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from vla_ros.config import Config, LiveConfig
from vla_ros.control.clock import Clock
from vla_ros.control.command import Command
from vla_ros.control.reasons import Reason
from vla_ros.control.suspension import LONGEST
from vla_ros.execution.context import ThrottledLogger
from vla_ros.execution.drivers import Drivers
from vla_ros.graph import Graph, open_graph
from vla_ros.graph.node import Node, RawSubscription, printable_logger
from vla_ros.graph.origin import Origin
from vla_ros.graph.wiring import Wiring
from vla_ros.guard.arm import parse_options
from vla_ros.guard.channel import Channel
from vla_ros.guard.frames import GuardFrame
from vla_ros.guard.guard import Guard
from vla_ros.process import Printing, SharedText, stay_in_memory, take_priority
from vla_ros.types import JointState

_CHORES, _TELL = 0.02, 0.05  # s between callbacks of timers and services; between reports and heartbeats
_OPTIONS = 600.0  # s; the node loads its policy before it sends options
_BURST = 0.005  # s for messages that only the executor reads, one at a time
_LONGEST = 500  # characters of what the node is told of one kind of event
_LAST_HOLD, _AGAIN = 0.6, 0.002  # s for the last hold, and between its attempts
_DELIVERED = 0.2  # s after which a middleware has delivered it (Fast DDS sends from a thread of its own)


class GuardProcess:
    """Connects a :class:`Guard` with the channel and the graph. Everything runs on one thread.

    It is what the drivers' endpoints need (:class:`vla_ros.execution.context.Surroundings`).

    Args:
        graph: The graph.
        node: The guard's node.
        channel: The guard's end of the channel.
        told: What the node reads.
        config: The first options.
        beats: Topics of the heartbeat that it hears, and of the one that it sends.
    """

    def __init__(
        self, graph: Graph, node: Node, channel: Channel, told: SharedText, config: Config, beats: Sequence[str]
    ) -> None:
        self._graph, self._channel, self._told, self._heard = graph, channel, told, 0
        self._wiring, self.logger = Wiring(graph, node), printable_logger(node.get_logger())
        self.clock = Clock(lambda: int(node.get_clock().now().nanoseconds))
        self.options, self.throttled, self.safety = LiveConfig(config), ThrottledLogger(self.logger), self
        topics, subscribe = config.topics, self._wiring.subscribe_from
        self._joints = [
            subscribe("sensor_msgs/msg/JointState", topic, partial(self._on_joints, topic), "joint_states")
            for topic in dict.fromkeys(arm.joint_states for arm in config.arms)
        ]
        self._requests = [
            subscribe("std_msgs/msg/Bool", topics.stop, self._on_stop, "request"),
            subscribe("std_msgs/msg/Empty", beats[0], self._on_heartbeat, "state"),
        ]
        self.guard = Guard(self.options, self._prepare, self.note, partial(self._hear, self._joints))
        self.drivers = Drivers(self, self._wiring, lambda error: self.guard.note("unsent", str(error)))
        self._heartbeat = self._wiring.teller("std_msgs/msg/UInt32MultiArray", beats[1], "command")
        self._events: dict[str, str] = {}
        self._beats, self._slowest, self._is_told = 0, 0.0, False
        self._periods = Counter[int]()  # of the loop, by four times the binary logarithm of their microseconds

    def run(self, node_ended: int) -> None:
        """Guard until the channel is closed, a process ends (``node_ended``: its pidfd) or SIGTERM; then hold."""
        ended = "an error"
        try:
            ended = self._run(node_ended)
        finally:
            self._end(ended)
            self._wiring.close()

    def _run(self, node_ended: int) -> str:
        poll = select.poll()
        poll.register(self._channel.socket, select.POLLIN)
        poll.register(node_ended, select.POLLIN)
        ended, chores, tell, last = list[str](), 0.0, 0.0, self.clock.awake()
        signal.signal(signal.SIGTERM, lambda *_: ended.append("SIGTERM"))
        while not ended:
            due = self.guard.due(time.monotonic_ns())
            ready = poll.poll(max(0.0, (due - time.monotonic_ns()) / 1e6))
            awake, now = self.clock.awake(), time.monotonic()
            if awake - last > LONGEST:
                self.guard.suspended(time.monotonic_ns())
            self._look()
            self._periods[int(4 * math.log2(1 + 1e6 * (awake - last)))] += 1
            self._slowest, last = max(self._slowest, awake - last), awake
            if self._channel.is_closed or any(number == node_ended for number, _ in ready):
                ended.append("the node has ended")
            if now >= chores:
                chores = now + _CHORES
                self._graph.spin_once()
            if now >= tell or not self._is_told:
                tell = now + _TELL
                self._tell()
        return ended[0]

    def sending(self) -> AbstractContextManager[bool]:
        """See :meth:`Safety.sending`: the thread that sends is the one that decides, so nothing is excluded."""
        return nullcontext(self.guard.may_move)

    def react(self, reason: Reason, detail: str = "") -> None:
        """See :meth:`Safety.react`: what a gripper reports is counted."""
        self.guard.note(reason.value, detail)

    def note(self, event: str, text: str) -> None:
        """Tell the node of an event at once, and log it."""
        self._events[event], self._is_told = text[:_LONGEST], False
        if event in ("stopped", "lapsed", "dropped", "suspended", "unsent"):
            self.throttled.log(event, f"{event}: {text}", "error")

    def _look(self) -> None:
        """Take stops, then frames; joint states before them only if a frame needs one that is not known yet."""
        self._hear(self._requests)
        self.guard.take(self._channel.frames(), time.monotonic_ns())  # which no frame is ahead of
        self._hear(self._joints)
        self.guard.merge()

    def _hear(self, inputs: Sequence[RawSubscription]) -> None:
        """Take what has arrived; the node logs what cannot be read."""
        for each in inputs:
            try:
                each.poll()
            except Exception:  # noqa: PERF203 - of the middleware, too
                self.guard.counts["unreadable"] += 1
        before, until = -1, time.monotonic() + _BURST
        while self._graph.lost_checks and before != self._heard and time.monotonic() < until:
            before = self._heard
            self._graph.spin_once()  # the only way to messages there

    def _end(self, why: str) -> None:
        """Hold, and wait for that up to :data:`_LAST_HOLD` seconds."""
        until = time.monotonic() + _LAST_HOLD
        while not self.guard.hold_all(time.monotonic_ns()) and time.monotonic() < until:
            time.sleep(_AGAIN)
        time.sleep(_DELIVERED)
        self._report()
        self.throttled.flush()
        self.logger.info(f"ended, because of this: {why}; state: {self.guard.status['state']}")

    def _prepare(self, command: Command) -> list[Callable[[], object]]:
        return [partial(each.send, each.pack(each.make())) for each in self.drivers.writes(command)]

    def _on_joints(self, topic: str, message: Any, origin: Origin) -> None:
        self._heard += 1
        stamp = int(message.header.stamp.sec) * 1_000_000_000 + int(message.header.stamp.nanosec)
        positions = np.asarray(message.position, dtype=np.float64)
        joints = JointState(tuple(message.name), positions, stamp or self.clock.ros())
        self.guard.joints(topic, joints, origin.publisher, time.monotonic_ns(), stamped=bool(stamp))

    def _on_stop(self, message: Any, origin: Origin) -> None:
        self._heard += 1
        if message.data:
            self.guard.stop(Reason.OPERATOR_STOP, "true on the stop topic", time.monotonic_ns())

    def _on_heartbeat(self, message: Any, origin: Origin) -> None:
        self._heard, self.guard.heard = self._heard + 1, time.monotonic_ns()

    def _tell(self) -> None:
        """Report to the node and send a heartbeat."""
        self._is_told = True
        self._report()
        if Printing.has_room():
            self.throttled.flush()  # of each kind, the newest line
        else:
            self.guard.counts["not_logged"] += 1
        self._beats = (self._beats + 1) & 0xFFFFFFFF
        counted = self._beats, ("holding", "moving", "stopped").index(self.guard.status["state"])
        seal = zlib.crc32(b"".join(number.to_bytes(4, "little") for number in counted))
        self._heartbeat.publish(self._graph.message("std_msgs/msg/UInt32MultiArray")(data=[*counted, seal]))

    def _report(self) -> None:
        """Tell the node."""
        report = {
            **self.guard.status,
            "events": self._events,
            "subscribers": self.drivers.subscribers,
            "gids": {topic: gid.hex() for topic, gid in self.drivers.gids.items()},
            "slowest_ms": round(1e3 * self._slowest, 2),
            "periods": self._periods,
        }
        self._slowest = 0.0
        self._told.write(json.dumps(report))


def first_options(channel: Channel, node_ended: int) -> Config | None:
    """Wait for the first options; return None if the node ends before."""
    ready = select.select([channel.socket.fileno(), node_ended], [], [], _OPTIONS)[0]
    frames = channel.frames() if node_ended not in ready else []
    return parse_options(frames[0].text) if frames and isinstance(frames[0], GuardFrame) else None


def main(arguments: Sequence[str]) -> int:
    """Run a guard; a node starts it, with JSON of what it needs as the only argument."""
    asked = json.loads(arguments[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node ends this process after its last hold
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    channel, told = Channel(socket.socket(fileno=asked["channel"])), SharedText(asked["told"])
    printing = Printing()  # noqa: F841 (its copier ends with it, and begins before there is a priority)
    refused = take_priority()
    node_ended = os.pidfd_open(asked["process"])
    ros = ["--ros-args", "-p", "use_sim_time:=true"] if asked["simulated"] else []
    with open_graph(asked["backend"], ros, asked["log_level"]) as graph:
        node = graph.create_node(asked["name"], asked["namespace"])
        try:
            if (config := first_options(channel, node_ended)) is None:
                return 0
            process = GuardProcess(graph, node, channel, told, config, asked["heartbeats"])
        except Exception as error:
            told.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:_LONGEST]}))
            return 1
        for each in refused + stay_in_memory():
            process.logger.warning(f"not permitted here, so that load can delay the guard: {each}")
        process.run(node_ended)
    return 0
