"""Runs one row of the fault table: arms the node, injects faults and calls the judge."""

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tools.faults.contact import contacts
from tools.faults.judge import GRACE, Judge, Permission, Violation
from tools.faults.rig import Rig
from tools.faults.row import Reaction, Row
from tools.faults.setups import OPTIONS
from vla_ros.config import load
from vla_ros.control.reasons import Reason
from vla_ros.control.robot import make_kinematics
from vla_ros.errors import VlaRosError

_GUESS = 1 / 30  # s; duration of a step if control.rate_hz is 0
_STATUS_PERIOD = 1.0  # s
_ENDED = 5.0  # s; the node must end within this time after its launcher
_RECORDS = 240.0  # s; a recorder, which is nicer than all others, must start and repair a bag within this time
_HELD = 3.0  # s; a node that was suspended must send a hold within this time after it resumes


@dataclass
class Injection:
    """When a fault began and ended, in seconds of the steady clock."""

    begin: float
    end: float = 0.0
    signalled: float = 0.0  # after the signals that begin it; a suspended process has stopped


@dataclass
class Outcome:
    """Result of one row."""

    row: Row
    seed: int  # seed of all randomness
    injections: list[Injection] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)  # each with the time since the row began
    motions: int = 0  # motions that the robot received
    interrupted: list[float] = field(default_factory=list)  # Judge.interrupted
    seconds: float = 0.0  # duration of the row


class Director:
    """Runs one row in a DDS domain.

    ``sabotage`` contains node options that the judge does not know; ``backend`` is that of the node and the robot.
    """

    def __init__(
        self,
        row: Row,
        seed: int,
        domain: int,
        sabotage: Mapping[str, str] = MappingProxyType({}),
        backend: str = "dds",
    ) -> None:
        self._row = row
        self._rng = random.Random(seed)
        self._outcome = Outcome(row, seed)
        self._permissions: list[Permission] = []
        self._began = time.monotonic()
        self._busy = 0.0  # longest time for which the node waited for a processor during a fault
        self._log = ""
        clock = ("--ros-args", "-p", "use_sim_time:=true") if row.simulated else ()
        chunks = ("--horizon", str(row.horizon), "--seconds", str(row.seconds))
        robot = ("--backend", backend, "--seed", str(self._rng.randrange(2**31)), *row.robot_words)
        robot += ("--simulated",) if row.simulated else ()
        robot += ("--person", row.person) if row.person else ()
        self._rig = Rig(
            domain,
            {"node.backend": backend, **row.options, **sabotage},
            (*chunks, *clock),
            robot,
            lease=row.lease,
            traced=row.traced,
            launched=row.launched,
            arms=row.arms,
            served=chunks if row.server else (),
            urdf=row.urdf,
        )

    def run(self, repeat: int) -> Outcome:
        """Inject the fault ``repeat`` times and return the outcome, even if the row fails."""
        status = 0
        with self._rig as rig:
            try:
                self._arm()
                for _ in range(repeat):
                    self._once()
                time.sleep(1.1 * _STATUS_PERIOD)  # wait for the last status
                status = rig.node.end()
            except VlaRosError as error:
                self._complain(str(error))
            self._log = rig.log.read_text(encoding="utf-8", errors="replace")
            if status != 0:
                self._complain(f"exit: the node ended with status {status}; {rig.last_words()}")
        self._judge()
        self._outcome.seconds = time.monotonic() - self._began
        return self._outcome

    def write_records(self, folder: Path) -> Path:
        """Write the robot's records and the node's log; return the file with the records."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._row.name.replace(' ', '_').replace('.', '_')}_{self._outcome.seed}.jsonl"
        path.write_text("\n".join(record.line() for record in self._rig.records) + "\n", encoding="utf-8")
        path.with_suffix(".log").write_text(self._log, encoding="utf-8")
        return path

    # What a person does

    def _arm(self) -> None:
        self._rig.ready()
        self._linger(*(0.05, 0.15 + self._row.seconds))
        self._permissions.append(Permission(time.monotonic(), True, armed=True))
        self._rig.arm()
        if self._row.corrects:
            self._rig.order(do="ask", what="correct")
            self._moved_by("person")

    def _moved_by(self, who: str) -> None:
        """Wait until ``~/status`` says that ``who`` moves the arm."""
        self._rig.wait(lambda: self._rig.status.get("source") == who, f"motion by the {who}")

    def _allow(self) -> None:
        self._permissions.append(Permission(time.monotonic(), True))

    def _linger(self, shortest: float, longest: float) -> None:
        time.sleep(self._rng.uniform(shortest, longest))

    # One injection

    def _once(self) -> None:
        row, rig = self._row, self._rig
        if row.absent:
            self._start_without(row.absent)
            return
        if row.refused:
            self._start_with(row.refused)
            return
        if row.fresh and self._outcome.injections:
            self._restart_node()
        self._linger(0.05, 0.35)
        if row.recorded:
            rig.wait(lambda: bool(rig.unfinished_bags), "recording", _RECORDS)
        bags = rig.unfinished_bags
        injection = Injection(time.monotonic())
        self._outcome.injections.append(injection)
        before = len(rig.motions)
        waited, permissions = rig.node.starved, len(self._permissions)
        self._signal(0)
        injection.signalled = time.monotonic()
        size = 0
        if row.traced:
            time.sleep(0.05)  # wait for a write in progress
            size = rig.trace.stat().st_size
        marks = rig.marks
        for order in row.begin:
            rig.order(**order)
        if row.begin:
            rig.wait(lambda: rig.marks == marks + len(row.begin), "injection")
            injection.begin = next(r.time for r in reversed(rig.records) if r.kind == "mark")
        if row.successor:
            rig.start_successor()
        if row.reaction is not Reaction.GOES_ON:
            grace = row.within + row.lag + GRACE
            since = max(injection.begin, injection.signalled)  # a starved director may send its signals late
            self._permissions.append(Permission(since, False, grace, row.name))
        if row.renews:
            self._permissions.append(Permission(injection.begin, True, row.within + GRACE, renewed=True))
        if row.person and row.reaction is Reaction.STOPS:
            rig.wait(lambda: rig.status.get("state") == "stopped", "stop")
            rig.order(do="ask", what="correct")
        self._linger(*row.lasts)
        if row.person and row.reaction is Reaction.GOES_ON and not row.storms:
            self._moved_by("person")
        if row.until:
            rig.wait(lambda: self._is_named(injection.begin, float("inf")), f"{row.reasons}")
        elif row.reaction is Reaction.GOES_ON:
            rig.wait(lambda: len(rig.motions) >= before + 3, "motions within the fault")
        if row.traced and rig.trace.stat().st_size > max(size, 1):  # with the limit, an empty file can get one byte
            self._complain("disk: the recording grew on a disk that was full")
        injection.end = time.monotonic()
        # What the node could not do for lack of a processor is no fault of it.
        busy = max(0.0, rig.node.starved - waited)
        self._busy = max(self._busy, busy)
        self._permissions[permissions:] = [
            replace(each, grace=each.grace + busy) for each in self._permissions[permissions:]
        ]
        if row.recorded:
            self._check_recording(bags)
        self._recover()

    def _check_recording(self, bags: Sequence[Path]) -> None:
        """Complain if a killed recorder's ``bags`` are not repaired, or if one grows on a disk that is full."""
        if self._row.recorded == "repaired":
            self._rig.wait(lambda: not {*bags} & {*self._rig.unfinished_bags}, "repaired bag", _RECORDS)
            return
        if self._row.recorded == "removed":
            self._rig.wait(
                lambda: self._rig.said("the bag was removed or moved; ~/record") == len(self._outcome.injections),
                "word of it",
                _RECORDS,
            )
            return
        sizes = [sum(file.stat().st_size for file in bag.glob("*.mcap")) for bag in bags]
        time.sleep(0.5)  # longer than from one write to the next
        if sizes != [sum(file.stat().st_size for file in bag.glob("*.mcap")) for bag in bags]:
            self._complain("disk: the bag grew on a disk that was full")

    def _start_without(self, what: str) -> None:
        """Start and arm a node while the robot lacks ``what``, and add it later."""
        row, rig = self._row, self._rig
        rig.node.end()
        injection = Injection(time.monotonic())
        self._outcome.injections.append(injection)
        self._permissions.append(Permission(injection.begin, False, GRACE, row.name))
        rig.order(do="leave", what=what)
        rig.start_node()
        rig.wait(lambda: row.reasons[0] in rig.status.get("holds", ()), "reason")
        rig.node.signal("SIGUSR1")
        self._linger(*row.lasts)
        injection.end = time.monotonic()
        self._permissions.append(Permission(injection.end, True, armed=True))
        rig.order(do="join", what=what)
        rig.wait_for_motion("motion with all drivers")

    def _start_with(self, urdf: str) -> None:
        """Start a node with a description that it must refuse and name, and a sound one afterwards."""
        injection = Injection(time.monotonic())
        self._outcome.injections.append(injection)
        self._permissions.append(Permission(injection.begin, False, self._row.within + GRACE, self._row.name))
        self._rig.node.end()
        status, text = self._rig.refusal(urdf)
        if status == 0 or f"{urdf}.stl cannot be read" not in text:
            self._complain(f"refused: the node ended with status {status} and said: {text[-300:]}")
        injection.end = time.monotonic()
        self._rig.start_node()
        self._arm()

    def _signal(self, index: int) -> None:
        if self._row.server:
            self._rig.server.do(self._row.server[index])
        for process, names in ((self._rig.node, self._row.node), (self._rig.robot, self._row.robot)):
            if len(names) > index:
                process.signal(names[index])

    def _recover(self) -> None:
        """End the fault, do what a person does to resume motion, and wait for it."""
        row, rig = self._row, self._rig
        if row.reaction is Reaction.HOLDS:
            self._allow()
        if row.robot == ("SIGKILL",):
            rig.robot.close()
            rig.start_robot()
        self._signal(1)
        time.sleep(row.wakes)
        for order in row.end:
            rig.order(**order)
        if row.reaction is Reaction.ENDS:
            if not self._ends():
                self._complain(f"lives: the node still runs {row.lasts[0] + _ENDED:g} s after its launcher ended")
            self._restart_node()
            return
        if row.reaction is Reaction.STOPS:
            rig.wait(lambda: rig.status.get("state") == "stopped", "stop")
            self._linger(0.05, 0.2)
            rig.end_successor()
            rig.node.signal("SIGUSR1")  # arming without a reset is refused
            self._linger(0.1, 0.2)
            rig.reset()
            self._linger(0.05, 0.1)
        if row.reaction in (Reaction.STOPS, Reaction.DISARMED):
            self._arm()
        if row.person:
            self._moved_by("person" if row.corrects else "policy")
        rig.wait_for_motion("motion after the fault")
        rig.wait(lambda: bool(rig.status), "status")  # a new robot may hear it later than a command

    def _ends(self) -> bool:
        """Wait until the node has ended; what it waits for a processor meanwhile does not count."""
        node, began = self._rig.node, time.monotonic()
        before = waited = node.starved
        while node.alive:
            waited = max(waited, node.starved)
            if time.monotonic() - began > _ENDED + waited - before:
                return False
            time.sleep(0.02)
        return True

    def _restart_node(self) -> None:
        self._permissions.append(Permission(time.monotonic(), False, GRACE, "the node ended"))
        self._rig.node.end()
        self._rig.start_node()
        self._arm()

    # Afterwards

    def _judge(self) -> None:
        row, rig = self._row, self._rig
        options = {**OPTIONS, **row.options}
        config = load((), [f"{name}:={value}" for name, value in options.items()])
        kinematics = make_kinematics(config).get(config.arms[0].name)
        assert kinematics is not None
        period = 1 / config.control.rate_hz if config.control.rate_hz else _GUESS
        judge = Judge(
            config,
            kinematics,
            period,
            lag=row.lag,
            memory=row.memory,
            busy=self._busy,
            steps=row.horizon,
            simulated=row.simulated,
            pieces=row.pieces,
            person=bool(row.person),
            suspensions=[
                (injection.signalled, injection.end)
                for injection in self._outcome.injections
                if row.suspended and injection.end
            ],
        )
        self._outcome.motions = len(rig.motions)
        for arm in ("", *row.arms[1:]):
            own = [record for record in rig.records if record.arm == arm or record.kind == "frame"]
            for violation in judge.check(own, self._permissions):
                self._complain_at(violation)
        self._outcome.interrupted = judge.interrupted
        if config.collision.check:
            for violation in contacts(config, rig.records):
                self._complain_at(violation)
        injections = self._outcome.injections
        asked = [record for record in rig.records if record.kind == "answer" and record.name == "correct"]
        if row.person and row.reaction is Reaction.STOPS and not all(answer.text for answer in asked):
            self._complain("refused: a person took over a stopped arm")
        for injection, following in zip_longest(injections, injections[1:]):
            until = following.begin if following else float("inf")
            if row.reasons and injection.end and not self._is_named(injection.begin, until):
                self._complain(
                    f"reason: at {injection.begin - self._began:.3f} s, none of {list(row.reasons)} was reported"
                )
            if row.launched and injection.end:
                held = self._holds(injection.begin, injection.end)
                if held != 1:
                    self._complain(
                        f"hold: at {injection.begin - self._began:.3f} s, {held} holds were sent, expected one"
                    )
            if (
                row.suspended
                and injection.end
                and self._was_armed(injection.begin)
                and not self._holds(injection.end, min(until, injection.end + _HELD))
            ):
                self._complain(f"hold: at {injection.end - self._began:.3f} s, none within {_HELD:g} s")
        if row.simulated:
            self._nothing_from_before_a_jump()

    def _holds(self, begin: float, end: float) -> int:
        """Return the number of hold commands between two times."""
        moved = {record.stamp for record in self._rig.motions}
        return sum(
            record.kind == "command" and begin <= record.time <= end and record.stamp not in moved
            for record in self._rig.records
        )

    def _was_armed(self, time: float) -> bool:
        """Return True if ``~/status`` last said that the arm may move."""
        said = [each.text for each in self._rig.records if each.kind == "status" and each.time < time]
        return bool(said) and json.loads(said[-1])["state"] == "armed"

    def _is_named(self, begin: float, until: float) -> bool:
        """Return True if ``~/status`` showed or counted one of the row's reasons.

        A node that a busy machine starved for 0.25 s says this instead.
        """
        before: Mapping[str, Any] = {}
        for record in self._rig.records:
            if record.kind != "status" or record.time > until:
                continue
            words = json.loads(record.text)
            if record.time < begin:
                before = words["counters"]
                continue
            for reason in (*self._row.reasons, Reason.SUSPENDED.value):
                counted = words["counters"].get(reason, 0) > before.get(reason, 0)
                if counted or reason in words["holds"] or reason == words["stopped_by"]:
                    return True
        return False

    def _nothing_from_before_a_jump(self) -> None:
        sent = {record.stamp: record.time for record in self._rig.records if record.kind == "frame"}
        for motion in self._rig.motions:
            for injection in self._outcome.injections:
                if sent[motion.stamp] < injection.begin < motion.time - 2 * GRACE:
                    self._complain_at(Violation("jump", motion.time, "on a frame from before the clock jumped"))

    def _complain_at(self, violation: Violation) -> None:
        self._complain(f"{violation.name}: at {violation.time - self._began:.3f} s, {violation.detail}")

    def _complain(self, text: str) -> None:
        self._outcome.violations.append(text)
