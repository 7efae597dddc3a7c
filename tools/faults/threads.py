"""Kills threads of the node, its recorder and its policy server, and checks what docs/safety.md says of each.

    python -m tools.faults.threads --count 200

An exception is raised at a random line that a thread executes while the arm moves. Checked from outside, on what
the robot received: the reaction; that log or ``~/status`` names the error; and that every request is answered, or
the process has ended.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.faults.processes import DOMAINS, wait_until
from tools.faults.rig import Rig
from tools.faults.setups import AHEAD
from vla_ros.errors import VlaRosError

_INJECT = Path(__file__).with_name("inject")
_VARIABLE = "VLA_ROS_FAULT_THREAD"
_MOST = 10.0  # s in which a thread executes the lines before the exception
_REACTS = 1.5  # s on a busy machine
_ENDS = 20.0  # s; a process ends after its hold, and a recorder's bag
_LOGS = 5.0  # s until it is logged
_RESUMES = 20.0  # s; a policy server is started, or connected, again


@dataclass(frozen=True)
class Victim:
    """A thread, and what may happen when it fails.

    ``stops``: the arm stops with ``thread_died``, or the process ends with status 1, after a hold. ``goes on``: the
    arm moves on, perhaps after a hold.
    """

    name: str
    process: str  # a part of its command line
    thread: str
    lines: int  # so many, at most, it executes before it fails
    reactions: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    served: bool = False
    traced: bool = False


# With a space, as no quoted name of a module that the fork server imports has.
_NODE, _RECORDER, _SERVER = " tools.faults.node", "vla_ros.cli record", " tools.faults.server"
_RECORDED = {"record.what": "all"}
_REMOTE = {"policy.name": "remote"}

VICTIMS = (
    Victim("control", _NODE, "vla_control", 3000, ("stops", "goes on")),
    Victim("graph", _NODE, "MainThread", 6000, ("stops", "goes on")),
    Victim("inference", _NODE, "vla_inference", 150, ("stops", "goes on"), AHEAD["options"]),
    Victim("node to recorder", _NODE, "vla_recorder", 300, ("goes on",), _RECORDED),
    Victim("trace", _NODE, "vla_trace", 30, ("goes on",), traced=True),
    Victim("server's connection", _NODE, "vla_remote", 60, ("goes on",), _REMOTE, served=True),
    Victim("recorder, writer", _RECORDER, "vla_record", 600, ("goes on",), _RECORDED),
    Victim("recorder, graph", _RECORDER, "MainThread", 2000, ("goes on",), _RECORDED),
    Victim("server, inference", _SERVER, "vla_inference", 600, ("goes on", "holds"), _REMOTE, served=True),
    Victim("server, connections", _SERVER, "MainThread", 600, ("goes on", "holds"), _REMOTE, served=True),
)


@dataclass
class Killed:
    """One thread that was killed."""

    victim: str
    place: str = ""  # "" if the thread did not get so far
    reaction: str = ""
    wrong: list[str] = field(default_factory=list)


@contextmanager
def injected(victim: Victim, lines: int, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Let processes that start meanwhile inject; yield the file that begins it, and the one with the place."""
    start, found = folder / "start", folder / "found"
    for file in (start, found):
        file.unlink(missing_ok=True)
    before = {name: os.environ.get(name) for name in (_VARIABLE, "PYTHONPATH")}
    os.environ[_VARIABLE] = "|".join((victim.process, victim.thread, str(lines), str(start), str(found)))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_INJECT), before["PYTHONPATH"])))
    try:
        yield start, found
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def kill(victim: Victim, seed: int, domain: int, folder: Path) -> Killed:
    """Start a node and its robot, kill the thread, and judge."""
    rng, killed = random.Random(seed), Killed(victim.name)
    chunks = ("--horizon", "8", "--seconds", "0.05")
    with (
        injected(victim, rng.randint(1, victim.lines), folder) as (start, found),
        Rig(
            domain,
            {**victim.options},
            chunks,
            ("--seed", str(seed % 2**31), "--person", "joy"),
            traced=victim.traced,
            served=chunks if victim.served else (),
        ) as rig,
    ):
        try:
            _judge(victim, killed, rig, start, found)
        except VlaRosError as error:
            killed.wrong.append(str(error))
    return killed


def _judge(victim: Victim, killed: Killed, rig: Rig, start: Path, found: Path) -> None:
    rig.ready()
    rig.arm()
    if victim.process == _RECORDER:
        rig.wait(lambda: bool(rig.unfinished_bags), "recording")
    start.touch()
    if not wait_until(lambda: found.exists() and found.stat().st_size > 0, _MOST):
        return
    told: Mapping[str, Any] = json.loads(found.read_text())
    killed.place = told["place"]
    died = float(told["time"])
    ended = wait_until(lambda: not rig.node.alive or rig.status.get("state") == "stopped", _REACTS)
    killed.reaction = "stops" if ended else _goes_on(victim, rig, died)
    if killed.reaction not in victim.reactions:
        killed.wrong.append(f"the arm {killed.reaction or 'is neither moved nor held with a reason'}")
    if killed.reaction == "stops":
        _check_stop(killed, rig)
    if rig.node.alive:
        _check_answers(killed, rig)
    # What may come with every message is logged once a second. The server's log is not the node's.
    if victim.process != _SERVER and not wait_until(lambda: _is_named(rig), _LOGS):
        killed.wrong.append("silence: neither the log nor ~/status names the error")


def _is_named(rig: Rig) -> bool:
    """Return True if the log or ``~/status`` names the error."""
    log = rig.log.read_text(encoding="utf-8", errors="replace")
    return "Injected" in log or any("Injected" in each.text for each in list(rig.records) if each.kind == "status")


def _goes_on(victim: Victim, rig: Rig, died: float) -> str:
    """Wait for motions after the fault; return what the arm does."""
    if wait_until(lambda: sum(each.time > died + 0.3 for each in list(rig.motions)) >= 3, _RESUMES):
        return "goes on"
    return "holds" if rig.status.get("holds") else ""


def _check_stop(killed: Killed, rig: Rig) -> None:
    """Complain unless the arm was held, with the reason, and nothing moved it afterwards."""
    if rig.node.alive and rig.status.get("stopped_by") != "thread_died":
        killed.wrong.append(f"stopped by {rig.status.get('stopped_by')}")
    if not rig.node.alive and (status := rig.node.process.poll()) != 1:
        killed.wrong.append(f"the process ended with status {status}")
    said = [each.time for each in list(rig.records) if each.kind == "status" and "thread_died" in each.text]
    if not said:
        killed.wrong.append("no ~/status with thread_died")
    time.sleep(0.3)
    stopped = min(said, default=time.monotonic())
    if late := [each for each in list(rig.motions) if each.time - each.delay > stopped]:
        killed.wrong.append(f"a motion {late[0].time - late[0].delay - stopped:.3f} s after the stop was reported")
    moved = {each.stamp for each in list(rig.motions)}
    commands = [each for each in list(rig.records) if each.kind == "command"]
    if commands[-1].stamp in moved:  # an arm that was held already gets no other hold
        killed.wrong.append("the last command is no hold")


def _check_answers(killed: Killed, rig: Rig) -> None:
    """Complain if a request is not answered, unless the process ends, which takes a while on a busy machine."""
    before = sum(each.kind == "answer" for each in list(rig.records))
    rig.order(do="ask", what="pause")

    def answered() -> bool:
        return sum(each.kind == "answer" for each in list(rig.records)) > before

    if not wait_until(lambda: answered() or not rig.node.alive, _ENDS):
        killed.wrong.append("unanswered: ~/pause")


def run(count: int, seed: int, folder: Path, victims: Sequence[Victim] = VICTIMS) -> list[Killed]:
    """Kill ``count`` threads, each kind as often; print every one."""
    rng, done = random.Random(seed), list[Killed]()
    while len(done) < count:
        victim = victims[len(done) % len(victims)]
        number = rng.randrange(2**31)
        killed = kill(victim, number, rng.choice(DOMAINS), folder)
        if not killed.place and not killed.wrong:
            continue  # it did not execute so many lines
        done.append(killed)
        print(f"{len(done):4} {victim.name:<20} {killed.reaction:<8} {killed.place}", flush=True)
        for each in killed.wrong:
            print(f"     WRONG (seed {number}): {each}", flush=True)
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.threads", description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="threads that are killed (default: 20)")
    parser.add_argument("--seed", type=int, default=None, help="seed of all randomness")
    parser.add_argument("--only", default="", metavar="TEXT", help="only threads whose name contains TEXT")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**5)
    victims = [each for each in VICTIMS if given.only in each.name]
    print(f"seed {seed}", flush=True)
    import tempfile

    with tempfile.TemporaryDirectory(prefix="vla_ros_threads_") as folder:
        done = run(given.count, seed, Path(folder), victims)
    wrong = sum(bool(each.wrong) for each in done)
    print(f"{len(done)} threads killed at {len({each.place for each in done})} places, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
