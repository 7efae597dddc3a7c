"""Watches the nodes of a graph and does what pages ask for, on the thread that spins the graph."""

import itertools
import json
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from vla_ros.cli.operate import Operator
from vla_ros.console.admission import OF_A_STATE, PageRequest
from vla_ros.console.watch import LOST_AFTER, Watch
from vla_ros.errors import VlaRosError, one_line

logger = logging.getLogger(__name__)

_LOOK = 0.5  # s between looks for nodes
_REFRESH = 0.05  # s between two views for the pages
_ANSWER = 2.0  # s for a node to answer
_ACTS = 20  # that are shown
_WAITING = 64  # requests that wait at most
_SERVICES: Mapping[str, tuple[str, Mapping[str, bool]]] = {
    "arm": ("enable", {"data": True}),
    "disarm": ("enable", {"data": False}),
    "reset": ("reset", {}),
    "pause": ("pause", {}),
    "correct": ("takeover", {"data": True}),
    "continue": ("takeover", {"data": False}),
}


@dataclass(frozen=True)
class Act:
    """A request that was admitted."""

    request: PageRequest
    node: str  # full name
    origin: str  # for the log
    until: float = float("inf")  # monotonic, s; void afterwards
    refused: str = ""  # why it does not count, only for the log


class Panel:
    """The nodes, what pages see of them, and what pages ask for.

    :meth:`turn` runs on the thread that spins; :meth:`ask`, :meth:`look_at` and :attr:`views` serve other threads.
    """

    def __init__(self, graph: Any, wanted: str = "") -> None:
        self._graph, self._counter = graph, itertools.count(1)
        self._operator = Operator(graph, wanted, "vla_console", status_qos="state")
        self._watches: dict[str, Watch] = {}
        self._asked = queue.Queue[Act](_WAITING)
        self._stops: deque[Act] = deque(maxlen=_WAITING)  # apart, so that nothing keeps a stop waiting
        self._answers: list[tuple[Act, Any, float]] = []
        self._done: deque[tuple[float, str, str, str]] = deque(maxlen=_ACTS)
        self._looked = self._refreshed = -1e9
        self.views: Mapping[str, tuple[int, str]] = {}
        """By node: the number of its state, and what a page shows, as JSON; "" while no page does."""
        self.turned = time.monotonic()  # when turn() was last called
        node, make = self._operator.node, graph.message
        many = graph.qos("recorder")
        node.create_subscription(
            make("diagnostic_msgs/msg/DiagnosticArray"),
            "/diagnostics",
            partial(self._tell, Watch.on_diagnostics),
            many,
        )
        node.create_subscription(make("rcl_interfaces/msg/Log"), "/rosout", partial(self._tell, Watch.on_log), many)

    def _tell(self, hear: Callable[[Watch, Any], None], message: Any) -> None:
        for watch in self._watches.values():
            hear(watch, message)

    # From other threads

    def ask(self, act: Act) -> None:
        """Have ``act`` done, or logged if it was refused; too many that wait are dropped, but for stops."""
        try:
            if act.request.do == "stop":
                self._stops.append(act)
            else:
                self._asked.put_nowait(act)
        except queue.Full:
            logger.warning("%s: %d requests wait; dropped %s", act.origin, _WAITING, act.request.do)
        self._graph.wake()

    def look_at(self, name: str) -> None:
        """A page shows this node, so that its images and joints are wanted."""
        if name in self._watches:
            self._watches[name].looked = time.monotonic()

    def images(self, name: str) -> Any:
        """Return the :class:`~vla_ros.console.images.Feeds` of a node, or None."""
        watch = self._watches.get(name)
        return watch and watch.images

    # On the thread that spins

    def turn(self) -> None:
        """Do what was asked for, look for nodes, and renew what pages see."""
        now = self.turned = time.monotonic()
        while self._stops:
            self._stop(self._stops.popleft())
        while not self._asked.empty():
            act = self._asked.get_nowait()
            try:
                self._do(act)
            except VlaRosError as error:
                self._log(act, f"refused: {error}")
        self._collect(now)
        if now - self._looked > _LOOK:
            self._looked = now
            self._look()
        if now - self._refreshed > _REFRESH:
            self._refreshed = now
            self._refresh(now)

    def _look(self) -> None:
        self._operator.look()
        node = self._operator.node
        for name, remote in self._operator.nodes.items():
            if name not in self._watches:
                self._watches = {
                    **self._watches,
                    name: Watch(self._graph, node, remote, self._counter.__next__),
                }

    def _refresh(self, now: float) -> None:
        names, watches = self._operator.names, self._watches
        for name, watch in watches.items():
            watch.refresh(now, names[name])
        nodes = [
            [name, watch.remote.status.get("state", ""), now - watch.remote.heard < LOST_AFTER]
            for name, watch in watches.items()
        ]
        more = {"nodes": nodes, "acts": list(self._done)}
        self.views = {
            name: (
                watch.number,
                json.dumps({**watch.shown(now, names[name]), **more}) if watch.is_looked_at else "",
            )
            for name, watch in watches.items()
        }

    def _stop(self, act: Act) -> None:
        """Stop every node that was found, whichever the page shows."""
        for watch in self._watches.values():
            watch.remote.stop()
        self._log(act, f"sent to {', '.join(self._watches) or 'nobody: no node was found'}")

    def _do(self, act: Act) -> None:
        request, watch = act.request, self._watches.get(act.node)
        if act.refused or watch is None:
            raise VlaRosError(act.refused or "this node was not found")
        remote, do, text = watch.remote, request.do, request.text
        if time.monotonic() > act.until:
            raise VlaRosError("too late: this request has waited for too long")
        if do in OF_A_STATE:
            self._check(watch, request.number)
        if do in _SERVICES:
            service, fields = _SERVICES[do]
            if not remote.serves(service):
                raise VlaRosError(f"{act.node} does not answer; use the emergency stop if the arm moves")
            self._answers.append((act, remote.call(service, **fields), time.monotonic()))
        elif do == "record":
            self._answers.append((act, watch.record(on=text == "on"), time.monotonic()))
        else:
            watch.label(text) if do == "label" else remote.instruct(text)
            self._log(act, "sent")

    def _check(self, watch: Watch, number: int) -> None:
        """Raise VlaRosError unless the state is the one that was on the screen, of one node that is there."""
        self._operator.look()
        watch.refresh(time.monotonic(), self._operator.names[watch.remote.name])
        self._operator.the_only([watch.remote])
        if watch.number != number:
            raise VlaRosError("the state has changed since: look, and ask again")
        if time.monotonic() - watch.remote.heard > LOST_AFTER:
            raise VlaRosError("the node is silent; use the emergency stop if the arm moves")

    def _collect(self, now: float) -> None:
        waiting = []
        for act, future, since in self._answers:
            if not future.done() and now - since < _ANSWER:
                waiting.append((act, future, since))
                continue
            answer = future.result() if future.done() else None
            self._log(act, str(answer.message) if answer else "no answer; use the emergency stop if the arm moves")
        self._answers = waiting

    def _log(self, act: Act, what: str) -> None:
        request = act.request
        asked = f"{request.do} {request.text}".strip()
        by = f"{act.origin} by {request.by or 'unknown'}"
        self._done.append((time.time(), asked, by, one_line(what, 300)))
        logger.info(one_line(f"{act.node}: {asked} from {by}: {what}", 1000))
