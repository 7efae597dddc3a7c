"""The command ``vla-ros``; the module of a sub-command is imported only when the sub-command runs."""

import argparse
import errno
import importlib
import sys
from collections.abc import Sequence

from vla_ros import __version__
from vla_ros.errors import VlaRosError, missing_library, printable
from vla_ros.process import end_process, record_end, record_requests, use_environment

COMMANDS = {
    "run": ("vla_ros.node.run", "run a policy as a node on the ROS 2 graph"),
    "infer": ("vla_ros.node.infer", "ask a policy about one observation from files"),
    "demo": ("vla_ros_lab.sim.demo", "watch a policy move the simulated arm; can write a report"),
    "eval": ("vla_ros_lab.eval.cli", "score a policy on benchmarks, with the node in the loop"),
    "serve": ("vla_ros.serve.cli", "serve a policy to robots on other machines"),
    "replay": ("vla_ros_lab.replay.cli", "evaluate a policy on recorded bags; can write a report"),
    "compare": ("vla_ros_lab.replay.compare", "compare two replay results"),
    "record": ("vla_ros.record.cli", "record a running node as rosbag2 bags, or repair such bags"),
    "export": ("vla_ros_lab.export.cli", "write recorded bags as a LeRobot data set"),
    "convert": ("vla_ros_models.oft.convert", "write a checkpoint as safetensors, adapters merged"),
    "bench": ("vla_ros_lab.bench.cli", "measure latency on this machine, stage by stage"),
    "tune": ("vla_ros_models.tune", "measure the engine's tiles on this GPU, and use them from then on"),
    "top": ("vla_ros.cli.top", "watch a running policy node in the terminal"),
    "teach": ("vla_ros.cli.teach", "take over from a policy by keyboard, and label its episodes"),
    "doctor": ("vla_ros.cli.doctor", "show what is installed, what is wrong and the command that fixes it"),
    "middleware": ("vla_ros.middleware.cli", "print, write or check middleware profiles for large camera frames"),
    "config": ("vla_ros.config.show", "print every option with unit, range and description"),
}
"""Name to (module with ``add_arguments(parser)`` and ``run(arguments) -> int``, help)."""

_OF_FILES = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR,
    errno.EEXIST, errno.EFBIG, errno.EIO,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; return its status, or 1 after an error, 2 after wrong usage, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and arguments[:1] == ["run"]:
        record_requests()  # before the imports, which take seconds
    elif argv is None and arguments[:1] == ["record"]:
        record_end()
    use_environment("vla_ros.cli")
    if not arguments or arguments[0] not in COMMANDS:
        _overview().parse_args(arguments or ["--help"])
        return 0
    try:
        status = _command(arguments[0], arguments[1:])
        return end_process(status) if argv is None else status
    except (KeyboardInterrupt, VlaRosError, ImportError) as error:
        if isinstance(_first_cause(error), KeyboardInterrupt):
            return _fail(arguments[0], "interrupted", 130)
        told = missing_library(error) if isinstance(error, ImportError) else error
        if told is None:
            raise
        return _fail(arguments[0], told)
    except BrokenPipeError:  # `vla-ros config | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in _OF_FILES:
            raise
        where = error.filename2 or error.filename or "a file"
        return _fail(arguments[0], f"{where}: {error.strerror}; check the path, permissions and free space")


def _fail(command: str, why: object, status: int = 1) -> int:
    print(printable(f"vla-ros {command}: {why}"), file=sys.stderr)
    return status


def _first_cause(error: BaseException) -> BaseException:
    """Return the first error in the chain; an interrupted import of an extension module raises ImportError."""
    return error if error.__cause__ is None else _first_cause(error.__cause__)


def _command(name: str, arguments: Sequence[str]) -> int:
    module = importlib.import_module(COMMANDS[name][0])
    parser = argparse.ArgumentParser(
        prog=f"vla-ros {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)))


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vla-ros", description="Vision-Language-Action policies on real robots, with ROS 2 or without it."
    )
    parser.add_argument("--version", action="version", version=f"vla_ros {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands (`vla-ros COMMAND --help` for each)")
    for name, (_, line) in COMMANDS.items():
        commands.add_parser(name, help=line, add_help=False)
    return parser
