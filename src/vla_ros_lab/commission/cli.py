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
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vla_ros.config import load
from vla_ros.config.show import add_config_arguments, number
from vla_ros.errors import ConfigError
from vla_ros.files import check_output, save_text
from vla_ros.graph.launcher import launched
from vla_ros.graph.names import parse_ros_arguments
from vla_ros.kinematics.urdf import DEMO
from vla_ros.node.run import check_topics, serve
from vla_ros_lab.commission import result
from vla_ros_lab.commission.answers import Person
from vla_ros_lab.commission.motion import prepared
from vla_ros_lab.commission.session import Commissioning
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
        raise ConfigError("a person must confirm each joint, so this command needs a terminal")
    given = load(arguments.config, [*arguments.param, "policy.name:=hold"])
    check_topics(given, parse_ros_arguments([]))
    config, person = prepared(given), Person(yes=arguments.yes)
    session = Commissioning(config, given.camera, person, arguments.speed, arguments.way)
    with simulation(simulated):
        status = serve(config, source=session.source, ends=session.ends)
    if not session.ended:
        return _fail(status or 130, "interrupted: the arm holds, and nothing was written")
    found, title = session.found, f"Commissioning of {arguments.config[0].stem}"
    surprise, told = result.surprise_of(found), [*result.findings(found, given)]
    proposed = [] if surprise else [*result.proposals(found, given)]
    for what, text, fix in told:
        print(f"{what}: {text}; {fix}")
    for name, value, why in proposed:
        print(f"{name}: {value:.3g} ({why})")
    if arguments.json:
        save_text(arguments.json, json.dumps(result.figures_of(found, told, proposed), indent=1) + "\n")
    if arguments.report:
        save_text(arguments.report, result.to_html(found, told, proposed, title))
    if surprise:
        return _fail(1, f"stopped: {surprise}")
    if arguments.output:
        save_text(arguments.output, result.options_file(proposed, told, title))
    return 0


def _fail(status: int, text: str) -> int:
    print(f"vla-ros commission: {text}", file=sys.stderr)
    return status


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
    environment = {**os.environ, **launched()}
    driver = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
    try:
        yield
    finally:
        driver.terminate()
        driver.wait(10)
