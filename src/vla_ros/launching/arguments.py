"""Launch arguments and the node options that they set."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from launch.actions import DeclareLaunchArgument, OpaqueFunction

from launch import Action, LaunchContext
from vla_ros.config import Config, entries, load
from vla_ros.config.files import config_file
from vla_ros.config.loading import assignment, build
from vla_ros.errors import did_you_mean
from vla_ros.middleware.profiles import NAMES

DEFAULT_NODE_NAME, PACKAGE = "vla_policy", "vla_ros"


@dataclass(frozen=True)
class Argument:
    """A launch argument."""

    name: str  # as in ``name:=value``
    default: str  # as text; "" keeps the value of the configuration file
    description: str  # shown by ``--show-args``
    choices: tuple[str, ...] = ()  # allowed texts; empty for any


MIDDLEWARE = (
    Argument(
        "middleware",
        "default",
        "RMW and profile that do not lose large frames, for the sourced distribution; default sets nothing",
        NAMES,
    ),
    Argument("interface", "", "Network interface for Cyclone DDS ('lo' stays on this host); empty: automatic"),
)

CONSOLE = (Argument("console", "false", "Serve the operator's page; its address is logged", ("true", "false")),)

_OPTIONS = {
    "policy": "policy.name",
    "checkpoint": "policy.checkpoint",
    "unnorm_key": "policy.unnorm_key",
    "instruction": "policy.instruction",
    "device": "policy.device",
    "quantization": "policy.quantization",
    "schedule": "control.schedule",
    "camera_topics": "camera.topics",
    "joint_states": "topics.joint_states",
    "command": "topics.command",
    "armed": "control.armed",
}
"""Launch argument to the node option that it sets; empty keeps the value of the configuration file."""

_KNOWN = {**entries(build({"policy.name": "openvla"}, complete=False)), **entries()}

POLICY = (
    Argument("config", "", "Parameter file (YAML) of the robot, or the name of one in share/vla_ros/config"),
    *(Argument(name, "", _KNOWN[option].option.description) for name, option in _OPTIONS.items()),
    Argument(
        "set", "", "Further options, separated by ';' : set:='control.rate_hz:=10.0; limits.joint_margin:=0.05'"
    ),
    Argument(
        "autostart", "true", "Configure and activate at start; false: use `ros2 lifecycle`", ("true", "false")
    ),
    Argument("use_sim_time", "false", "Use the time of /clock", ("true", "false")),
    Argument("namespace", "", "Namespace of the node"),
    Argument("name", DEFAULT_NODE_NAME, "Name of the node"),
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
        lines = "; ".join(f"{name}:= is no argument of {file.name}{did_you_mean(name, known)}" for name in unknown)
        raise RuntimeError(f"{lines}; `ros2 launch {PACKAGE} {file.name} --show-args` lists all")


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
    known = entries()  # an option that only some policies have is text
    given = [
        assignment(option, text) if option not in known or known[option].type is str else f"{option}:={text}"
        for name, option in _OPTIONS.items()
        if (text := value(context, name))
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
