"""``vla-ros``: one command, one module behind each sub-command, loaded only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vla_ros import __version__
from vla_ros.errors import VlaRosError
from vla_ros.interpreter import use_environment

COMMANDS = {
    "run": ("vla_ros.node.run", "run a policy as a node on the ROS 2 graph"),
    "demo": ("vla_ros.sim.demo", "watch a policy move the simulated arm; writes a report"),
    "replay": ("vla_ros.replay.cli", "evaluate a policy on recorded bags; writes a report"),
    "compare": ("vla_ros.replay.compare", "compare two replay results"),
    "bench": ("vla_ros.bench.cli", "measure how fast this machine answers, stage by stage"),
    "top": ("vla_ros.cli.top", "watch a running policy node in the terminal"),
    "doctor": ("vla_ros.cli.doctor", "say what is installed, what is wrong and the command that fixes it"),
    "middleware": ("vla_ros.middleware.cli", "profiles that keep large camera frames: print, write, check"),
    "config": ("vla_ros.config.show", "print every option with unit, range and description"),
}
"""Name to (module with ``add_arguments(parser)`` and ``run(arguments) -> int``, one line of help)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Returns:
        Exit status: 0 when the command did its work, 1 when it could not, 2 for wrong usage, 130 after Ctrl-C.
    """
    use_environment("vla_ros.cli")
    words = list(sys.argv[1:] if argv is None else argv)
    overview = _overview()
    if not words or words[0] not in COMMANDS:
        overview.parse_args(words or ["--help"])
        return 0
    try:
        return _command(words[0], words[1:])
    except VlaRosError as error:
        print(f"vla-ros {words[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `vla-ros config | head`
        sys.stderr.close()
        return 0


def _command(name: str, words: Sequence[str]) -> int:
    module = importlib.import_module(COMMANDS[name][0])
    parser = argparse.ArgumentParser(
        prog=f"vla-ros {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words)))


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vla-ros", description="Vision-Language-Action policies on real robots, with ROS 2 or without it."
    )
    parser.add_argument("--version", action="version", version=f"vla_ros {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands (`vla-ros COMMAND --help` for each)")
    for name, (_, line) in COMMANDS.items():
        commands.add_parser(name, help=line, add_help=False)
    return parser
