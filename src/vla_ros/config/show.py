"""Print every option with its value, unit, range and description, as a ROS parameter file.

The output includes the options given on the command line and is itself a valid --config file.
"""

import argparse
import contextlib
import math
from collections.abc import Callable

from vla_ros.config.files import config_file
from vla_ros.config.loading import load, to_yaml


def number(kind: Callable[[str], float], low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type for numbers from ``low`` to ``high``; ``kind`` is int or float."""
    expected = f"{low:g} or more" if high == math.inf else f"{low:g} to {high:g}"

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")

    return parse


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config FILE`` and ``-p name:=value``, which all commands that take options share."""
    parser.add_argument(
        "--config",
        type=config_file,
        action="append",
        default=[],
        metavar="FILE",
        help="ROS parameter file (YAML), or the name of one in the package, such as demo; may be repeated, later "
        "files win",
    )
    parser.add_argument(
        "-p",
        "--param",
        action="append",
        default=[],
        metavar="NAME:=VALUE",
        help="set an option, for example -p policy.device:=cuda; wins over --config",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--plain", action="store_true", help="print values without descriptions")


def run(arguments: argparse.Namespace) -> int:
    print(to_yaml(load(arguments.config, arguments.param), comments=not arguments.plain), end="")
    return 0
