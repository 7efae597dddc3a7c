"""Runs the real node with a policy that often exceeds every limit and fails on command.

Takes the arguments of ``vla-ros run``. The instruction selects what the policy does: ``wave`` moves in random
steps; ``carry`` as well, with the gripper closed; ``meet`` moves two arms towards each other; ``late 0.5`` takes
half a second per inference; ``raise``, ``nan``, ``infinite``, ``shape`` and ``empty`` cause the error that they
name. ``lock 3`` keeps the interpreter's lock for three seconds while the plan is executed, ``graph 3`` blocks the
graph's thread then, ``endless 3`` computes and ``never 3`` waits that long in the inference, ``memory 3`` lets no
thread get address space meanwhile, and ``full 3`` takes all memory up to a limit, so that no thread gets any.
``oom 3`` takes memory that long until the kernel ends the process.
"""

import argparse
import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tools.faults.driver import ARM, HOME
from vla_ros.config import Config, load
from vla_ros.contract.components import Component, parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.execution.source import PolicySource
from vla_ros.node import run
from vla_ros.policies import Policy, Session
from vla_ros.policies.base import create
from vla_ros.types import ActionChunk, FloatArray, Observation
from vla_ros.vision.processors import ResizeNaive

_SPREAD: dict[str, FloatArray] = {
    "tip_delta": np.array([0.01, 0.01, 0.01, 0.05, 0.05, 0.05]),
    "joint_position": np.array(0.5),
    "joint_velocity": np.array(0.5),
}
_ASIDE = np.array([0.0, -0.01, 0.0, 0.0, 0.0, 0.0])  # m; of the left arm, towards the right one
_TOWARDS = np.array([0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # rad; of the right arm, towards the left one
_WILD = 0.15  # share of steps far beyond every limit


_SOON = 0.35  # s after the inference that begins a plan
_WIDTH = 512  # of the matrices; 17 MFLOP and 1 ms, for which the interpreter's lock is free
_SPARE, _SMALLEST = 64 << 20, 64  # bytes beyond what the process has, and of the smallest block that is taken


def _keep_lock(seconds: float) -> None:
    threading.Timer(_SOON, ctypes.PyDLL(None).usleep, [int(1e6 * seconds)]).start()


def _block_graph(seconds: float) -> None:
    """Block the thread that spins, which handles signals, between two of its callbacks."""
    signal.signal(signal.SIGWINCH, lambda *_: time.sleep(seconds))
    threading.Timer(_SOON, os.kill, [os.getpid(), signal.SIGWINCH]).start()


def _compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def _exhaust(seconds: float) -> None:
    """Leave no address space to this process for a while."""
    threading.Timer(_SOON, _exhaust_at, [_address_space()]).start()
    threading.Timer(_SOON + seconds, _exhaust_at, [resource.RLIM_INFINITY]).start()


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _exhaust_at(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _fill(seconds: float) -> None:
    """Take all memory that this process may have, to the last small block, and free it after a while."""

    def take() -> None:
        _exhaust_at(_address_space() + _SPARE)
        taken, block = list[bytearray](), 1 << 24
        while block > _SMALLEST:
            with contextlib.suppress(MemoryError):
                while True:
                    taken.append(bytearray(b"x" * block))
            block //= 2
        time.sleep(seconds)
        taken.clear()
        _exhaust_at(resource.RLIM_INFINITY)

    threading.Timer(_SOON, take).start()


def _devour(seconds: float) -> None:
    """Take memory until the kernel ends this process, ``seconds`` at most."""

    def take() -> None:
        taken, until = list[bytearray](), time.monotonic() + seconds
        while time.monotonic() < until:
            taken.append(bytearray(b"x" * (1 << 20)))

    threading.Timer(_SOON, take).start()


_STALLS: dict[str, Callable[[float], None]] = {
    "lock": _keep_lock,
    "graph": _block_graph,
    "endless": _compute,
    "never": time.sleep,
    "memory": _exhaust,
    "full": _fill,
    "oom": _devour,
}


class WildPolicy(Policy):
    """A policy whose actions depend only on the stamp of the frame and on the instruction.

    Args:
        config: The options.
        horizon: Steps per chunk.
        seconds: Duration of each inference.
        computes: Multiply matrices meanwhile, as a network does, which keeps a processor and not the interpreter.
    """

    def __init__(self, config: Config, horizon: int = 1, seconds: float = 0.0, *, computes: bool = False) -> None:
        self._seconds, self._closed = seconds, np.array(config.gripper.closed_value)
        self._weights = np.ones((_WIDTH, _WIDTH), np.float32) * computes
        self._stalled = ""  # the instruction that has stalled it
        keys = [one.key for one in config.camera.each if not one.info]
        images = tuple(ImageFeature(key, ResizeNaive((64, 64))) for key in keys)
        points = tuple((keys[0], one.key) for one in config.camera.each if one.info)
        parts = parse_components(" + ".join(config.features.action) or "arm.tip_delta + arm.gripper", action=True)
        self._parts = tuple((part, part.size(len(ARM))) for part in parts)
        dimension = sum(size for _, size in self._parts)
        self.spec = PolicySpec(images, action=parts, dimension=dimension, horizon=horizon, points=points)

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        word, _, amount = observation.instruction.partition(" ")
        if word in _STALLS and observation.instruction != self._stalled:
            self._stalled = observation.instruction
            _STALLS[word](float(amount))
        if word == "raise":
            raise RuntimeError("the policy fails on command")
        until = time.monotonic() + self._seconds
        while self._weights.any() and time.monotonic() < until:
            self._weights @ self._weights
        time.sleep(float(amount or 0.5) if word == "late" else max(0.0, until - time.monotonic()))
        actions = np.stack([self._action(observation.stamp, step) for step in range(self.spec.horizon)])
        if word in ("carry", "meet"):
            self._set(actions, "gripper", self._closed)
            if word == "meet":
                self._set(actions, "tip_delta", _ASIDE)
                self._set(actions, "joint_position", HOME[: len(ARM)] + _TOWARDS)
        elif word == "nan":
            actions[-1, 3] = np.nan
        elif word == "infinite":
            actions[0, 0] = -np.inf
        elif word == "absurd":
            actions[0, 0] = 1e30
        elif word == "shape":
            actions = actions[:, :5]
        elif word == "empty":
            actions = actions[:0]
        return ActionChunk(actions, observation.stamp)

    def _set(self, actions: FloatArray, quantity: str, value: FloatArray) -> None:
        """Set the parts of ``actions`` [H, A] that are of this quantity."""
        start = 0
        for part, size in self._parts:
            if part.quantity == quantity:
                actions[:, start : start + size] = value
            start += size

    def _action(self, stamp: int, step: int) -> FloatArray:
        return np.concatenate(
            [self._part(part, size, [stamp % 2**63, step, index]) for index, (part, size) in enumerate(self._parts)]
        )

    def _part(self, part: Component, size: int, seed: list[int]) -> FloatArray:
        rng = np.random.default_rng(seed)
        if part.quantity == "gripper":
            return rng.random(1)
        # The direction changes once a second, so that the arm reaches the borders of its workspace.
        drift = np.random.default_rng([seed[0] // 1_000_000_000, seed[2]]).normal(size=size)
        numbers: FloatArray = (drift + 0.3 * rng.normal(size=size)) * _SPREAD[part.quantity]
        if rng.random() < _WILD:
            numbers *= 10.0 ** rng.uniform(0, 6)
        return numbers + (HOME[:size] if part.quantity == "joint_position" else 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    run.add_arguments(parser)
    parser.add_argument("--horizon", type=int, default=1, help="steps per chunk")
    parser.add_argument("--seconds", type=float, default=0.0, help="duration of an inference")
    parser.add_argument("--computes", action="store_true", help="keep a processor during an inference")
    arguments = parser.parse_args()
    config = load(arguments.config, arguments.param)
    remote = config.policy.name == "remote"
    plan = arguments.horizon, arguments.seconds
    policy = create(config) if remote else WildPolicy(config, *plan, computes=arguments.computes)
    ros_args = ["--ros-args", *arguments.ros_args] if arguments.ros_args else []
    return run.serve(config, ros_args, stats=arguments.stats, source=PolicySource(policy))


if __name__ == "__main__":
    sys.exit(main())
