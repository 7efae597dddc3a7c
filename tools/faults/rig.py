"""Runs the node and the robot together: arms, gives orders, waits, and collects the robot's records."""

import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tools.faults import descriptions
from tools.faults.driver import HOME
from tools.faults.processes import LaunchedNode, NodeProcess, RobotProcess, ServerProcess, wait_until
from tools.faults.records import Record
from tools.faults.setups import OPTIONS
from vla_ros.errors import VlaRosError
from vla_ros.record.bag import METADATA

PATIENCE = 30.0
"""Seconds within which an expected event must occur, on a busy machine."""
_SOME = 100_000  # bytes; more than the definitions at a bag's beginning
_STARTS = 100.0  # s; a process must start within this time


class Rig(AbstractContextManager["Rig"]):
    """A node and a robot in separate processes. A context manager that ends both on exit.

    Args:
        domain: DDS domain.
        options: Options of the node besides :data:`~tools.faults.setups.OPTIONS`.
        node_words: Further arguments of the node.
        robot_words: Arguments of the robot.
        arms: Names of the arms if there are several, each in its own process; the first has the cameras.
        lease: As in :func:`~tools.faults.processes.environment`.
        traced: Let the node write ``node.trace``.
        launched: Let a launcher start the node.
        served: Arguments of a policy server; empty for none.
        urdf: The node's description, as :func:`tools.faults.descriptions.write` writes it; "" for the demo's.

    Attributes:
        records: All messages that the robot sent and received.
        motions: The motion commands among the records, a person's as well.
        status: The last message on ``~/status``.
        marks: Number of orders that the robot has followed.
        log: File of the node's log.
        trace: File of the node's trace.
    """

    def __init__(
        self,
        domain: int,
        options: Mapping[str, str] | None = None,
        node_words: tuple[str, ...] = (),
        robot_words: tuple[str, ...] = (),
        *,
        arms: tuple[str, ...] = (),
        lease: float = 0.0,
        traced: bool = False,
        launched: bool = False,
        served: tuple[str, ...] = (),
        urdf: str = "",
    ) -> None:
        self._domain, self._lease, self._traced, self._urdf = domain, lease, traced, urdf
        self._node_class = LaunchedNode if launched else NodeProcess
        self._options = {**OPTIONS, **(options or {})}
        self._node_words, self._robot_words = node_words, robot_words
        self._arms, self._served = arms, served
        self._others: dict[str, RobotProcess] = {}
        self._successor: NodeProcess | None = None
        self._lock = threading.Lock()
        self._frames: set[int] = set()
        self._measured: set[int] = set()  # stamps of joint states
        self.records: list[Record] = []
        self.motions: list[Record] = []
        self.status: dict[str, Any] = {}
        self.marks = 0

    def __enter__(self) -> "Rig":
        self._folder = tempfile.TemporaryDirectory(prefix="vla_ros_faults_")
        self.log = Path(self._folder.name) / "log"
        self.trace = Path(self._folder.name) / "trace.jsonl"
        if self._traced:
            self._options["node.trace"] = str(self.trace)
        self._options["record.folder"] = self._folder.name
        if self._urdf:
            self._options["robot.urdf"] = str(descriptions.write(self._urdf, Path(self._folder.name)))
        if self._served:
            action = "features.action"
            more = ("-p", f"{action}:={self._options[action]}") if action in self._options else ()
            self.server = ServerProcess(self._domain, (*self._served, *more))
            self._options["policy.server"] = f"ws://127.0.0.1:{self.server.port}"
        self.start_robot()
        for arm in self._arms[1:]:
            words = [*self._robot_words, "--arm", arm, "--cameras", "0"]
            self._others[arm] = RobotProcess(self._domain, words, partial(self._take, arm=arm), self._lease)
        self.start_node()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_successor()
        self.node.end()
        if self._served:
            self.server.end("SIGKILL")
        self.robot.close()
        for other in self._others.values():
            other.close()
        self._folder.cleanup()

    def start_robot(self, *words: str) -> None:
        """Start the robot; one that follows another one stands where that one was measured last."""
        self.status = {}  # what this robot hears
        first = ("--arm", self._arms[0]) if self._arms else ()
        there = self._last_positions()
        at = ("--at", *map(str, there)) if there else ()
        self.robot = RobotProcess(self._domain, [*self._robot_words, *first, *at, *words], self._take, self._lease)

    def _last_positions(self) -> tuple[float, ...]:
        whole = (each.positions or () for each in reversed(self.records) if each.kind == "joints" and not each.arm)
        return next((each for each in whole if len(each) == len(HOME) and all(map(math.isfinite, each))), ())

    def order(self, arm: str = "", **order: Any) -> None:
        (self._others[arm] if arm else self.robot).order(**order)

    def start_node(self) -> None:
        self.status = {}
        self.node: NodeProcess = self._node_class(
            self._domain, self.log, self._options, self._node_words, self._lease
        )

    def refusal(self, urdf: str) -> tuple[int, str]:
        """Start a node with another description; return the status with which it ended, and its log."""
        log = self.log.with_name("refused")
        options = {**self._options, "robot.urdf": str(descriptions.write(urdf, log.parent))}
        node = NodeProcess(self._domain, log, options, self._node_words, self._lease)
        wait_until(lambda: not node.alive, _STARTS)
        status = node.end()
        text = log.read_text(encoding="utf-8", errors="replace")
        log.unlink()
        return status, text

    def start_successor(self) -> None:
        """Start another node for the same arm, and wait until it has claimed the command topic."""
        log = self.log.with_name("successor")
        words = ("-p", "control.armed:=true", "--ros-args", "-r", "__node:=successor")
        self._successor = NodeProcess(self._domain, log, self._options, (*self._node_words, *words), self._lease)
        self.wait(lambda: "not armed: " in log.read_text(encoding="utf-8"), "answer of the successor", _STARTS)

    def end_successor(self) -> None:
        if self._successor is not None:
            self._successor.end()
            self._successor.log.unlink()
            self._successor = None

    def ready(self) -> None:
        """Wait until the node is disarmed and has all its inputs."""

        def is_ready() -> bool:
            well = self.status.get("state") == "disarmed"
            ready = well and not self.status["holds"] and not self.status["blocks"]
            return ready or not self.node.alive

        self.wait(is_ready, "readiness", _STARTS)
        if not self.node.alive:
            raise VlaRosError(
                f"start: the node ended with {self.node.process.poll()} before it was ready; {self.last_words()}"
            )

    def arm(self) -> None:
        self.node.signal("SIGUSR1")
        self.wait_for_motion("motion after arming")

    def reset(self) -> None:
        self.node.signal("SIGHUP")
        self.wait(lambda: self.status.get("state") == "disarmed", "the reset")

    @property
    def unfinished_bags(self) -> list[Path]:
        """The recorder's bags that have messages and no metadata."""
        found = (file.parent for file in Path(self._folder.name).glob("*/*.mcap") if file.stat().st_size > _SOME)
        return [bag for bag in found if not bag.joinpath(METADATA).exists()]

    def wait_for_motion(self, what: str) -> None:
        before = time.monotonic()
        self.wait(lambda: bool(self.motions) and self.motions[-1].time > before, what)

    def wait(self, ready: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        """Wait until ``ready()`` is True; raises VlaRosError after ``patience`` seconds."""

        def asked() -> bool:
            with self._lock:
                return ready()

        if not wait_until(asked, patience):
            raise VlaRosError(
                f"recovery: no {what} within {patience:g} s; the node says: {self.status.get('explanation')}; "
                f"{self.last_words()}"
            )

    def forget(self) -> None:
        """Discard all records except the stamps of the last frames."""
        with self._lock:
            self._frames = {record.stamp for record in self.records[-50:] if record.kind == "frame"}
            self.records.clear()
            self.motions.clear()

    def said(self, text: str) -> int:
        """Return how often the node's log has ``text``."""
        return self.log.read_text(encoding="utf-8", errors="replace").count(text)

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "log: " + " | ".join(lines[-3:])

    def _is_persons(self, command: Record) -> bool:
        return "--person" in self._robot_words and command.stamp not in self._measured

    def _take(self, record: Record, arm: str = "") -> None:
        record = replace(record, arm=arm)
        with self._lock:
            self.records.append(record)
            if record.kind == "frame":
                self._frames.add(record.stamp)
            elif record.kind == "joints":
                self._measured.add(record.stamp)
            elif record.kind == "command" and (record.stamp in self._frames or self._is_persons(record)):
                self.motions.append(record)
            elif record.kind == "mark":
                self.marks += 1
            elif record.kind == "status":
                self.status = json.loads(record.text)
