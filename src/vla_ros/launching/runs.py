"""Runs that end by themselves: the demo, and a bag that is played into the live node."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.actions import EmitEvent, ExecuteProcess, LogInfo, RegisterEventHandler
from launch.event_handlers import OnProcessExit, OnProcessIO
from launch.events import matches_action
from launch.events.process import SignalProcess

from launch import Action, LaunchContext
from vla_ros.config import Config
from vla_ros.errors import VlaRosError
from vla_ros.graph.launcher import launched
from vla_ros.launching.arguments import configuration, given_file, node_name, overrides, value
from vla_ros.launching.ending import ends_with_launch, shut_down_with
from vla_ros.launching.middleware import middleware
from vla_ros.launching.node import interpreter, policy_node
from vla_ros.middleware import Frames

READY = b"is ready"
"""Part of the line that the node logs once it listens."""

RECORDING = b"Subscribed to topic"
"""Part of the line that `ros2 bag record` logs once it hears the node."""


def _vla_ros(context: LaunchContext, *words: str, **more: Any) -> ExecuteProcess:
    python = interpreter(context)
    command = [*python, "-m", "vla_ros.cli", *words] if python else ["vla-ros", *words]
    return ends_with_launch(ExecuteProcess(cmd=command, output="screen", additional_env=launched(), **more))


def demo(context: LaunchContext, names: Sequence[str]) -> list[Action]:
    """Everything of ``demo.launch.py``: the node with the demo's options, and the simulation that attaches to it.

    Args:
        context: Of the launch.
        names: Launch arguments that `vla-ros demo` takes as options.
    """
    from vla_ros.sim.demo import add_arguments, plan

    words = ["--attach"]
    for name in names:
        given = value(context, name)
        if given == "true":
            words.append(f"--{name.replace('_', '-')}")
        elif given not in ("", "false"):
            words += [f"--{name.replace('_', '-')}", given]
    for assignment in overrides(context):
        words += ["-p", assignment]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    try:
        options = plan(parser.parse_args(words))
    except VlaRosError as error:
        raise RuntimeError(str(error)) from None
    simulation = _vla_ros(context, "demo", *words, name="demo", on_exit=shut_down_with("the demo"))
    node = policy_node(context, options.files[0], options.assignments, on_exit=shut_down_with("the policy node"))
    return [*middleware(context, Frames.of(options.config)), node, simulation]


def replay(context: LaunchContext) -> list[Action]:
    """Everything of ``replay.launch.py``: node, recorder, player, and the report at the end."""
    bag = Path(value(context, "bag")).expanduser()
    output = Path(value(context, "output")).expanduser()
    if not bag.exists():
        raise RuntimeError(f"bag:={value(context, 'bag')}: no such bag")
    if output.exists():
        raise RuntimeError(f"output:={output}: is there already; name another folder")
    assignments = [*overrides(context), "control.armed:=false"]
    try:
        config = configuration(context)
    except VlaRosError as error:
        raise RuntimeError(str(error)) from None
    context.launch_configurations["use_sim_time"] = "true"
    node = policy_node(context, assignments=assignments, on_exit=shut_down_with("the policy node"))
    name = node_name(context)
    action = _resolved(config.topics.action, name)
    record = ExecuteProcess(
        cmd=["ros2", "bag", "record", "-o", str(output / "actions"), action], output="log", name="record"
    )
    play = ExecuteProcess(
        cmd=[
            # The pause is for discovery: frames are best effort, and nobody sends them again.
            *("ros2", "bag", "play", str(bag), "--clock", "100", "--delay", "3", "--rate", value(context, "rate")),
            *("--topics", *_inputs(config, name)),
        ],
        output="screen",
        name="play",
    )
    report = _vla_ros(context, "replay", str(bag), *_report_words(context, output), name="report")

    def on_played(event: Any, played: LaunchContext) -> list[Action]:
        if played.is_shutdown:
            return []
        said = LogInfo(msg=f"played; the live actions are in {output / 'actions'}")
        end = EmitEvent(event=SignalProcess(signal_number=signal.SIGINT, process_matcher=matches_action(record)))
        return [said, end, report]

    return [
        *middleware(context, Frames.of(config)),
        _when_said(node, READY, record),
        _when_said(record, RECORDING, play),
        RegisterEventHandler(OnProcessExit(target_action=play, on_exit=on_played)),
        RegisterEventHandler(OnProcessExit(target_action=report, on_exit=shut_down_with("the report"))),
        node,
    ]


def _when_said(process: Any, words: bytes, then: Action) -> RegisterEventHandler:
    """Do ``then`` once, when ``process`` says ``words``."""
    done = False

    def on_output(event: Any) -> list[Action] | None:
        nonlocal done
        if done or words not in event.text:
            return None
        done = True
        return [then]

    return RegisterEventHandler(OnProcessIO(target_action=process, on_stdout=on_output, on_stderr=on_output))


def _resolved(topic: str, node: str) -> str:
    """Full name of a topic whose name begins with ``~``."""
    return f"{node}{topic[1:]}" if topic.startswith("~") else topic


def _inputs(config: Config, node: str) -> list[str]:
    """Topics that the node listens to and that a bag may hold; never a command."""
    feeds = [feed.partition("=")[2] for feed in config.robot.state_topics]
    topics = config.topics
    return [
        _resolved(topic, node) for topic in (*config.camera.topics, topics.joint_states, topics.instruction, *feeds)
    ]


def _report_words(context: LaunchContext, output: Path) -> list[str]:
    file = given_file(context)
    words = ["--config", str(file)] if file else []
    for assignment in overrides(context):
        words += ["-p", assignment]
    return [*words, "--report", str(output / "report.html"), "--json", str(output / "result.json")]
