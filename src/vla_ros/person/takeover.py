"""Takes a person's requests and inputs from the graph, and publishes who moves the arm and how episodes end."""

import json
import threading
from functools import partial
from typing import Any

import numpy as np

from vla_ros.config import node_topics
from vla_ros.control.command import Command, to_message
from vla_ros.control.mode import NOBODY, Mode
from vla_ros.control.safety import Event, State
from vla_ros.execution.context import Context
from vla_ros.graph.origin import Origin, stamp_of
from vla_ros.graph.wiring import Wiring
from vla_ros.person.source import PersonSource
from vla_ros.types import FloatArray

LABELS = ("success", "failure", "discard", "end")
_REQUESTS = {"correct": Mode.CORRECTING, "resume": Mode.AUTONOMOUS}


class Takeover:
    """Serves ``~/takeover``, ``~/pause`` and the person's topics; callbacks run on the graph thread."""

    def __init__(self, context: Context, wiring: Wiring, source: PersonSource | None) -> None:
        self._context, self._source, self._wiring = context, source, wiring
        takeover = context.options.current.takeover
        self._event = wiring.teller("std_msgs/msg/String", node_topics.EVENT, "event")
        self._episodes = Episodes(context, self._publish)
        wiring.service("std_srvs/srv/SetBool", "~/takeover", self._on_takeover)
        wiring.service("std_srvs/srv/Trigger", "~/pause", self._on_pause)
        wiring.subscribe(
            "std_msgs/msg/String", node_topics.LABEL, lambda message: self._label(message.data), "request"
        )
        wiring.on_close(self._episodes.close)
        self._target = None
        if source is None:
            return
        if takeover.joy:
            wiring.subscribe_from("sensor_msgs/msg/Joy", takeover.joy, self._on_joy, "buttons")
        for kind, topic, followed, reader in source.followed_topics():
            hear = partial(self._on_input, followed, reader)
            wiring.subscribe_from(kind, topic, hear, "joint_states")  # a second publisher must be heard as well
        if source.input == "leader":
            self._target = wiring.teller("sensor_msgs/msg/JointState", node_topics.LEADER_TARGET, "state_publisher")

    def request(self, mode: Mode) -> tuple[bool, str]:
        """Hand the arm over; return whether that succeeded, and a sentence for the caller."""
        source = self._source
        if source is None and mode is not Mode.AUTONOMOUS:
            return False, "refused: with node.clock inputs or an environment, nobody takes over"
        if source is not None and mode is Mode.CORRECTING:
            if source.input == "none":
                return False, "refused: takeover.input is none, so there is nothing to correct with"
            source.begin()
        refused = self._context.safety.take_over(mode)
        return not refused, refused or self._context.safety.explain()

    def on_event(self, event: Event) -> None:
        """Publish what a change of state means for the episode."""
        self._episodes.look("source" if event.kind == "source" else "state")

    def instructed(self) -> None:
        self._episodes.look("instruction")

    def tell(self, state: dict[str, FloatArray]) -> None:
        """Tell a leader arm with motors where the arm is."""
        if self._target is None or self._source is None or self._target.get_subscription_count() == 0:
            return
        for names, positions in self._source.targets(state):
            target = Command(tuple(names), np.array(positions), self._context.clock.ros())
            self._target.publish(to_message(target, "joint_state", self._wiring.graph.message))

    def _on_takeover(self, request: Any, response: Any) -> Any:
        mode, refused = Mode.CORRECTING if request.data else Mode.AUTONOMOUS, self._context.suspension.void
        response.success, response.message = (False, refused) if refused else self.request(mode)
        return response

    def _on_pause(self, request: Any, response: Any) -> Any:
        response.success, response.message = self.request(Mode.PAUSED)
        return response

    def _label(self, text: str) -> None:
        if text not in LABELS:
            said = f"label: found {text[:40]!r}, expected one of {', '.join(LABELS)}"
            self._context.throttled.log("label", said)
        elif self._episodes.is_open:
            if self._source is not None:
                self._context.safety.take_over(Mode.PAUSED)
            self._episodes.label(text)

    def _is_fresh(self, origin: Origin) -> bool:
        suspension = self._context.suspension
        return suspension.note_arrival(*origin) >= suspension.resumed

    def _on_input(self, followed: Any, reader: Any, message: Any, origin: Origin) -> None:
        if self._source is not None and self._is_fresh(origin):
            self._source.hear(message, followed, reader, origin)

    def _on_joy(self, message: Any, origin: Origin) -> None:
        assert self._source is not None
        followed, steady = self._source.buttons.followed, self._context.clock.steady()
        axes, buttons = np.asarray(message.axes, dtype=np.float64), [int(each) for each in message.buttons]
        pauses = self._source.buttons.has(buttons, "pause")  # from anybody, however old
        if pauses and self._context.safety.mode is not Mode.PAUSED:
            self._ask(Mode.PAUSED)
        if not self._is_fresh(origin):
            return
        if self._context.safety.mode is not Mode.CORRECTING and followed.is_silent(steady):
            followed.begin()  # a restarted driver may request again
        heard = origin.publisher, stamp_of(message), origin.published
        pressed, released = self._source.buttons.hear(buttons, axes, steady, *heard)
        if released and self._source.input != "leader":
            self._context.safety.release()
        for name, mode in _REQUESTS.items():
            if name in pressed and not pauses:
                self._ask(mode)
        for name in LABELS:
            if name in pressed:
                self._label(name)

    def _ask(self, mode: Mode) -> None:
        succeeded, said = self.request(mode)
        self._context.throttled.log("takeover", said, "info" if succeeded else "warning")

    def _publish(self, content: dict[str, Any]) -> None:
        self._event.publish(self._wiring.graph.message("std_msgs/msg/String")(data=json.dumps(content)))


class Episodes:
    """Numbers the episodes of this process, and publishes each change of source, label and state. Thread-safe."""

    def __init__(self, context: Context, publish: Any) -> None:
        self._context, self._publish = context, publish
        self._lock = threading.RLock()
        self._number, self.is_open = 0, False
        self._source = NOBODY
        self._said: dict[str, Any] = {}

    def look(self, kind: str) -> None:
        """Publish the change that an event of ``kind`` may have brought, and begin or end an episode."""
        with self._lock:
            status = self._context.safety.status
            running = status.state in (State.ARMED, State.HOLDING)
            if self.is_open and not running:
                self._end("end")
            elif running and not self.is_open and status.mode is not Mode.PAUSED:
                self._number, self.is_open = self._number + 1, True
                self._say("episode_start")
            changed = status.source != self._source
            self._source = status.source
            self._say("source" if changed else "state" if kind == "source" else kind)

    def label(self, label: str) -> None:
        """End the episode with a person's label, if there is one."""
        with self._lock:
            if self.is_open:
                self._end(label)

    def close(self) -> None:
        self.label("end")

    def _end(self, label: str) -> None:
        self.is_open = False
        self._say("episode_end", label)

    def _say(self, kind: str, label: str = "") -> None:
        status = self._context.safety.status
        stopped = {status.stopped_by.value: status.detail} if status.stopped_by else {}
        content = {
            "event": kind,
            "episode": self._number,
            "mode": status.mode.value,
            "source": status.source,
            "state": status.state.value,
            "instruction": self._context.inputs.snapshot.instruction,
            "label": label,
            "reasons": stopped | {reason.value: detail for reason, detail in status.holds.items()},
        }
        if kind == "state" and content == self._said:
            return
        self._said = content
        self._publish({"stamp": self._context.clock.ros(), **content})
