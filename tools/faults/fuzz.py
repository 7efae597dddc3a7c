"""Sends random messages and requests to all that the node hears, and checks that a stop is still in force in time.

    python -m tools.faults.fuzz --count 10000
    python -m tools.faults.fuzz --count 2000 --output twist
    python -m tools.faults.fuzz --count 2000 --inputs other

The messages have the topic's type and random content, or are damaged; they come between those of a working robot,
from the same publishers, so that no second source hides them. Requests go to every service but ``~/reset``, which
ends a stop, and to the action. While they come, somebody stops the arm. The oracle: no motion is sent later than
``--within`` seconds after the stop was sent, by the command's own source timestamp; a velocity is followed by
another command before it has to expire; every request is answered; the node lives, reports the stop, and none of
its code has failed (``thread_died``). The ``other`` inputs are compressed images and a leader arm.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from rosbags.interfaces import Nodetype

from tools.faults.driver import ARM, FINGERS, HOME
from tools.faults.messages import joint_state
from tools.faults.person import LEADER
from tools.faults.processes import DOMAINS, NodeProcess, environment, wait_until
from tools.faults.setups import LEADS, OPTIONS, SERVO, VELOCITY
from vla_ros.errors import VlaRosError
from vla_ros.graph import open_graph
from vla_ros.graph.messages import MessageTypes, message_types
from vla_ros.graph.origin import Origin
from vla_ros.vision.messages import encode_compressed, encode_image

_TOPICS: Mapping[str, tuple[str, str]] = {
    "/joint_states": ("sensor_msgs/msg/JointState", "state_publisher"),
    "/vla_policy/instruction": ("std_msgs/msg/String", "instruction"),
    "/vla_policy/stop": ("std_msgs/msg/Bool", "command"),
    "/vla_policy/label": ("std_msgs/msg/String", "command"),
    "/vla_policy/success": ("std_msgs/msg/Bool", "command"),
    "/vla_policy/heartbeat": ("std_msgs/msg/Empty", "state_publisher"),
    "/joy": ("sensor_msgs/msg/Joy", "state_publisher"),
    "/wrench": ("geometry_msgs/msg/WrenchStamped", "state_publisher"),
}
_RAW, _JPEG = "/camera/image_raw", "/camera/image_raw/compressed"
TOPICS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "plain": {
        _RAW: ("sensor_msgs/msg/Image", "camera"),
        "/hand": ("geometry_msgs/msg/TwistStamped", "state_publisher"),
        **_TOPICS,
    },
    "other": {
        _JPEG: ("sensor_msgs/msg/CompressedImage", "camera"),
        LEADER: ("sensor_msgs/msg/JointState", "state_publisher"),
        **_TOPICS,
    },
}
"""By ``--inputs``, every topic that is fuzzed, with its type and the publisher's profile."""

_INPUTS: Mapping[str, Mapping[str, str]] = {
    "plain": {"takeover.input": "twist_stamped", "takeover.topic": "/hand"},
    "other": {**LEADS["options"], "camera.topics": f'["{_JPEG}"]', "camera.transport": "compressed"},
}
_LISTENING = {
    "takeover.joy": "/joy",
    "takeover.buttons": '["deadman = 0", "correct = 1", "resume = 2"]',
    "robot.state_topics": '["wrench=/wrench:WrenchStamped"]',
    "control.rate_hz": "20.0",
    "limits.max_joint_acceleration": "12.0",
}
_COMMANDED = {
    "position": ("sensor_msgs/msg/JointState", {}),
    "twist": ("geometry_msgs/msg/TwistStamped", SERVO["options"]),
    "velocity": ("sensor_msgs/msg/JointState", VELOCITY["options"]),
}
_ACTION = "rosetta_interfaces/action/RunPolicy"
SERVICES: Mapping[str, str] = {
    "/vla_policy/enable": "std_srvs/srv/SetBool",
    "/vla_policy/takeover": "std_srvs/srv/SetBool",
    "/vla_policy/pause": "std_srvs/srv/Trigger",
    "/vla_policy/run_policy/_action/send_goal": f"{_ACTION}_SendGoal",
    "/vla_policy/run_policy/_action/get_result": f"{_ACTION}_GetResult",
    "/vla_policy/run_policy/_action/cancel_goal": "action_msgs/srv/CancelGoal",
}
"""Every service that is fuzzed, with the name of its type before ``_Request``."""

_ASKED = 0.15  # share of requests
_ANSWERS = 5.0  # s; a result may take as long as its goal
_BATCH = 20  # messages for each stop
_RESUMES = 15.0  # s
_NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e30, 1e300, float("inf"), float("-inf"), float("nan"), 2.0**53)
_TEXTS = (
    "",
    " ",
    "\0",
    "\n\x1b[31m",
    "ü",
    "/",
    "../..",
    "x" * 70_000,
    "joint_1",
    "base_link",
    "rgb8",
    "mono8",
    "jpeg",
)
_LONGEST = 3000  # items of an array that is long


def random_message(types: MessageTypes, name: str, rng: random.Random) -> Any:
    """Return a message of a type with random content."""
    message = types.message(name)()
    for (attribute, _), (_, description) in zip(message._fields.items(), types.definition(name), strict=True):
        if rng.random() < 0.8:
            setattr(message, attribute, _value(types, description, rng))
    return message


def _value(types: MessageTypes, description: Any, rng: random.Random) -> Any:
    kind, argument = description
    if kind == Nodetype.NAME:
        return random_message(types, argument, rng)
    if kind == Nodetype.BASE:
        return _scalar(argument[0], rng)
    inner, length = argument
    count = length if kind == Nodetype.ARRAY else rng.choice((0, 1, 2, 7, 9, rng.randrange(_LONGEST)))
    return [_value(types, inner, rng) for _ in range(count)]


def _scalar(kind: str, rng: random.Random) -> Any:
    if kind == "string":
        return rng.choice(
            (*_TEXTS, *ARM, *FINGERS, "".join(map(chr, rng.choices(range(1, 256), k=rng.randrange(40)))))
        )
    if kind == "bool":
        return rng.random() < 0.5
    if kind.startswith("float"):
        value = rng.choice((*_NUMBERS, rng.gauss(0, 1), rng.gauss(0, 1e4)))
        return value if kind == "float64" else float(np.float32(np.clip(value, -3e38, 3e38)))
    bits = int(kind.strip("uint") or 8) if kind not in ("byte", "char") else 8
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind.startswith("int") else (0, 2**bits - 1)
    return rng.choice((low, high, 0 if low else 1, rng.randint(low, high), min(high, rng.randrange(100))))


def damaged(cdr: bytes, rng: random.Random) -> bytes:
    """Return CDR with flipped bits, a wrong length, or cut off."""
    spoiled = bytearray(cdr)
    for _ in range(rng.choice((1, 2, 8))):
        spoiled[rng.randrange(4, max(5, len(spoiled)))] ^= 1 << rng.randrange(8) if len(spoiled) > 4 else 0
    if len(spoiled) > 12 and rng.random() < 0.3:
        at = rng.randrange(1, len(spoiled) // 4) * 4
        spoiled[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 2**16, 2**31 - 1, 2**32 - 1)))
    return (
        bytes(spoiled[: rng.randrange(4, len(spoiled))])
        if len(spoiled) > 5 and rng.random() < 0.2
        else bytes(spoiled)
    )


@dataclass
class Outcome:
    """What a run has found."""

    messages: int = 0
    stops: int = 0
    moving: int = 0  # stops while the arm moved
    latencies: list[float] = field(default_factory=list)  # s from a stop to the last motion, 0 if none came
    wrong: list[str] = field(default_factory=list)


class FuzzedRobot:
    """A robot that works, and sends random messages from its publishers, in a domain of its own."""

    def __init__(self, domain: int, output: str, rng: random.Random, folder: Path, inputs: str = "plain") -> None:
        os.environ.update(
            {name: text for name, text in environment(domain).items() if name.startswith(("ROS", "CYC"))}
        )
        self._rng, self._types, self._output = rng, message_types(), output
        self.graph = open_graph("dds")
        self._node = self.graph.create_node("fuzzed_robot")
        make, qos = self.graph.message, self.graph.qos
        self._publishers = {
            topic: self._node.create_publisher(make(kind), topic, qos(profile))
            for topic, (kind, profile) in TOPICS[inputs].items()
        }
        self._topics = TOPICS[inputs]
        self._clients = {name: self._node.create_client(self._service(name), name) for name in SERVICES}
        self._asked: list[tuple[float, str, Any]] = []  # when (monotonic), what, and its answer
        self._good: dict[str, bytes] = {}  # the last sound message, by topic
        self._stopper = self._node.create_publisher(make("std_msgs/msg/Bool"), "/vla_policy/stop", qos("command"))
        self._set = self.graph.service("std_srvs/srv/SetBool")
        self._takeover = self._node.create_client(self._set, "/vla_policy/takeover")
        self._frames: set[int] = set()
        self._positions = np.array(HOME)
        self.commands: list[tuple[float, float, bool]] = []  # sent and received (time.time), and whether it moves
        self.status: dict[str, Any] = {}
        self.sent: deque[str] = deque(maxlen=_BATCH)
        self._reads, options = _COMMANDED[output]
        self.graph.subscribe_raw(
            self._node, make(self._reads), "/arm/joint_command", self._on_command, qos("command")
        )
        self._node.create_subscription(
            make("std_msgs/msg/String"), "/vla_policy/status", self._on_status, qos("instruction")
        )
        noise = np.random.default_rng(rng.randrange(2**31)).integers(60, 190, (16, 48, 64, 3), dtype=np.uint8)
        self._images = itertools.cycle(noise)
        self._ended = threading.Event()
        threads = (self.graph.spin, (self._ended.is_set, 0.02)), (self._work, ())
        self._threads = [threading.Thread(target=target, args=words, daemon=True) for target, words in threads]
        for thread in self._threads:
            thread.start()
        values = {**OPTIONS, **_LISTENING, **_INPUTS[inputs], **options, "timeouts.frame_age": "0.0"}
        words = ("--horizon", "4", "--seconds", "0.02")
        self.log = folder / "log"
        self.node = NodeProcess(domain, self.log, values, words)

    def _work(self) -> None:
        """Send joint states at 50 Hz and frames at 25 Hz, and the instruction once a second."""
        for count in itertools.count():
            if self._ended.wait(0.02):
                return
            now = time.time_ns()
            names = [*ARM, *FINGERS]
            self._send("/joint_states", joint_state(names, self._positions.tolist(), now & ~1))
            if LEADER in self._topics:
                self._send(LEADER, joint_state(names, self._positions.tolist(), now & ~1))
            if count % 2 == 0:
                self._frames.add(now | 1)
                self._send_image(next(self._images), now | 1)
            if count % 50 == 0:
                text = self._types.message("std_msgs/msg/String")(data="wave")
                self._publishers["/vla_policy/instruction"].publish(text)
                wrench = self._types.message("geometry_msgs/msg/WrenchStamped")()
                self._publishers["/wrench"].publish(wrench)

    def _send(self, topic: str, message: Any) -> None:
        self._good[topic] = bytes(message if isinstance(message, bytes) else self._types.serialize(message))
        self._publishers[topic].publish(message)

    def _send_image(self, image: Any, stamp: int) -> None:
        if _JPEG in self._topics:
            self._send(_JPEG, encode_compressed(simplejpeg.encode_jpeg(image), stamp, "camera"))
        else:
            self._send(_RAW, encode_image(image, stamp, "camera"))

    def _service(self, name: str) -> Any:
        kind = SERVICES[name]
        if not kind.startswith(_ACTION):
            return self.graph.service(kind)
        return getattr(self.graph.action(_ACTION), kind.removeprefix(f"{_ACTION}_"))

    def ask_random(self) -> None:
        """Send one random request, if its service is there."""
        name = self._rng.choice(tuple(SERVICES))
        request = random_message(self._types, f"{SERVICES[name]}_Request", self._rng)
        if self._clients[name].service_is_ready():
            self._asked.append((time.monotonic(), name, self._clients[name].call_async(request)))
            self.sent.append(f"{name} {self._types.serialize(request)[:120].hex()}")

    def unanswered(self) -> list[str]:
        """Return the requests that were sent a while ago and have no answer; forget them."""
        now = time.monotonic()
        late = [each for each in self._asked if now - each[0] > _ANSWERS]
        self._asked = [each for each in self._asked if now - each[0] <= _ANSWERS]
        return [name for _, name, answer in late if not (answer.done() or name.endswith("get_result"))]

    def _on_command(self, cdr: Any, origin: Origin) -> None:
        received, cls = time.time(), self.graph.message(self._reads)
        message = self.graph.deserialize(bytes(cdr), cls)
        if self._output == "position":
            stamp = message.header.stamp.sec * 10**9 + message.header.stamp.nanosec
            moves = stamp in self._frames
            known = dict(zip(message.name, message.position, strict=False))
            self._positions = np.array(
                [known.get(n, p) for n, p in zip((*ARM, *FINGERS), self._positions, strict=True)]
            )
        elif self._output == "twist":
            twist = message.twist
            moves = any(
                (twist.linear.x, twist.linear.y, twist.linear.z, twist.angular.x, twist.angular.y, twist.angular.z)
            )
        else:
            moves = bool(np.any(message.velocity))
        self.commands.append((origin.published / 1e9 or received, received, moves))

    def _on_status(self, message: Any) -> None:
        self.status = json.loads(message.data)

    def send_random(self) -> None:
        """Publish one random message that the middleware takes; a stop among them is none."""
        if self._rng.random() < _ASKED:
            self.ask_random()
            return
        while True:
            topic = self._rng.choice(tuple(self._topics))
            message = random_message(self._types, self._topics[topic][0], self._rng)
            if topic == "/vla_policy/stop":
                message.data = False
            cdr = self._types.serialize(message)
            if self._rng.random() < 0.3 and topic != "/vla_policy/stop":
                cdr = damaged(self._rng.choice((cdr, self._good.get(topic, cdr))), self._rng)
            with contextlib.suppress(VlaRosError):  # Cyclone checks CDR against the type
                self._publishers[topic].publish(cdr)
                self.sent.append(f"{topic} {cdr[:120].hex()}")
                return

    def stop(self) -> float:
        """Stop the arm; return when (time.time)."""
        began = time.time()
        self._stopper.publish(self._types.message("std_msgs/msg/Bool")(data=True))
        return began

    def moving(self, seconds: float) -> bool:
        """Reset, arm, hand back to the policy what a random button paused, and wait until the arm moves."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.node.alive:
            if self.status.get("state") == "stopped":
                self.node.signal("SIGHUP")
            elif self.status.get("state") == "disarmed":
                self.node.signal("SIGUSR1")
            elif self.status.get("mode", "autonomous") != "autonomous" and self._takeover.service_is_ready():
                self._takeover.call_async(self._set.Request(data=False))
            if self._moves_within(0.5):
                return True
        return False

    def _moves_within(self, seconds: float) -> bool:
        began = time.time()
        return wait_until(lambda: sum(m and s > began for s, _, m in self.commands[-20:]) >= 2, seconds)

    def close(self) -> int:
        status = self.node.end()
        self._ended.set()
        for thread in self._threads:
            thread.join(5)
        self.graph.close()
        return status


def fuzz(
    count: int, seed: int, output: str, within: float, say: Callable[[str], object] = print, inputs: str = "plain"
) -> Outcome:
    """Send ``count`` random messages and stop the arm for every twenty of them."""
    rng, outcome = random.Random(seed), Outcome()
    with tempfile.TemporaryDirectory(prefix="vla_ros_fuzz_") as folder:
        robot = FuzzedRobot(rng.choice(DOMAINS), output, rng, Path(folder), inputs)
        try:
            if not robot.moving(100.0):
                raise VlaRosError(f"the arm does not move: {robot.log.read_text(errors='replace')[-2000:]}")
            while outcome.messages < count and robot.node.alive:
                wrong = _once(robot, rng, outcome, within)
                if wrong:
                    outcome.wrong += [f"after {outcome.messages} messages: {each}" for each in wrong]
                    say("\n".join([*wrong, *robot.sent]))
                if outcome.stops % 25 == 0:
                    say(f"{outcome.messages} messages, {outcome.stops} stops, {len(outcome.wrong)} wrong")
        finally:
            status = robot.close()
            if status != 0:
                outcome.wrong.append(f"the node ended with status {status}")
                say(robot.log.read_text(errors="replace")[-3000:])
    return outcome


def _once(robot: FuzzedRobot, rng: random.Random, outcome: Outcome, within: float) -> list[str]:
    """Send a batch of messages with a stop among them; return what went wrong."""
    wrong = list[str]()
    if not robot.moving(_RESUMES):
        wrong.append(f"the arm does not move again: {robot.status.get('explanation')}")
    robot.commands.clear()
    place, stopped = rng.randrange(_BATCH), 0.0
    for number in range(_BATCH):
        if number == place:
            stopped = robot.stop()
        robot.send_random()
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0.0, 0.03))
    outcome.messages, outcome.stops = outcome.messages + _BATCH, outcome.stops + 1
    outcome.moving += any(moves and stopped - 0.15 < sent < stopped for sent, _, moves in robot.commands)
    if not wait_until(lambda: robot.status.get("state") in ("stopped", "disarmed"), 5.0):
        wrong.append(f"no stop is reported: {robot.status.get('explanation')}")
    time.sleep(0.3)
    late = [sent - stopped for sent, _, moves in robot.commands if moves and sent > stopped]
    outcome.latencies.append(max(late, default=0.0))
    if late and late[-1] > within:
        wrong.append(f"a motion was sent {late[-1]:.3f} s after the stop, allowed {within:g} s")
    wrong += [f"unanswered: {name}" for name in robot.unanswered()]
    if robot.status.get("counters", {}).get("thread_died"):
        wrong.append(f"its code has failed: {robot.status.get('detail')}")
    for (sent, _, moves), (following, _, _) in itertools.pairwise(robot.commands):
        if robot.status and moves and robot._output != "position" and following - sent > 0.2 + within:
            wrong.append(f"a velocity stood for {following - sent:.3f} s, allowed {0.2 + within:g} s")
    if robot._output != "position" and robot.commands and robot.commands[-1][2]:
        wrong.append("the last command is a velocity that does not end")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="messages (default: 1000)")
    parser.add_argument("--seed", type=int, default=None, help="seed of all randomness")
    parser.add_argument("--output", choices=tuple(_COMMANDED), default="position", help="what the driver takes")
    parser.add_argument("--inputs", choices=tuple(TOPICS), default="plain", help="what the node hears")
    parser.add_argument(
        "--within", type=float, default=0.2, help="seconds from a stop to the last motion, on an idle machine"
    )
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**5)
    print(f"seed {seed}, load {os.getloadavg()[0]:.1f}", flush=True)
    outcome = fuzz(
        given.count, seed, given.output, given.within, lambda text: print(text, flush=True), given.inputs
    )
    spread = np.percentile(outcome.latencies or [0.0], (50, 99, 100))
    print(
        f"{outcome.messages} messages, {outcome.stops} stops, {outcome.moving} while the arm moved, "
        f"{len(outcome.wrong)} wrong; last motion after the stop: "
        f"p50 {1e3 * spread[0]:.0f} ms, p99 {1e3 * spread[1]:.0f} ms, at most {1e3 * spread[2]:.0f} ms; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
