"""Watch a policy move the simulated arm, or two of them.

The simulation runs in this process and the policy node (`vla-ros run`) in another. They communicate over DDS, in a
ROS domain of their own on this host unless ROS_DOMAIN_ID is set. The seed of an episode decides the three or four
objects on the table and the instruction.

  vla-ros demo --report out.html                the small OpenVLA that comes with the package
  vla-ros demo --checkpoint demo-pi --real-time --delay-ms 200    the small pi0.5, as slow as a large one
  vla-ros demo --checkpoint DIR                 your own checkpoint
  vla-ros demo --policy expert                  the scripted expert, which needs no PyTorch
  vla-ros demo --policy expert --arms 2 --actions joint_position    it moves two arms by joint positions
  vla-ros demo -p camera.orientation:="[none]"  what goes wrong when the image is upside down
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_ros.config import Config, load
from vla_ros.config.files import config_file, read_file
from vla_ros.config.loading import assignment, parse_assignment
from vla_ros.config.sections import SCHEDULES
from vla_ros.config.show import add_config_arguments
from vla_ros.contract.parts import Part, parse_parts
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError, MissingDependencyError
from vla_ros.graph.launcher import end_with_launcher
from vla_ros.policies.base import policy_of
from vla_ros.policies.shipped import SHIPPED
from vla_ros.sim.expert import ACTIONS, ExpertPolicy
from vla_ros.sim.process import PolicyProcess, private_graph
from vla_ros.sim.results import DemoResult, EpisodeResult
from vla_ros.sim.status import PolicyFailedError
from vla_ros.sim.tasks import SLOTS

if TYPE_CHECKING:
    from vla_ros.sim.world import WorldOptions

# In lockstep nothing is late, because the simulation waits. Only a policy node that hangs times out.
_LOCKSTEP = (
    "control.lockstep:=true",
    "timeouts.camera:=600.0",
    "timeouts.joint_state:=600.0",
    "timeouts.inference:=600.0",
    "timeouts.driver:=600.0",
    "timeouts.frame_age:=0.0",
    "timeouts.joint_state_age:=0.0",
)
_FINGERS_APART = ("gripper.output:=joint_state", "control.output:=joint_velocity_state")
_MOST_THREADS = 8  # more do not speed up a model as small as the demo's
_TASKS = {"pick": ("pick",), "push": ("push_left", "push_right"), "all": ("pick", "push_left", "push_right")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``vla-ros demo``."""
    positive, natural, decimal = _number(int, 1), _number(int, 0), _number(float, 0.1, 1e5)
    add = parser.add_argument
    add("--episodes", type=positive, default=5, metavar="N", help="episodes to run (default 5)")
    add("--seed", type=natural, default=0, metavar="S", help="seed of the first episode (default 0)")
    add("--policy", metavar="NAME", help="policy by its entry-point name (openvla, pi, expert, hold)")
    add(
        "--checkpoint",
        metavar="DIR",
        help=f"another checkpoint: a folder, or one of {', '.join(SHIPPED)}",
    )
    add("--arms", type=int, choices=(1, 2), default=1, help="arms on the table (default 1)")
    add("--actions", choices=tuple(ACTIONS), help="what the expert answers with (default eef_delta)")
    add("--server", metavar="URL", help="ask a policy server, such as ws://127.0.0.1:8000 of vla-ros serve")
    add("--json", type=Path, metavar="FILE", help="write the results as JSON")
    add("--report", type=Path, metavar="FILE.html", help="write a self-contained HTML report")
    add("--record", type=Path, metavar="BAG", help="record a rosbag2 bag (MCAP)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--lockstep", action="store_true", help="wait for each command, however long (default)")
    mode.add_argument("--real-time", action="store_true", help="run physics in real time")
    add("--task", choices=sorted(_TASKS), default="pick", help="kind of task (default pick)")
    add(
        "--objects",
        type=int,
        choices=range(1, SLOTS + 1),
        metavar="N",
        help="objects on the table (default 3 or 4)",
    )
    add("--schedule", choices=SCHEDULES, help="how chunks follow each other (default control.schedule)")
    add(
        "--delay-ms", type=_number(float, 0), default=0.0, metavar="MS", help="make each answer of the policy later"
    )
    add("--camera-hz", type=decimal, metavar="HZ", help="camera rate with --real-time (default control.rate_hz)")
    add(
        "--wrist-camera",
        action="store_true",
        help="also publish /wrist_camera/image_raw (two arms: /left_wrist_camera/...)",
    )
    add("--max-steps", type=positive, metavar="N", help="control steps per episode (default 8 s)")
    add("--step-timeout", type=decimal, default=60.0, metavar="S", help="longest wait for a command")
    add("--start-timeout", type=decimal, default=300.0, metavar="S", help="longest wait for the policy node")
    add("--log", type=Path, metavar="FILE", help="write the policy node's output to this file")
    add("--attach", action="store_true", help="use a policy node that already runs, such as demo.launch.py's")
    controls = parser.add_argument_group("controls", "make the task harder, or show what a policy relies on")
    add = controls.add_argument
    add("--bump", type=float, default=0.0, metavar="M", help="bump the tool by up to M metres")
    add("--dim", type=float, default=1.0, metavar="GAIN", help="multiply the camera's brightness by GAIN")
    add("--blank", action="store_true", help="publish black images")
    add("--shuffle", action="store_true", help="ask for another object than the one that counts")
    add("--switch-at", type=natural, default=0, metavar="STEP", help="ask for a distractor from this step on")
    add_config_arguments(parser)


def _number(kind: Callable[[str], float], low: float, high: float = math.inf) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            expected = f"{low:g} or more" if high == math.inf else f"{low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"found {text}, expected {expected}")
        return value

    return number


@dataclass(frozen=True)
class Plan:
    """Options of the policy node, checked before anything starts."""

    files: tuple[Path, ...]  # parameter files
    assignments: tuple[str, ...]  # ``name:=value`` that override them
    config: Config  # the resulting options


def plan(arguments: argparse.Namespace) -> Plan:
    """Turn the arguments into options of the policy node.

    Raises:
        ConfigError: As :func:`vla_ros.config.load`.
    """
    two = arguments.arms == 2
    named = arguments.checkpoint in SHIPPED
    policy = arguments.policy or (policy_of(arguments.checkpoint) if arguments.checkpoint else "")
    chunks = [config_file("demo_pi")] if policy == "pi" and not two else []
    files = (config_file("demo_two_arms" if two else "demo"), *chunks, *arguments.config)
    mode = [] if arguments.real_time else list(_LOCKSTEP)
    model: list[str] = []
    if two and arguments.task != "pick":
        raise ConfigError(f"--task {arguments.task}: found for two arms, expected pick")
    if arguments.objects and two:
        raise ConfigError(f"--objects {arguments.objects}: found for two arms, which always have {SLOTS} objects")
    if arguments.objects == 1 and (arguments.shuffle or arguments.switch_at):
        raise ConfigError("--objects 1: leaves no other object for --shuffle and --switch-at to name")
    if arguments.delay_ms and not arguments.real_time:
        raise ConfigError(
            f"--delay-ms {arguments.delay_ms:g}: in lockstep the simulation waits for each answer, so that none is "
            "late; add --real-time"
        )
    if arguments.delay_ms:
        mode.append(f"control.inject_delay_ms:={arguments.delay_ms}")
    if policy:
        model.append(f"policy.name:={policy}")
    if arguments.checkpoint:
        folder = arguments.checkpoint if named else Path(arguments.checkpoint).expanduser().resolve()
        model.append(assignment("policy.checkpoint", str(folder)))
    if arguments.schedule:
        model.append(f"control.schedule:={arguments.schedule}")
    if arguments.server:
        model += ["policy.name:=remote", f"policy.server:={arguments.server}"]
    if arguments.actions:
        model.append(f"policy.actions:={arguments.actions}")
    if arguments.actions == "joint_velocity":
        model += _FINGERS_APART
        hands = ("left", "right") if two else ()
        model += [f"{hand}.gripper:=/{hand}_arm/gripper_command" for hand in hands] or [
            "topics.gripper:=/arm/gripper_command"
        ]
    model += arguments.param
    if arguments.real_time and hasattr(load(files, model).policy, "threads"):
        mode.append(f"policy.threads:={_threads()}")
    assignments = (*mode, *_reset_statistics(files, model), *model)
    return Plan(files, assignments, load(files, assignments))


def _threads() -> int:
    """Return all cores but the simulation's.

    Threads of one matrix product wait for each other: with another process on one of their cores, two threads were
    measured to be up to ten times as slow as one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores - 1, _MOST_THREADS))


def _reset_statistics(files: Sequence[Path], chosen: Sequence[str]) -> list[str]:
    """Drop the demo's ``unnorm_key`` for another checkpoint, which has statistics of its own."""
    usual, now = load(files[:1]).policy, load(files, chosen).policy
    given = {parse_assignment(text)[0] for text in chosen}.union(*(read_file(file) for file in files[1:]))
    same = now.name != usual.name or getattr(now, "checkpoint", "") == getattr(usual, "checkpoint", "")
    return [] if same or "policy.unnorm_key" in given else ["policy.unnorm_key:="]


def run(arguments: argparse.Namespace) -> int:
    """Run the episodes and write the outputs; returns 0 even if episodes fail.

    Raises:
        VlaRosError: The episodes could not be run.
    """
    for path in (arguments.json, arguments.report):
        if path is not None and path.is_dir():
            raise ConfigError(f"{path}: is a folder, expected a file name")
    result, config = play(arguments, plan(arguments))
    from vla_ros.sim import console

    console.summary(result)
    if arguments.json is not None:
        result.write_json(arguments.json)
        console.wrote("results", arguments.json)
    if arguments.report is not None:
        from vla_ros.sim import report

        report.write(result, arguments.report, config)
        console.wrote("report", arguments.report)
    if arguments.record is not None:
        console.wrote("bag", arguments.record)
    return 0


def play(arguments: argparse.Namespace, options: Plan) -> tuple[DemoResult, Config]:
    """Start the policy node, run all episodes, stop the node and collect the results.

    Raises:
        VlaRosError: The graph or the renderer is not available, or the policy node did not start or failed.
    """
    if not arguments.attach:
        check_torch(options.config)
        os.environ.update(private_graph(os.environ))
    _interrupt_on_terminate()
    end_with_launcher()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vla_ros_demo_")))
        log = arguments.log or folder / "policy.log"
        if arguments.attach:
            episodes, wall = _episodes(arguments, options.config, lambda: True, stack)
            return _result(arguments, options.config, episodes, {}, wall), options.config
        policy = PolicyProcess(options.files, options.assignments, folder / "stats.json", log)
        stack.callback(policy.end)
        try:
            episodes, wall = _episodes(arguments, options.config, policy.alive, stack)
        except PolicyFailedError:
            policy.end()  # its last lines include what it logs while it shuts down
            print(policy.last_lines(), file=sys.stderr)
            raise
        policy.end()
        stats = policy.stats()
    return _result(arguments, options.config, episodes, stats, wall), options.config


def check_torch(config: Config) -> None:
    """Check that PyTorch is installed if the policy needs it.

    Raises:
        MissingDependencyError: It is not; the message names what to install and what runs without it.
    """
    if config.policy.name in SHIPPED.values() and importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            "the demo's policy is a neural network, and PyTorch is not installed: pip install 'vla_ros[openvla]' "
            "(without a GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu, which is a "
            "tenth of the size). Without PyTorch: vla-ros demo --policy expert"
        )


def _interrupt_on_terminate() -> None:
    """Handle SIGTERM like Ctrl-C, so that the policy node is shut down in order."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _episodes(
    arguments: argparse.Namespace, config: Config, alive: Callable[[], bool], stack: ExitStack
) -> tuple[list[EpisodeResult], float]:
    """Return the results of all episodes and the seconds they took."""
    from vla_ros.graph import open_graph
    from vla_ros.sim import console
    from vla_ros.sim.episodes import EpisodeOptions, Lockstep, RealTime, Runner
    from vla_ros.sim.node import SimNode
    from vla_ros.sim.record import BagRecorder
    from vla_ros.sim.world import TableTop

    world = stack.enter_context(TableTop(world_options(arguments, config)))
    world.render()  # fail at once if there is no OpenGL
    recorder = stack.enter_context(closing(BagRecorder(arguments.record))) if arguments.record else None
    graph = stack.enter_context(open_graph(config.node.backend, (), config.node.log_level))
    wrist = world.wrist_cameras if arguments.wrist_camera else ()
    node = SimNode(graph, config.arms, wrist=wrist, tap=recorder)
    console.header(config, os.environ.get("ROS_DOMAIN_ID", "0"), graph.backend)
    with console.spinner("waiting for the policy node"):
        node.wait_for_policy(arguments.start_timeout, alive)
    options = EpisodeOptions(
        max_steps=arguments.max_steps or round(8 * world.options.rate_hz),
        step_timeout=arguments.step_timeout,
        camera_hz=arguments.camera_hz or world.options.rate_hz,
        wrist=wrist,
        blank=arguments.blank,
        shuffle=arguments.shuffle,
        switch_at=arguments.switch_at,
    )
    kind = RealTime if arguments.real_time else Lockstep
    runner: Runner = kind(world, node, options, alive)
    results: list[EpisodeResult] = []
    began = time.monotonic()
    with console.progress(arguments.episodes) as report_progress:
        for seed in range(arguments.seed, arguments.seed + arguments.episodes):
            results.append(_small(runner.run(seed), arguments.episodes))
            report_progress(results)
    return results, time.monotonic() - began


def world_options(arguments: argparse.Namespace, config: Config) -> WorldOptions:
    """Return the options of the table-top from the arguments."""
    from vla_ros.sim.world import WorldOptions

    return WorldOptions(
        width=config.camera.width[0],
        height=config.camera.height[0],
        tasks=_TASKS[arguments.task],
        camera_gain=arguments.dim,
        bump=arguments.bump,
        arms=len(config.arms),
        rate_hz=config.control.rate_hz or 10.0,
        objects=arguments.objects or 0,
    )


def _action(config: Config) -> tuple[Part, ...]:
    """What the numbers of the policy's actions are."""
    if config.policy.name == "expert":
        return ExpertPolicy(config).spec.action
    stated = parse_parts(" + ".join(config.features.action), action=True) if config.features.action else ()
    return stated or PolicySpec().action


def _small(result: EpisodeResult, episodes: int) -> EpisodeResult:
    """Halve the images of long runs, so that the report can still be mailed."""
    if episodes <= 10:
        return result
    return replace(result, images=tuple(image[::2, ::2].copy() for image in result.images))


def _result(
    arguments: argparse.Namespace,
    config: Config,
    episodes: Sequence[EpisodeResult],
    stats: Mapping[str, Any],
    wall: float,
) -> DemoResult:
    import numpy as np

    controls = {
        name: getattr(arguments, name)
        for name, usual in (("bump", 0.0), ("dim", 1.0), ("blank", False), ("shuffle", False), ("switch_at", 0))
        if getattr(arguments, name) != usual
    }
    samples = stats.get("latency_samples_ms", {})
    return DemoResult(
        policy=config.policy.name,
        checkpoint=getattr(config.policy, "checkpoint", ""),
        mode="real_time" if arguments.real_time else "lockstep",
        schedule=config.control.schedule,
        delay_ms=config.control.inject_delay_ms,
        rate_hz=config.control.rate_hz or 10.0,
        seed=arguments.seed,
        arms=tuple(arm.name for arm in config.arms),
        action=_action(config),
        episodes=tuple(episodes),
        latency_ms=stats.get("latency_ms", {}),
        frames=stats.get("frames", {}),
        execution=stats.get("execution", {}),
        latency_samples_ms={stage: np.asarray(values, dtype=np.float64) for stage, values in samples.items()},
        controls=controls,
        wall_s=wall,
    )
