"""The demo's table and the length of its episodes, made from the arguments of ``vla-ros demo``."""

import argparse

from vla_ros.config import Config
from vla_ros_lab.eval.arguments import TASKS
from vla_ros_lab.eval.runner import EpisodeOptions
from vla_ros_lab.sim.expert import RATE_HZ
from vla_ros_lab.sim.table import POINTS_TOPIC, TableEnvironment, TableOptions
from vla_ros_lab.sim.world import TableTop, WorldOptions


def make_table(arguments: argparse.Namespace, config: Config) -> TableEnvironment:
    """Return the simulated table that the arguments describe."""
    width, height, tasks = config.camera.width[0], config.camera.height[0], TASKS[arguments.task]
    how = {"camera_gain": arguments.dim, "camera_turn": arguments.camera_turn, "bump": arguments.bump}
    size = {"arms": len(config.arms), "objects": arguments.objects or 0, "shrink": arguments.shrink}
    size |= {"displace": arguments.displace}
    depth = {"depth_sensor": arguments.depth_sensor, "extrinsics": tuple(arguments.extrinsics)}
    world = WorldOptions(width, height, tasks, rate_hz=rate_of(config), **how, **size, **depth)
    points = POINTS_TOPIC in config.camera.topics
    options = TableOptions(arguments.blank, arguments.shuffle, arguments.switch_at, points)
    return TableEnvironment(TableTop(world), options)


def rate_of(config: Config) -> float:
    """Return the control steps per second of simulated time."""
    return max(config.control.rate_hz, 0.0) or RATE_HZ


def episode_options(arguments: argparse.Namespace, config: Config) -> EpisodeOptions:
    """Return how long an episode of these arguments takes and how often its camera sends."""
    rate_hz = rate_of(config)
    steps, camera_hz = arguments.max_steps or round(8 * rate_hz), arguments.camera_hz or rate_hz
    return EpisodeOptions(steps, arguments.step_timeout, camera_hz)
