"""The actions of ``demo.launch.py`` and ``replay.launch.py``."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.actions import EmitEvent, ExecuteProcess, LogInfo, RegisterEventHandler
from launch.event_handlers import OnProcessExit, OnProcessIO
from launch.events import matches_action
from launch.events.process import SignalProcess

from launch import Action, LaunchContext
from vla_ros.config import Config, node_topics
from vla_ros.errors import VlaRosError
from vla_ros.launching.arguments import given_file, node_name, node_options, overrides, value
from vla_ros.launching.ending import ends_with_launch, interrupted_with_launch, shut_down_with
from vla_ros.launching.middleware import middleware
from vla_ros.launching.node import policy_node, vla_ros
from vla_ros.middleware.profiles import FrameLoad

READY = b"is ready"
"""Part of the line that the node logs when it is active."""

RECORDING = b"Subscribed to topic"
"""Part of the line that `ros2 bag record` logs when it is connected to the node."""


def _bag(verb: str, *arguments: str, output: str) -> ExecuteProcess:
    command = interrupted_with_launch("ros2", "bag", verb, *arguments)
    return ends_with_launch(ExecuteProcess(cmd=command, output=output, name=verb))


def demo(context: LaunchContext, names: Sequence[str]) -> list[Action]:
    """Return the launch actions of the node and its simulation; ``names`` are the demo's arguments."""
    from vla_ros_lab.eval.arguments import parse, plan_demo

    arguments = ["--attach"]
    for name in names:
        text = value(context, name)
        if text == "true":
            arguments.append(f"--{name.replace('_', '-')}")
        elif text not in ("", "false"):
            arguments += [f"--{name.replace('_', '-')}", text]
    for assignment in overrides(context):
        arguments += ["-p", assignment]
    try:
        options = plan_demo(parse(*arguments))
    except VlaRosError as error:
        raise RuntimeError(str(error)) from None
    simulation = vla_ros(context, "demo", *arguments, name="demo", on_exit=shut_down_with("the demo"))
    node = policy_node(context, options.files, options.assignments, on_exit=shut_down_with("the policy node"))
    return [*middleware(context, FrameLoad.of(options.config)), node, simulation]


def replay(context: LaunchContext) -> list[Action]:
    """Return the launch actions that play a bag into the live node, record its actions and write the report."""
    bag = Path(value(context, "bag")).expanduser()
    output = Path(value(context, "output")).expanduser()
    if not bag.exists():
        raise RuntimeError(f"bag:={value(context, 'bag')}: no such bag")
    if output.exists():
        raise RuntimeError(f"output:={output}: already exists; name another folder")
    assignments = [*overrides(context), "control.armed:=false"]
    try:
        config = node_options(context)
    except VlaRosError as error:
        raise RuntimeError(str(error)) from None
    context.launch_configurations["use_sim_time"] = "true"
    node = policy_node(context, assignments=assignments, on_exit=shut_down_with("the policy node"))
    name = node_name(context)
    action = _resolved(node_topics.ACTION, name)
    # Lyrical takes topics only after --topics, which Humble does not know; all know expressions.
    record = _bag("record", "-o", str(output / "actions"), "-e", f"^{action}$", output="log")
    # The delay is for discovery, because lost frames are not sent again.
    rates = ("--clock", "100", "--delay", "3", "--rate", value(context, "rate"))
    play = _bag("play", str(bag), *rates, "--topics", *_inputs(config, name), output="screen")
    report = vla_ros(context, "replay", str(bag), *_report_arguments(context, output), name="report")
    complete = False  # the whole bag was played

    def on_recorded(event: Any, recorded: LaunchContext) -> None:
        if not complete and not recorded.is_shutdown:
            raise RuntimeError(f"the recorder (ros2 bag record) ended too early, with status {event.returncode}")

    def on_played(event: Any, played: LaunchContext) -> list[Action]:
        nonlocal complete
        if played.is_shutdown:
            return []
        if event.returncode:
            raise RuntimeError(f"the player (ros2 bag play) ended with status {event.returncode}")
        complete = True
        finished = LogInfo(msg=f"finished; the live actions are in {output / 'actions'}")
        end = EmitEvent(event=SignalProcess(signal_number=signal.SIGINT, process_matcher=matches_action(record)))
        return [finished, end, report]

    return [
        *middleware(context, FrameLoad.of(config)),
        _when_logged(node, READY, record),
        _when_logged(record, RECORDING, play),
        RegisterEventHandler(OnProcessExit(target_action=record, on_exit=on_recorded)),
        RegisterEventHandler(OnProcessExit(target_action=play, on_exit=on_played)),
        RegisterEventHandler(OnProcessExit(target_action=report, on_exit=shut_down_with("the report"))),
        node,
    ]


def _when_logged(process: Any, text: bytes, then: Action) -> RegisterEventHandler:
    done = False

    def on_output(event: Any) -> list[Action] | None:
        nonlocal done
        if done or text not in event.text:
            return None
        done = True
        return [then]

    return RegisterEventHandler(OnProcessIO(target_action=process, on_stdout=on_output, on_stderr=on_output))


def _resolved(topic: str, node: str) -> str:
    """Return the full name of a topic whose name begins with ``~``."""
    return f"{node}{topic[1:]}" if topic.startswith("~") else topic


def _inputs(config: Config, node: str) -> list[str]:
    """Return the bag's topics that are played: the node's observations and instruction, no commands."""
    state = [topic.topic for topic in config.robot.parsed_state_topics]
    joints = dict.fromkeys(arm.joint_states for arm in config.arms)
    return [_resolved(topic, node) for topic in (*config.camera.topics, *joints, node_topics.INSTRUCTION, *state)]


def _report_arguments(context: LaunchContext, output: Path) -> list[str]:
    file = given_file(context)
    arguments = ["--config", str(file)] if file else []
    for assignment in overrides(context):
        arguments += ["-p", assignment]
    return [*arguments, "--report", str(output / "report.html"), "--json", str(output / "result.json")]
