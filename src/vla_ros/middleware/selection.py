"""A profile by name: which RMW, which files, which variables, which daemon."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from vla_ros.errors import ConfigError
from vla_ros.middleware import profiles
from vla_ros.middleware.distributions import Distribution
from vla_ros.middleware.frames import Frames

RMW_OF = {
    "fastdds": "rmw_fastrtps_cpp",
    "cyclonedds": "rmw_cyclonedds_cpp",
    "iceoryx": "rmw_cyclonedds_cpp",
    "zenoh": "rmw_zenoh_cpp",
}
"""``RMW_IMPLEMENTATION`` of each profile that sets one."""

NAMES = ("default", *RMW_OF)

FOLDER = "{folder}"
"""Stands in a variable's value for the folder into which the files are written."""

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Profile:
    """How to run one middleware for given frames.

    Attributes:
        name: One of :data:`NAMES`.
        rmw: Value of ``RMW_IMPLEMENTATION``, or "" to leave the user's choice alone.
        frames: What it was made for.
        distribution: What it was made for.
        files: File name to text.
        variables: Environment variables; :data:`FOLDER` stands for the folder of the files.
        daemon: Command of the process that one host needs once, or empty.
    """

    name: str
    rmw: str
    frames: Frames
    distribution: Distribution
    files: Mapping[str, str] = field(default_factory=lambda: _NONE)
    variables: Mapping[str, str] = field(default_factory=lambda: _NONE)
    daemon: tuple[str, ...] = ()

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables to set, with the files in ``folder``."""
        own = {name: value.replace(FOLDER, str(folder.resolve())) for name, value in self.variables.items()}
        return {"RMW_IMPLEMENTATION": self.rmw, **own} if self.rmw else own

    def command(self, folder: Path) -> list[str]:
        """Command of the daemon, with the files in ``folder``; empty where none is needed."""
        return [word.replace(FOLDER, str(folder.resolve())) for word in self.daemon]

    def shell(self, folder: Path) -> str:
        """A file to ``source`` in the shell of the camera driver (bash, zsh, sh)."""
        lines = [f"# {self.name} on ROS 2 {self.distribution.name} for {self.frames}: source this file."]
        stale = sorted({*ALL_VARIABLES} - set(self.environment(folder)))
        if self.rmw:  # what another profile left behind would act on top of this one
            lines.append("unset " + " ".join(stale))
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment(folder).items()]
        if self.daemon:
            lines.append(f"# once per host: {shlex.join(self.command(folder))}")
        return "\n".join(lines) + "\n"


ALL_VARIABLES = (
    "FASTRTPS_DEFAULT_PROFILES_FILE",
    "FASTDDS_DEFAULT_PROFILES_FILE",
    "CYCLONEDDS_URI",
    "ZENOH_CONFIG_OVERRIDE",
    "ZENOH_SHM_ALLOC_SIZE",
)
"""Everything that some profile sets besides ``RMW_IMPLEMENTATION``; what another left behind must go."""


def select(name: str, frames: Frames, distribution: Distribution, interface: str = "") -> Profile:
    """The profile called ``name`` for these frames on this distribution.

    Args:
        name: One of :data:`NAMES`. ``default`` sets nothing.
        frames: What the cameras send.
        distribution: The one that is sourced.
        interface: Network interface for Cyclone DDS, "" lets it choose. ``lo`` keeps everything on this host.

    Raises:
        ConfigError: There is no such profile.
    """
    if name == "default":
        return Profile(name, "", frames, distribution)
    if name == "fastdds":
        file = "fastdds.xml"
        return Profile(
            name,
            RMW_OF[name],
            frames,
            distribution,
            {file: profiles.fastdds_xml(frames)},
            {distribution.fastdds_variable: f"{FOLDER}/{file}"},
        )
    if name in ("cyclonedds", "iceoryx"):
        shared = name == "iceoryx"
        file = f"{name}_{distribution.cyclone}.xml"
        files = {file: profiles.cyclone_xml(frames, distribution, iceoryx=shared, interface=interface)}
        if shared:
            files["roudi.toml"] = profiles.roudi_toml(frames)
        return Profile(
            name,
            RMW_OF[name],
            frames,
            distribution,
            files,
            {"CYCLONEDDS_URI": f"file://{FOLDER}/{file}"},
            ("iox-roudi", "-c", f"{FOLDER}/roudi.toml") if shared else (),
        )
    if name == "zenoh":
        return Profile(
            name,
            RMW_OF[name],
            frames,
            distribution,
            {},
            profiles.zenoh_override(frames, distribution),
            ("ros2", "run", "rmw_zenoh_cpp", "rmw_zenohd"),
        )
    raise ConfigError(f"middleware: found '{name}', expected one of {', '.join(NAMES)}")


def default_folder(profile: Profile, environment: Mapping[str, str] | None = None) -> Path:
    """Where the files of a profile are kept: below ``ROS_HOME`` (``~/.ros``), a folder for each frame size."""
    variables = os.environ if environment is None else environment
    home = Path(variables.get("ROS_HOME", "") or Path.home() / ".ros")
    frames = profile.frames
    size = f"{frames.width}x{frames.height}x{frames.cameras}"
    return home / "vla_ros" / "middleware" / profile.distribution.name / size


def write(profile: Profile, folder: Path) -> Path:
    """Write the files and the one to ``source`` into ``folder``; returns the latter's path.

    Raises:
        ConfigError: The folder cannot be written.
    """
    source = folder / f"{profile.name}.sh"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (*profile.files.items(), (source.name, profile.shell(folder))):
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write the middleware profile ({error.strerror})") from None
    return source


READY_MADE = Frames(1920, 1080, cameras=2)
"""What the profile files in ``config/`` of the repository are for: two cameras of 1080p and anything smaller."""


def ready_made(distributions: Mapping[str, Distribution]) -> dict[str, str]:
    """File name to text of every profile file, for all ``distributions``, made for :data:`READY_MADE`."""
    return {
        file: text
        for distribution in distributions.values()
        for name in NAMES
        for file, text in select(name, READY_MADE, distribution).files.items()
    }
