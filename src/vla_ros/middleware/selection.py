"""Selects a profile: RMW, files, environment variables and daemon."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vla_ros.errors import ConfigError
from vla_ros.middleware import profiles
from vla_ros.middleware.profiles import Distribution, FrameLoad

RMW_OF = {
    "fastdds": "rmw_fastrtps_cpp",
    "cyclonedds": "rmw_cyclonedds_cpp",
    "iceoryx": "rmw_cyclonedds_cpp",
    "zenoh": "rmw_zenoh_cpp",
}
"""``RMW_IMPLEMENTATION`` of each profile that sets one."""

NAMES = ("default", *RMW_OF)

_FOLDER = "{folder}"
"""Placeholder for the folder of the files."""


@dataclass(frozen=True)
class Profile:
    """A middleware configured for given frames."""

    name: str  # one of :data:`NAMES`
    rmw: str  # value of ``RMW_IMPLEMENTATION``, or "" to keep the user's choice
    frames: FrameLoad
    distribution: Distribution
    files: Mapping[str, str]  # file name to text
    variables: Mapping[str, str]  # environment variables, with :data:`_FOLDER` for the folder of the files
    daemon: tuple[str, ...]  # command of the daemon, one per host, with :data:`_FOLDER`; empty if none is needed

    def environment(self, folder: Path) -> dict[str, str]:
        own = {name: value.replace(_FOLDER, str(folder.resolve())) for name, value in self.variables.items()}
        return {"RMW_IMPLEMENTATION": self.rmw, **own} if self.rmw else own

    def command(self, folder: Path) -> list[str]:
        return [part.replace(_FOLDER, str(folder.resolve())) for part in self.daemon]

    def shell(self, folder: Path) -> str:
        """Return the text to ``source`` in the camera driver's shell (bash, zsh, sh)."""
        lines = [f"# {self.name} on ROS 2 {self.distribution.name} for {self.frames}: source this file."]
        stale = sorted({*ALL_VARIABLES} - set(self.environment(folder)))
        if self.rmw:  # variables of another profile would still take effect
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
"""All variables that a profile may set besides ``RMW_IMPLEMENTATION``."""


def select_profile(name: str, frames: FrameLoad, distribution: Distribution, interface: str = "") -> Profile:
    """Generate the profile called ``name``, one of :data:`NAMES`; ``default`` sets nothing.

    ``interface`` is Cyclone DDS's network interface: "" lets it choose, ``lo`` keeps everything on this host.
    """
    if name not in NAMES:
        raise ConfigError(f"middleware: found '{name}', expected one of {', '.join(NAMES)}")
    files: dict[str, str] = {}
    variables: dict[str, str] = {}
    daemon: tuple[str, ...] = ()
    if name == "fastdds":
        files["fastdds.xml"] = profiles.fastdds_xml(frames)
        variables[distribution.fastdds_variable] = f"{_FOLDER}/fastdds.xml"
    elif name in ("cyclonedds", "iceoryx"):
        shared = name == "iceoryx"
        file = f"{name}_{distribution.cyclone}.xml"
        files[file] = profiles.cyclone_xml(frames, distribution, iceoryx=shared, interface=interface)
        variables["CYCLONEDDS_URI"] = f"file://{_FOLDER}/{file}"
        if shared:
            files["roudi.toml"] = profiles.roudi_toml(frames)
            # With monitoring, RouDi also removes slow processes; an armed node then aborts without a hold.
            daemon = ("iox-roudi", "-m", "off", "-c", f"{_FOLDER}/roudi.toml")
    elif name == "zenoh":
        variables = profiles.zenoh_override(frames, distribution)
        daemon = ("ros2", "run", "rmw_zenoh_cpp", "rmw_zenohd")
    return Profile(name, RMW_OF.get(name, ""), frames, distribution, files, variables, daemon)


def default_folder(profile: Profile, environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder of a profile's files below ``ROS_HOME`` (``~/.ros``), one for each frame size."""
    variables = os.environ if environment is None else environment
    home = Path(variables.get("ROS_HOME", "") or Path.home() / ".ros")
    frames = profile.frames
    size = f"{frames.width}x{frames.height}x{frames.cameras}"
    return home / "vla_ros" / "middleware" / profile.distribution.name / size


def write_profile(profile: Profile, folder: Path) -> Path:
    """Write the files to ``folder``; return the path of the file to ``source``."""
    source = folder / f"{profile.name}.sh"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (*profile.files.items(), (source.name, profile.shell(folder))):
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write the middleware profile ({error.strerror})") from None
    return source
