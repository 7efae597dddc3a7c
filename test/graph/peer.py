"""The other process of the graph tests: executes commands from standard input, one JSON object a line.

Run as ``python peer.py BACKEND [--ros-args ...]``. Each command is answered by one JSON line.
"""

import base64
import json
import queue
import sys
import threading
from typing import Any

from vla_ros.graph import open_graph


class Peer:
    """Executes commands on the thread that spins."""

    def __init__(self, backend: str, args: list[str]) -> None:
        self.graph = open_graph(backend, args)
        self.node = self.graph.create_node("peer")
        self.publishers: dict[str, Any] = {}
        self.received: dict[str, list[bytes]] = {}
        self.timers: dict[str, Any] = {}
        self.calls: dict[str, Any] = {}
        self.commands: queue.Queue[str] = queue.Queue()
        self.over = False
        self.node.create_timer(0.01, self.work)

    def work(self) -> None:
        while not self.commands.empty():
            line = self.commands.get()
            if not line:
                self.over = True
                return
            command = json.loads(line)
            try:
                answer = getattr(self, "do_" + command.pop("op"))(**command)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)

    def do_publisher(self, topic: str, type_name: str, qos: str) -> None:
        self.publishers[topic] = self.node.create_publisher(
            self.graph.message(type_name), topic, self.graph.qos(qos)
        )

    def do_publish(self, topic: str, cdr: str) -> None:
        self.publishers[topic].publish(base64.b64decode(cdr))

    def do_stream(self, topic: str, cdr: str, period: float) -> None:
        """Publish again and again; bytes 4 to 8 (seconds of the stamp) count the messages."""
        data = bytearray(base64.b64decode(cdr))
        count = 0

        def send() -> None:
            nonlocal count
            count += 1
            data[4:8] = count.to_bytes(4, "little")
            self.publishers[topic].publish(bytes(data))

        self.timers[topic] = self.node.create_timer(period, send)

    def do_repeat(self, topic: str, cdr: str, period: float) -> None:
        data = base64.b64decode(cdr)
        self.timers[topic] = self.node.create_timer(period, lambda: self.publishers[topic].publish(data))

    def do_matched(self, topic: str) -> int:
        return int(self.publishers[topic].get_subscription_count())

    def do_subscribe(self, topic: str, type_name: str, qos: str) -> None:
        got = self.received.setdefault(topic, [])
        self.node.create_subscription(
            self.graph.message(type_name), topic, got.append, self.graph.qos(qos), raw=True
        )

    def do_received(self, topic: str) -> list[str]:
        return [base64.b64encode(item).decode() for item in self.received[topic]]

    def do_call(self, service: str, type_name: str, request: dict[str, Any]) -> None:
        """Call a service once it is there (rclpy only)."""
        kind = self.graph.service(type_name)
        client = self.node.create_client(kind, service)

        def attempt() -> None:
            if client.service_is_ready():
                self.timers[service].cancel()
                self.calls[service] = client.call_async(kind.Request(**request))

        self.timers[service] = self.node.create_timer(0.05, attempt)

    def do_called(self, service: str) -> dict[str, Any] | None:
        """What the service answered."""
        call = self.calls.get(service)
        if call is None or not call.done():
            return None
        answer = call.result()
        return {name: getattr(answer, name) for name in answer.get_fields_and_field_types()}

    def do_publishers_info(self, topic: str) -> list[dict[str, Any]]:
        return [_info(item) for item in self.node.get_publishers_info_by_topic(topic)]

    def do_subscriptions_info(self, topic: str) -> list[dict[str, Any]]:
        return [_info(item) for item in self.node.get_subscriptions_info_by_topic(topic)]

    def do_nodes(self) -> list[list[str]]:
        return [list(item) for item in self.node.get_node_names_and_namespaces()]


def _info(item: Any) -> dict[str, Any]:
    return {
        "node": item.node_name,
        "namespace": item.node_namespace,
        "type": item.topic_type,
        "reliability": item.qos_profile.reliability.name,
        "durability": item.qos_profile.durability.name,
        "depth": item.qos_profile.depth,
    }


def _read(peer: Peer) -> None:
    for line in sys.stdin:
        peer.commands.put(line)
    peer.commands.put("")


def main() -> None:
    peer = Peer(sys.argv[1], sys.argv[2:])
    threading.Thread(target=_read, args=(peer,), daemon=True).start()
    print(json.dumps("ready"), flush=True)
    with peer.graph:
        peer.graph.spin(lambda: peer.over)


if __name__ == "__main__":
    main()
