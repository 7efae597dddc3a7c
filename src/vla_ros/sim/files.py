"""Where the parameter file of the demo lies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vla_ros.errors import MissingDependencyError

DEMO_CONFIG = "demo.yaml"


def demo_config() -> Path:
    """``demo.yaml`` in the source tree, or where pip or colcon installed it.

    Raises:
        MissingDependencyError: It is nowhere; the text lists where it was looked for.
    """
    shares = [
        Path(prefix) / "share" for prefix in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if prefix
    ]
    shares += [Path(sys.prefix) / "share", *(parent / "share" for parent in Path(__file__).resolve().parents)]
    places = [Path(__file__).resolve().parents[3] / "config", *(share / "vla_ros" / "config" for share in shares)]
    for place in places:
        if (place / DEMO_CONFIG).is_file():
            return place / DEMO_CONFIG
    looked = ", ".join(str(place) for place in places)
    raise MissingDependencyError(
        f"{DEMO_CONFIG}: not found in {looked}; install the package again (pip install . or colcon build)"
    )
