"""Watch a policy move one or two simulated arms.

The simulation runs in this process and the policy node (`vla-ros run`) in another one. They communicate over DDS,
in a free ROS domain on this host unless ROS_DOMAIN_ID is set. In simulated time, the node's control loop runs in
this process, too. The seed of an episode determines the objects on the table and the instruction.

  vla-ros demo --report out.html                the small OpenVLA that comes with the package
  vla-ros demo --checkpoint demo-pi --delay-ms 200    the small pi0.5 with the latency of a large one
  vla-ros demo --checkpoint DIR                 your own checkpoint
  vla-ros demo --policy expert                  the scripted expert, which needs no PyTorch
  vla-ros demo --real-time --console            the same in the browser: watch, stop, arm, take over
  vla-ros demo --policy expert --arms 2 --actions joint_position    the expert moves two arms
  vla-ros demo -p camera.orientation:="[none]"  the failure caused by an upside-down image
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from vla_ros.config import Config
from vla_ros.config.checkpoints import SHIPPED
from vla_ros.errors import MissingDependencyError, install, printable
from vla_ros.files import read_json_value, save_text
from vla_ros.graph.launcher import end_with_launcher, launched
from vla_ros_lab.eval import report
from vla_ros_lab.eval.arguments import CONTROLS, Plan, add_arguments, mode_of, plan_demo
from vla_ros_lab.eval.command import CommandProcess, private_graph
from vla_ros_lab.eval.port import LOCKSTEP, SIMULATED, WALL, NodePort, PolicyFailedError, Port
from vla_ros_lab.eval.progress import ProgressList
from vla_ros_lab.eval.results import Score, motion_of, summary_of, unjudged
from vla_ros_lab.eval.runner import EpisodeRunner
from vla_ros_lab.eval.scene import episode_options, make_table, rate_of
from vla_ros_lab.report import charts, page
from vla_ros_lab.report.versions import versions
from vla_ros_lab.sim.environment import Environment

__all__ = ["add_arguments", "run"]

_CONSOLE = Console(highlight=False)
_EPISODE_FIGURES = ("instruction", "success", "steps", "reason", "touched")
_SECTIONS = ("episodes", "latency_ms", "frames", "execution", "controls")
_LATENCY_NOTES = (
    "Measured in the policy node, without warm-up.",
    "wait, frame_age and total are in simulated time; the other stages were measured on this machine, and inference"
    " includes the added delay.",
)
_Run = tuple[Sequence[Score], float, Mapping[str, Any]]
"""The episodes, the seconds that they took, and the policy node's statistics (``vla-ros run --stats``)."""


def run(arguments: argparse.Namespace) -> int:
    """Run the episodes and write the outputs; returns 1 if none was judged."""
    _CONSOLE.stderr = page.to_stdout(json=arguments.json, report=arguments.report)
    options = plan_demo(arguments)
    if not arguments.attach:
        check_torch(options.config)
    mode, config = mode_of(arguments), options.config
    run_all = _on_a_graph(arguments, options) if mode != "simulated_time" else _in_simulated_time(arguments, config)
    scores, seconds, stats = run_all
    given = vars(arguments)
    controls = {name: given[name] for name, usual in CONTROLS.items() if given[name] != usual}
    figures = {**make_figures(config, mode, scores, stats), "controls": controls, "wall_s": seconds}
    _summary(figures, scores)
    if arguments.json is not None:
        save_text(arguments.json, json.dumps(figures, indent=2) + "\n")
    if arguments.report is not None:
        save_text(arguments.report, render_report(figures, scores, config, stats.get("latency_samples_ms", {})))
    for what, path in {"results": arguments.json, "report": arguments.report, "bag": arguments.record}.items():
        if path is not None:
            _CONSOLE.print(f"{what}: {path}", markup=False, soft_wrap=True)
    if why := unjudged(scores):
        _CONSOLE.print(f"[red]{escape(printable(why))}[/]", soft_wrap=True)
    return 1 if why else 0


def _on_a_graph(arguments: argparse.Namespace, options: Plan) -> _Run:
    """Start the policy node unless one is running, run all episodes, and stop the node."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the policy node shuts down cleanly
    end_with_launcher()
    if not arguments.attach:
        os.environ.update(private_graph(os.environ))
    if arguments.console:  # it ends with this process
        command = [sys.executable, "-m", "vla_ros.cli", "console", "--port", "0"]
        subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, **launched()})
    if arguments.attach:
        return _episodes(arguments, options.config, lambda: True)
    with tempfile.TemporaryDirectory(prefix="vla_ros_demo_") as folder:
        log, stats = arguments.log or Path(folder) / "policy.log", Path(folder) / "stats.json"
        words = [word for file in options.files for word in ("--config", str(file))]
        words += [word for assignment in options.assignments for word in ("-p", assignment)]
        policy = CommandProcess(["run", "--stats", str(stats), *words], log)
        try:
            scores, seconds, _ = _episodes(arguments, options.config, policy.alive)
        except PolicyFailedError:
            policy.end()  # first, so that the log includes the shutdown
            print("End of the policy node's output:", policy.last_lines(), sep="\n", file=sys.stderr)
            raise
        finally:
            policy.end()
        return scores, seconds, read_json_value(stats) if stats.exists() else {}  # none if it was killed


def check_torch(config: Config) -> None:
    """Raise MissingDependencyError if the policy needs PyTorch and PyTorch is not installed."""
    if config.policy.name in SHIPPED.values() and importlib.util.find_spec("torch") is None:
        smaller = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        advice = f"{install('openvla')} (without a GPU first: {smaller}, which is a tenth of the size)"
        found = "the demo's policy needs PyTorch, which is not installed"
        raise MissingDependencyError(f"{found}: {advice}. Without PyTorch: vla-ros demo --policy expert")


def _episodes(arguments: argparse.Namespace, config: Config, alive: Callable[[], bool]) -> _Run:
    """Run all episodes over the graph; ``alive()`` is False once the policy node has exited."""
    from vla_ros.graph import open_graph
    from vla_ros_lab.eval.graph import GraphPort
    from vla_ros_lab.eval.record import BagRecorder

    with ExitStack() as stack:
        table = stack.enter_context(closing(make_table(arguments, config)))
        table.world.render()  # fail at once if there is no OpenGL
        recorder = stack.enter_context(closing(BagRecorder(arguments.record))) if arguments.record else None
        graph = stack.enter_context(open_graph(config.node.backend, (), config.node.log_level))
        asked = [one for one in table.cameras if one in config.camera.topics]
        cameras = table.cameras if arguments.wrist_camera else asked or table.cameras[:1]
        clock, timeout = WALL if arguments.real_time else LOCKSTEP, arguments.step_timeout
        options = {"cameras": cameras, "timeout": timeout, "alive": alive, "patient": arguments.console}
        port = GraphPort(graph, config.arms, clock, **options, tap=recorder)
        _header(config, f"ROS domain {os.environ.get('ROS_DOMAIN_ID', '0')}, {graph.backend}")
        with _CONSOLE.status("waiting for the policy node"):
            port.wait_for_policy(arguments.start_timeout)
        if recorder is not None and clock == LOCKSTEP:
            recorder.clock = lambda: port.last
        return *_run_all(arguments, config, table, port), {}


def _in_simulated_time(arguments: argparse.Namespace, config: Config) -> _Run:
    from vla_ros.execution.source import PolicySource
    from vla_ros.policies.base import create

    _header(config, "simulated time")
    with closing(PolicySource(create(config))) as source:
        with _CONSOLE.status("loading the policy"):
            source.load()  # before rendering: torch crashes if Mesa has loaded its LLVM
        with closing(make_table(arguments, config)) as table:
            port = NodePort(config, source, SIMULATED)
            return *_run_all(arguments, config, table, port), port.stats


def _run_all(
    arguments: argparse.Namespace, config: Config, table: Environment, port: Port
) -> tuple[Sequence[Score], float]:
    began, runner = time.monotonic(), EpisodeRunner(table, port, episode_options(arguments, config))
    with ProgressList(_CONSOLE) as progress:
        progress.expect(arguments.episodes)
        for seed in range(arguments.seed, arguments.seed + arguments.episodes):
            score = replace(runner.run(seed), task="table")
            if arguments.episodes > 10:  # smaller images keep the report small
                images = tuple(image[::2, ::2].copy() for image in score.trace.images)
                score = replace(score, trace=replace(score.trace, images=images))
            progress.add(score)
    return tuple(progress.scores.values()), time.monotonic() - began


def _header(config: Config, where: str) -> None:
    checkpoint = getattr(config.policy, "checkpoint", "")
    model = f" ({checkpoint})" if checkpoint else ""
    _CONSOLE.print(f"policy [bold]{config.policy.name}[/]{escape(printable(model))}, {where}", soft_wrap=True)


def make_figures(config: Config, mode: str, scores: Sequence[Score], stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return all figures as plain JSON values.

    Stages that a simulated clock measured took no time, and are left out.
    """
    won, rate_hz = [score.steps for score in scores if score.success], rate_of(config)
    wrong = sum(score.reason == "wrong_object" for score in scores)
    latency = {stage: times for stage, times in stats.get("latency_ms", {}).items() if times["p99"] > 0}
    return {
        "policy": config.policy.name,
        "checkpoint": str(getattr(config.policy, "checkpoint", "")),
        "arms": [one.name for one in config.arms],
        "action": " + ".join(map(str, report.action_of(config))),
        "mode": mode,
        "schedule": config.control.schedule,
        "delay_ms": config.control.inject_delay_ms,
        "rate_hz": rate_hz,
        "seed": scores[0].state,
        "success_rate": summary_of(scores).rate,
        "wrong_object_rate": wrong / len(scores),
        "seconds_to_success": float(np.mean(won)) / rate_hz if won else None,
        **motion_of(scores),
        "episodes": [
            {"seed": score.state, **{name: getattr(score, name) for name in _EPISODE_FIGURES}} for score in scores
        ],
        "latency_ms": latency,
        "frames": stats.get("frames", {}),
        "execution": stats.get("execution", {}),
    }


def render_report(
    figures: Mapping[str, Any], scores: Sequence[Score], config: Config, samples: Mapping[str, Sequence[float]]
) -> str:
    """Return the HTML report; ``samples`` are individual measurements of stages, in milliseconds."""
    policy, checkpoint, mode = figures["policy"], figures["checkpoint"], figures["mode"]
    controls = [f"{name} = {value}: a control experiment" for name, value in figures["controls"].items()]
    stages = figures["latency_ms"]
    plots = [charts.histogram(samples[stage], title=stage, x_label="ms") for stage in stages if stage in samples]
    rows = [(stage, times["p50"], times["p99"]) for stage, times in stages.items()]
    latency = page.table(("stage", "p50 [ms]", "p99 [ms]"), rows)
    about = {name: value for name, value in figures.items() if name not in _SECTIONS}
    body = [
        *report.episodes(scores, controls, config, counted=False),
        page.section("Latency", [latency, page.cards(plots)], _LATENCY_NOTES[mode != "real_time"]),
        page.section("Frames", page.facts(figures["frames"])),
        page.section(
            "Plan", page.facts(figures["execution"]), "Counted by the policy node, also between episodes."
        ),
        page.section("Configuration and versions", [page.facts({**about, **versions()}), report.options(config)]),
    ]
    # The names of checkpoints that ship with the package say little in a heading.
    title = f"vla_ros demo: {policy if checkpoint in ('', *SHIPPED) else checkpoint}"
    lead = f"{len(scores)} episodes, policy {policy}, {mode.replace('_', ' ')}"
    return page.document(title, lead, body, "Written by vla-ros demo --report.")


def _summary(figures: Mapping[str, Any], scores: Sequence[Score]) -> None:
    """Print the report's headline figures and the latency by stage."""
    mode, won = figures["mode"].replace("_", " "), summary_of(scores).successes
    _CONSOLE.print(f"\n[bold]{won} of {len(scores)} episodes succeeded[/] ({mode}, {figures['wall_s']:.1f} s)")
    for title, figure, remark in report.headline(scores):
        _CONSOLE.print(f"{title}: {figure}, {remark}")
    if frames := figures["frames"]:
        dropped = ", ".join(f"{reason} {count}" for reason, count in frames["dropped"].items()) or "none"
        _CONSOLE.print(f"Frames used: {frames['used']} of {frames['received']} received, dropped: {dropped}")
    if figures["latency_ms"]:
        _CONSOLE.print(f"{'latency in the policy node (ms)':32}{'p50':>10}{'p99':>10}")
    for stage, values in figures["latency_ms"].items():
        _CONSOLE.print(f"  {stage:30}{values['p50']:10.2f}{values['p99']:10.2f}", markup=False)
