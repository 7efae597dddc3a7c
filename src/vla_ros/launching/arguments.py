"""Launch arguments and the node options that they set."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from launch.actions import DeclareLaunchArgument, OpaqueFunction

from launch import Action, LaunchContext
from vla_ros.config import Config, load
from vla_ros.config.control import SCHEDULES
from vla_ros.config.files import config_file
from vla_ros.config.loading import assignment
from vla_ros.errors import did_you_mean
from vla_ros.middleware.selection import NAMES

NODE_NAME, PACKAGE = "vla_policy", "vla_ros"


@dataclass(frozen=True)
class Argument:
    """A launch argument."""

    name: str  # as in ``name:=value``
    default: str  # as text; "" keeps the value of the configuration file
    description: str  # shown by ``--show-args``
    choices: tuple[str, ...] = ()  # allowed texts; empty for any
    option: str = ""  # node option that it sets, or ""
    yaml: bool = False  # the value is YAML; otherwise it is text


MIDDLEWARE = (
    Argument(
        "middleware",
        "default",
        "RMW and profile that do not lose large frames, for the sourced distribution; default sets nothing",
        NAMES,
    ),
    Argument("interface", "", "Network interface for Cyclone DDS ('lo' stays on this host); empty: automatic"),
)

POLICY = (
    Argument("config", "", "Parameter file (YAML) of the robot, or the name of one in share/vla_ros/config"),
    Argument("policy", "", "Policy by its entry-point name: openvla, oft, pi, lerobot, remote", (), "policy.name"),
    Argument("checkpoint", "", "Folder of the checkpoint, or demo or demo-pi", (), "policy.checkpoint"),
    Argument("unnorm_key", "", "Dataset whose statistics un-normalise actions", (), "policy.unnorm_key"),
    Argument("instruction", "", "Instruction until another one arrives on the topic", (), "policy.instruction"),
    Argument("device", "", "Where the model runs: auto, cpu, cuda or cuda:N", (), "policy.device"),
    Argument("quantization", "", "Weights of the model: none, int8, int4, fp8 or nf4", (), "policy.quantization"),
    Argument(
        "schedule",
        "",
        "How the next chunk of actions is merged with the current one (control.schedule)",
        ("", *SCHEDULES),
        "control.schedule",
    ),
    Argument(
        "camera_topics",
        "",
        "Image topics, such as [/front/image_raw, /wrist/image_raw]",
        (),
        "camera.topics",
        yaml=True,
    ),
    Argument("joint_states", "", "Topic of the robot's joint states", (), "topics.joint_states"),
    Argument("command", "", "Topic of the commands", (), "topics.command"),
    Argument(
        "armed",
        "",
        "true: the arm moves as soon as frames arrive; false: after ~/enable",
        ("", "true", "false"),
        "control.armed",
        yaml=True,
    ),
    Argument(
        "set", "", "Further options, separated by ';' : set:='control.rate_hz:=10.0; limits.joint_margin:=0.05'"
    ),
    Argument(
        "autostart", "true", "Configure and activate at start; false: use `ros2 lifecycle`", ("true", "false")
    ),
    Argument("use_sim_time", "false", "Use the time of /clock", ("true", "false")),
    Argument("namespace", "", "Namespace of the node"),
    Argument("name", NODE_NAME, "Name of the node"),
    Argument(
        "python",
        "",
        "Interpreter of the node: a virtual environment that has torch (made with --system-site-packages). Empty: "
        "the active one ($VIRTUAL_ENV), or the one that was active when vla_ros was built",
    ),
)


_OF_LAUNCH = ("launch-prefix", "launch-prefix-filter", "emulate_tty")
"""Arguments that `ros2 launch` itself reads."""


def declare_arguments(*groups: Sequence[Argument], **defaults: str) -> list[Action]:
    """Return launch actions that declare the arguments; ``defaults`` replaces some of their defaults.

    An argument of the command line that the file does not have ends the launch.
    """
    known = [argument.name for group in groups for argument in group]
    return [
        OpaqueFunction(function=_refuse_unknown, args=[known]),
        *(_declare(argument, defaults) for group in groups for argument in group),
    ]


def _refuse_unknown(context: LaunchContext, known: Sequence[str], command: Sequence[str] = ()) -> None:
    """Raise RuntimeError for unknown arguments, unless the file is included by another one, which has its own."""
    file = Path(context.get_locals_as_dict().get("current_launch_file_path", ""))
    pairs = pairwise(command or sys.argv)
    started = any(
        Path(word).name == file.name and (before == PACKAGE or _same(word, file)) for before, word in pairs
    )
    given = dict.fromkeys(text.partition(":=")[0] for text in context.argv if started)
    if unknown := [name for name in given if name not in (*known, *_OF_LAUNCH)]:
        told = "; ".join(f"{name}:= is no argument of {file.name}{did_you_mean(name, known)}" for name in unknown)
        raise RuntimeError(f"{told}; `ros2 launch {PACKAGE} {file.name} --show-args` lists all")


def _same(path: str, file: Path) -> bool:
    return Path(path).exists() and file.exists() and file.samefile(path)


def _declare(argument: Argument, defaults: Mapping[str, str]) -> DeclareLaunchArgument:
    return DeclareLaunchArgument(
        argument.name,
        default_value=defaults.get(argument.name, argument.default),
        description=argument.description,
        choices=list(argument.choices) or None,
    )


def value(context: LaunchContext, name: str) -> str:
    return str(context.launch_configurations.get(name, ""))


def overrides(context: LaunchContext) -> list[str]:
    """Return ``name:=value`` for every option given as a launch argument."""
    given = [
        f"{argument.option}:={text}" if argument.yaml else assignment(argument.option, text)
        for argument in POLICY
        if argument.option and (text := value(context, argument.name))
    ]
    return given + [part.strip() for part in value(context, "set").split(";") if part.strip()]


def given_file(context: LaunchContext) -> Path | None:
    name = value(context, "config")
    return config_file(name).resolve() if name else None


def node_name(context: LaunchContext) -> str:
    """Return the fully qualified name of the node, such as ``/robot_1/vla_policy``."""
    return "/".join(["", *filter(None, [value(context, "namespace").strip("/"), value(context, "name")])])


def node_options(context: LaunchContext) -> Config:
    file = given_file(context)
    return load([file] if file else [], overrides(context), node_name(context))
