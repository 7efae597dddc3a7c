"""Operate running policy nodes from a terminal, with or without ROS.

  vla-ros status            state, reason and instruction of every node
  vla-ros stop              stop every node until a reset; use the emergency stop if one does not confirm
  vla-ros disarm            disarm every node
  vla-ros reset             end a stop; the node stays disarmed
  vla-ros arm               arm the only node, or the one that --node names
  vla-ros instruct TEXT     give the only node, or the one that --node names, another instruction

A node is found by its services; ROS_DOMAIN_ID and the discovery range must be the node's.
"""

import argparse
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vla_ros.errors import VlaRosError, one_line

EVERY = ("status", "stop", "disarm")
"""Commands that reach all nodes; the others need one."""

_SET_BOOL, _TRIGGER = "std_srvs/srv/SetBool", "std_srvs/srv/Trigger"
_SERVICES = {"enable": _SET_BOOL, "reset": _TRIGGER, "takeover": _SET_BOOL, "pause": _TRIGGER}
_SETTLE = 1.0  # s after the last new node within which another one may be found
_CONFIRM = 2.0  # s for a node to answer


class RemoteNode:
    """A policy node, seen from outside: its ``~/status``, services and topics. Used on the thread that spins.

    ``heard`` is when the newest status arrived (monotonic, s). ``status_qos`` names the subscription's profile.
    """

    def __init__(self, graph: Any, node: Any, name: str, status_qos: str = "instruction") -> None:
        self.name, self.status, self.heard = name, dict[str, Any](), -math.inf
        self._graph, self._node = graph, node
        self._instruction: Any = None  # its publisher
        self._text, qos = graph.message("std_msgs/msg/String"), graph.qos
        self._kinds = {key: graph.service(kind) for key, kind in _SERVICES.items()}
        self._clients = {key: node.create_client(kind, f"{name}/{key}") for key, kind in self._kinds.items()}
        self._stop = node.create_publisher(graph.message("std_msgs/msg/Bool"), f"{name}/stop", qos("request"))
        node.create_subscription(self._text, f"{name}/status", self._on_status, qos(status_qos))

    def _on_status(self, message: Any) -> None:
        status = json.loads(message.data, parse_constant=lambda _: None)
        if isinstance(status, dict):
            self.status, self.heard = status, time.monotonic()

    @property
    def hears_stop(self) -> bool:
        return bool(self._stop.get_subscription_count())

    @property
    def hears(self) -> bool:
        """True once the node's stop and services have been discovered."""
        return self.hears_stop and self.serves("enable") and self.serves("reset")

    def serves(self, service: str) -> bool:
        return bool(self._clients[service].service_is_ready())

    def stop(self) -> None:
        self._stop.publish(self._graph.message("std_msgs/msg/Bool")(data=True))

    def instruct(self, text: str) -> None:
        if self._instruction is None:
            topic, qos = f"{self.name}/instruction", self._graph.qos("instruction")
            self._instruction = self._node.create_publisher(self._text, topic, qos)
        self._instruction.publish(self._text(data=text))

    def call(self, service: str, **fields: Any) -> Any:
        """Call ``enable``, ``reset``, ``takeover`` or ``pause``; return the future of its answer."""
        return self._clients[service].call_async(self._kinds[service].Request(**fields))

    def describe(self) -> str:
        said = self.status or {"explanation": "no status yet"}
        instruction = f"; instruction: {said['instruction']}" if said.get("instruction") else ""
        return one_line(f"{self.name}: {said.get('explanation') or said.get('state')}{instruction}", 1000)


class Operator:
    """Finds the nodes of a graph, and operates them; ``name`` is its own node, ``options`` are a RemoteNode's."""

    def __init__(self, graph: Any, wanted: str = "", name: str = "vla_operator", **options: str) -> None:
        self.nodes: dict[str, RemoteNode] = {}
        self.names = Counter[str]()  # how many nodes have a name
        self._graph, self._wanted, self._clock, self._options = graph, wanted, time.monotonic, options
        self.node = graph.create_node(name)
        self._last = self._clock()

    def look(self) -> None:
        """Notice the nodes that discovery shows."""
        pairs = self.node.get_node_names_and_namespaces()
        self.names = Counter(f"{namespace.rstrip('/')}/{name}" for name, namespace in pairs)
        for name, namespace in pairs:
            full = f"{namespace.rstrip('/')}/{name}"
            if full in self.nodes or self._wanted not in ("", full):
                continue
            served = dict(self.node.get_service_names_and_types_by_node(name, namespace))
            if _SET_BOOL in served.get(f"{full}/enable", ()):
                found = RemoteNode(self._graph, self.node, full, **self._options)
                self.nodes[full], self._last = found, self._clock()

    def find(
        self, seconds: float, hears: Callable[[RemoteNode], bool], act: Callable[[RemoteNode], object] = id
    ) -> list[RemoteNode]:
        """Look for nodes, and ``act`` on each as soon as it ``hears``; return those that do.

        Raises VlaRosError if there is none, or if one does not hear within ``seconds``.
        """
        began, heard = self._clock(), dict[str, RemoteNode]()

        def found_all() -> bool:
            self.look()
            for name, node in self.nodes.items():
                if name not in heard and hears(node):
                    heard[name] = node
                    act(node)
            waiting, now = len(heard) < len(self.nodes) or not heard, self._clock()
            is_it = bool(self._wanted and heard)
            return now - began > seconds or (not waiting and (is_it or now - self._last > _SETTLE))

        self._graph.spin(found_all, 0.02)
        if not self.nodes:
            what = f"no node {self._wanted}" if self._wanted else "no policy node"
            raise VlaRosError(
                f"{what} within {seconds:g} s; is it running, and do both have the same ROS_DOMAIN_ID "
                f"(here: {os.environ.get('ROS_DOMAIN_ID', '0')}) and reach (`vla-ros doctor` shows both)?"
            )
        if deaf := self.nodes.keys() - heard.keys():
            raise VlaRosError(f"{', '.join(sorted(deaf))} was found, but does not hear; use the emergency stop")
        return list(heard.values())

    def the_only(self, nodes: list[RemoteNode]) -> RemoteNode:
        """Return the node; raises VlaRosError if there are several, or another node has its name."""
        if len(nodes) > 1:
            listed = "".join(f"\n  --node {node.name}" for node in nodes)
            raise VlaRosError(f"found {len(nodes)} nodes; name one:{listed}")
        if self.names[nodes[0].name] > 1:
            raise VlaRosError(f"{self.names[nodes[0].name]} nodes are called {nodes[0].name}; end or rename one")
        return nodes[0]

    def wait(self, done: Callable[[], Any]) -> bool:
        """Run callbacks until ``done()``; return whether it came true in time."""
        end = self._clock() + _CONFIRM
        self._graph.spin(lambda: bool(done()) or self._clock() > end, 0.01)
        return bool(done())


def stop(operator: Operator, seconds: float) -> int:
    """Stop every node, each as soon as it hears; return 1 unless all confirm."""
    nodes = operator.find(seconds, lambda node: node.hears_stop, RemoteNode.stop)
    stopped = operator.wait(lambda: all(node.status.get("state") == "stopped" for node in nodes))
    for node in nodes:
        print(node.describe())
    if not stopped:
        raise VlaRosError("not every node says that it has stopped; use the emergency stop")
    return 0


def call_each(operator: Operator, nodes: list[RemoteNode], service: str, **fields: Any) -> int:
    """Call a service of each node and print the answers; return 1 unless all agree."""
    answers = {node.name: node.call(service, **fields) for node in nodes}
    operator.wait(lambda: all(future.done() for future in answers.values()))
    agreed = True
    for name, future in answers.items():
        answer = future.result() if future.done() else None
        agreed &= bool(answer and answer.success)
        print(one_line(f"{name}: {answer.message if answer else 'no answer'}", 1000))
    return 0 if agreed else 1


def instruct(operator: Operator, node: RemoteNode, text: str) -> int:
    """Give the node an instruction; return 1 unless its status says so."""
    node.instruct(text)
    taken = operator.wait(lambda: node.status.get("instruction") == text.strip())
    print(node.describe() if taken else f"{node.name}: refused; its log says why")
    return 0 if taken else 1


def show_status(operator: Operator, nodes: list[RemoteNode], file: str) -> int:
    """Print what the nodes say of themselves, or write it to ``file`` as JSON."""
    operator.wait(lambda: all(node.status for node in nodes))
    for node in nodes:
        print(node.describe())
    if file:
        content: Mapping[str, Any] = {node.name: node.status for node in nodes}
        Path(file).write_text(json.dumps({"nodes": content}, indent=1) + "\n", encoding="utf-8")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command, add = parser.get_default("command"), parser.add_argument
    if command == "instruct":
        add("text", metavar="TEXT", help="the instruction, such as 'pick up the red cube'")
    if command == "status":
        add("--json", default="", metavar="FILE", help="write what the nodes say to FILE")
    which = (
        "only this node (default: every node)"
        if command in EVERY
        else "full name of the node, if there are several"
    )
    add("--node", default="", metavar="NAME", help=which)
    add("--timeout", type=float, default=5.0, metavar="SECONDS", help="longest search (default: 5)")
    add("--backend", choices=("auto", "rclpy", "dds"), default="auto", help="see node.backend (default: auto)")


def run(arguments: argparse.Namespace) -> int:
    from vla_ros.graph import open_graph

    command, name = arguments.command, arguments.node.strip("/")
    with open_graph(arguments.backend, log_level="error") as graph:
        operator = Operator(graph, f"/{name}" if name else "")
        if command == "stop":
            return stop(operator, arguments.timeout)
        nodes = operator.find(arguments.timeout, lambda node: node.hears)
        if command == "status":
            return show_status(operator, nodes, arguments.json)
        if command == "disarm":
            return call_each(operator, nodes, "enable", data=False)
        node = operator.the_only(nodes)
        if command == "instruct":
            return instruct(operator, node, arguments.text)
        if command == "arm":
            return call_each(operator, [node], "enable", data=True)
        return call_each(operator, [node], "reset")
