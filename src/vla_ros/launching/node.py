"""The policy node as a launch action, and the actions of ``policy.launch.py``."""

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.actions import ExecuteProcess
from launch_ros.actions import Node

from launch import LaunchContext
from vla_ros.config.loading import parse_assignment
from vla_ros.errors import VlaRosError
from vla_ros.graph.launcher import launched
from vla_ros.launching.arguments import (
    DEFAULT_NODE_NAME,
    given_file,
    node_name,
    node_options,
    overrides,
    value,
)
from vla_ros.launching.ending import ends_with_launch, interrupted_at_shutdown, shut_down_with
from vla_ros.launching.middleware import middleware
from vla_ros.middleware.profiles import FrameLoad


def policy_node(
    context: LaunchContext, files: Sequence[Path] = (), assignments: Sequence[str] | None = None, **more: Any
) -> Node:
    """Return the managed node.

    Later parameter ``files`` override earlier ones; the default is the launch argument ``config``.
    ``assignments`` (``name:=value``) override the files; the default is the other launch arguments. ``more`` is
    passed to ``launch_ros.actions.Node``.
    """
    chosen = given_file(context)
    files = files or ([chosen] if chosen else [])
    parameters: dict[str, Any] = dict(
        parse_assignment(text) for text in (overrides(context) if assignments is None else assignments)
    )
    parameters["autostart"] = value(context, "autostart") != "false"
    parameters["use_sim_time"] = value(context, "use_sim_time") == "true"
    node = Node(
        package="vla_ros",
        executable="vla_policy_node",
        exec_name="vla_policy_node",  # otherwise log lines show the interpreter's name
        name=value(context, "name") or DEFAULT_NODE_NAME,
        namespace=value(context, "namespace"),
        parameters=[*map(str, files), parameters],
        prefix=shlex.join(interpreter(context)),
        additional_env=launched(),
        output="screen",
        **more,
    )
    return interrupted_at_shutdown(ends_with_launch(node), context)


def vla_ros(context: LaunchContext, *arguments: str, **more: Any) -> ExecuteProcess:
    """Return a command of ``vla-ros`` that ends with the launch."""
    python = interpreter(context)
    command = [*python, "-m", "vla_ros.cli", *arguments] if python else ["vla-ros", *arguments]
    return ends_with_launch(ExecuteProcess(cmd=command, output="screen", additional_env=launched(), **more))


def interpreter(context: LaunchContext, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the command that runs this package's scripts; empty for the interpreter in their first line.

    Raises RuntimeError if there is no such program.
    """
    variables = os.environ if environment is None else environment
    chosen = value(context, "python")
    if not chosen and variables.get("VIRTUAL_ENV"):
        chosen = str(Path(variables["VIRTUAL_ENV"]) / "bin/python")
    command = str(Path(chosen).expanduser())
    if chosen and shutil.which(command) is None:
        named = "python:" if value(context, "python") else "VIRTUAL_ENV"
        raise RuntimeError(
            f"{named}={chosen}: found no such program, expected an interpreter such as ~/venv/bin/python"
        )
    return [command] if chosen else []


def policy(context: LaunchContext) -> list[Any]:
    """Return the actions of ``policy.launch.py``: middleware, node, console; the launch ends with the node."""
    try:
        frames = FrameLoad.of(node_options(context))
    except VlaRosError as error:
        raise RuntimeError(str(error)) from None
    node = policy_node(context, on_exit=shut_down_with("the policy node"))
    served = value(context, "console") == "true"
    console = [vla_ros(context, "console", "--node", node_name(context), name="console")] if served else []
    return [*middleware(context, frames), node, *console]
