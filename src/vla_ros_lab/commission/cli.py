"""Move each joint of an arm slowly, and measure the numbers that safety rests on.

A person holds the emergency stop and confirms each joint. Nothing moves that the limits, the collision check and
the watchdogs of the file would not allow. Signs, units, order of joints, sag, delay, deceleration, clocks and what
the driver does in silence are measured; whatever surprises ends everything at once.

  vla-ros commission --config my_robot.yaml --output my_measured.yaml --report my_arm.html
  vla-ros commission --config demo --yes        the simulated arm, where nobody need answer
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vla_ros.config import Config, load
from vla_ros.config.show import add_config_arguments, number
from vla_ros.contract.binding import make_arms
from vla_ros.control.clock import Clock
from vla_ros.errors import ConfigError
from vla_ros.files import check_output, save_text
from vla_ros.graph.launcher import launched
from vla_ros.graph.names import parse_ros_arguments
from vla_ros.kinematics.urdf import DEMO
from vla_ros.node.run import check_topics, serve
from vla_ros_lab.commission import result
from vla_ros_lab.commission.motion import Heard, ScriptedSource, prepared
from vla_ros_lab.commission.session import Session
from vla_ros_lab.eval.command import private_graph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE.yaml", help="write the options that follow from the figures")
    add("--report", type=Path, metavar="FILE.html", help="write a page with the curves")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--speed", type=number(float, 0.02, 0.5), default=0.2, help="of a joint, rad/s; a fifth of it in m/s (0.2)")
    add("--way", type=number(float, 0.05, 0.3), default=0.15, help="of a joint, rad; a fifth of it in m (0.15)")
    add("--yes", action="store_true", help="nobody confirms: only with --config demo, the simulated arm")


def run(arguments: argparse.Namespace) -> int:
    """Commission the arm; return 0 if everything was measured, 1 after a surprise, 130 after Ctrl-C."""
    for name in ("output", "report", "json"):
        check_output(f"--{name}", getattr(arguments, name))
    simulated = [path.stem for path in arguments.config] == [DEMO]
    if arguments.yes and not simulated:
        raise ConfigError(
            "--yes: moves an arm that nobody watches, so it is refused except with --config demo alone"
        )
    if not arguments.yes and not sys.stdin.isatty():
        raise ConfigError("commission: a person must confirm each joint, so it needs a terminal")
    given = load(arguments.config, [*arguments.param, "policy.name:=hold"])
    check_topics(given, parse_ros_arguments([]))
    config = prepared(given)
    clock, person = Clock(), Person(yes=arguments.yes)
    source, heard = ScriptedSource(config, clock), Heard(config, given.camera, clock)
    session = Session(
        config,
        make_arms(config),
        source,
        heard,
        clock,
        print,
        person.ask,
        person.pressed,
        arguments.speed,
        arguments.way,
    )
    with simulation(simulated):
        status = serve(config, source=source, ends=session.ends)
    if not session.ended:
        return _fail(status or 130, "interrupted: the arm holds, and nothing was written")
    return _write(arguments, session, given)


def _write(arguments: argparse.Namespace, session: Session, config: Config) -> int:
    found, arms, title = (
        result.Result.of(session.found),
        make_arms(config),
        f"Commissioning of {arguments.config[0].stem}",
    )
    told = [*result.findings(found, config)]
    proposed = [*result.proposals(found, config, arms)] if session.complete and not found.surprise else []
    for what, text, fix in told:
        print(f"{what}: {text}; {fix}")
    for name, value, why in proposed:
        print(f"{name}: {value:.3g}  ({why})")
    if arguments.json:
        save_text(arguments.json, json.dumps(result.to_json(found, told, proposed), indent=1) + "\n")
    if arguments.report:
        save_text(arguments.report, result.to_html(found, told, proposed, title))
    if found.surprise or not session.complete:
        return _fail(1, f"stopped: {found.surprise}")
    if arguments.output:
        save_text(arguments.output, result.to_yaml(proposed, told, title))
    return 0


def _fail(status: int, text: str) -> int:
    print(f"vla-ros commission: {text}", file=sys.stderr)
    return status


class Person:
    """Whoever answers at the terminal; with ``yes``, every answer is yes and nobody presses anything."""

    def __init__(self, *, yes: bool) -> None:
        self._yes, self._lines = yes, queue.SimpleQueue[str]()
        if not yes:
            threading.Thread(target=self._read, name="answers", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.put(line.strip().lower())
        self._lines.put("n")  # the terminal is gone

    def pressed(self) -> bool:
        """Return True if a line came that nobody asked for."""
        return not self._lines.empty()

    def ask(self, question: str) -> Callable[[], bool | None]:
        while self.pressed():  # what was typed before is no answer
            self._lines.get()
        print(f"{question} [y/n] ", end="y\n" if self._yes else "", flush=True)
        if self._yes:
            return lambda: True

        def answer() -> bool | None:
            return None if self._lines.empty() else self._lines.get() in ("y", "yes")

        return answer


@contextmanager
def simulation(wanted: bool) -> Iterator[None]:
    """Run the simulated arm in a process of its own, on a graph that no robot shares."""
    if not wanted:
        yield
        return
    for name in ("ROS_DOMAIN_ID", "ROS_AUTOMATIC_DISCOVERY_RANGE", "ROS_LOCALHOST_ONLY"):
        os.environ.pop(name, None)
    os.environ.update(private_graph(os.environ))
    command = [sys.executable, "-m", "vla_ros_lab.commission.simulated"]
    driver = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, env={**os.environ, **launched()}, start_new_session=True
    )
    try:
        yield
    finally:
        driver.terminate()
        driver.wait(10)
