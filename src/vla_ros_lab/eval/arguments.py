"""Arguments of ``vla-ros demo``, and the policy node's options that follow from them.

``demo.launch.py`` evaluates them in the launch process, whose Python may have neither OpenCV nor MuJoCo.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vla_ros.config import Config, load
from vla_ros.config.checkpoints import SHIPPED
from vla_ros.config.control import SCHEDULES
from vla_ros.config.files import config_file, read_file
from vla_ros.config.loading import assignment, parse_assignment
from vla_ros.config.show import add_config_arguments, number
from vla_ros.errors import ConfigError
from vla_ros.policies.base import policy_of
from vla_ros_lab.sim.expert import ACTIONS
from vla_ros_lab.sim.tasks import SLOTS

# An inference takes no time in lockstep, so there is nothing to gain from inferring ahead.
LOCKSTEP_OPTIONS = ("node.clock:=inputs", "control.schedule:=sync")
_OPTIONS = {"schedule": "control.schedule", "delay_ms": "control.inject_delay_ms"}
_OPTIONS |= {"server": "policy.server", "actions": "policy.actions"}
"""Arguments that set an option of the policy node."""
CONTROLS = {
    "bump": 0.0, "dim": 1.0, "camera_turn": 0.0, "blank": False, "shuffle": False, "switch_at": 0,
    "shrink": 0.0, "displace": 0.0, "depth_sensor": False, "extrinsics": [0.0, 0.0],
}  # fmt: skip
"""Arguments that make the task harder or show what a policy relies on, and their defaults."""
_FINGERS_APART = ("gripper.output:=joint_state", "control.output:=joint_velocity_state")
_MAX_THREADS = 8  # more do not speed up a model as small as the demo's
TASKS = {"pick": ("pick",), "push": ("push_left", "push_right"), "all": ("pick", "push_left", "push_right")}
"""Tasks of a scene, by ``--task``."""


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``vla-ros demo`` and ``vla-ros eval`` share."""
    positive, add = number(int, 1), parser.add_argument
    add("--policy", metavar="NAME", help="policy by its entry-point name (policy.name)")
    shipped = ", ".join(SHIPPED)
    add("--checkpoint", metavar="DIR", help=f"checkpoint (policy.checkpoint): a folder, or one of {shipped}")
    add("--episodes", type=positive, metavar="N", help="episodes: of the table (default 5), or of each task")
    add("--seed", type=number(int, 0), metavar="S", help="the benchmark's seed, or that of the first scene")
    add("--max-steps", type=positive, metavar="N", help="control steps of an episode (default: as published; 8 s)")
    add("--schedule", choices=SCHEDULES, help="how chunks follow each other (default control.schedule)")
    add("--step-timeout", type=number(float, 0.01, 1e5), default=60.0, metavar="S", help="maximum wait for a step")
    add("--delay-ms", type=number(float, 0, 1e5), default=0.0, metavar="MS", help="duration of an inference")
    add("--json", type=Path, metavar="FILE", help="write the results as JSON; - prints them and nothing else")
    add("--report", type=Path, metavar="FILE.html", help="write a self-contained HTML report, failures first")
    add_config_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vla-ros demo``."""
    add_common_arguments(parser)
    parser.set_defaults(episodes=5, seed=0)
    decimal, amount, add = number(float, 0.1, 1e5), number(float, 0.0, 1e5), parser.add_argument
    add("--arms", type=int, choices=(1, 2), default=1, help="arms on the table (default 1)")
    add("--actions", choices=tuple(ACTIONS), help="kind of the expert's actions (default eef_delta)")
    add("--server", metavar="URL", help="use a policy server, such as ws://127.0.0.1:8000 of vla-ros serve")
    add("--record", type=Path, metavar="BAG", help="record a rosbag2 bag (MCAP)")
    modes, add = parser.add_mutually_exclusive_group(), parser.add_argument
    for name, text in (
        ("--lockstep", "the simulation waits for each command (default)"),
        ("--real-time", "the physics run in real time; --delay-ms is added to each inference"),
        ("--simulated-time", "one process, on a clock that stops during an inference (default with --delay-ms)"),
    ):
        modes.add_argument(name, action="store_true", help=text)
    add("--task", choices=sorted(TASKS), default="pick", help="kind of task (default pick)")
    counts = range(1, SLOTS + 1)
    add("--objects", type=int, choices=counts, metavar="N", help="objects on the table (default 3 or 4)")
    add("--camera-hz", type=decimal, metavar="HZ", help="camera rate outside lockstep (default control.rate_hz)")
    wrist = "also publish /wrist_camera/image_raw (two arms: /left_wrist_camera/...)"
    add("--wrist-camera", action="store_true", help=wrist)
    add("--start-timeout", type=decimal, default=300.0, metavar="S", help="maximum wait for the policy node")
    add("--log", type=Path, metavar="FILE", help="write the policy node's output to this file")
    add("--console", action="store_true", help="serve the operator's page (vla-ros console) as well")
    add("--attach", action="store_true", help="use a running policy node, as demo.launch.py does")
    controls = parser.add_argument_group("controls", "make the task harder, or show which inputs a policy uses")
    add = controls.add_argument
    add("--bump", type=amount, default=0.0, metavar="M", help="bump the tool by up to M metres")
    add("--dim", type=amount, default=1.0, metavar="GAIN", help="multiply the camera's brightness by GAIN")
    degrees = number(float, -180, 180)
    add("--camera-turn", type=degrees, default=0.0, metavar="DEG", help="move the camera around the table")
    metres = number(float, 0, 0.2)
    text = "draw objects from a region that is M metres smaller on each side"
    add("--shrink", type=metres, default=0.0, metavar="M", help=text)
    text = "put the target M metres outside the region from which objects are drawn"
    add("--displace", type=metres, default=0.0, metavar="M", help=text)
    text = "points with the noise and the holes of a stereo camera (policies that take points)"
    add("--depth-sensor", action="store_true", help=text)
    text, error = "compute points with a pose of the camera that is wrong by this much", number(float, 0, 180)
    add("--extrinsics", type=error, nargs=2, default=[0.0, 0.0], metavar=("M", "DEG"), help=text)
    add("--blank", action="store_true", help="publish black images")
    add("--shuffle", action="store_true", help="name another object than the one that is judged")
    steps = number(int, 0)
    add("--switch-at", type=steps, default=0, metavar="STEP", help="change the task to a distractor at this step")


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def mode_of(arguments: argparse.Namespace) -> str:
    """Return ``real_time``, ``simulated_time`` or ``lockstep``.

    ``--delay-ms`` selects simulated time, because a delay has no effect in lockstep.
    """
    if arguments.real_time:
        return "real_time"
    return "simulated_time" if arguments.simulated_time or arguments.delay_ms else "lockstep"


@dataclass(frozen=True)
class Plan:
    """Options of the policy node, checked before anything starts."""

    files: tuple[Path, ...]  # parameter files
    assignments: tuple[str, ...]  # ``name:=value`` overrides of the files
    config: Config  # the resulting options


def plan_demo(arguments: argparse.Namespace) -> Plan:
    """Turn the arguments into options of the policy node."""
    two, mode_name = arguments.arms == 2, mode_of(arguments)
    given = dict(map(parse_assignment, arguments.param))
    checkpoint = arguments.checkpoint or given.get("policy.checkpoint", "")
    policy = arguments.policy or given.get("policy.name") or (policy_of(checkpoint) if checkpoint else "")
    chunks = [config_file("demo_pi")] if policy == "pi" and not two else []
    files = (config_file("demo_two_arms" if two else "demo"), *chunks, *arguments.config)
    mode = list(LOCKSTEP_OPTIONS) if mode_name == "lockstep" else []
    model: list[str] = []
    if two and arguments.task != "pick":
        raise ConfigError(f"--task {arguments.task}: two arms can only pick")
    if arguments.objects and two:
        raise ConfigError(f"--objects {arguments.objects}: a scene with two arms always has {SLOTS} objects")
    if arguments.objects == 1 and (arguments.shuffle or arguments.switch_at):
        raise ConfigError("--objects 1: --shuffle and --switch-at need at least two objects")
    if arguments.lockstep and arguments.delay_ms:
        raise ConfigError("--delay-ms has no effect with --lockstep, which waits for every command; omit one")
    if mode_name == "simulated_time" and (arguments.record or arguments.attach or arguments.console):
        raise ConfigError("--record, --attach and --console need a ROS graph, which simulated time does not use")
    if policy or arguments.server:
        model.append(f"policy.name:={'remote' if arguments.server else policy}")
    if arguments.checkpoint:
        shipped = arguments.checkpoint in SHIPPED
        folder = arguments.checkpoint if shipped else Path(arguments.checkpoint).expanduser().resolve()
        model.append(assignment("policy.checkpoint", str(folder)))
    values = {option: getattr(arguments, name) for name, option in _OPTIONS.items()}
    model += [f"{option}:={value}" for option, value in values.items() if value]
    if arguments.actions == "joint_velocity":
        model += _FINGERS_APART
        drivers = {"left.gripper": "left_arm", "right.gripper": "right_arm"} if two else {"topics.gripper": "arm"}
        model += [f"{option}:=/{driver}/gripper_command" for option, driver in drivers.items()]
    model += arguments.param
    if arguments.real_time and hasattr(load(files, model).policy, "threads"):
        mode.append(f"policy.threads:={_threads()}")
    assignments = (*mode, *_reset_statistics(files, model), *model)
    return Plan(files, assignments, load(files, assignments))


def _threads() -> int:
    """Return the policy's number of threads: one core is left to the simulation.

    Threads of a matrix product wait for each other: two threads, one of them on a core shared with another process,
    were up to ten times slower than one thread.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores - 1, _MAX_THREADS))


def _reset_statistics(files: Sequence[Path], chosen: Sequence[str]) -> list[str]:
    """Return the override that resets the demo's ``unnorm_key`` if another checkpoint is chosen."""
    usual, now = load(files[:1]).policy, load(files, chosen).policy
    given = {parse_assignment(text)[0] for text in chosen}.union(*(read_file(file) for file in files[1:]))
    same = now.name != usual.name or getattr(now, "checkpoint", "") == getattr(usual, "checkpoint", "")
    return [] if same or "policy.unnorm_key" in given else ["policy.unnorm_key:="]
