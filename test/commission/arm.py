"""A simulated arm and its driver in a process of its own: follows commands late, sags, sticks, and does worse.

Run as ``python arm.py '{"delay": 0.2}'``; the keys are the fields of :class:`Faults`. It prints "ready".
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_ros.graph import open_graph
from vla_ros.vision.messages import encode_image

TICK = 0.004  # s


@dataclass
class Faults:
    """What the arm does wrong: s, rad and Hz; lists have a number per joint."""

    joints: list[str] = field(default_factory=lambda: [f"joint_{number}" for number in range(1, 5)])
    home: list[float] = field(default_factory=lambda: [0.3, 0.6, -0.4, 1.5])
    delay: float = 0.0  # from a command to the motion
    sag: float = 0.0  # of the second joint
    stick: float = 0.0  # of the third joint
    deceleration: float = 0.0  # of the fourth joint; 0: at once
    reversed: str = ""  # the joint whose state has another sign than its command
    swapped: bool = False  # the first two joints get each other's commands
    degrees: bool = False  # joint states are in degrees
    blocked: str = ""  # the joint that stands still
    noise: float = 0.0
    rate: float = 100.0  # of joint states
    jitter: float = 0.0  # share of a period
    clock: float = 0.0  # s by which stamps are behind
    camera_clock: float = 0.0
    inverted: bool = False  # the gripper closes when it is told to open
    limp: float = 0.0  # s without a command after which the second joint sinks; 0: it holds
    velocity: bool = False  # it takes velocities
    twist: bool = False  # it takes velocities of its tip, which ``solve`` makes velocities of joints
    ends: float = 0.0  # s after which it ends a velocity; 0: never


class Arm:
    """Joints under position or velocity control, one gripper of two fingers."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.count = len(faults.joints)
        self.at = np.array(faults.home)
        self.speed = np.zeros(self.count)
        self.fingers = np.full(2, 0.04)
        self.goal, self.finger_goal = self.at.copy(), self.fingers.copy()
        self.queue: deque[tuple[float, np.ndarray, np.ndarray]] = deque()
        self.heard = math.inf
        self.started = False

    def hear(self, now: float, arm: np.ndarray, fingers: np.ndarray) -> None:
        if self.faults.swapped:
            arm = arm[[1, 0, *range(2, self.count)]]
        self.queue.append((now + self.faults.delay, arm, fingers))
        self.heard = now

    def move(self, now: float) -> None:
        faults = self.faults
        while self.queue and self.queue[0][0] <= now:
            _, self.goal, self.finger_goal = self.queue.popleft()
            self.started = True
        if faults.velocity or faults.twist:
            if faults.ends and now - self.heard > faults.ends:
                self.goal = np.zeros(self.count)  # until the next command takes effect
            step = (self.goal if self.started else np.zeros(self.count)) * TICK
        else:
            error = self.goal - self.at
            if self.started:
                error[1] -= faults.sag
            if faults.limp and now - self.heard > faults.limp:
                error[1] = -0.2
            error[2] = math.copysign(max(abs(error[2]) - faults.stick, 0.0), error[2])
            step = np.clip(error, -2.0 * TICK, 2.0 * TICK)
            if faults.deceleration:
                most = faults.deceleration
                wanted = math.copysign(min(abs(error[3]) / TICK, math.sqrt(2 * most * abs(error[3]))), error[3])
                self.speed[3] += np.clip(wanted - self.speed[3], -most * TICK, most * TICK)
                step[3] = self.speed[3] * TICK
        if faults.blocked:
            step[faults.joints.index(faults.blocked)] = 0.0
        self.at = self.at + step
        goal = 0.04 - self.finger_goal if faults.inverted and self.started else self.finger_goal
        self.fingers = self.fingers + np.clip(goal - self.fingers, -0.1 * TICK, 0.1 * TICK)

    def measured(self, rng: np.random.Generator) -> np.ndarray:
        faults, at = self.faults, self.at.copy()
        if faults.reversed:
            index = faults.joints.index(faults.reversed)
            at[index] = 2 * faults.home[index] - at[index]
        at += faults.noise * rng.standard_normal(self.count)
        return np.degrees(at) if faults.degrees else at


def main(faults: Faults) -> None:
    rng, arm, ended = np.random.default_rng(0), Arm(faults), False
    with open_graph("dds") as graph:
        node, make, qos = graph.create_node("driver"), graph.message, graph.qos
        names = [*faults.joints, "finger_left", "finger_right"]
        states = node.create_publisher(make("sensor_msgs/msg/JointState"), "/joint_states", qos("state_publisher"))
        camera = node.create_publisher(make("sensor_msgs/msg/Image"), "/camera/image_raw", qos("camera"))

        def hear(message: Any) -> None:
            now = time.monotonic()
            if faults.velocity:
                arm.hear(now, np.array(message.velocity), arm.finger_goal)
            else:
                at = dict(zip(message.name, message.position, strict=True))
                arm.hear(
                    now,
                    np.array([at[name] for name in faults.joints]),
                    np.array([at.get(name, 0.04) for name in names[-2:]]),
                )

        node.create_subscription(make("sensor_msgs/msg/JointState"), "/arm/joint_command", hear, qos("command"))

        def stamped(behind: float) -> Any:
            seconds, nanoseconds = divmod(time.time_ns() - round(1e9 * behind), 1_000_000_000)
            return make("builtin_interfaces/msg/Time")(sec=seconds, nanosec=nanoseconds)

        began = moved = due = time.monotonic()
        shown, image = began, np.full((48, 64, 3), 128, np.uint8)

        def work() -> bool:
            nonlocal moved, due, shown
            now = time.monotonic()
            while moved + TICK <= now:
                moved += TICK
                arm.move(moved)
            if now >= due:
                due = max(due + (1 + faults.jitter * rng.uniform(-1, 1)) / faults.rate, now)
                header = make("std_msgs/msg/Header")(stamp=stamped(faults.clock), frame_id="")
                numbers = [*arm.measured(rng).tolist(), *arm.fingers.tolist()]
                fields = {"name": names, "position": numbers, "velocity": [], "effort": []}
                states.publish(make("sensor_msgs/msg/JointState")(header=header, **fields))
            if now >= shown:
                shown = now + 0.1
                camera.publish(encode_image(image, time.time_ns() - round(1e9 * faults.camera_clock), "camera"))
            return ended

        print("ready", flush=True)
        graph.spin(work, TICK)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(Faults(**json.loads(sys.argv[1])))
