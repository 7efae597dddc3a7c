"""Print, write or check middleware profiles that do not lose large camera frames.

    vla-ros middleware fastdds --write ~/middleware && . ~/middleware/fastdds.sh    the camera driver's shell
    vla-ros middleware iceoryx --check                                              is it in force here?

Without a size, the frames are those of the configuration (--config, -p camera.width:=1920).
"""

import argparse
from pathlib import Path

from vla_ros.config.loading import load
from vla_ros.config.show import add_config_arguments
from vla_ros.middleware.checks import check_profile
from vla_ros.middleware.profiles import (
    DISTRIBUTIONS,
    NAMES,
    FrameLoad,
    Profile,
    default_folder,
    select_profile,
    sourced_distribution,
    write_profile,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=NAMES, help="name of the profile")
    parser.add_argument("--width", type=int, metavar="PX", help="width of the frames")
    parser.add_argument("--height", type=int, metavar="PX", help="height of the frames")
    parser.add_argument("--cameras", type=int, metavar="N", help="number of cameras")
    parser.add_argument("--bytes-per-pixel", type=int, default=3, metavar="N", help="3 for rgb8 (default)")
    parser.add_argument("--distro", choices=DISTRIBUTIONS, help="default: the sourced one, or jazzy")
    parser.add_argument("--interface", default="", help="network interface for Cyclone DDS; lo stays on this host")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FOLDER", help="write the files, including one to source")
    action.add_argument("--check", action="store_true", help="check whether it is active in this shell")
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print, write or check a profile; ``--check`` returns 1 if it is not in force."""
    profile = _profile(arguments)
    if arguments.check:
        report = check_profile(profile.name, profile.frames, profile.distribution)
        print(report)
        return 0 if report.active else 1
    if arguments.write is not None:
        print(f"source {write_profile(profile, arguments.write)}")
    else:
        folder = default_folder(profile)
        for name, text in (*profile.files.items(), (f"{profile.name}.sh", profile.shell(folder))):
            print(f"----- {name}\n{text}")
    return 0


def _profile(arguments: argparse.Namespace) -> Profile:
    configured = FrameLoad.of(load(arguments.config, arguments.param))
    frames = FrameLoad(
        configured.width if arguments.width is None else arguments.width,
        configured.height if arguments.height is None else arguments.height,
        configured.cameras if arguments.cameras is None else arguments.cameras,
        arguments.bytes_per_pixel,
    )
    distribution = DISTRIBUTIONS[arguments.distro] if arguments.distro else sourced_distribution(fallback="jazzy")
    return select_profile(arguments.name, frames, distribution, arguments.interface)
