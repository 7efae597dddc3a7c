"""Runs one row of the table: arms, injects at random moments, looks what follows, and lets the judge decide."""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_ros.config import load
from vla_ros.faults.judge import GRACE, Judge, Permission, Violation
from vla_ros.faults.processes import NodeProcess, RobotProcess, wait_until
from vla_ros.faults.records import Record
from vla_ros.faults.rows import OPTIONS, Reaction, Row
from vla_ros.stepper import make_kinematics

_PATIENCE = 30.0  # s; for what must come, on a machine with other work
_GUESS = 1 / 30  # s; the node's guess of a step's time where control.rate_hz is 0


@dataclass
class Injection:
    """One fault: when it began and ended, on the steady clock."""

    begin: float
    end: float = 0.0


@dataclass
class Outcome:
    """What one row came to.

    Attributes:
        row: Which one.
        seed: From which everything random came.
        injections: How many, and when.
        violations: What did not hold, with seconds since the row began.
        motions: Motions that the robot received.
        seconds: How long it took.
    """

    row: Row
    seed: int
    injections: list[Injection] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    motions: int = 0
    seconds: float = 0.0


class Director:
    """Runs one row.

    Args:
        row: Which.
        seed: Of everything random.
        domain: DDS domain of its processes.
    """

    def __init__(self, row: Row, seed: int, domain: int) -> None:
        self._row, self._domain = row, domain
        self._rng = random.Random(seed)
        self._outcome = Outcome(row, seed)
        self._records: list[Record] = []
        self._frames: set[int] = set()
        self._motions: list[float] = []  # when they came
        self._status: dict[str, Any] = {}
        self._permissions: list[Permission] = []
        self._lock = threading.Lock()
        self._seed = seed
        self._options = dict(OPTIONS) | dict(row.options)

    def run(self, repeat: int) -> Outcome:
        """Inject ``repeat`` times.

        Returns:
            With every violation; none is raised.
        """
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="vla_ros_faults_") as folder:
            self._folder = Path(folder)
            if self._row.node == ("DISK_FULL",):
                self._options["node.trace"] = str(self._folder / "trace.jsonl")
            self._start_robot()
            self._start_node()
            try:
                self._arm()
                for _ in range(repeat):
                    if not self._once():
                        break
                time.sleep(1.1)  # the last status
            except TimeoutError as error:
                self._complain(str(error))
            finally:
                status = self._node.end()
                self._robot.close()
            if status != 0:
                self._complain(f"exit: the node ended with status {status}; {self._last_words()}")
        self._judge()
        self._outcome.seconds = time.monotonic() - began
        return self._outcome

    # Processes

    def _start_robot(self) -> None:
        words = ["--seed", str(self._rng.randrange(2**31)), *(["--simulated"] if self._row.simulated else [])]
        self._robot = RobotProcess(self._domain, words, self._take, self._row.lease)

    def _start_node(self) -> None:
        words = ["--horizon", str(self._row.horizon), "--think", str(self._row.think)]
        words += ["--ros-args", "-p", "use_sim_time:=true"] if self._row.simulated else []
        self._status = {}
        self._node = NodeProcess(self._domain, self._folder / "log", self._options, words, self._row.lease)

    def _take(self, record: Record) -> None:
        with self._lock:
            self._records.append(record)
            if record.kind == "frame":
                self._frames.add(record.stamp)
            elif record.kind == "command" and record.stamp in self._frames:
                self._motions.append(record.time)
            elif record.kind == "status":
                self._status = json.loads(record.text)

    # A person

    def _arm(self) -> None:
        """Arm once the node has all it needs, and wait for the first motion."""
        self._wait(lambda: self._status.get("state") == "disarmed" and not self._status["holds"], "readiness")
        self._watch(self._rng.uniform(0.05, 0.15))
        self._press()

    def _press(self) -> None:
        self._allow()
        self._node.signal("SIGUSR1")
        self._wait_for_motion("motion after arming")

    def _reset(self) -> None:
        self._node.signal("SIGHUP")
        self._wait(lambda: self._status.get("state") == "disarmed", "the reset")

    def _allow(self) -> None:
        self._permissions.append(Permission(time.monotonic(), True))

    def _forbid(self, when: float, grace: float, why: str) -> None:
        self._permissions.append(Permission(when, False, grace, why))

    # One injection

    def _once(self) -> bool:
        row = self._row
        self._watch(self._rng.uniform(0.05, 0.35))
        if row.fresh and self._outcome.injections:
            self._restart_node()
        injection = Injection(time.monotonic())
        self._outcome.injections.append(injection)
        if row.reaction is not Reaction.GOES_ON:
            self._forbid(injection.begin, row.within + row.lag + GRACE, row.name)
        for order in row.begin:
            self._robot.order(**order)
        for process, names in ((self._node, row.node), (self._robot, row.robot)):
            if names:
                process.signal(names[0])
        lasts = self._rng.uniform(*row.lasts)
        if row.reaction is Reaction.GOES_ON:
            self._goes_on(lasts)
        else:
            self._watch(lasts)
        injection.end = time.monotonic()
        return self._recover()

    def _goes_on(self, lasts: float) -> None:
        """Motions of frames that came within the fault."""
        began, before = time.monotonic(), len(self._motions)
        self._watch(lasts)
        self._wait(lambda: len(self._motions) >= before + 3, f"motions within the fault, since {began:.1f}")

    def _recover(self) -> bool:
        row = self._row
        if row.reaction is Reaction.HOLDS:
            self._allow()
        if row.robot == ("SIGKILL",):
            self._robot.close()
            self._start_robot()
        for process, names in ((self._node, row.node), (self._robot, row.robot)):
            if len(names) > 1:
                process.signal(names[1])
        for order in row.end:
            self._robot.order(**order)
        if row.reaction is Reaction.STOPS:
            self._wait(lambda: self._status.get("state") == "stopped", "the stop")
            self._watch(self._rng.uniform(0.05, 0.2))
            self._node.signal("SIGUSR1")  # to arm without a reset is refused
            self._watch(self._rng.uniform(0.1, 0.2))
            self._reset()
            self._watch(0.1)
        elif row.reaction is Reaction.ENDS:
            self._restart_node()
            return self._node.alive
        if row.reaction in (Reaction.STOPS, Reaction.DISARMED):
            self._wait(lambda: not self._status["holds"], "readiness")
            self._press()
        self._wait_for_motion("motion after the fault")
        return self._node.alive

    def _restart_node(self) -> None:
        self._forbid(time.monotonic(), GRACE, "the node ended")
        if self._node.alive:
            self._node.end()
        self._start_node()
        self._arm()

    def _watch(self, seconds: float) -> None:
        time.sleep(seconds)

    def _wait_for_motion(self, what: str) -> None:
        before = time.monotonic()
        self._wait(lambda: bool(self._motions) and self._motions[-1] > before, what)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        def asked() -> bool:
            with self._lock:
                return ready()

        if not wait_until(asked, _PATIENCE):
            raise TimeoutError(
                f"recovery: no {what} within {_PATIENCE:g} s; the node says: {self._status.get('explanation')}; "
                f"{self._last_words()}"
            )

    # Afterwards

    def _judge(self) -> None:
        row = self._row
        config = load((), [f"{name}:={value}" for name, value in self._options.items() if name != "node.trace"])
        kinematics = make_kinematics(config)
        assert kinematics is not None
        rate = config.control.rate_hz
        judge = Judge(
            config,
            kinematics,
            1 / rate if rate else _GUESS,
            lag=row.lag,
            steps=row.horizon,
            simulated=row.simulated,
        )
        self._outcome.motions = len(self._motions)
        for violation in judge.check(self._records, self._permissions):
            self._complain_at(violation)
        for number, injection in enumerate(self._outcome.injections):
            following = self._outcome.injections[number + 1 :]
            self._named(number, injection, following[0].begin if following else injection.end + 2)
        if row.simulated:
            self._nothing_from_before_a_jump()

    def _named(self, number: int, injection: Injection, until: float) -> None:
        """Whether the node named one of the row's reasons: in force, or counted more often than before."""
        if not self._row.reasons or not injection.end:
            return
        statuses = [record for record in self._records if record.kind == "status"]
        before: Mapping[str, Any] = {}
        for record in statuses:
            words = json.loads(record.text)
            if record.time < injection.begin:
                before = words["counters"]
            elif record.time <= until and any(
                reason in words["holds"]
                or reason == words["stopped_by"]
                or words["counters"].get(reason, 0) > before.get(reason, 0)
                for reason in self._row.reasons
            ):
                return
        self._complain(f"reason: injection {number} was not named as any of {list(self._row.reasons)}")

    def _nothing_from_before_a_jump(self) -> None:
        sent = {record.stamp: record.time for record in self._records if record.kind == "frame"}
        for record in self._records:
            if record.kind != "command" or record.stamp not in sent:
                continue
            for injection in self._outcome.injections:
                if sent[record.stamp] < injection.begin < record.time - self._row.within - GRACE:
                    self._complain_at(
                        Violation("jump", record.time, "a motion of a frame from before the clock jumped")
                    )

    def _complain_at(self, violation: Violation) -> None:
        began = self._records[0].time
        self._complain(f"{violation.name}: at {violation.time - began:.3f} s, {violation.detail}")

    def _complain(self, text: str) -> None:
        self._outcome.violations.append(text)

    def _last_words(self) -> str:
        lines = (self._folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        return "log: " + " | ".join(lines[-3:])
