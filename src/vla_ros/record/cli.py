"""Record a running node's images, joint states, actions, commands and events as rosbag2 bags (MCAP).

The recorder is a process of its own. `vla-ros run` starts it if record.what says so, and passes it the node's
messages; a recorder that a person starts is a subscriber.
Bags of a killed recorder are repaired at the next start, or with --repair; then `ros2 bag info` and `play` work.
"""

import argparse
import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from vla_ros.config import load
from vla_ros.config.show import add_config_arguments
from vla_ros.errors import MissingDependencyError, install
from vla_ros.graph import open_graph
from vla_ros.graph.launcher import end_with_launcher
from vla_ros.graph.names import expand_name
from vla_ros.process import take_requests
from vla_ros.record.topics import Topic, recorded_topics

_NICE = 10  # the node and its driver go first
_LAST = 0.3  # s; events of a node that ends


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--node", default="/vla_policy", metavar="NAME", help="full name of the node to record")
    parser.add_argument(
        "--topic",
        nargs=3,
        action="append",
        metavar=("NAME", "TYPE", "QOS"),
        help="record these topics, instead of the options'; the node passes what it resolved",
    )
    parser.add_argument("--ring", type=int, help=argparse.SUPPRESS)  # descriptor from the node
    parser.add_argument("--repair", nargs="+", type=Path, metavar="DIR", help="finish these bags and exit")


def run(arguments: argparse.Namespace) -> int:
    try:
        from vla_ros.record.bag import repair
        from vla_ros.record.recorder import Recorder
        from vla_ros.record.ring import Ring
    except ImportError as error:
        raise MissingDependencyError(f"{error}; install it with: {install('replay')}") from error
    if arguments.repair:
        for path in arguments.repair:
            print(repair(path))
        return 0
    config = load(arguments.config, arguments.param)
    namespace, _, base = arguments.node.rpartition("/")
    topics = [Topic(*words) for words in arguments.topic or ()]
    topics = topics or recorded_topics(config, lambda name: expand_name(name, base, namespace or "/"))
    options = replace(config.record, what="all") if config.record.what == "none" else config.record
    ring = None if arguments.ring is None else Ring(arguments.ring, [topic.name for topic in topics])
    os.nice(_NICE)
    with open_graph(config.node.backend, log_level=config.node.log_level) as graph:
        recorder = Recorder(graph, arguments.node, options, topics, ring)
        end_with_launcher()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                graph.spin(lambda: "end" in take_requests())
            for number in (signal.SIGINT, signal.SIGTERM):  # another one must not keep the bag from being finished
                signal.signal(number, lambda *_: None)
            end = time.monotonic() + _LAST
            graph.spin(lambda: time.monotonic() >= end, 0.05)
        finally:
            recorder.close()
    return 0
