"""Run a policy as a node on the ROS 2 graph: camera frames in, joint commands out.

With ROS 2 sourced it is an rclpy node, otherwise it joins the graph over DDS by itself. Ctrl-C ends it. Without
ROS, signals replace the services: SIGUSR1 arms, SIGUSR2 disarms, SIGHUP resets (in a terminal, SIGHUP ends the
node).
"""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from logging import Logger
from pathlib import Path

from vla_ros.collision.world import write_srdf
from vla_ros.config import Config, load, read_file
from vla_ros.config.loading import is_ros_own
from vla_ros.config.show import add_config_arguments
from vla_ros.control.clock import Clock
from vla_ros.control.collision import CollisionCheck
from vla_ros.errors import ConfigError
from vla_ros.execution.source import ActionSource
from vla_ros.files import check_output, save_text
from vla_ros.graph import open_graph
from vla_ros.graph.launcher import end_with_launcher
from vla_ros.graph.names import RosArguments, parse_ros_arguments
from vla_ros.node.pipeline import build_pipeline
from vla_ros.node.policy_node import PolicyNode
from vla_ros.node.signals import Signals
from vla_ros.policies.base import Progress, create, selection

NODE_NAME = "vla_policy"
_NODES = ("command_shared_with",)  # an option of ``topics`` that names nodes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--arm", action="store_true", help="the arm moves as soon as frames arrive (control.armed)")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print features, rate, units, frames, limits and memory, and exit; nothing is loaded",
    )
    parser.add_argument(
        "--srdf",
        type=Path,
        metavar="FILE",
        help="as --dry-run, and write the pairs that collision.check leaves out, for collision.srdf",
    )
    parser.add_argument("--stats", type=Path, metavar="FILE.json", help="write latency and frame counts at the end")
    parser.add_argument(
        "--ros-args",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="arguments for any ROS node: remaps (-r /camera/image_raw:=/cam0/image), node name,"
        " namespace, parameters",
    )


def run(arguments: argparse.Namespace) -> int:
    ros_args = ["--ros-args", *arguments.ros_args] if arguments.ros_args else []
    ros = parse_ros_arguments(ros_args)
    assignments = [*arguments.param, *(["control.armed:=true"] if arguments.arm else [])]
    name = ros.full_name(NODE_NAME)
    for file in ros.files:
        read_file(file, name)  # raises ConfigError for a file without parameters for this node
    values = {option: value for option, value in ros.values(name).items() if not is_ros_own(option)}
    config = load(arguments.config, assignments, name, values)
    check_topics(config, ros)
    if arguments.dry_run or arguments.srdf:
        print(selection(config), flush=True)
        policy = create(config)
        pipeline = build_pipeline(config, policy.describe())
        print(pipeline.describe())
        if arguments.srdf:
            _write_srdf(arguments.srdf, pipeline.controller.collision)
        if need := policy.describe_memory():
            print(need)
        return 0
    return serve(config, ros_args, stats=arguments.stats)


def check_topics(config: Config, ros: RosArguments) -> None:
    """Raise ConfigError if an option is no name on the ROS 2 graph; the node would fail only when it uses it."""
    arms = [(arm.command, arm.gripper_topic, arm.joint_states, arm.leader) for arm in config.arms]
    others = [getattr(config.topics, each.name) for each in fields(config.topics) if each.name not in _NODES]
    states = [each.topic for each in config.robot.parsed_state_topics]
    takeover = (config.takeover.leader, config.takeover.topic, config.takeover.joy)
    node, namespace = ros.node_name(NODE_NAME), ros.namespace("/", NODE_NAME)
    for topic in chain(*arms, others, states, takeover, config.camera.topics, [config.collision.scene]):
        if topic:
            ros.resolve(topic, node, namespace)


def _write_srdf(path: Path, check: CollisionCheck | None) -> None:
    if check is None or check.world is None:
        raise ConfigError(f"--srdf: no pairs are checked ({check.why_not if check else 'no arm'})")
    write_file("--srdf", path, write_srdf(check.world))


def serve(
    config: Config, ros_args: Sequence[str] = (), *, stats: Path | None = None, source: ActionSource | None = None
) -> int:
    """Run the node until SIGINT or SIGTERM and return the exit status. A signal during loading ends it at once.

    Whatever ends it, the arm gets a hold first. If the thread that spins fails, the status is 1.
    """
    signals, loading, status = Signals(interrupts=True), True, 0
    with open_graph(config.node.backend, ros_args, config.node.log_level) as graph:
        end_with_launcher()
        ros_node = graph.create_node(NODE_NAME)
        logger = ros_node.get_logger()
        node = PolicyNode(graph, ros_node, config)

        def until() -> bool:
            for answer in follow(signals.take_requests(), node):
                logger.info(answer)
            return bool(signals.name) or node.lost

        try:
            try:
                node.configure(loading_bar() if sys.stderr.isatty() else log_progress(logger), source)
                loading = signals.interrupts = False
                if not signals.name:
                    node.activate()
                    for answer in follow(signals.take_requests(), node, ready=False):
                        logger.info(answer)
                    resets = ", -HUP resets" if signal.SIGHUP in signals.requests else ""
                    logger.info(f"by signal: kill -USR1 {os.getpid()} arms, -USR2 disarms{resets}")
                    graph.spin(until, 0.05)
                status = int(node.lost)
            except KeyboardInterrupt:
                if not loading:
                    logger.error("a callback did not end: it was interrupted")
            except BaseException as error:
                if loading:
                    raise
                logger.error(traceback.format_exc())
                node.fail("the graph thread", error)
                status = 1
            finally:
                signals.ending()
        finally:
            signals.ending()  # a signal may have interrupted the line above
            node.cleanup()
            if stats is not None:
                write_file("--stats", stats, json.dumps(node.stats.summary()) + "\n")
        logger.info("ended while the policy was loading" if loading else "ended: the arm holds")
    return status


def follow(requests: Sequence[str], node: PolicyNode, *, ready: bool = True) -> list[str]:
    """Carry out requests that arrived together as signals; return a sentence for each.

    Signals are not ordered: a busy process may see a reset before an earlier request to arm. A request to ``arm``
    is therefore refused if ``disarm`` or ``reset`` came with it, and if it came before the node was ``ready``.
    """
    answers = []
    if "disarm" in requests:
        answers.append(node.enable(False)[1])
    if "reset" in requests:
        answers.append(node.reset()[1])
    if "arm" in requests:
        late = "not armed: the signal came together with another, and signals have no order; send it again"
        early = "not armed: the signal came before the node was ready, and is void; send it again"
        answers.append(early if not ready else late if answers else node.enable(True)[1])
    return answers


def write_file(option: str, path: Path, text: str) -> None:
    """Write the file that an option of the command names. Raises VlaRosError if it cannot be written."""
    check_output(option, path)
    save_text(path, text)


def log_progress(logger: Logger) -> Progress:
    """Log progress every two seconds."""
    clock = Clock()
    last = clock.steady()

    def progress(fraction: float, message: str) -> None:
        nonlocal last
        if fraction >= 1.0 or clock.steady() - last >= 2.0:
            last = clock.steady()
            logger.info(f"loading {100 * fraction:.0f} %: {message}")

    return progress


def loading_bar() -> Progress:
    """Show progress as a bar on standard error until loading has finished."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    bar = Bar(console=Console(stderr=True), transient=True)
    task = bar.add_task("loading", total=1.0)
    bar.start()

    def progress(fraction: float, message: str) -> None:
        bar.update(task, completed=fraction, description=message)
        if fraction >= 1.0:
            bar.stop()

    return progress
