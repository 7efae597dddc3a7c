"""Watch a policy move one or two simulated arms.

The simulation runs in this process and the policy node (`vla-ros run`) in another one. They communicate over DDS,
in a free ROS domain on this host unless ROS_DOMAIN_ID is set. In simulated time, the node's control loop runs in
this process, too. The seed of an episode determines the objects on the table and the instruction.

  vla-ros demo --report out.html                the small OpenVLA that comes with the package
  vla-ros demo --checkpoint demo-pi --delay-ms 200    the small pi0.5 with the latency of a large one
  vla-ros demo --checkpoint DIR                 your own checkpoint
  vla-ros demo --policy expert                  the scripted expert, which needs no PyTorch
  vla-ros demo --policy expert --arms 2 --actions joint_position    the expert moves two arms
  vla-ros demo -p camera.orientation:="[none]"  the failure caused by an upside-down image
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vla_ros.config import Config
from vla_ros.config.checkpoints import SHIPPED
from vla_ros.errors import MissingDependencyError, printable
from vla_ros.graph.launcher import end_with_launcher
from vla_ros_lab.report.page import to_stdout
from vla_ros_lab.sim import report
from vla_ros_lab.sim.arguments import CONTROLS, Plan, add_arguments, episode_options, make_table, mode_of, plan_demo
from vla_ros_lab.sim.environment import PolicyFailedError
from vla_ros_lab.sim.process import PolicyProcess, private_graph
from vla_ros_lab.sim.results import DemoResult, EpisodeResult

__all__ = ["add_arguments", "run"]

_CONSOLE = Console(highlight=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the episodes and write the outputs; returns 0 even if episodes fail."""
    _CONSOLE.stderr = to_stdout(json=arguments.json, report=arguments.report)
    options = plan_demo(arguments)
    if not arguments.attach:
        check_torch(options.config)
    in_one_process = mode_of(arguments) == "simulated_time"
    result = _in_simulated_time(arguments, options.config) if in_one_process else _on_a_graph(arguments, options)
    _summary(result)
    if arguments.json is not None:
        result.write_json(arguments.json)
        _wrote("results", arguments.json)
    if arguments.report is not None:
        report.write(result, arguments.report)
        _wrote("report", arguments.report)
    if arguments.record is not None:
        _wrote("bag", arguments.record)
    return 0


def _on_a_graph(arguments: argparse.Namespace, options: Plan) -> DemoResult:
    """Start the policy node unless one is running, run all episodes, and stop the node."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the policy node shuts down cleanly
    end_with_launcher()
    if arguments.attach:
        return _episodes(arguments, options.config, lambda: True)
    os.environ.update(private_graph(os.environ))
    with tempfile.TemporaryDirectory(prefix="vla_ros_demo_") as folder:
        log = arguments.log or Path(folder) / "policy.log"
        policy = PolicyProcess(options.files, options.assignments, Path(folder) / "stats.json", log)
        try:
            result = _episodes(arguments, options.config, policy.alive)
        except PolicyFailedError:
            policy.end()  # first, so that the log includes the shutdown
            print("End of the policy node's output:", policy.last_lines(), sep="\n", file=sys.stderr)
            raise
        finally:
            policy.end()
        return result.with_stats(policy.stats())


def check_torch(config: Config) -> None:
    """Raise MissingDependencyError if the policy needs PyTorch and PyTorch is not installed."""
    if config.policy.name in SHIPPED.values() and importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            "the demo's policy needs PyTorch, which is not installed: pip install 'vla_ros[openvla]' "
            "(without a GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu, which is a "
            "tenth of the size). Without PyTorch: vla-ros demo --policy expert"
        )


def _episodes(arguments: argparse.Namespace, config: Config, alive: Callable[[], bool]) -> DemoResult:
    """Run all episodes over the graph; ``alive()`` is False once the policy node has exited."""
    from vla_ros.graph import open_graph
    from vla_ros_lab.sim.episodes import Lockstep, RealTime
    from vla_ros_lab.sim.node import SimNode
    from vla_ros_lab.sim.record import BagRecorder

    with ExitStack() as stack:
        table = stack.enter_context(closing(make_table(arguments, config)))
        table.world.render()  # fail at once if there is no OpenGL
        recorder = stack.enter_context(closing(BagRecorder(arguments.record))) if arguments.record else None
        graph = stack.enter_context(open_graph(config.node.backend, (), config.node.log_level))
        cameras = table.cameras if arguments.wrist_camera else table.cameras[:1]
        node = SimNode(graph, config.arms, cameras=cameras, tap=recorder)
        _header(config, f"ROS domain {os.environ.get('ROS_DOMAIN_ID', '0')}, {graph.backend}")
        with _CONSOLE.status("waiting for the policy node"):
            node.wait_for_policy(arguments.start_timeout, alive)
        kind = RealTime if arguments.real_time else Lockstep
        if recorder is not None and kind is Lockstep:
            recorder.clock = lambda: node.stamp
        return _run_all(arguments, config, kind(table, node, episode_options(arguments, config), alive).run)


def _in_simulated_time(arguments: argparse.Namespace, config: Config) -> DemoResult:
    from vla_ros.execution.source import PolicySource
    from vla_ros.policies.base import create
    from vla_ros_lab.sim.simulated_time import SimulatedTime

    _header(config, "simulated time")
    with closing(PolicySource(create(config))) as source:
        with _CONSOLE.status("loading the policy"):
            source.load()  # before rendering: torch crashes if Mesa has loaded its LLVM
        with closing(make_table(arguments, config)) as table:
            runner = SimulatedTime(table, config, source, episode_options(arguments, config))
            return _run_all(arguments, config, runner.run).with_stats(runner.stats)


def _run_all(arguments: argparse.Namespace, config: Config, run: Callable[[int], EpisodeResult]) -> DemoResult:
    results: list[EpisodeResult] = []
    began = time.monotonic()
    with _progress(arguments.episodes) as report_progress:
        for seed in range(arguments.seed, arguments.seed + arguments.episodes):
            result = run(seed)
            if arguments.episodes > 10:  # smaller images keep the report small
                result = replace(result, images=tuple(image[::2, ::2].copy() for image in result.images))
            results.append(result)
            report_progress(results)
    return DemoResult(
        config,
        mode_of(arguments),
        arguments.seed,
        tuple(results),
        controls={name: getattr(arguments, name) for name, usual in CONTROLS if getattr(arguments, name) != usual},
        wall_s=time.monotonic() - began,
    )


def _header(config: Config, where: str) -> None:
    checkpoint = getattr(config.policy, "checkpoint", "")
    model = f" ({checkpoint})" if checkpoint else ""
    _CONSOLE.print(f"policy [bold]{config.policy.name}[/]{escape(printable(model))}, {where}", soft_wrap=True)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Sequence[EpisodeResult]], None]]:
    """Show a progress bar; call the yielded function with the results so far after each episode."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_CONSOLE, transient=True) as bar:
        task = bar.add_task("episodes", total=total)

        def update(results: Sequence[EpisodeResult]) -> None:
            last = results[-1]
            mark = "[green]success[/]" if last.success else f"[red]{last.reason}[/]"
            note = f" ({last.touched})" if last.touched else ""
            bar.console.print(
                f"seed {last.seed:5d}  {last.steps:3d} steps  {mark}{note}  {escape(printable(last.instruction))}",
                soft_wrap=True,
            )
            share = sum(result.success for result in results) / len(results)
            bar.update(task, completed=len(results), description=f"episodes, {share:.0%} succeed")

        yield update


def _summary(result: DemoResult) -> None:
    """Print the report's headline figures and the latency by stage."""
    won, mode = sum(episode.success for episode in result.episodes), result.mode.replace("_", " ")
    _CONSOLE.print(f"\n[bold]{won} of {len(result.episodes)} episodes succeeded[/] ({mode}, {result.wall_s:.1f} s)")
    for title, figure, remark in report.headline(result):
        _CONSOLE.print(f"{title}: {figure}, {remark}")
    if result.latency_ms:
        table = Table(title="latency in the policy node", title_justify="left")
        table.add_column("stage")
        for name in ("p50", "p99"):
            table.add_column(f"{name} (ms)", justify="right")
        for stage, values in result.latency_ms.items():
            table.add_row(stage, f"{values['p50']:.2f}", f"{values['p99']:.2f}")
        _CONSOLE.print(table)


def _wrote(what: str, path: Path) -> None:
    _CONSOLE.print(f"{what}: {path}", markup=False, soft_wrap=True)
