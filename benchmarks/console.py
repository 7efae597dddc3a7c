"""Measures the operator's page in a headless Chromium, beside a running node and the simulated arm.

    python benchmarks/console.py [--stops 200] [--clicks 1000] [--seed 0] [--demo "--policy expert"] [--json FILE]

``--stops`` times, the node is armed, and at a random moment escape is pressed in the page, while the policy infers:
how long after the key were the last motion and the hold sent, and how long after ``~/status`` did the page show the
state? The key's time is the one before the browser is told to press it, and a command's the middleware's source
timestamp. Then ``--clicks`` random clicks, keys and disconnects: a node that arms without the act, or a page that
shows another state than ``~/status`` half a second after it was said, is counted.
"""

import argparse
import itertools
import json
import os
import platform
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from tools.chromium import Browser, Tab
from vla_ros.cli.operate import RemoteNode
from vla_ros.graph import open_graph
from vla_ros.graph.origin import Origin
from vla_ros_lab.eval.command import CommandProcess, private_graph

_NAME, _SHOWN, _PATIENCE = "/vla_policy", "document.body?.dataset.state", 60.0
_LONGEST = 1.0  # s; latest hold after a stop
_MOVES = ("armed", "holding")
# Times at which the page showed another state, ms since 1970.
_OBSERVE = (
    "window.changes = []; new MutationObserver(() => window.changes.push([document.body.dataset.state, Date.now()])"
    ").observe(document.body, {attributeFilter: ['data-state']})"
)


class Watcher:
    """Hears the node's commands and states, with the time at which each was sent (ns), and operates it."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.node = graph.create_node("console_benchmark")
        self.remote = RemoteNode(graph, self.node, _NAME)
        self.commands: list[int] = []
        self.states: list[tuple[int, str]] = []
        hears = ("sensor_msgs/msg/JointState", "/arm/joint_command", self._on_command)
        says = ("std_msgs/msg/String", f"{_NAME}/status", self._on_status)
        for kind, topic, hear in (hears, says):
            graph.subscribe_raw(self.node, graph.message(kind), topic, hear, graph.qos("request"))

    def _on_command(self, cdr: Any, origin: Origin) -> None:
        self.commands.append(origin.published)

    def _on_status(self, cdr: Any, origin: Origin) -> None:
        message = self.graph.deserialize(cdr, self.graph.message("std_msgs/msg/String"))
        self.states.append((origin.published, json.loads(message.data)["state"]))

    @property
    def state(self) -> str:
        return self.states[-1][1] if self.states else ""

    def until(self, ready: Callable[[], Any], seconds: float = _PATIENCE) -> bool:
        end = time.monotonic() + seconds
        self.graph.spin(lambda: bool(ready()) or time.monotonic() > end, 0.005)
        return bool(ready())

    def arm(self) -> None:
        """Reset and arm; wait until the arm moves."""
        for service, fields in (("reset", {}), ("enable", {"data": True})):
            assert self.until(self.remote.call(service, **fields).done), f"{service} was not answered"
        count = len(self.commands)
        assert self.until(lambda: self.state == "armed" and len(self.commands) > count + 3), self.remote.status


def measure_stops(watcher: Watcher, page: Tab, count: int, chance: random.Random) -> dict[str, list[float]]:
    """Press escape ``count`` times while the arm moves; all figures in milliseconds."""
    figures: dict[str, list[float]] = {"last motion": [], "hold": [], "shown": []}
    for _ in range(count):
        watcher.arm()
        watcher.until(lambda: False, chance.uniform(0.1, 0.5))
        if watcher.state != "armed":  # it holds, as on a busy machine, so that nothing moves that could be stopped
            continue
        page.eval("window.changes.length = 0")
        pressed = time.time_ns()
        page.key("Escape")
        assert watcher.until(lambda: watcher.state == "stopped"), "the node did not stop"
        watcher.until(lambda: False, _LONGEST)
        said = next(at for at, state in watcher.states if at > pressed and state == "stopped")
        sent = [at for at in watcher.commands if at < pressed + _LONGEST * 1e9]
        figures["hold"].append((sent[-1] - pressed) / 1e6)
        figures["last motion"].append(max(0.0, (sent[-2] - pressed) / 1e6))
        page.until(f"{_SHOWN} === 'stopped'")
        shown = next(at for state, at in page.eval("window.changes") if state == "stopped")
        figures["shown"].append(shown - said / 1e6)
    return figures


def click_around(watcher: Watcher, page: Tab, count: int, chance: random.Random) -> dict[str, int]:
    """Click, press keys and disconnect at random; count what must not happen."""
    counts = {"clicks": 0, "armings by the page": 0, "disagreements": 0, "compared": 0}
    for number in range(count):
        if number % 100 == 50:
            watcher.arm()
        heard, what = len(watcher.states), chance.random()
        if what < 0.7:
            spot = chance.uniform(0, 1440), chance.uniform(70, 900)
            at = page.place(chance.choice(["#arm", "#continue"])) if what < 0.2 else spot
            page.mouse("mousePressed", at)
            page.mouse("mouseReleased", at)
        elif what < 0.92:
            page.key(chance.choice(["Enter", "Tab", " ", "Escape", "a"]))
        else:
            page.eval("page.socket?.close()")
        counts["clicks"] += 1
        watcher.until(lambda: False, 0.02)
        states = [state for _, state in watcher.states[max(0, heard - 1) :]]
        armed = sum(was not in _MOVES and now in _MOVES for was, now in itertools.pairwise(states))
        counts["armings by the page"] += armed
        if number % 10 == 0:
            before = watcher.states[-1:]
            watcher.until(lambda: False, 0.5)
            if all(state == before[0][1] for _, state in watcher.states[-5:]):
                counts["compared"] += 1
                counts["disagreements"] += page.eval(_SHOWN) not in (watcher.state, "lost")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=200, metavar="N", help="stops to measure (default 200)")
    parser.add_argument("--clicks", type=int, default=1000, metavar="N", help="random clicks (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--demo", default="--policy expert", metavar="WORDS", help="further arguments of vla-ros demo"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    arguments = parser.parse_args()
    os.environ.update(private_graph(os.environ))
    chance, load = random.Random(arguments.seed), os.getloadavg()[0]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        words = ["demo", "--real-time", "--console", "--episodes", "100000", *arguments.demo.split()]
        demo = CommandProcess(words, folder / "demo.txt")
        stack.callback(demo.end)
        watcher = Watcher(stack.enter_context(open_graph("dds", log_level="error")))
        assert watcher.until(lambda: watcher.state and watcher.remote.hears, 300.0), demo.last_lines()
        found = partial(re.search, r"http\S+token=\S+")
        watcher.until(lambda: found((folder / "demo.txt").read_text()), 300.0)
        address = found((folder / "demo.txt").read_text())
        assert address, demo.last_lines()
        browser = Browser(folder / "profile")
        stack.callback(browser.close)
        page = browser.open(address[0])
        page.until(f"(({_SHOWN}) ?? 'lost') !== 'lost'", _PATIENCE)
        page.eval(_OBSERVE)
        stops = measure_stops(watcher, page, arguments.stops, chance)
        counts = click_around(watcher, page, arguments.clicks, chance)
    machine = {"cores": os.cpu_count(), "load": [load, os.getloadavg()[0]], "machine": platform.machine()}
    quantiles = {
        name: {f"p{q}": round(float(np.percentile(values, q)), 1) for q in (50, 99, 100)}
        for name, values in stops.items()
        if values
    }
    for name, of in quantiles.items():
        print(f"{name:12} ms after: " + ", ".join(f"{key} {value}" for key, value in of.items()))
    print(f"{len(stops['hold'])} stops; {counts}; {machine}")
    if arguments.json:
        content = {"ms": quantiles, "stops": len(stops["hold"]), **counts, **machine, "demo": arguments.demo}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(counts["armings by the page"] > 0 or counts["disagreements"] > 0)


if __name__ == "__main__":
    sys.exit(main())
