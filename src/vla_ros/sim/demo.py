"""Watch a policy move the simulated arm, or two of them.

The simulation runs in this process and the policy node (`vla-ros run`) in another. They communicate over DDS, in a
ROS domain of their own on this host unless ROS_DOMAIN_ID is set. In simulated time the node's control loop runs in
this process, too. The seed of an episode decides the three or four objects on the table and the instruction.

  vla-ros demo --report out.html                the small OpenVLA that comes with the package
  vla-ros demo --checkpoint demo-pi --delay-ms 200    the small pi0.5, as slow as a large one, in simulated time
  vla-ros demo --checkpoint DIR                 your own checkpoint
  vla-ros demo --policy expert                  the scripted expert, which needs no PyTorch
  vla-ros demo --policy expert --arms 2 --actions joint_position    it moves two arms by joint positions
  vla-ros demo -p camera.orientation:="[none]"  what goes wrong when the image is upside down
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_ros.config import Config
from vla_ros.contract.parts import Part, parse_parts
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError, MissingDependencyError
from vla_ros.graph.launcher import end_with_launcher
from vla_ros.policies.shipped import SHIPPED
from vla_ros.sim.arguments import Plan, add_arguments, episode_options, mode_of, plan, world_options
from vla_ros.sim.expert import ExpertPolicy
from vla_ros.sim.process import PolicyProcess, private_graph
from vla_ros.sim.results import DemoResult, EpisodeResult
from vla_ros.sim.status import PolicyFailedError

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the episodes and write the outputs; returns 0 even if episodes fail."""
    for path in (arguments.json, arguments.report):
        if path is not None and path.is_dir():
            raise ConfigError(f"{path}: is a folder, expected a file name")
    options = plan(arguments)
    from vla_ros.sim import console

    console.CONSOLE.stderr = Path("-") in (arguments.json, arguments.report)
    result, config = play(arguments, options)
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
    """Start the policy node, run all episodes, stop the node and collect the results."""
    if not arguments.attach:
        check_torch(options.config)
    if mode_of(arguments) == "simulated_time":
        return _in_simulated_time(arguments, options.config), options.config
    if not arguments.attach:
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
    """Check that PyTorch is installed if the policy needs it; the error names what runs without it."""
    if config.policy.name in SHIPPED.values() and importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            "the demo's policy is a neural network, and PyTorch is not installed: pip install 'vla_ros[openvla]' "
            "(without a GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu, which is a "
            "tenth of the size). Without PyTorch: vla-ros demo --policy expert"
        )


def _interrupt_on_terminate() -> None:
    """Handle SIGTERM like Ctrl-C, so that the policy node shuts down cleanly."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _episodes(
    arguments: argparse.Namespace, config: Config, alive: Callable[[], bool], stack: ExitStack
) -> tuple[list[EpisodeResult], float]:
    """Return the results of all episodes and the seconds they took."""
    from vla_ros.graph import open_graph
    from vla_ros.sim import console
    from vla_ros.sim.episodes import Lockstep, RealTime
    from vla_ros.sim.node import SimNode
    from vla_ros.sim.record import BagRecorder
    from vla_ros.sim.world import TableTop

    world = stack.enter_context(TableTop(world_options(arguments, config)))
    world.render()  # fail at once if there is no OpenGL
    recorder = stack.enter_context(closing(BagRecorder(arguments.record))) if arguments.record else None
    graph = stack.enter_context(open_graph(config.node.backend, (), config.node.log_level))
    chosen = episode_options(arguments, world)
    node = SimNode(graph, config.arms, wrist=chosen.wrist, tap=recorder)
    console.header(config, f"ROS domain {os.environ.get('ROS_DOMAIN_ID', '0')}, {graph.backend}")
    with console.spinner("waiting for the policy node"):
        node.wait_for_policy(arguments.start_timeout, alive)
    kind = RealTime if arguments.real_time else Lockstep
    return _run_all(arguments, kind(world, node, chosen, alive).run)


def _in_simulated_time(arguments: argparse.Namespace, config: Config) -> DemoResult:
    """Run all episodes in this process."""
    from vla_ros.node.stepper import Stepper
    from vla_ros.policies.base import create
    from vla_ros.sim import console
    from vla_ros.sim.simulated_time import SimulatedTime
    from vla_ros.sim.world import TableTop

    console.header(config, "simulated time")
    with closing(Stepper(config, create(config))) as stepper:
        with console.spinner("loading the policy"):
            stepper.load()  # before anything is rendered: torch crashes where Mesa has loaded its LLVM
        with TableTop(world_options(arguments, config)) as world:
            runner = SimulatedTime(world, config, stepper, episode_options(arguments, world))
            episodes, wall = _run_all(arguments, runner.run)
        return _result(arguments, config, episodes, runner.stats, wall)


def _run_all(
    arguments: argparse.Namespace, run: Callable[[int], EpisodeResult]
) -> tuple[list[EpisodeResult], float]:
    """Results of all seeds and the seconds they took."""
    from vla_ros.sim import console

    results: list[EpisodeResult] = []
    began = time.monotonic()
    with console.progress(arguments.episodes) as report_progress:
        for seed in range(arguments.seed, arguments.seed + arguments.episodes):
            results.append(_small(run(seed), arguments.episodes))
            report_progress(results)
    return results, time.monotonic() - began


def _action(config: Config) -> tuple[Part, ...]:
    """Return the parts of the policy's action."""
    if config.policy.name == "expert":
        return ExpertPolicy(config).spec.action
    stated = parse_parts(" + ".join(config.features.action), action=True) if config.features.action else ()
    return stated or PolicySpec().action


def _small(result: EpisodeResult, episodes: int) -> EpisodeResult:
    """Halve the image size of long runs, to keep the report small."""
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
        mode=mode_of(arguments),
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
