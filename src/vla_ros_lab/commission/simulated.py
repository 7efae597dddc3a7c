"""The demo's arm as a driver in real time, a process of its own: ``python -m vla_ros_lab.commission.simulated``."""

import contextlib
from dataclasses import replace

from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros.graph import open_graph
from vla_ros.graph.launcher import end_with_launcher
from vla_ros_lab.eval.arguments import parse
from vla_ros_lab.eval.graph import GraphPort
from vla_ros_lab.eval.port import WALL
from vla_ros_lab.eval.scene import make_table

_CAMERA_TICKS = 5  # an image every 0.1 s


def main() -> None:
    """Simulate the arm of ``config/demo.yaml`` until the process is interrupted."""
    end_with_launcher()
    config = load([config_file("demo")])
    with contextlib.closing(make_table(parse(), config)) as table, open_graph(config.node.backend) as graph:
        table.reset(0)
        port, done = GraphPort(graph, config.arms, WALL, cameras=table.cameras[:1]), 0
        images = table.observe(port.cameras, port.stamp()).images  # the same each time: it takes longer than a tick
        port.begin(table.instruction, lambda cameras, stamp: table.observe(cameras, stamp))
        seconds, due = table.step_seconds / table.ticks, port.time.steady()
        while True:
            now, stamp = port.time.steady(), port.stamp()
            due = max(due, now - seconds) + seconds
            measured = table.observe((), stamp)
            port.publish(measured if done % _CAMERA_TICKS else replace(measured, images=images), stamp)
            port.wait(due - now)
            for command in port.commands:
                table.apply(command)
            port.forget()
            table.step()
            done += 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
