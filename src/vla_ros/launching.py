"""What the launch files share: arguments, the policy node, and the middleware that they select.

Imports ``launch`` and ``launch_ros``; only launch files import this. Options are checked here with the same code
as in the node, so that a mistake is told before anything starts.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ament_index_python.packages import get_package_share_directory
from launch import LaunchContext
from launch.actions import (
    DeclareLaunchArgument,
    ExecuteProcess,
    LogInfo,
    OpaqueFunction,
    RegisterEventHandler,
    SetEnvironmentVariable,
    Shutdown,
    TimerAction,
    UnsetEnvironmentVariable,
)
from launch.event_handlers import OnProcessExit
from launch_ros.actions import Node

from vla_ros.config import Config, load
from vla_ros.config.loading import parse_assignment
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.middleware import NAMES, Frames, Profile, default_folder, examine, select, sourced_distribution, write
from vla_ros.middleware.checks import roudi_is_up, zenoh_router_is_up
from vla_ros.middleware.selection import ALL_VARIABLES

NODE_NAME = "vla_policy"


@dataclass(frozen=True)
class Argument:
    """A launch argument.

    Attributes:
        name: As in ``name:=value``.
        default: Text; "" leaves the option as the configuration file has it.
        description: Shown by ``--show-args``.
        choices: Allowed texts; empty for any.
        option: Option of the tree that it sets, or "".
    """

    name: str
    default: str
    description: str
    choices: tuple[str, ...] = ()
    option: str = ""


MIDDLEWARE = (
    Argument(
        "middleware",
        "default",
        "RMW and the profile that keeps large frames, for the sourced distribution. default sets nothing",
        NAMES,
    ),
    Argument("interface", "", "Network interface of Cyclone DDS ('lo' stays on this host); empty: it chooses"),
)

POLICY = (
    Argument("config", "", "Parameter file (YAML) of the robot, or the name of one in share/vla_ros/config"),
    Argument("policy", "", "Policy by its entry-point name: openvla, expert, hold", (), "policy.name"),
    Argument("checkpoint", "", "Folder of the checkpoint", (), "policy.checkpoint"),
    Argument("unnorm_key", "", "Dataset whose statistics un-normalise actions", (), "policy.unnorm_key"),
    Argument("instruction", "", "Instruction to follow until one arrives", (), "policy.instruction"),
    Argument("device", "", "Where the model runs: auto, cpu, cuda or cuda:N", (), "policy.device"),
    Argument(
        "quantization", "", "Weights of the language model", ("", "none", "int8", "nf4"), "policy.quantization"
    ),
    Argument(
        "camera_topics", "", "Image topics as a list: [/front/image_raw, /wrist/image_raw]", (), "camera.topics"
    ),
    Argument("joint_states", "", "Topic of the robot's joint states", (), "topics.joint_states"),
    Argument("command", "", "Topic of the commands", (), "topics.command"),
    Argument(
        "armed",
        "",
        "true: the arm moves as soon as frames come; false: after ~/enable",
        ("", "true", "false"),
        "control.armed",
    ),
    Argument(
        "set", "", "Further options, separated by ';' : set:='control.rate_hz:=10.0; limits.joint_margin:=0.05'"
    ),
    Argument(
        "autostart", "true", "Configure and activate at start; false: use `ros2 lifecycle`", ("true", "false")
    ),
    Argument("use_sim_time", "false", "Take the time from /clock", ("true", "false")),
    Argument("namespace", "", "Namespace of the node"),
    Argument("name", NODE_NAME, "Name of the node"),
    Argument(
        "python",
        "",
        "Interpreter of the node: a virtual environment that has torch (made with --system-site-packages). Empty: "
        "the active one ($VIRTUAL_ENV), or the one that vla_ros was built with",
    ),
)


def declare(*groups: Sequence[Argument], **defaults: str) -> list[DeclareLaunchArgument]:
    """Launch actions that declare the arguments; ``defaults`` replaces some of their defaults."""
    return [
        DeclareLaunchArgument(
            argument.name,
            default_value=defaults.get(argument.name, argument.default),
            description=argument.description,
            choices=list(argument.choices) or None,
        )
        for group in groups
        for argument in group
    ]


def value(context: LaunchContext, name: str) -> str:
    """Text of a launch argument."""
    return str(context.launch_configurations.get(name, ""))


def overrides(context: LaunchContext) -> list[str]:
    """``name:=value`` of every option that was given on the command line."""
    given = [
        f"{argument.option}:={value(context, argument.name)}"
        for argument in POLICY
        if argument.option and value(context, argument.name)
    ]
    return given + [part.strip() for part in value(context, "set").split(";") if part.strip()]


def config_file(context: LaunchContext) -> Path | None:
    """The parameter file, or None where the defaults are enough.

    Raises:
        ConfigError: There is no such file; the text lists those that come with the package.
    """
    name = value(context, "config")
    if not name:
        return None
    own = Path(get_package_share_directory("vla_ros")) / "config"
    for path in (Path(name).expanduser(), own / name, own / f"{name}.yaml"):
        if path.is_file():
            return path.resolve()
    there = ", ".join(sorted(path.stem for path in own.glob("*.yaml")))
    raise ConfigError(f"config:={name}: no such file; with vla_ros come {there}")


def configuration(context: LaunchContext) -> Config:
    """The checked tree that the node will have.

    Raises:
        ConfigError: As :func:`vla_ros.config.load`.
    """
    file = config_file(context)
    return load([file] if file else [], overrides(context), value(context, "name"))


def policy_node(context: LaunchContext, **more: Any) -> Node:
    """The managed node, with the options that were given over those of the file.

    Args:
        context: Of the launch.
        **more: Further arguments of ``launch_ros.actions.Node``.
    """
    file = config_file(context)
    given: dict[str, Any] = dict(parse_assignment(text) for text in overrides(context))
    given["autostart"] = value(context, "autostart") == "true"
    given["use_sim_time"] = value(context, "use_sim_time") == "true"
    return Node(
        package="vla_ros",
        executable="vla_policy_node",
        name=value(context, "name"),
        namespace=value(context, "namespace"),
        parameters=[*([str(file)] if file else []), given],
        prefix=interpreter(context),
        output="screen",
        **more,
    )


def interpreter(context: LaunchContext, environment: Mapping[str, str] | None = None) -> str:
    """Command that runs Python scripts of this package, or "" for the interpreter that they were built with."""
    variables = os.environ if environment is None else environment
    chosen = value(context, "python")
    if not chosen and variables.get("VIRTUAL_ENV"):
        chosen = str(Path(variables["VIRTUAL_ENV"]) / "bin/python")
    return shlex.quote(str(Path(chosen).expanduser())) if chosen else ""


def policy(context: LaunchContext) -> list[Any]:
    """Everything of ``policy.launch.py``: middleware, then the node; the launch ends when the node does."""
    try:
        frames = Frames.of(configuration(context))
    except VlaRosError as error:
        raise RuntimeError(str(error)) from None
    return [*middleware(context, frames), policy_node(context, on_exit=Shutdown(reason="the policy node ended"))]


# Middleware


def middleware(context: LaunchContext, frames: Frames) -> list[Any]:
    """Set the environment of everything that starts after this, start the daemon, and say whether it works.

    Raises:
        RuntimeError: The RMW is not installed, or the distribution is not known; the text says what to do.
    """
    name = value(context, "middleware")
    try:
        profile = select(name, frames, sourced_distribution(), value(context, "interface"))
        folder = default_folder(profile)
        if profile.files:
            write(profile, folder)
    except VlaRosError as error:
        raise RuntimeError(str(error)) from None
    chosen = profile.environment(folder)
    report = examine(name, frames, profile.distribution, {**os.environ, **chosen})
    if report.fatal:
        raise RuntimeError(str(report))
    actions: list[Any] = []
    if chosen:
        actions += [UnsetEnvironmentVariable(variable) for variable in ALL_VARIABLES if variable not in chosen]
        actions += [SetEnvironmentVariable(variable, text) for variable, text in chosen.items()]
    return actions + _daemon(profile, folder)


def _daemon(profile: Profile, folder: Path) -> list[Any]:
    """The daemon, unless the host has one, and the line that says whether the profile is in force."""
    up = {"iceoryx": roudi_is_up, "zenoh": zenoh_router_is_up}.get(profile.name)
    if up is None or up():
        return [_say_when(profile, lambda: True, 0)]
    process = ExecuteProcess(cmd=profile.command(folder), name=profile.daemon[0], output="log")
    ended = LogInfo(
        msg=f"middleware {profile.name}: its daemon ended. What runs may go on, what starts now hangs or hears "
        "nothing: end this launch and all its partners, then start again"
    )

    def on_exit(event: Any, context: LaunchContext) -> list[Any]:
        return [] if context.is_shutdown else [ended]

    return [
        process,
        RegisterEventHandler(OnProcessExit(target_action=process, on_exit=on_exit)),
        _say_when(profile, up, 20),
    ]


def _say(profile: Profile) -> LogInfo:
    return LogInfo(msg=str(examine(profile.name, profile.frames, profile.distribution)))


def _say_when(profile: Profile, up: Any, attempts: int) -> OpaqueFunction:
    """Look four times a second whether the daemon is up, for ``attempts`` times; then say what there is."""

    def look(context: LaunchContext) -> list[Any]:
        if up() or attempts == 0:
            return [_say(profile)]
        return [TimerAction(period=0.25, actions=[_say_when(profile, up, attempts - 1)])]

    return OpaqueFunction(function=look)
