"""Injects what keeps a node from ending a motion, and measures when its guard does, at the driver.

    python benchmarks/guard.py --injections 1000 --seed 1 --json guard.json   # resumes where the file ends
    python benchmarks/guard.py --normal 1800 --jobs 4 --json guard.json   # seconds of each kind; resumes, too
    python benchmarks/guard.py --frames 10000000        # damaged frames, none of which may be accepted
    python benchmarks/guard.py --commands 1000000 --jobs 4   # legal ones, on a clock of their own: none is rejected
    python benchmarks/guard.py --rate-hz 250 --seconds 600 --busy 2   # commands that are missing, on a busy machine
    python benchmarks/guard.py --hours 1 --rounds 0 --json hour.json   # beside an inference; behind
        # ``setpriv --bounding-set -sys_nice``, root has no real-time priority either
    python benchmarks/guard.py --backend rclpy ...      # with the ROS 2 that is sourced, over RMW_IMPLEMENTATION

Node, guard and robot are processes of their own; everything is judged from what a listener at the driver's topic
received, by the middleware's source timestamps. While a velocity, a twist or a position plan is in force, the node
is killed, suspended or starved, its interpreter lock is kept, its address space or all its memory used up, its
graph thread blocked, its control thread in an endless loop or in a call that does not return; or the memory of a
cgroup of node and guard runs out, and the kernel ends one of them (where cgroups are permitted). In half of the
others, a stop is pressed meanwhile; then nothing may move until a person has reset the node.

A violation is a velocity without a successor, or a position plan of a dead or silent node without a hold, 20 ms
after its end; where the guard may not use SCHED_FIFO, plus the lateness of a bare timer process. The added
latency is that from a frame to its command, with a guard and without.
"""

import argparse
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from tools.faults.messages import stamp_of
from tools.faults.processes import (
    DOMAINS,
    MemoryGroup,
    environment,
    reserved,
    wait_until,
)
from tools.faults.records import Record
from tools.faults.rig import Rig
from tools.faults.setups import AHEAD, FINE, SERVO, VELOCITY
from vla_ros.errors import VlaRosError
from vla_ros.graph import open_graph
from vla_ros.graph.origin import Origin
from vla_ros.guard.channel import socket_pair
from vla_ros.guard.frames import DamagedError, GuardFrame, Kind, packet_of

ENDS_WITHIN = 0.02
"""Seconds after the end of a motion within which it must have ended at the driver."""

STOPS_WITHIN = 0.06  # s from sending the stop to the last motion: two ways through the middleware, and the hold
_LIFETIME = 0.2  # s; two periods of 10 Hz
_INFERENCE = 0.3  # s; timeouts.inference of the rig; a rest lasts 1 s longer, and is announced every 0.1 s
_RESTS = {"velocity": 2.5, "twist": 2.5, "positions": _INFERENCE + 1.0}
_BEGINS = 0.3  # s after which a fault that the policy causes has begun
_KILLED = 0.1  # s from the end of the node to the hold
_SILENT = {"killed": 0.0, "oom": 0.0, "suspended": 0.0, "lock": _BEGINS, "endless": _BEGINS, "never": _BEGINS}
"""Faults that silence the control thread, and after how many seconds."""
_GUARD_ENDS = 1.5  # s after its node
_WATCHED = 1.0  # s after the node has come back
_POSITIONS = {"options": {"control.rate_hz": "10.0", "control.schedule": "sync"}}
PLANS: dict[str, dict[str, Any]] = {"velocity": dict(VELOCITY), "twist": dict(SERVO), "positions": _POSITIONS}
WORDS = ("lock", "graph", "endless", "never", "memory", "full")
ENDS = ("killed", "oom")  # of the node
KINDS = ("killed", "suspended", "starved", *WORDS, *(("oom",) if MemoryGroup.is_permitted() else ()))
_CHUNK = ("--horizon", "8", "--seconds", "0.05")
_TOPIC = "/arm/joint_command"
_MEMORY = 64 << 20  # bytes, more than what the processes have
_SLICE = 10.0  # s between records of normal work
_PER_RIG = 12  # injections with one node


class Timer:
    """A bare process that wakes every 5 ms; :attr:`late` is its largest lateness in seconds since it was set."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "timer"], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.late = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.late = max(self.late, float(line))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(5)


def tick() -> None:
    due = time.monotonic()
    while True:
        due += 0.005
        time.sleep(max(0.0, due - time.monotonic()))
        late = time.monotonic() - due
        if late > 0.001:
            print(late, flush=True)
            due = time.monotonic()


def burn(count: int) -> list[subprocess.Popen[bytes]]:
    """Start processes that do nothing but keep a processor busy."""
    return [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]


def inject(rig: Rig, kind: str, seconds: float) -> float:
    """Cause a fault that lasts some seconds; return when it begins."""
    if kind in WORDS:
        rig.order(do="instruct", text=f"{kind} {seconds:.3f}")
        time.sleep(0.6)  # the plan that follows is in force
        return time.monotonic()
    if kind == "oom":
        return run_out_of_memory(rig)
    if kind == "starved":
        hogs = burn(2 * len(os.sched_getaffinity(0)))
        for task in Path(f"/proc/{rig.node.process.pid}/task").iterdir():
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))

        def end() -> None:
            for hog in hogs:
                hog.kill()
                hog.wait(5)
            for task in Path(f"/proc/{rig.node.process.pid}/task").iterdir():
                os.sched_setscheduler(int(task.name), os.SCHED_OTHER, os.sched_param(0))

        threading.Timer(seconds, end).start()
        return time.monotonic()
    rig.node.signal({"killed": "SIGKILL", "suspended": "SIGSTOP"}[kind])
    began = time.monotonic()
    if kind == "suspended":
        threading.Timer(seconds, rig.node.signal, ["SIGCONT"]).start()
    return began


def run_out_of_memory(rig: Rig) -> float:
    """Let node and guard start in a cgroup, whose memory the policy takes; return when the kernel ended the node.

    Raises VlaRosError if it has not, or not only the node.
    """
    rig.node.end()
    group = MemoryGroup(str(rig.node.process.pid))
    with group.entered():
        rig.start_node()
    rig.ready()
    rig.arm()
    rig.forget()
    group.limit(_MEMORY)
    rig.order(do="instruct", text="oom 20")
    ended, ends = wait_until(lambda: not rig.node.alive, 20.0, 0.001), time.monotonic()
    killed = group.close(5.0)
    if not ended or killed != 1:
        raise VlaRosError(f"the node has ended: {ended}; the kernel killed {killed} processes, expected 1")
    return ends


@dataclass(frozen=True)
class Heard:
    """A command at the driver: when it was sent, seconds of the steady clock, and whether it moves the arm."""

    sent: float
    moves: bool


class Listener:
    """Hears every command on a topic, however late it reads; the robot's driver keeps only the newest."""

    def __init__(self, domain: int, backend: str, plan: str) -> None:
        os.environ.update(environment(domain, 0.0))
        self._graph = open_graph(backend)
        node = self._graph.create_node("listener")
        kind = "geometry_msgs/msg/TwistStamped" if plan == "twist" else "sensor_msgs/msg/JointState"
        self._kind, self._plan, self.heard = self._graph.message(kind), plan, list[Heard]()
        self._graph.subscribe_raw(node, self._kind, _TOPIC, self._hear, self._graph.qos("request"))
        self._ended = False
        self._thread = threading.Thread(target=self._graph.spin, args=(lambda: self._ended, 0.05))
        self._thread.start()

    def _hear(self, cdr: Any, origin: Origin) -> None:
        sent = time.monotonic() - (time.time_ns() - origin.published) / 1e9
        self.heard.append(Heard(sent, self._moves(self._graph.deserialize(cdr, self._kind))))

    def _moves(self, message: Any) -> bool:
        """Return True if the command moves the arm: other velocities than zero, or the odd stamp of a frame."""
        if self._plan == "positions":
            return bool(stamp_of(message) % 2)
        if self._plan == "velocity":
            return any(message.velocity)
        parts = message.twist.linear, message.twist.angular
        return any(value for part in parts for value in (part.x, part.y, part.z))

    def close(self) -> None:
        self._ended = True
        self._thread.join(5)
        self._graph.close()


def _ends(plan: str, kind: str, since: float, seconds: float) -> float:
    """Return for how long a position may be in force that was sent ``since`` seconds before a fault.

    A node that is back within ``seconds``, before its rest has lapsed, goes on saying that the arm rests.
    """
    if kind not in _SILENT or (kind not in ENDS and seconds < _RESTS[plan]):
        return math.inf
    return max(0.0, since + _SILENT[kind]) + (_KILLED if kind in ENDS else _RESTS[plan])


def judge(
    heard: Sequence[Heard],
    plan: str,
    fault: tuple[str, float, float],
    stopped: float | None,
    until: float,
    allowed: float,
) -> tuple[list[str], float]:
    """Return the violations of one injection, and the latest end of a motion after its own end, in seconds.

    ``fault`` is its kind, when it began, and how many seconds it lasted.
    """
    kind, began, seconds = fault
    commands = sorted(heard, key=lambda each: each.sent)
    found, slowest = list[str](), 0.0
    for command, after in zip_longest(commands, commands[1:]):
        if not command.moves or command.sent > until:
            continue
        stood = (after.sent if after else until) - command.sent
        ends = _LIFETIME if plan != "positions" else _ends(plan, kind, began - command.sent, seconds)
        slowest = max(slowest, stood - ends)
        if stood > ends + allowed:
            found.append(f"{plan} stood for {stood:.3f} s, allowed {ends:.3f} s and {1e3 * allowed:.0f} ms")
        if stopped is not None and command.sent > stopped + STOPS_WITHIN:
            found.append(f"a motion {command.sent - stopped:.3f} s after the stop")
    return found, slowest


def one(
    rig: Rig, ear: Listener, plan: str, kind: str, rng: random.Random, timer: Timer, fifo: bool
) -> dict[str, Any]:
    """Inject one fault into a moving arm, and bring it back to motion."""
    rig.forget()
    ear.heard.clear()
    time.sleep(rng.uniform(0.3, 0.9))
    timer.late = 0.0
    seconds = rng.uniform(1.0, 4.0)
    began, stopped = inject(rig, kind, seconds), None
    time.sleep(rng.uniform(0.05, 0.5))
    if kind not in ENDS and rng.random() < 0.5:
        rig.order(do="stop")
        stopped = time.monotonic()
    lasts = 1.0 if kind in ENDS else max(seconds, _RESTS[plan] * (plan == "positions")) + _WATCHED
    time.sleep(max(0.0, began + lasts - time.monotonic()))
    until = time.monotonic() - 0.4
    allowed = ENDS_WITHIN + (0.0 if fifo else timer.late)
    if stopped is not None:  # the robot may be busy before it follows the order
        stopped = next(each.time for each in reversed(rig.records) if each.kind == "mark" and "stop" in each.name)
    found, slowest = judge(list(ear.heard), plan, (kind, began, seconds), stopped, until, allowed)
    if stopped is not None and kind != "full" and rig.status.get("state") != "stopped":
        rig.wait(lambda: rig.status.get("state") == "stopped", "stop")
    bring_back(rig, kind)
    return {
        "plan": plan,
        "kind": kind,
        "seconds": round(seconds, 2),
        "stop": stopped is not None,
        "violations": found,
        "late_ms": round(1e3 * slowest, 2),
        "timer_ms": round(1e3 * timer.late, 2),
    }


def bring_back(rig: Rig, kind: str) -> None:
    """Start a node that has died, reset one that was stopped, and arm it; one without memory has to be replaced.

    Fast DDS may repeat a stop that the node missed three seconds later, so that it has to be reset once more.
    """
    rig.order(do="instruct", text="wave")  # which a node that starts gets, too
    if kind == "full" or not rig.node.alive:
        rig.node.end("SIGKILL")
        time.sleep(_GUARD_ENDS)
        rig.start_node()
        rig.ready()
    began, deadline = time.monotonic(), time.monotonic() + 100.0
    while not (rig.motions and rig.motions[-1].time > began):
        state = rig.status.get("state")
        if state in ("stopped", "disarmed"):
            rig.node.signal("SIGHUP" if state == "stopped" else "SIGUSR1")
        time.sleep(0.5)
        if time.monotonic() > deadline:
            raise VlaRosError(f"no motion after {kind}; the node says: {rig.status.get('explanation')}")


def has_fifo(rig: Rig) -> bool:
    """Return True if the guard of the rig's node was permitted to use SCHED_FIFO."""
    return "SCHED_FIFO" not in rig.log.read_text(encoding="utf-8", errors="replace")


def domains(seed: int) -> SimpleQueue[int]:
    """Return the DDS domains for runs that discover only each other, in random order."""
    free = SimpleQueue[int]()
    for domain in random.Random(seed).sample(DOMAINS, len(DOMAINS)):
        free.put(domain)
    return free


def run(
    count: int, seed: int, done: list[dict[str, Any]], backend: str, kinds: Sequence[str] = KINDS
) -> Iterator[list[dict[str, Any]]]:
    """Inject until there are ``count`` results; yield all results after each."""
    timer = Timer()
    try:
        while len(done) < count:
            number = len(done)
            rng, plan = random.Random(f"{seed} {number}"), list(PLANS)[number // _PER_RIG % len(PLANS)]
            own = PLANS[plan]
            options = {**own["options"], "guard.process": "true", "node.backend": backend}
            words = (*own.get("robot_words", ()), "--backend", backend)
            with (
                reserved(domains(seed)) as domain,
                Rig(domain, options, _CHUNK, words) as rig,
                ExitStack() as stack,
            ):
                rig.ready()
                rig.arm()
                fifo, ear = has_fifo(rig), Listener(domain, backend, plan)
                stack.callback(ear.close)
                for _ in range(min(_PER_RIG, count - number)):
                    kind = kinds[len(done) % len(kinds)]
                    try:
                        done.append({**one(rig, ear, plan, kind, rng, timer, fifo), "fifo": fifo})
                    except Exception as error:
                        done.append({"plan": plan, "kind": kind, "violations": [f"{error}"], "late_ms": 0.0})
                        yield done
                        break
                    yield done
    finally:
        timer.close()


def latencies(seconds: float, guard: bool, backend: str, seed: int) -> tuple[list[float], bool]:
    """Return the times from sending a frame to sending its command in milliseconds, and :func:`has_fifo`."""
    options = {"guard.process": str(guard).lower(), "node.backend": backend}
    with reserved(domains(seed)) as domain, Rig(domain, options, (), ("--backend", backend)) as rig:
        rig.ready()
        rig.arm()
        time.sleep(1.0)
        rig.forget()
        time.sleep(seconds)
        return since_frames(list(rig.records)), has_fifo(rig)


def since_frames(records: Sequence[Record]) -> list[float]:
    """Return the times from sending a frame to sending its command in milliseconds."""
    sent = {record.stamp: record.time for record in records if record.kind == "frame"}
    commands = [record for record in records if record.kind == "command" and record.stamp in sent]
    return [1e3 * (command.time - command.delay - sent[command.stamp]) for command in commands]


def over_hours(hours: float, backend: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield, every minute, histograms over all time beside an inference that computes for 20 of 33 ms.

    Of the guard's period, and of the time from a frame to its command. Each has the upper limit of a bin in
    microseconds and how many there were.
    """
    options, until = {"guard.process": "true", "node.backend": backend}, time.monotonic() + 3600 * hours
    words, times, began = ("--seconds", "0.02", "--computes"), list[float](), time.monotonic()
    with reserved(domains(seed)) as domain, Rig(domain, options, words, ("--backend", backend)) as rig:
        rig.ready()
        rig.arm()
        time.sleep(1.0)
        before = Counter(rig.status["guard"]["periods"])
        rig.forget()
        while time.monotonic() < until:
            time.sleep(min(60.0, max(0.0, until - time.monotonic())))
            records = list(rig.records)
            rig.forget()
            times += since_frames(records)
            periods = Counter(rig.status["guard"]["periods"]) - before
            latencies = Counter(str(int(4 * math.log2(1 + 1e3 * each))) for each in times)
            quantiles = np.percentile(times, [50, 99, 99.9, 100]).round(3).tolist()
            yield {
                "minutes": round((time.monotonic() - began) / 60, 1),
                "fifo": has_fifo(rig),
                "state": rig.status["state"],
                "guard": dict(rig.status["guard"]["counts"]),
                "frame_to_command_ms": dict(zip(("p50", "p99", "p99.9", "longest"), quantiles, strict=True)),
                "frame_to_command_us": bins(latencies),
                "period_us": bins(periods),
            }


def bins(counts: Mapping[str, int]) -> dict[int, int]:
    """Return how many there were below each limit, from counts by four times the limit's binary logarithm."""
    return {round(2 ** ((number + 1) / 4)): counts[str(number)] for number in sorted(map(int, counts))}


def added(rounds: int, backend: str, seed: int) -> dict[str, Any]:
    """Return the latency that a guard adds, from alternating runs."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds):
        guard = bool(number % 2)
        some, fifo = latencies(15.0, guard, backend, seed + number)
        times[guard] += some
    without, with_one = (np.percentile(times[guard], [50, 99]) for guard in (False, True))
    return {
        "commands": {"without": len(times[False]), "with": len(times[True])},
        "fifo": fifo,
        "p50_ms": {"without": round(without[0], 3), "with": round(with_one[0], 3)},
        "p99_ms": {"without": round(without[1], 3), "with": round(with_one[1], 3)},
        "p50_added_ms": round(with_one[0] - without[0], 3),
        "p99_added_ms": round(with_one[1] - without[1], 3),
    }


def misses(given: argparse.Namespace, guard: bool) -> dict[str, Any]:
    """Return how many commands of a plan, ``rate_hz`` a second, did not come, beside ``busy`` processes."""
    seconds, rate, backend = given.seconds, given.rate_hz, given.backend
    options = {**FINE["options"], "control.command_rate_hz": str(rate)}
    options |= {"guard.process": str(guard).lower(), "node.backend": backend}
    chunk, words = ["--horizon", "8", "--seconds", str(FINE["seconds"])], ("--backend", backend)
    chunk += ["--computes"] * given.computes
    hogs = burn(given.busy)
    try:
        with reserved(domains(given.seed)) as domain, Rig(domain, options, tuple(chunk), words) as rig:
            rig.ready()
            rig.arm()
            time.sleep(2.0)
            rig.forget()
            time.sleep(seconds)
            records, slowest = list(rig.records), rig.status.get("guard", {}).get("slowest_ms")
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait(5)
    frames = {record.stamp for record in records if record.kind == "frame"}
    commands = [record for record in records if record.kind == "command"]
    commands.sort(key=lambda record: record.time - record.delay)
    gaps = np.array(
        [
            second.time - second.delay - first.time + first.delay
            for first, second in itertools.pairwise(commands)
            if first.stamp in frames and second.stamp in frames  # neither is a hold
        ]
    )
    return {
        "seconds": seconds,
        "commands": len(commands),
        "missed": int(np.maximum(np.round(gaps * rate) - 1, 0).sum()),
        "longest_gap_ms": round(1e3 * float(gaps.max()), 2),
        "p99_gap_ms": round(1e3 * float(np.percentile(gaps, 99)), 2),
        "holds": sum(record.stamp not in frames for record in commands),
        "slowest_period_ms": slowest,
    }


NORMAL: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "sync": ({}, ()),
    "ask-ahead": (dict(AHEAD), ()),
    "commands at 250 Hz": (dict(FINE), ()),
    "inference of 2 s": ({"options": {"timeouts.inference": "4.0"}, "seconds": 2.0}, ()),
    "an arm that sags": ({}, ({"do": "arm", "kind": "sags"},)),
    "an arm that lags": ({}, ({"do": "arm", "kind": "lags"},)),
    "twist at 5 Hz": ({**SERVO, "options": {**SERVO["options"], "control.rate_hz": "5.0"}}, ()),
    "joint states with jitter": ({}, ({"do": "joints", "kind": "jitter", "amount": 0.015},)),
    "joint states that are late and reordered": ({}, ({"do": "joints", "kind": "reorder", "amount": 4},)),
}
"""Normal work: what the node and the policy are set up with, and orders of the robot."""


@dataclass
class Worked:
    """What became of one kind of normal work, over all runs that add up."""

    seconds: float = 0.0
    sent: int = 0
    other: dict[str, int] = field(default_factory=dict)  # what else the guard did, by name
    node: str = ""  # its state

    def add(self, seconds: float, counts: Mapping[str, int], node: str) -> "Worked":
        """Return this with another run."""
        other = Counter(self.other) + Counter(counts)
        sent = self.sent + other.pop("sent", 0)
        return Worked(round(self.seconds + seconds, 1), sent, dict(other), node)


def work(
    kind: str, wanted: float, found: dict[str, Worked], free: SimpleQueue[int], backend: str, end: threading.Event
) -> None:
    """Let one kind of normal work go on until there are ``wanted`` seconds of it, and record it in ``found``."""
    before, (own, orders) = found.setdefault(kind, Worked()), NORMAL[kind]
    options = {**own.get("options", {}), "guard.process": "true", "node.backend": backend}
    chunk = "--horizon", str(own.get("horizon", 1)), "--seconds", str(own.get("seconds", 0.0))
    words = (*own.get("robot_words", ()), "--backend", backend)
    with reserved(free) as domain, Rig(domain, options, chunk, words) as rig:
        rig.ready()
        rig.arm()
        for order in orders:
            rig.order(**order)
        time.sleep(1.0)
        first, began = Counter(rig.status["guard"]["counts"]), time.monotonic()
        while found[kind].seconds < wanted and not end.wait(min(_SLICE, wanted - found[kind].seconds)):
            counts = Counter(rig.status["guard"]["counts"]) - first
            found[kind] = before.add(time.monotonic() - began, counts, rig.status["state"])
            rig.forget()


def work_all(
    wanted: float, limit: float, jobs: int, done: Mapping[str, Any], backend: str, seed: int
) -> Iterator[dict[str, Any]]:
    """Let every kind of normal work go on, ``jobs`` at a time; yield what became of all, until all has ended.

    It adds to what is ``done``, and ends after ``limit`` seconds.
    """
    found, free, until = (
        {kind: Worked(**each) for kind, each in done.items()},
        domains(seed),
        time.monotonic() + limit,
    )
    end = threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        missing = [kind for kind in NORMAL if kind not in found or found[kind].seconds < wanted]
        running = {pool.submit(work, kind, wanted, found, free, backend, end) for kind in missing}
        try:
            while running and not end.is_set():
                finished, running = wait(running, timeout=_SLICE)
                for each in finished:
                    each.result()
                yield {kind: asdict(each) for kind, each in found.items()}
                if time.monotonic() > until:
                    break
        finally:
            end.set()


_PER_CELL = 300  # commands of one robot with one policy


def propose(count: int, limit: float, seed: int, jobs: int) -> dict[str, Any]:
    """Let nodes propose ``count`` legal commands to guards (test/guard/cell.py); count what became of them.

    It ends after ``limit`` seconds, if there are fewer then.
    """
    folder = Path(__file__).parents[1] / "test"
    sys.path.extend(str(folder / part) for part in ("guard", "control"))
    from cell import legal

    proposed, counts, stopped, began = 0, Counter[str](), dict[int, str](), time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        seeds = itertools.count(seed * 10_000_000)
        running = {pool.submit(legal, each, _PER_CELL): each for each in itertools.islice(seeds, 2 * jobs)}
        while running:
            for done in wait(running, return_when=FIRST_COMPLETED)[0]:
                cell = running.pop(done)
                made, counted, why = done.result()
                proposed, counts = proposed + made, counts + counted
                stopped |= {cell: why} if why else {}
                if proposed < count and time.monotonic() - began < limit:
                    more = next(seeds)
                    running[pool.submit(legal, more, _PER_CELL)] = more
    rejected = sum(number for name, number in counts.items() if name.startswith("rejected"))
    seconds = round(time.monotonic() - began, 1)
    return {"commands": proposed, "rejected": rejected, "counts": counts, "stopped": stopped, "seconds": seconds}


def damage(count: int, seed: int) -> dict[str, Any]:
    """Let ``count`` damaged, repeated, reordered and cut frames arrive among good ones; count what is accepted."""
    rng, (sender, reader), counter, accepted = np.random.default_rng(seed), socket_pair(), 0, 0
    good = old = b""
    for number in range(count):
        if number % 64 == 0:
            counter += 2
            old, good = good, packet_of(GuardFrame(Kind.POSITIONS, counter, number, values=rng.normal(size=8)))
            assert isinstance(reader.read(good), GuardFrame)
        how, packet = int(rng.integers(0, 6)), bytearray(good)
        if how < 3:
            for bit in rng.integers(0, 8 * len(packet), how * 2 + 1).tolist():
                packet[bit // 8] ^= 1 << bit % 8
        elif how == 3:
            packet = packet[: int(rng.integers(0, len(packet)))]
        else:
            packet = bytearray(good if how == 4 or not old else old)
        accepted += not isinstance(reader.read(bytes(packet)), DamagedError)
    sender.close()
    reader.close()
    return {"frames": count, "accepted": accepted, "crc32": zlib.crc32(good)}


def main() -> int:
    if sys.argv[1:2] == ["timer"]:
        tick()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=0, metavar="N")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of injections")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2, help="pairs of runs that measure the added latency")
    parser.add_argument("--normal", type=float, default=0.0, metavar="SECONDS", help="of each kind of normal work")
    parser.add_argument("--frames", type=int, default=0, metavar="N", help="damaged frames")
    parser.add_argument("--rate-hz", type=float, default=0.0, help="of commands, of which none may be missing")
    parser.add_argument("--seconds", type=float, default=600.0, help="for --rate-hz, without and with a guard")
    parser.add_argument("--computes", action="store_true", help="let the policy keep a processor beside --rate-hz")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy processes beside --rate-hz")
    parser.add_argument("--hours", type=float, default=0.0, help="histograms beside an inference")
    parser.add_argument("--commands", type=int, default=0, metavar="N", help="legal commands")
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS", help="for --commands and --normal"
    )
    parser.add_argument("--jobs", type=int, default=1, help="at a time, of --commands and --normal")
    parser.add_argument("--backend", choices=("dds", "rclpy"), default="dds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report: dict[str, Any] = {"seed": given.seed, "backend": given.backend, "results": []}
    if given.json and given.json.exists():
        report = json.loads(given.json.read_text())
    normal = report.get("normal", {})
    runs = work_all(given.normal, given.limit, given.jobs, normal, given.backend, given.seed)
    for report["normal"] in runs if given.normal else ():
        write(given.json, report)
    if given.rate_hz:
        report["rate"] = {name: misses(given, guard) for name, guard in (("without", False), ("with", True))}
        write(given.json, report)
    for report["hours"] in over_hours(given.hours, given.backend, given.seed) if given.hours else ():
        write(given.json, report)
    if given.commands:
        report["legal"] = propose(given.commands, given.limit, given.seed, given.jobs)
        write(given.json, report)
    if given.frames:
        report["damaged"] = damage(given.frames, given.seed)
    for results in run(given.injections, given.seed, report["results"], given.backend, given.kinds):
        report |= summary(results)
        print(len(results), results[-1], flush=True)
        write(given.json, report)
    if given.rounds:
        report |= added(given.rounds, given.backend, given.seed)
    write(given.json, report)
    print(json.dumps({name: value for name, value in report.items() if name != "results"}, indent=1))
    return int(bool(report.get("violations")))


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "injections": len(results),
        "violations": sum(len(each["violations"]) for each in results),
        "slowest_ms": max((each["late_ms"] for each in results), default=0.0),
        "stops": sum(bool(each.get("stop")) for each in results),
    }


def write(file: Path | None, report: dict[str, Any]) -> None:
    if file:
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
