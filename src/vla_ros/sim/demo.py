"""Watch a policy move the simulated arm.

The simulation runs in this process and the policy node (`vla-ros run`) in another; they meet over DDS, in a
domain of their own on this host unless ROS_DOMAIN_ID says otherwise. Each episode draws a table with three or
four objects and an instruction from its seed.

  vla-ros demo --report out.html                the small OpenVLA that comes with the package
  vla-ros demo --checkpoint DIR                 your own checkpoint
  vla-ros demo --policy expert                  the scripted expert, which needs no PyTorch
  vla-ros demo -p camera.orientation:="[none]"  what goes wrong with the picture upside down
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_ros.config import Config, load
from vla_ros.config.files import config_file
from vla_ros.config.loading import parse_assignment, read_file
from vla_ros.config.show import add_config_arguments
from vla_ros.errors import ConfigError, MissingDependencyError
from vla_ros.graph.launcher import end_with_launcher
from vla_ros.sim.process import PolicyProcess, RunningPolicy, private_graph
from vla_ros.sim.results import DemoResult, EpisodeResult
from vla_ros.sim.status import PolicyFailedError

if TYPE_CHECKING:
    from vla_ros.sim.world import WorldOptions

LOCKSTEP_HZ = 10.0

# In lockstep nothing is late: the simulation waits. Only a policy node that hangs is given up on.
_LOCKSTEP = (
    "control.lockstep:=true",
    "timeouts.camera:=600.0",
    "timeouts.joint_state:=600.0",
    "timeouts.inference:=600.0",
    "timeouts.driver:=600.0",
    "timeouts.frame_age:=0.0",
    "timeouts.joint_state_age:=0.0",
)
_MOST_THREADS = 8  # more do not help a model that is as small as the demo's
_TASKS = {"pick": ("pick",), "push": ("push_left", "push_right"), "all": ("pick", "push_left", "push_right")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``vla-ros demo``."""
    parser.add_argument("--episodes", type=_positive, default=5, metavar="N", help="episodes to run (default 5)")
    parser.add_argument(
        "--seed", type=_natural, default=0, metavar="S", help="seed of the first episode (default 0)"
    )
    parser.add_argument("--policy", metavar="NAME", help="policy by its entry-point name (openvla, expert, hold)")
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="folder of another checkpoint; means --policy openvla where no policy is named",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a self-contained HTML report")
    parser.add_argument("--record", type=Path, metavar="BAG", help="record a rosbag2 bag (MCAP)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--lockstep", action="store_true", help="wait for each command; independent of machine speed (default)"
    )
    mode.add_argument("--real-time", action="store_true", help="physics at the pace of the wall clock")
    parser.add_argument("--task", choices=sorted(_TASKS), default="pick", help="what is asked (default pick)")
    parser.add_argument("--camera-hz", type=_rate, default=10.0, metavar="HZ", help="camera rate in real time")
    parser.add_argument("--wrist-camera", action="store_true", help="publish /wrist_camera/image_raw too")
    parser.add_argument("--max-steps", type=_positive, default=80, metavar="N", help="steps of 0.1 s per episode")
    parser.add_argument(
        "--step-timeout", type=_rate, default=60.0, metavar="S", help="wait for one command at most"
    )
    parser.add_argument("--start-timeout", type=_rate, default=300.0, metavar="S", help="wait for the policy node")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what the policy node says goes here")
    parser.add_argument(
        "--attach", action="store_true", help="a policy node runs already, such as demo.launch.py's; start none"
    )
    controls = parser.add_argument_group("controls", "options that harden the run, or show what a policy relies on")
    controls.add_argument(
        "--bump", type=float, default=0.0, metavar="M", help="knock the tool aside by up to M metres"
    )
    controls.add_argument("--dim", type=float, default=1.0, metavar="GAIN", help="dim the camera by this factor")
    controls.add_argument("--blank", action="store_true", help="black pictures")
    controls.add_argument("--shuffle", action="store_true", help="name another object than the one judged by")
    controls.add_argument("--switch-at", type=_natural, default=0, metavar="STEP", help="switch to a distractor")
    add_config_arguments(parser)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text}, expected 1 or more")
    return int(text)


def _natural(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"found {text}, expected 0 or more")
    return int(text)


def _rate(text: str) -> float:
    if not 0.1 <= float(text) <= 1e5:
        raise argparse.ArgumentTypeError(f"found {text}, expected 0.1 to 100000")
    return float(text)


@dataclass(frozen=True)
class Plan:
    """What the arguments come to.

    Attributes:
        files: Parameter files of the policy node.
        assignments: ``name:=value`` over them.
        config: The tree that results, checked here so that mistakes show before anything starts.
    """

    files: tuple[Path, ...]
    assignments: tuple[str, ...]
    config: Config


def plan(arguments: argparse.Namespace) -> Plan:
    """Options of the policy node.

    Raises:
        ConfigError: As :func:`vla_ros.config.load`.
    """
    files = (config_file("demo"), *arguments.config)
    mode = [] if arguments.real_time else list(_LOCKSTEP)
    model: list[str] = []
    if arguments.policy:
        model.append(f"policy.name:={arguments.policy}")
    if arguments.checkpoint:
        if not arguments.policy:
            model.append("policy.name:=openvla")
        named = arguments.checkpoint == "demo"  # a name, no folder
        folder = arguments.checkpoint if named else Path(arguments.checkpoint).expanduser().resolve()
        model.append(f"policy.checkpoint:={folder}")
    model += arguments.param
    if arguments.real_time and hasattr(load(files, model).policy, "threads"):
        mode.append(f"policy.threads:={_threads()}")
    assignments = (*mode, *_forgotten(files, model), *model)
    return Plan(files, assignments, load(files, assignments))


def _threads() -> int:
    """For the policy in real time: all cores but the simulation's.

    Threads of one multiplication wait for each other. Where something else takes turns on a core, two of them were
    measured to be up to ten times as slow as one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores - 1, _MOST_THREADS))


def _forgotten(files: Sequence[Path], chosen: Sequence[str]) -> list[str]:
    """Another checkpoint has nothing to do with the statistics that the demo's file names."""
    usual, now = load(files[:1]).policy, load(files, chosen).policy
    given = {parse_assignment(text)[0] for text in chosen}.union(*(read_file(file) for file in files[1:]))
    same = now.name != usual.name or getattr(now, "checkpoint", "") == getattr(usual, "checkpoint", "")
    return [] if same or "policy.unnorm_key" in given else ["policy.unnorm_key:="]


def run(arguments: argparse.Namespace) -> int:
    """Run the episodes and write what was asked for; exit status 0 when that was done, whatever the arm did.

    Raises:
        VlaRosError: The demo could not do its work; the text says why.
    """
    for path in (arguments.json, arguments.report):
        if path is not None and path.is_dir():
            raise ConfigError(f"{path}: is a folder, expected a file name")
    result, config = play(arguments, plan(arguments))
    from vla_ros.sim import console

    console.summary(result)
    if arguments.json is not None:
        result.write_json(arguments.json)
        console.wrote("figures", arguments.json)
    if arguments.report is not None:
        from vla_ros.sim import report

        report.write(result, arguments.report, config)
        console.wrote("report", arguments.report)
    if arguments.record is not None:
        console.wrote("bag", arguments.record)
    return 0


def play(arguments: argparse.Namespace, options: Plan) -> tuple[DemoResult, Config]:
    """Start the policy node, run all episodes, end it, and gather the result.

    Raises:
        VlaRosError: The graph cannot be joined, there is no renderer, or the policy node did not come or ended.
    """
    if not arguments.attach:
        check_torch(options.config)
        os.environ.update(private_graph(os.environ))
    _interrupt_on_terminate()
    end_with_launcher()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vla_ros_demo_")))
        log = arguments.log or folder / "policy.log"
        policy = _policy(arguments, options, folder / "stats.json", log)
        stack.callback(policy.end)
        try:
            episodes, wall = _episodes(arguments, options.config, policy, stack)
        except PolicyFailedError:
            policy.end()  # what it says at its end belongs to its last lines
            print(policy.last_lines(), file=sys.stderr)
            raise
        policy.end()
        stats = policy.stats()
    return _result(arguments, options.config, episodes, stats, wall), options.config


def check_torch(config: Config) -> None:
    """Say what the demo's own policy lacks before anything starts, and what runs without it.

    Raises:
        MissingDependencyError: PyTorch is not installed.
    """
    if config.policy.name == "openvla" and importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            "the demo's policy is a small OpenVLA, and PyTorch is not installed: pip install 'vla_ros[openvla]' "
            "(without a GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu, which is a "
            "tenth of the size). Without PyTorch: vla-ros demo --policy expert"
        )


def _policy(arguments: argparse.Namespace, options: Plan, stats: Path, log: Path) -> PolicyProcess | RunningPolicy:
    if arguments.attach:
        return RunningPolicy()
    return PolicyProcess(options.files, options.assignments, stats, log)


def _interrupt_on_terminate() -> None:
    """SIGTERM ends the demo as Ctrl-C does: the policy node is ended in order."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _episodes(
    arguments: argparse.Namespace, config: Config, policy: PolicyProcess | RunningPolicy, stack: ExitStack
) -> tuple[list[EpisodeResult], float]:
    """All results, and the seconds that they took."""
    from vla_ros.graph import open_graph
    from vla_ros.sim import console
    from vla_ros.sim.episodes import EpisodeOptions, Lockstep, RealTime, Runner
    from vla_ros.sim.node import SimNode
    from vla_ros.sim.record import BagRecorder
    from vla_ros.sim.world import TableTop

    world = stack.enter_context(TableTop(world_options(arguments, config)))
    world.render()  # without OpenGL the demo ends here, before anybody waits
    recorder = stack.enter_context(BagRecorder(arguments.record)) if arguments.record is not None else None
    graph = stack.enter_context(open_graph(config.node.backend, (), config.node.log_level))
    node = SimNode(graph, wrist=arguments.wrist_camera, tap=recorder)
    console.waiting(config, os.environ.get("ROS_DOMAIN_ID", "0"), graph.backend)
    with console.spinner("the policy node loads"):
        node.wait_for_policy(arguments.start_timeout, policy.alive)
    options = EpisodeOptions(
        max_steps=arguments.max_steps,
        step_timeout=arguments.step_timeout,
        camera_hz=arguments.camera_hz,
        wrist=arguments.wrist_camera,
        blank=arguments.blank,
        shuffle=arguments.shuffle,
        switch_at=arguments.switch_at,
    )
    kind = RealTime if arguments.real_time else Lockstep
    runner: Runner = kind(world, node, options, policy.alive)
    results: list[EpisodeResult] = []
    began = time.monotonic()
    with console.progress(arguments.episodes) as told:
        for seed in range(arguments.seed, arguments.seed + arguments.episodes):
            results.append(_small(runner.run(seed), arguments.episodes))
            told(results)
    return results, time.monotonic() - began


def world_options(arguments: argparse.Namespace, config: Config) -> WorldOptions:
    """What the arguments say about the table-top."""
    from vla_ros.sim.world import WorldOptions

    return WorldOptions(
        width=config.camera.width[0],
        height=config.camera.height[0],
        tasks=_TASKS[arguments.task],
        camera_gain=arguments.dim,
        bump=arguments.bump,
    )


def _small(result: EpisodeResult, episodes: int) -> EpisodeResult:
    """Pictures at half size where there are many episodes: the report stays a file that one can mail."""
    if episodes <= 10:
        return result
    from dataclasses import replace

    return replace(result, pictures=tuple(picture[::2, ::2].copy() for picture in result.pictures))


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
        rate_hz=LOCKSTEP_HZ,
        seed=arguments.seed,
        episodes=tuple(episodes),
        latency_ms=stats.get("latency_ms", {}),
        frames=stats.get("frames", {}),
        latency_samples_ms={stage: np.asarray(values, dtype=np.float64) for stage, values in samples.items()},
        controls=controls,
        wall_s=wall,
    )
