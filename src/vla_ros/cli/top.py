"""Watch a policy node in the terminal: state and reasons, latency by stage, execution, frames, resources.

Reads /diagnostics and the node's ~/status until Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vla_ros.errors import VlaRosError, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

STATE_COLOURS = {"armed": "bold green", "disarmed": "bold cyan", "holding": "bold yellow", "stopped": "bold red"}
_LEVEL_COLOURS = {0: "green", 1: "yellow", 2: "red", 3: "bright_black"}
_STALE = 3.0  # s without diagnostics, which are published once a second
_LONGEST = 1000  # characters of a text
_REFRESH = 0.25  # s


class View:
    """The latest diagnostics and status of ``node``, a fully qualified name such as ``/vla_policy``."""

    def __init__(self, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.node, self._clock = node, clock
        self.parts: dict[str, tuple[int, str, dict[str, str]]] = {}
        self.status: Mapping[str, Any] = {}
        self.received_at: float | None = None
        self._counted: tuple[float, list[int]] | None = None
        self._rates: list[float] = []

    def on_diagnostics(self, message: Any) -> None:
        """Store a ``diagnostic_msgs/DiagnosticArray`` of this node; ignore other nodes."""
        prefix = f"{self.node.lstrip('/')}: "
        own = [status for status in message.status if status.name.startswith(prefix)]
        for status in own:
            values = {one_line(pair.key): one_line(pair.value, _LONGEST) for pair in status.values}
            name = one_line(status.name[len(prefix) :])
            self.parts[name] = (_level(status.level), one_line(status.message, _LONGEST), values)
        if own:
            self.received_at = self._clock()
            self._count(self.received_at)

    def on_status(self, message: Any) -> None:
        """Store the ``std_msgs/String`` of ``~/status``; ignore anything but a JSON object."""
        try:
            status = json.loads(message.data)
        except ValueError:
            return
        if isinstance(status, dict):
            self.status = status

    def _count(self, now: float) -> None:
        values = self._values("camera")
        counts = [int(text) if (text := values.get(key, "")).isdigit() else 0 for key in ("received", "commands")]
        if self._counted is None or now - self._counted[0] > 0.5:
            if self._counted is not None:
                before, passed = self._counted[1], now - self._counted[0]
                self._rates = [(count - earlier) / passed for count, earlier in zip(counts, before, strict=True)]
            self._counted = now, counts

    def render(self) -> RenderableType:
        from rich.columns import Columns
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        if self.received_at is None:
            return Panel(Text(f"nothing on /diagnostics from {self.node} yet"), title="vla-ros top")
        _, message, values = self.parts.get("state", (3, "", {}))
        state = str(self.status.get("state") or values.get("state", "unknown"))
        head = Table.grid(padding=(0, 2))
        explained = one_line(str(self.status.get("explanation") or message), _LONGEST)
        head.add_row("state", Text(explained, STATE_COLOURS.get(state, "")))
        moved_by = f"{self.status.get('source', '')} ({self.status.get('mode', '')})"
        head.add_row("moved by", Text(one_line(moved_by)))
        head.add_row("instruction", Text(values.get("instruction", "")))
        silence = self._clock() - self.received_at
        if silence > _STALE:
            head.add_row("", Text(f"no diagnostics for {silence:.0f} s: the node hangs or has exited", "bold red"))
        for name, (level, text, _) in self.parts.items():
            if name != "state":
                head.add_row(name, Text(text, _LEVEL_COLOURS.get(level, "")))
        if self._rates:
            head.add_row("rates", Text("{:.1f} frames/s in, {:.1f} commands/s out".format(*self._rates)))
        tables = Columns(padding=(0, 4))  # side by side if the terminal is wide enough
        tables.add_renderable(_table("latency", ("stage", "p50 ms", "p99 ms"), self._latency()))
        tables.add_renderable(_table("execution", ("what", "value"), self._values("execution").items()))
        tables.add_renderable(_table("dropped frames and reasons", ("what", "count"), self._counts()))
        return Panel(Group(head, tables), title=f"vla-ros top {self.node}")

    def _values(self, part: str) -> Mapping[str, str]:
        return self.parts.get(part, (0, "", {}))[2]

    def _latency(self) -> Iterator[tuple[str, ...]]:
        values = self._values("latency")
        for key, value in values.items():
            stage, _, figure = key.rpartition("/")
            if figure == "p50_ms":
                yield stage, value, values.get(f"{stage}/p99_ms", "")

    def _counts(self) -> Iterator[tuple[str, ...]]:
        for part, prefix in (("camera", "dropped/"), ("state", "count/")):
            yield from (row for row in self._values(part).items() if row[0].startswith(prefix))


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _level(level: Any) -> int:
    """Return the value of a ``byte`` field, which in rclpy is a bytes object of length one."""
    return int(level[0]) if isinstance(level, bytes) else int(level)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--node", default="/vla_policy", metavar="NAME", help="full name of the node (default: /vla_policy)")
    add("--once", action="store_true", help="print the current state and exit")
    add("--timeout", type=float, default=10.0, metavar="SECONDS", help="maximum wait of --once (default: 10)")
    add("--backend", choices=("auto", "rclpy", "dds"), default="auto", help="see node.backend (default: auto)")


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    from vla_ros.graph import open_graph

    name = "/" + arguments.node.strip("/")
    view, console = View(name), Console()
    with open_graph(arguments.backend, log_level="error") as graph:
        node = graph.create_node("vla_top")
        diagnostics = graph.message("diagnostic_msgs/msg/DiagnosticArray")
        node.create_subscription(diagnostics, "/diagnostics", view.on_diagnostics, graph.qos("diagnostics"))
        text = graph.message("std_msgs/msg/String")
        node.create_subscription(text, f"{name}/status", view.on_status, graph.qos("instruction"))
        if arguments.once:
            deadline = time.monotonic() + arguments.timeout
            graph.spin(lambda: bool(view.received_at and view.status) or time.monotonic() > deadline, 0.05)
            if view.received_at is None:
                raise VlaRosError(
                    f"nothing on /diagnostics from {name} within {arguments.timeout:g} s; is the node running, is "
                    "its name right (--node), and do both have the same ROS_DOMAIN_ID?"
                )
            console.print(view.render())
            return 0
        with Live(view.render(), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            drawn = 0.0

            def draw() -> bool:
                nonlocal drawn
                if time.monotonic() - drawn >= _REFRESH:
                    drawn = time.monotonic()
                    live.update(view.render(), refresh=True)
                return False

            graph.spin(draw, _REFRESH)
    return 0
