"""A person who takes over: publishes a leader arm or a Joy, and calls the node's services."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from vla_ros.graph.node import Graph
from vla_ros.types import FloatArray

LEADER, JOY = "/leader/joint_states", "/joy"
_REACH = 0.06  # rad; how far the leader leads the arm
_PRESSED, _CYCLE = 25, 30  # messages for which the dead-man button is pressed, of so many
_JUMP = 1.0  # rad


class Person:
    """Leads the arm a little ahead of where it is, so that it follows at any time.

    Args:
        graph: The graph.
        node: The robot's node.
        kind: ``leader`` or ``joy``.
        names: The arm's joints.
        rng: Source of all randomness.
        emit: Records a request (``ask``) and its ``answer``, whose text is "" if the node obeyed.
    """

    def __init__(
        self,
        graph: Graph,
        node: Any,
        kind: str,
        names: tuple[str, ...],
        rng: random.Random,
        emit: Callable[..., None],
    ) -> None:
        self._graph, self._node, self._kind = graph, node, kind
        self._names, self._rng, self._emit = names, rng, emit
        self.fault = ""
        self._publishers: list[Any] = []
        self._count, self._last = 0, np.zeros(len(names))
        self._noise = np.random.default_rng(rng.randrange(2**31))
        self._direction = np.zeros(len(names))
        self._set, self._trigger = graph.service("std_srvs/srv/SetBool"), graph.service("std_srvs/srv/Trigger")
        self._takeover = node.create_client(self._set, "/vla_policy/takeover")
        self._pause = node.create_client(self._trigger, "/vla_policy/pause")
        self._join()

    def _join(self) -> None:
        kind, topic = ("JointState", LEADER) if self._kind == "leader" else ("Joy", JOY)
        make, qos = self._graph.message, self._graph.qos
        self._publishers.append(
            self._node.create_publisher(make(f"sensor_msgs/msg/{kind}"), topic, qos("state_publisher"))
        )

    def become(self, fault: str) -> None:
        """Begin ``dies``, ``freezes``, ``jumps``, ``nan``, ``other``, ``second``, ``sticks`` or ``lets go``."""
        self.fault = fault
        wanted = {"dies": 0, "second": 2}.get(fault, 1)
        while len(self._publishers) > wanted:
            self._node.destroy_publisher(self._publishers.pop())
        while len(self._publishers) < wanted:
            self._join()

    def send(self, positions: FloatArray, header: Any) -> None:
        """Publish where the leader is, or the Joy, for an arm at ``positions`` [N]."""
        self._count += 1
        if self._count % 20 == 0:
            self._direction = self._noise.uniform(-1.0, 1.0, len(positions))
        make = self._graph.message
        if self._kind == "joy":
            pressed = self.fault == "sticks" or (self.fault != "lets go" and self._count % _CYCLE < _PRESSED)
            message = make("sensor_msgs/msg/Joy")(
                header=header, axes=self._noise.uniform(-1.0, 1.0, 3).tolist(), buttons=[int(pressed)]
            )
        else:
            if self.fault != "freezes":
                self._last = positions + _REACH * self._direction + self._noise.normal(size=len(positions)) * 1e-4
            hand, names = self._last + (_JUMP if self.fault == "jumps" else 0.0), list(self._names)
            if self.fault == "nan":
                hand[self._count % len(hand)] = np.nan
            elif self.fault == "other":
                names = [f"other_{name}" for name in names]
            message = make("sensor_msgs/msg/JointState")(
                header=header, name=names, position=hand, velocity=np.zeros(0), effort=np.zeros(0)
            )
        for publisher in self._publishers:
            publisher.publish(message)

    def ask(self, what: str, more: int = 0) -> None:
        """Request ``correct``, ``policy`` or ``pause``, then ``more``: random ones, and ``policy`` as the last."""
        self._emit("ask", name=what)
        if what == "pause":
            future = self._pause.call_async(self._trigger.Request())
        else:
            future = self._takeover.call_async(self._set.Request(data=what == "correct"))

        def answered(done: Any) -> None:
            answer = done.result()
            self._emit("answer", name=what, text="" if answer.success else json.dumps(answer.message))
            if more:
                self.ask(self._rng.choice(("correct", "policy", "pause")) if more > 1 else "policy", more - 1)

        future.add_done_callback(answered)
