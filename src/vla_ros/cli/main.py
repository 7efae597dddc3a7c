"""The command ``vla-ros``; the module of a sub-command is imported only when the sub-command runs."""

import argparse
import errno
import importlib
import sys
from collections.abc import Mapping, Sequence

from vla_ros import __version__
from vla_ros.errors import VlaRosError, missing_library, printable
from vla_ros.houses import SubCommand, commands
from vla_ros.process import end_process, record_end, record_requests, use_environment

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
    known = commands()
    if not arguments or arguments[0] not in known:
        _overview(known).parse_args(arguments or ["--help"])
        return 0
    try:
        status = _run(arguments[0], known[arguments[0]], arguments[1:])
        return end_process(status) if argv is None else status
    except (KeyboardInterrupt, VlaRosError, ImportError) as error:
        if isinstance(_first_cause(error), KeyboardInterrupt):
            return _fail(arguments[0], "interrupted", 130)
        failure = missing_library(error) if isinstance(error, ImportError) else error
        if failure is None:
            raise
        return _fail(arguments[0], failure)
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


def _run(name: str, command: SubCommand, arguments: Sequence[str]) -> int:
    module = importlib.import_module(command.module)
    parser = argparse.ArgumentParser(
        prog=f"vla-ros {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(command=name)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)))


def _overview(known: Mapping[str, SubCommand]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vla-ros", description="Vision-Language-Action policies on real robots, with ROS 2 or without it."
    )
    parser.add_argument("--version", action="version", version=f"vla_ros {__version__}")
    rows = parser.add_subparsers(metavar="COMMAND", title="commands (`vla-ros COMMAND --help` for each)")
    for name, command in known.items():
        rows.add_parser(name, help=command.help, add_help=False)
    return parser
