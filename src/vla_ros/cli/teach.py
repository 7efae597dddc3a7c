"""Take over from a policy by keyboard: pause it, correct it, label its episodes.

space: pause                                  c: let the policy continue
tab: correct with the leader arm or pad; again: pause
s, f: the episode was a success, a failure    r: discard the episode
esc: end the episode, pause and leave         Ctrl-C: leave, and change nothing
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vla_ros.cli.top import STATE_COLOURS, View
from vla_ros.errors import VlaRosError

if TYPE_CHECKING:
    from rich.console import RenderableType

KEYS = {
    " ": "pause",
    "c": "continue",
    "\t": "correct",
    "s": "success",
    "f": "failure",
    "r": "discard",
    "\x1b": "end",
}
LABELS = ("success", "failure", "discard", "end")
_STALE = 3.0  # s without ~/status, which is published once a second
_REPEATS = 0.7  # s; a key that is held down is repeated within this time
_REFRESH = 0.1  # s


class Teacher:
    """What the keys do; watches the node ``name``, and calls its services over ``graph``."""

    def __init__(self, graph: Any, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.view = View(name, clock)
        self.labels: Counter[str] = Counter()
        self.episode: int | None = None  # that is open
        self.said = ""
        self.ended = False
        self._graph, self._clock = graph, clock
        self._heard = self._began = self._since = -1e9
        self._pressed: dict[str, float] = {}
        text, qos = graph.message("std_msgs/msg/String"), graph.qos
        node = graph.create_node("vla_teach")
        node.create_subscription(text, f"{name}/status", self._on_status, qos("instruction"))
        node.create_subscription(text, f"{name}/event", self._on_event, qos("event"))
        self._label = node.create_publisher(text, f"{name}/label", qos("command"))
        self._set, self._trigger = graph.service("std_srvs/srv/SetBool"), graph.service("std_srvs/srv/Trigger")
        self._takeover = node.create_client(self._set, f"{name}/takeover")
        self._pause = node.create_client(self._trigger, f"{name}/pause")

    @property
    def mode(self) -> str:
        """The node's mode; "" if it is not known."""
        return str(self.view.status.get("mode", "")) if self._clock() - self._heard < _STALE else ""

    def press(self, key: str) -> None:
        """Do what a key says. A key that is held down counts once; pausing always counts."""
        what, now = KEYS.get(key, ""), self._clock()
        repeats, self._pressed[key] = now - self._pressed.get(key, -1e9) < _REPEATS, now
        if not what or (repeats and what != "pause"):
            return
        if what in LABELS:
            self._label.publish(self._graph.message("std_msgs/msg/String")(data=what))
            self.ended, self.said = what == "end", f"labelled {what}"
        elif what == "pause" or (what == "correct" and self.mode == "correcting"):
            self._call(self._pause, self._trigger.Request())
        else:
            self._call(self._takeover, self._set.Request(data=what == "correct"))

    def _call(self, client: Any, request: Any) -> None:
        if not client.service_is_ready():
            self.said = f"{self.view.node} does not answer: is the node running?"
            return
        self.said = "asked ..."
        client.call_async(request).add_done_callback(self._answered)

    def _answered(self, future: Any) -> None:
        answer = future.result()
        self.said = answer.message if answer is not None else "no answer"

    def _on_status(self, message: Any) -> None:
        before = self.view.status.get("mode")
        self.view.on_status(message)
        self._heard = self._clock()
        if self.view.status.get("mode") != before:
            self._since = self._heard

    def _on_event(self, message: Any) -> None:
        try:
            event = json.loads(message.data)
        except ValueError:
            return
        if event.get("event") == "episode_start":
            self.episode, self._began = event.get("episode"), self._clock()
        elif event.get("event") == "episode_end":
            self.episode = None
            self.labels[str(event.get("label"))] += 1

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        status, now, mode = self.view.status, self._clock(), self.mode
        head = Table.grid(padding=(0, 2))
        colour = STATE_COLOURS.get(str(status.get("state")), "")
        head.add_row("state", Text(str(status.get("explanation", "")) if mode else "no status", colour))
        head.add_row("mode", Text(f"{mode} for {now - self._since:.0f} s; moved by {status.get('source')}", "bold"))
        episode = "none" if self.episode is None else f"{self.episode}, {now - self._began:.0f} s"
        head.add_row("episode", Text(episode))
        head.add_row("labels", Text(", ".join(f"{self.labels[label]} {label}" for label in LABELS)))
        head.add_row("", Text(self.said))
        return Panel(Group(head, Text(__doc__.partition("\n\n")[2])), title=f"vla-ros teach {self.view.node}")


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Read keys without waiting for return; yields a function that returns those pressed since its last call."""
    import termios
    import tty

    if not sys.stdin.isatty():
        raise VlaRosError("the keys are read from a terminal; found another standard input")
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def read() -> str:
        ready, _, _ = select.select([number], [], [], 0.0)
        text = os.read(number, 64).decode(errors="replace") if ready else ""
        return "" if text.startswith(("\x1b[", "\x1bO")) else text  # an arrow or a function key is not esc

    try:
        tty.setcbreak(number)
        yield read
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--node", default="/vla_policy", metavar="NAME", help="full name of the node (default: /vla_policy)")
    add("--backend", choices=("auto", "rclpy", "dds"), default="auto", help="see node.backend (default: auto)")


def run(arguments: argparse.Namespace) -> int:
    from rich.live import Live

    from vla_ros.graph import open_graph

    with _keys() as read, open_graph(arguments.backend, log_level="error") as graph:
        teacher = Teacher(graph, "/" + arguments.node.strip("/"))
        with Live(teacher.render(), auto_refresh=False) as live:
            drawn = 0.0

            def turn() -> bool:
                nonlocal drawn
                for key in read():
                    teacher.press(key)
                if time.monotonic() - drawn >= _REFRESH or teacher.ended:
                    drawn = time.monotonic()
                    live.update(teacher.render(), refresh=True)
                return teacher.ended

            graph.spin(turn, 0.02)
            until = time.monotonic() + 0.3  # for the last label to be sent
            graph.spin(lambda: time.monotonic() > until, 0.02)
    return 0
