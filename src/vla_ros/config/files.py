"""Where parameter files lie: by path, or by the name of one that comes with the package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vla_ros.errors import ConfigError


def config_file(name: str) -> Path:
    """The parameter file at the path ``name``, or the one of this package that is called so (``demo``).

    Those of the package are in the source tree, or where pip or colcon installed them.

    Raises:
        ConfigError: There is no such file; the text lists those that come with the package.
    """
    here = Path(__file__).resolve()
    prefixes = [Path(prefix) for prefix in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if prefix]
    shares = [prefix / "share" for prefix in (*prefixes, Path(sys.prefix), *here.parents)]
    folders = [here.parents[3] / "config", *(share / "vla_ros" / "config" for share in shares)]
    for path in (Path(name).expanduser(), *(folder / f"{name}.yaml" for folder in folders)):
        if path.is_file():
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    own = f"with vla_ros come {', '.join(known)}" if known else "none came with vla_ros: install the package again"
    raise ConfigError(f"config '{name}': no such file; {own}")
