"""Measures the age of a command's frame between a driver here and the node in another process, over DDS.

The policy returns at once (`hold`, but it accesses its image, which triggers the resize), so the figures cover
everything around a model: transport, mailbox, decoding, resizing, kinematics, limits, sending. Ages run from the
stamp that the driver gave the frame to the arrival of the command that carries it, so they include both directions.

    python benchmarks/latency.py [--size 640x480] [--rate 30] [--seconds 10] [--backend dds]
    python benchmarks/latency.py --cameras 2 --record 6    # alternating runs without and with a recorder
    python benchmarks/latency.py --cameras 3 --size 1280x720 --stops 3    # alternating, without and with slots

A stop is sent right behind the frames of all cameras. Its latency ends when the node's status, which is published
at once, says that it is stopped. With slots, the policy has memory for its device: the graph thread copies frames.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.cli.operate import RemoteNode
from vla_ros.config import load
from vla_ros.execution.source import PolicySource
from vla_ros.graph import open_graph
from vla_ros.node.run import serve
from vla_ros.policies import Session
from vla_ros.policies.hold import HoldPolicy
from vla_ros.types import ActionChunk, Observation, UInt8Array
from vla_ros.vision.messages import encode_image

JOINTS = [f"joint_{number}" for number in range(1, 8)]
_WARM_UP = 4.0  # s from the first answer; a recorder starts meanwhile
HOME = [0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0]


SLOTS = "VLA_ROS_BENCHMARK_SLOTS"
"""Environment variable of a node whose policy has memory for frames."""


class Looking(HoldPolicy):
    """A policy that holds, but accesses every image first."""

    def page_locked(self, size: int) -> UInt8Array | None:
        return np.zeros(size, np.uint8) if os.environ.get(SLOTS) else None

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        dict(observation.images)
        return super().infer(session, observation)


def main() -> None:
    if sys.argv[1:2] == ["node"]:  # the process under test
        config = load([], sys.argv[3:])
        raise SystemExit(serve(config, stats=Path(sys.argv[2]), source=PolicySource(Looking(config))))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="640x480", help="width x height of the camera")
    parser.add_argument("--rate", type=float, default=30.0, help="frames per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--backend", default="dds", choices=("dds", "rclpy"), help="of driver and node")
    parser.add_argument("--cameras", type=int, default=1)
    parser.add_argument("--record", type=int, default=0, metavar="N", help="N runs without and N with a recorder")
    parser.add_argument("--stops", type=int, default=0, metavar="N", help="N runs without and N with slots")
    arguments = parser.parse_args()
    os.environ.setdefault("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))
    if arguments.stops:
        compare_stops(arguments)
        return
    if not arguments.record:
        ages, sent, summary = measure(arguments)
        show(arguments, ages, sent, summary)
        return
    found: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for number in range(2 * arguments.record):
        recorded = bool(number % 2)
        with tempfile.TemporaryDirectory() as folder:
            more = ["record.what:=all", f"record.folder:={folder}"] if recorded else []
            ages, sent, summary = measure(arguments, more)
            size = sum(file.stat().st_size for file in Path(folder).glob("*/*.mcap")) / 1e6
        found[recorded].append(np.percentile(ages, [50, 99]))
        p50, p99 = found[recorded][-1]
        kind = f"recorded, {size:.0f} MB" if recorded else "not recorded"
        print(f"{kind:<22}{len(ages)} of {sent} answered, p50 {p50:.2f} ms, p99 {p99:.2f} ms", flush=True)
    without, with_recorder = (np.median(found[which], axis=0) for which in (False, True))
    for name, before, after in zip(("p50", "p99"), without, with_recorder, strict=True):
        print(f"median {name}: {before:.2f} ms, with a recorder {after:.2f} ms ({after / before - 1:+.1%})")


def compare_stops(arguments: argparse.Namespace) -> None:
    """Alternate runs without and with slots, and print the latency of their stops."""
    found: dict[str, list[float]] = {"": [], "1": []}
    for _ in range(arguments.stops):
        for slots, latencies in found.items():
            os.environ[SLOTS] = slots
            received = measure(arguments, stops=latencies)[2]["latency_ms"]["receive"]
            shown = f"p50 {received['p50']:.2f} ms, p99 {received['p99']:.2f} ms"
            print(f"{'with' if slots else 'without'} slots: callback to mailbox {shown}", flush=True)
    for slots, latencies in found.items():
        p50, p99 = np.percentile(latencies, [50, 99])
        kind = f"{'with' if slots else 'without'} slots: {len(latencies)} stops"
        print(f"{kind}, p50 {p50:.2f} ms, p99 {p99:.2f} ms, load {os.getloadavg()[0]:.1f}")


class Stops(RemoteNode):
    """Stops the node unless it is stopped, measures when its status says so, and resets it."""

    def __init__(self, graph: Any, node: Any, latencies: list[float]) -> None:
        super().__init__(graph, node, "/vla_policy")
        self._latencies, self._began = latencies, 0.0

    def send(self) -> None:
        if not self._began:
            self._began = time.perf_counter()
            self.stop()

    def _on_status(self, message: Any) -> None:
        stopped = json.loads(message.data)["state"] == "stopped"
        if stopped and self._began:
            self._latencies.append(1e3 * (time.perf_counter() - self._began))
            self._began = 0.0
        if stopped:
            self.call("reset")


def measure(
    arguments: argparse.Namespace, more: Sequence[str] = (), stops: list[float] | None = None
) -> tuple[list[float], int, dict[str, Any]]:
    """Run the node with ``more`` options; return the ages, the number of frames and the node's statistics.

    ``stops`` gets the latencies of stops; without it there are none.
    """
    width, height = (int(part) for part in arguments.size.split("x"))
    cameras = [f"/camera{number}/image_raw" for number in range(arguments.cameras)]
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        options = ["policy.instruction:=hold still", "robot.urdf:=demo", "control.armed:=true"]
        options += ["control.rate_hz:=0", f"node.backend:={arguments.backend}", "node.log_level:=warn"]
        options += [f"camera.width:=[{width}]", f"camera.height:=[{height}]"]
        options += [f"camera.topics:={json.dumps(cameras)}"]
        options += [f"camera.keys:={json.dumps([f'image{number}' for number in range(len(cameras))])}"]
        command = [sys.executable, __file__, "node", str(stats), *options, *more]
        with subprocess.Popen(command) as node:
            ages, sent = drive(
                arguments.backend, cameras, (width, height), arguments.rate, arguments.seconds, stops
            )
            node.send_signal(signal.SIGINT)
            node.wait(20)
        return ages, sent, json.loads(stats.read_text())


def show(arguments: argparse.Namespace, ages: list[float], sent: int, summary: dict[str, Any]) -> None:
    print(f"{arguments.size} rgb8 at {arguments.rate:g} Hz, {arguments.backend}, load {os.getloadavg()[0]:.1f}")
    print(f"{sent} frames sent, {len(ages)} answered; node: {summary['frames']}")
    print(f"{'stage':<34}{'p50 ms':>9}{'p99 ms':>9}")
    p50, p99 = np.percentile(ages, [50, 99])
    print(f"{'frame stamp to command at driver':<34}{p50:9.2f}{p99:9.2f}")
    for stage, times in summary["latency_ms"].items():
        print(f"{'  ' + stage:<34}{times['p50']:9.2f}{times['p99']:9.2f}")


def drive(
    backend: str,
    cameras: Sequence[str],
    size: tuple[int, int],
    rate: float,
    seconds: float,
    stops: list[float] | None = None,
) -> tuple[list[float], int]:
    """Send frames and joint states, receive commands; return ages in milliseconds and the number of frames."""
    ages: list[float] = []
    heard = threading.Event()
    with open_graph(backend, log_level="warn") as graph:
        node = graph.create_node("benchmark_driver")
        make, qos = graph.message, graph.qos

        def now() -> int:
            return int(node.get_clock().now().nanoseconds)

        def on_command(message: object) -> None:
            stamp = message.header.stamp  # type: ignore[attr-defined]
            ages.append((now() - stamp.sec * 1_000_000_000 - stamp.nanosec) / 1e6)
            heard.set()

        # The other cameras come first: the first one's frame begins a step.
        frames = [
            node.create_publisher(make("sensor_msgs/msg/Image"), camera, qos("camera")) for camera in cameras[::-1]
        ]
        joints = node.create_publisher(make("sensor_msgs/msg/JointState"), "/joint_states", qos("state_publisher"))
        node.create_subscription(
            make("sensor_msgs/msg/JointState"), "/arm/joint_command", on_command, qos("command")
        )
        stopper = None if stops is None else Stops(graph, node, stops)
        ended = threading.Event()
        spinner = threading.Thread(target=lambda: graph.spin(ended.is_set, 0.02))
        spinner.start()
        image = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        sent, deadline = 0, time.monotonic() + 60.0
        measured_from, measuring = 0.0, False
        due = time.monotonic()
        while time.monotonic() < deadline:
            stamp = now()
            header = make("std_msgs/msg/Header")(
                stamp=make("builtin_interfaces/msg/Time")(sec=stamp // 10**9, nanosec=stamp % 10**9), frame_id=""
            )
            joints.publish(
                make("sensor_msgs/msg/JointState")(
                    header=header, name=JOINTS, position=HOME, velocity=[], effort=[]
                )
            )
            for each in frames:
                each.publish(encode_image(image, now(), "camera"))
            sent += 1
            if stopper is not None and measuring and sent % 5 == 0:  # reset meanwhile
                stopper.send()
            if heard.is_set() and not measured_from:  # a recorder starts beside the node: let it
                measured_from = time.monotonic() + _WARM_UP
                deadline = measured_from + seconds
            if measured_from and not measuring and time.monotonic() >= measured_from:
                measuring, sent = True, 0
                ages.clear()
            due = max(due + 1 / rate, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
        ended.set()
        spinner.join()
    return ages, sent


if __name__ == "__main__":
    main()
