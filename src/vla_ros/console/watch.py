"""What the console knows of one policy node, from its topics."""

import json
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from vla_ros.cli.operate import RemoteNode
from vla_ros.cli.teach import LABELS
from vla_ros.cli.top import View
from vla_ros.console.advice import describe_reason
from vla_ros.console.images import Feeds
from vla_ros.errors import VlaRosError, one_line
from vla_ros.record.topics import recorder_name

LOST_AFTER = 2.5
"""Seconds without ``~/status``, which is published once a second, after which a node counts as lost."""
_MINUTE = 60  # diagnostics, of which there is one a second
_LABELS, _LINES = 8, 40  # that are kept
_LONGEST = 400  # characters of a text
_LOOKED = 5.0  # s after which nobody looks at a node any more
_STATE = ("state", "mode", "source", "stopped_by")
_WARN = 30  # rcl_interfaces/msg/Log


class Watch:
    """One node: what it says, the number of its state, its episodes, its last minute. On the thread that spins.

    ``number`` changes with the state, the mode, the reasons, with who moves the arm, with the node's loss or
    restart, and with the number of nodes of this name.
    """

    def __init__(self, graph: Any, node: Any, remote: RemoteNode, count: Callable[[], int]) -> None:
        self.remote, self.number, self.looked = remote, count(), -1e9
        self._graph, self._node, self._count = graph, node, count
        self._key: tuple[Any, ...] = ()
        self._parts, self._recorder = View(remote.name), View(recorder_name(remote.name))
        self._lines: deque[tuple[float, int, str]] = deque(maxlen=_LINES)
        self._minute: deque[Mapping[str, float | None]] = deque(maxlen=_MINUTE)
        self._stalled = 0.0, 0.0  # seconds with motion, and of them stalled
        self._frames, self._seen, self._warned = 0, "", dict[str, str]()
        self._episode: dict[str, Any] = {"number": None, "open": None, "since": 0.0}
        self._labels: deque[tuple[int, str]] = deque(maxlen=_LABELS)
        self._view: Mapping[str, Any] = {}
        self._heavy: Any = None  # subscription while somebody looks
        self.images = Feeds(graph, node)
        text, name = graph.message("std_msgs/msg/String"), remote.name
        node.create_subscription(text, f"{name}/event", self._on_event, graph.qos("joint_states"))
        self._label = node.create_publisher(text, f"{name}/label", graph.qos("request"))
        self._set = graph.service("std_srvs/srv/SetBool")
        self._record = node.create_client(self._set, f"{recorder_name(name)}/record")

    def label(self, text: str) -> None:
        """End the episode with a label."""
        if text not in LABELS:
            raise VlaRosError(f"label: found {text[:40]!r}, expected one of {', '.join(LABELS)}")
        self._label.publish(self._graph.message("std_msgs/msg/String")(data=text))

    def record(self, *, on: bool) -> Any:
        """Return the future of the recorder's answer."""
        if not self._record.service_is_ready():
            raise VlaRosError("no recorder runs; start the node with record.what")
        return self._record.call_async(self._set.Request(data=on))

    def say(self, level: int, text: str) -> None:
        """Add a line to the warnings: 1 warns, 2 is an error."""
        line = one_line(text, _LONGEST)
        if not self._lines or self._lines[-1][2] != line:
            self._lines.append((time.time(), level, line))

    # What arrives

    def on_diagnostics(self, message: Any) -> None:
        """Take the parts of this node and of its recorder; keep what charts show, and what is wrong now."""
        before = self._parts.received_at
        self._parts.on_diagnostics(message)
        self._recorder.on_diagnostics(message)
        for name, (level, text, _) in {**self._parts.parts, **self._recorder.parts}.items():
            kind = re.sub(r"\d[\d.]*", "#", text) if level in (1, 2) else ""
            if kind and kind != self._warned.get(name) and name != "state":
                self.say(level, f"{name}: {text}")
            self._warned[name] = kind
        is_whole = any(status.name.endswith(": latency") for status in message.status)
        if self._parts.received_at != before and is_whole:
            self._minute.append(self._figures())

    def on_log(self, message: Any) -> None:
        """Take a line of ``/rosout``, where nodes of rclpy write their logs."""
        name = str(message.name).replace(".", "/")
        level = message.level[0] if isinstance(message.level, bytes) else int(message.level)
        if level >= _WARN and self.remote.name.strip("/") == name:
            self.say(1 if level == _WARN else 2, str(message.msg))

    def _on_event(self, message: Any) -> None:
        event = json.loads(message.data)
        kind, number = event["event"], int(event["episode"])
        if kind in ("episode_start", "episode_end"):
            since = time.time() if kind == "episode_start" else self._episode["since"]
            self._episode = {"number": number, "open": kind == "episode_start", "since": since}
            if kind == "episode_end":
                self._labels.append((number, one_line(str(event["label"]))))

    def _on_view(self, message: Any) -> None:
        view = json.loads(message.data, parse_constant=lambda _: None)
        self._view = view if isinstance(view, dict) else {}
        cameras = self._view.get("cameras")
        kinds = {str(topic): str(kind) for topic, kind in cameras.items()} if isinstance(cameras, dict) else {}
        self.images.watch(kinds, f"{self.remote.name}/debug_image")

    def _figures(self) -> Mapping[str, float | None]:
        latency = self._parts.parts.get("latency", (0, "", {}))[2]
        execution = self._parts.parts.get("execution", (0, "", {}))[2]
        moved = float(execution.get("seconds", 0.0))
        stalled = moved * float(execution.get("stalled_share", 0.0))
        before, self._stalled = self._stalled, (moved, stalled)
        share = (stalled - before[1]) / (moved - before[0]) if moved > before[0] else None
        ages = [latency.get(f"frame_age/p{quantile}_ms") for quantile in (50, 99)]
        p50, p99 = (None if age is None else float(age) for age in ages)
        return {"p50": p50, "p99": p99, "stalled": share and min(1.0, max(0.0, share))}

    # What a page gets

    @property
    def is_looked_at(self) -> bool:
        return self._heavy is not None

    def refresh(self, now: float, namesakes: int) -> None:
        """Notice changes of the state, and subscribe to what is large only while somebody looks."""
        status, alive = self.remote.status, now - self.remote.heard < LOST_AFTER
        received = int(status.get("frames", {}).get("received", 0))
        restarted, self._frames = received < self._frames, received
        reasons = tuple(tuple(status.get(kind, ())) for kind in ("holds", "blocks"))
        key = (*(status.get(name) for name in _STATE), reasons, alive, namesakes)
        if key != self._key or restarted:
            self._key, self.number = key, self._count()
        kind = f"{status.get('state')} {status.get('stopped_by')} {reasons}"
        if kind != self._seen and status.get("state") in ("holding", "stopped"):
            self.say(2 if status["state"] == "stopped" else 1, str(status.get("explanation", "")))
        self._seen = kind
        if (now - self.looked < _LOOKED) != self.is_looked_at:
            self._look(not self.is_looked_at)

    def _look(self, looks: bool) -> None:
        if looks:
            text, topic = self._graph.message("std_msgs/msg/String"), f"{self.remote.name}/view"
            self._heavy = self._node.create_subscription(text, topic, self._on_view, self._graph.qos("state"))
        else:
            self._node.destroy_subscription(self._heavy)
            self._heavy, self._view = None, {}
            self.images.close()

    def shown(self, now: float, namesakes: int) -> dict[str, Any]:
        """Return what a page shows of this node."""
        status = self.remote.status
        stopped = {status["stopped_by"]: status.get("detail", "")} if status.get("stopped_by") else {}
        kinds = {"stop": stopped, "block": status.get("blocks", {}), "hold": status.get("holds", {})}
        reasons = [
            {**describe_reason(name, one_line(str(detail), _LONGEST)), "kind": kind}
            for kind, named in kinds.items()
            for name, detail in named.items()
        ]
        recording = self._recorder.parts.get("recording")
        is_fresh = now - (self._recorder.received_at or -1e9) < LOST_AFTER
        return {
            "name": self.remote.name,
            "number": self.number,
            "silent": round(min(now - self.remote.heard, 1e6), 1),
            "namesakes": namesakes,
            **{name: status.get(name, "") for name in (*_STATE, "explanation", "instruction")},
            "reasons": reasons,
            "collision": status.get("collision", {}),
            "minute": list(self._minute),
            "view": self._view,
            "images": self.images.names,
            "episode": {**self._episode, "labels": list(self._labels)},
            "recording": [*recording[:2], recording[2].get("bag", "")] if recording and is_fresh else None,
            "lines": list(self._lines),
        }
