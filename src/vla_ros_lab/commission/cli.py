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
import select
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

from vla_ros.config.show import add_config_arguments, number
from vla_ros.control.clock import Clock, SimulatedClock
from vla_ros.errors import ConfigError
from vla_ros.files import check_output, save_text
from vla_ros.graph.names import parse_ros_arguments
from vla_ros.kinematics.urdf import DEMO
from vla_ros.node.run import check_topics
from vla_ros_lab.commission import result, rigs
from vla_ros_lab.commission.measure import TICK
from vla_ros_lab.commission.motion import commissioning_options
from vla_ros_lab.commission.session import Commissioning
from vla_ros_lab.eval.arguments import parse
from vla_ros_lab.eval.scene import make_table


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
    simulated, status = [path.stem for path in arguments.config] == [DEMO], 0
    if arguments.yes and not simulated:
        raise ConfigError(
            "--yes: moves an arm that nobody watches, so it is refused except with --config demo alone"
        )
    if not arguments.yes and not sys.stdin.isatty():
        raise ConfigError("a person must confirm each joint, so this command needs a terminal")
    given, config = commissioning_options(arguments.config, arguments.param)
    check_topics(given, parse_ros_arguments([]))
    clock = SimulatedClock(1) if simulated else Clock()
    session = Commissioning(config, clock, None if arguments.yes else typed, arguments.speed, arguments.way)
    if isinstance(clock, SimulatedClock):
        with closing(make_table(parse(), config)) as table:
            table.reset(0)
            pause = partial(time.sleep, 0 if arguments.yes else TICK)
            rigs.simulated(session, config, table, clock, pause)
    else:
        status = rigs.on_graph(session, config, given.camera)
    if not session.ended:
        return _fail(status or 130, "interrupted: the arm holds, and nothing was written")
    figures, title = result.figures_of(session, given), f"Commissioning of {arguments.config[0].stem}"
    print(*result.findings_of(figures), sep="\n")
    for name, value in figures["options"].items():
        print(f"{name}: {value} ({figures['why'][name]})")
    if arguments.json:
        save_text(arguments.json, json.dumps(figures, indent=1) + "\n")
    if arguments.report:
        save_text(arguments.report, result.to_html(figures, session, title))
    if figures["surprise"]:
        return _fail(1, f"stopped: {figures['surprise']}")
    if arguments.output:
        save_text(arguments.output, result.options_file(figures, title))
    return 0


def typed() -> str:
    """Return what a person has typed, "" if nothing; "n" once the terminal is gone."""
    waits = select.select([sys.stdin], [], [], 0)[0]
    return os.read(sys.stdin.fileno(), 4096).decode(errors="replace") or "n" if waits else ""


def _fail(status: int, text: str) -> int:
    print(f"vla-ros commission: {text}", file=sys.stderr)
    return status
