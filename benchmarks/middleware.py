"""Measures losses and latencies of raw camera frames between two processes, for each middleware profile.

    source /opt/ros/jazzy/setup.bash
    python benchmarks/middleware.py                  # 1920x1080 rgb8, 30 Hz, all that is installed
    python benchmarks/middleware.py --profiles default fastdds --seconds 5 --json out.json

The publisher sends ``sensor_msgs/Image`` messages as a driver in rclpy does (BEST_EFFORT, KEEP_LAST(1)). The
receiver subscribes once as the policy node does (raw bytes, header stamp, mailbox) and once to typed messages, in
separate runs. *latency* is from stamping to the end of the callback. *take* is the receiving thread's time from
waking up to having the frame in the mailbox. Every run ends with the line of ``vla-ros middleware --check``, which
shows the settings in force.
"""

import argparse
import array
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.middleware.checks import check_profile
from vla_ros.middleware.daemons import roudi_is_up, zenoh_router_is_up
from vla_ros.middleware.profiles import (
    ALL_VARIABLES,
    DEFAULT_RMW,
    NAMES,
    FrameLoad,
    select_profile,
    sourced_distribution,
    write_profile,
)
from vla_ros.vision.messages import CdrBytes

TOPIC = "/vla_ros_benchmark/image_raw"
WARM_UP = 15
"""Unmeasured frames at the start, during discovery and first allocations."""


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.part == "publish":
        publish(arguments)
    elif arguments.part == "receive":
        receive(arguments)
    else:
        measure(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--rmw", default="", help="RMW of the profile 'default' (empty: the environment's)")
    parser.add_argument("--width", type=int, default=1920)
    parser.add_argument("--height", type=int, default=1080)
    parser.add_argument("--rate", type=float, default=30.0, help="frames a second")
    parser.add_argument("--seconds", type=float, default=9.0, help="duration of one run")
    parser.add_argument("--compressed", action="store_true", help="JPEG images (sensor_msgs/CompressedImage)")
    parser.add_argument("--interface", default="", help="network interface of Cyclone DDS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--part", choices=("publish", "receive"), help=argparse.SUPPRESS)
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    return parser


# The two ends


def _qos() -> Any:
    from rclpy.qos import HistoryPolicy, QoSProfile, ReliabilityPolicy

    return QoSProfile(reliability=ReliabilityPolicy.BEST_EFFORT, history=HistoryPolicy.KEEP_LAST, depth=1)


def publish(arguments: argparse.Namespace) -> None:
    """Send frames at the given rate once the receiver is up."""
    import rclpy
    from sensor_msgs.msg import CompressedImage, Image

    rclpy.init()
    node = rclpy.create_node("benchmark_camera")
    publisher = node.create_publisher(CompressedImage if arguments.compressed else Image, TOPIC, _qos())
    shape = (arguments.height, arguments.width, 3)
    image: Any = Image(height=arguments.height, width=arguments.width, encoding="rgb8", step=3 * arguments.width)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    image.data = array.array("B", pixels.tobytes())
    if arguments.compressed:
        image = CompressedImage(format="rgb8; jpeg compressed bgr8", data=array.array("B", _jpeg(shape)))
    deadline = time.monotonic() + 20
    while publisher.get_subscription_count() == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # the receiver's side of discovery has no such call
    count = int(arguments.rate * arguments.seconds) + WARM_UP
    due = time.monotonic()
    for index in range(count):
        time.sleep(max(0.0, due - time.monotonic()))
        due += 1 / arguments.rate
        image.header.frame_id = "warm" if index < WARM_UP else "frame"
        now = time.time_ns()
        image.header.stamp.sec, image.header.stamp.nanosec = divmod(now, 1_000_000_000)
        publisher.publish(image)
    time.sleep(0.5)
    print(json.dumps({"sent": count - WARM_UP}))
    node.destroy_node()
    rclpy.shutdown()


def _jpeg(shape: tuple[int, int, int]) -> bytes:
    """Return a smooth image with a camera's noise: about 2.5 bits per pixel."""
    import simplejpeg

    rows, columns, _ = np.indices(shape, dtype=np.float32)
    noise = np.random.default_rng(0).normal(0, 4, shape)
    image = 128 + 60 * np.sin(rows / 90) * np.cos(columns / 130) + noise
    return bytes(simplejpeg.encode_jpeg(image.clip(0, 255).astype(np.uint8), quality=90))


def receive(arguments: argparse.Namespace) -> None:
    """Receive until SIGINT; print counts and times."""
    import rclpy
    from rclpy.executors import SingleThreadedExecutor
    from sensor_msgs.msg import CompressedImage, Image

    from vla_ros.control.clock import Clock
    from vla_ros.control.mailbox import Mailbox
    from vla_ros.graph.rclpy_frames import subscribe_raw
    from vla_ros.process import keep_freed_memory
    from vla_ros.vision.messages import image_header, image_stamp, read_compressed

    if arguments.raw:
        keep_freed_memory()
    rclpy.init()
    node = rclpy.create_node("benchmark_policy")
    mailbox: Mailbox[Any] = Mailbox(Clock())
    latency: list[float] = []
    take: list[float] = []

    def count(stamp: int, warm: bool) -> None:
        if not warm:
            latency.append((time.time_ns() - stamp) / 1e6)

    def on_bytes(data: CdrBytes, _: bytes) -> None:
        stamp = image_stamp(data)
        mailbox.put(data)
        header = read_compressed(data)[0] if arguments.compressed else image_header(data)
        count(stamp, header.frame_id == "warm")

    def on_message(message: Any) -> None:
        stamp = message.header.stamp.sec * 1_000_000_000 + message.header.stamp.nanosec
        mailbox.put(np.frombuffer(message.data, np.uint8))
        count(stamp, message.header.frame_id == "warm")

    kind = CompressedImage if arguments.compressed else Image
    if arguments.raw:
        subscribe_raw(node, kind, TOPIC, on_bytes, _qos())
    else:
        node.create_subscription(kind, TOPIC, on_message, _qos())
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    print("ready", flush=True)
    ended = False

    def end(*_: Any) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGINT, end)
    while not ended:
        try:
            handler, _, _ = executor.wait_for_ready_callbacks(timeout_sec=0.1)
        except Exception:  # rclpy's TimeoutException, and the context's end
            continue
        before, seen = time.perf_counter(), len(latency)
        handler()
        if len(latency) > seen:
            take.append(1e3 * (time.perf_counter() - before))
    print(json.dumps({"latency_ms": latency, "take_ms": take}))
    sys.stdout.flush()
    node.destroy_node()
    rclpy.shutdown()


# The measurement


def measure(arguments: argparse.Namespace) -> None:
    frames = FrameLoad(arguments.width, arguments.height)
    rows = []
    for name in arguments.profiles:
        for raw in (True, False):
            row = _run(arguments, name, frames, raw)
            if row is None:
                break
            rows.append(row)
            print(_line(row), file=sys.stderr)
    print(table(rows, arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def _run(arguments: argparse.Namespace, name: str, frames: FrameLoad, raw: bool) -> dict[str, Any] | None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        profile = select_profile(name, frames, sourced_distribution(), arguments.interface)
        write_profile(profile, folder)
        environment = {key: text for key, text in os.environ.items() if key not in ALL_VARIABLES}
        if name == "default" and arguments.rmw:
            environment["RMW_IMPLEMENTATION"] = arguments.rmw
        environment |= profile.environment(folder)
        found = check_profile(name, frames, profile.distribution, environment)
        if found.fatal:
            print(f"{name}: {found}", file=sys.stderr)
            return None
        up = {"iceoryx": roudi_is_up, "zenoh": zenoh_router_is_up}.get(name)
        if up is not None and not up():
            daemon = subprocess.Popen(profile.command(folder), env=environment, stdout=subprocess.DEVNULL)
            stack.callback(_end, daemon)
            _wait(up, 15)
        state = str(check_profile(name, frames, profile.distribution, environment))
        words = [sys.executable, __file__, "--width", str(arguments.width), "--height", str(arguments.height)]
        words += ["--rate", str(arguments.rate), "--seconds", str(arguments.seconds), *(["--raw"] if raw else [])]
        words += ["--compressed"] if arguments.compressed else []
        receiver = subprocess.Popen(
            [*words, "--part", "receive"], env=environment, stdout=subprocess.PIPE, text=True
        )
        stack.callback(_end, receiver)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        patience = arguments.seconds + 60
        sender = subprocess.run(
            [*words, "--part", "publish"], env=environment, capture_output=True, text=True, timeout=patience
        )
        if sender.returncode:
            raise SystemExit(f"{name}: the publisher failed\n{sender.stderr}")
        receiver.send_signal(signal.SIGINT)
        answer = json.loads(receiver.stdout.readline())
        receiver.wait(20)  # before the daemon: RouDi wants its clients to leave first
        return {
            "profile": name,
            "rmw": environment.get("RMW_IMPLEMENTATION", DEFAULT_RMW),
            "subscription": "raw" if raw else "message",
            "sent": json.loads(sender.stdout.splitlines()[-1])["sent"],
            "received": len(answer["latency_ms"]),
            "latency_p50_ms": _percentile(answer["latency_ms"], 50),
            "latency_p99_ms": _percentile(answer["latency_ms"], 99),
            "take_p50_ms": _percentile(answer["take_ms"], 50),
            "take_p99_ms": _percentile(answer["take_ms"], 99),
            "check": state,
        }


def _percentile(values: list[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 2) if values else None


def _wait(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the daemon did not come up")
        time.sleep(0.05)


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _line(row: dict[str, Any]) -> str:
    return f"{row['profile']} {row['subscription']}: {row['received']} of {row['sent']}; {row['check']}"


def table(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """Return the rows as Markdown, with machine and date."""
    kind = "JPEG" if arguments.compressed else "rgb8"
    size = f"{arguments.width}x{arguments.height} {kind} at {arguments.rate:g} Hz"
    rmem = Path("/proc/sys/net/core/rmem_max").read_text().strip()
    processor = platform.processor() or platform.machine()
    lines = [
        f"{size}; ROS 2 {os.environ.get('ROS_DISTRO', '?')}, {date.today()}, {os.cpu_count()} cores of "
        f"{processor}, load {os.getloadavg()[0]:.1f}, net.core.rmem_max {int(rmem):,}",
        "",
        "| middleware | subscription | received of sent | latency p50 / p99, ms | take p50 / p99, ms |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['profile']} ({row['rmw']}) | {row['subscription']} | {row['received']} of {row['sent']} | "
        f"{row['latency_p50_ms'] or '-'} / {row['latency_p99_ms'] or '-'} | "
        f"{row['take_p50_ms'] or '-'} / {row['take_p99_ms'] or '-'} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
