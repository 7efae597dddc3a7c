"""Tiles that ``vla-ros tune`` measured on this machine, one JSON file per GPU, driver and Triton. Without torch."""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vla_ros.errors import ConfigError
from vla_ros_models.engine.tile import Tile

logger = logging.getLogger(__name__)

_LIMITS = {"block_n": 512, "block_k": 8192, "warps": 16, "stages": 16, "splits": 64, "block_m": 512, "k_groups": 8}
"""Largest value of each field that must be a power of two, except stages and splits."""


def header(gpu: str) -> dict[str, str]:
    """Return what tiles depend on: the name of the GPU, the driver, and Triton's version."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {"format": "vla_ros tiles 2", "gpu": gpu, "driver": _driver(), "triton": triton}


def path_of(gpu: str) -> Path:
    """Return the file of a GPU, in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    words = [re.sub(r"[^A-Za-z0-9.]+", "_", word) for word in list(header(gpu).values())[1:]]
    return root / "vla_ros" / "tiles" / f"{'-'.join(words)}.json"


def read_tiles(gpu: str) -> dict[str, Tile]:
    """Return the tiles of a GPU by :attr:`~vla_ros_models.engine.tile_configs.Work.key`; none if there is no file.

    Raises ConfigError if the file is damaged, or of another GPU, driver or Triton.
    """
    path = path_of(gpu)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(_refused(path, str(error))) from error
    expected = header(gpu)
    if not isinstance(content, dict) or not isinstance(content.get("tiles"), dict):
        raise ConfigError(_refused(path, "it holds no tiles"))
    for name, value in expected.items():
        if content.get(name) != value:
            raise ConfigError(_refused(path, f"its {name} is {content.get(name)!r}, expected {value!r}"))
    return {key: _tile(path, key, fields) for key, fields in content["tiles"].items()}


def write_tiles(gpu: str, tiles: Mapping[str, Tile]) -> Path:
    """Add tiles to the file of a GPU, and return its path; a refused file is replaced."""
    path = path_of(gpu)
    try:
        before = read_tiles(gpu)
    except ConfigError as error:
        logger.warning("%s", error)
        before = {}
    content = header(gpu) | {"tiles": {key: asdict(tile) for key, tile in sorted({**before, **tiles}.items())}}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
    return path


@cache
def tiles_of(gpu: str) -> dict[str, Tile]:
    """Like :func:`read_tiles`, but log why a file is refused, and return no tiles then."""
    try:
        found = read_tiles(gpu)
    except ConfigError as error:
        logger.warning("policy.engine: %s", error)
        return {}
    if found:
        logger.info("policy.engine: %d tiles measured on this GPU, from %s", len(found), path_of(gpu))
    return found


def _tile(path: Path, key: str, fields: Any) -> Tile:
    if not isinstance(fields, dict) or fields.keys() != asdict(Tile()).keys():
        raise ConfigError(_refused(path, f"the tile of '{key}' is {fields!r}"))
    for name, value in fields.items():
        limit = _LIMITS.get(name, 256)
        good = type(value) is int and 0 <= value <= limit and (value > 0 or name == "tail_m")
        if name not in ("stages", "splits", "max_registers"):
            good = good and value & (value - 1) == 0
        if not (good or (name == "max_registers" and value is None)):
            raise ConfigError(
                _refused(path, f"{name} of the tile of '{key}' is {value!r}, expected at most {limit}")
            )
    return Tile(**fields)


def _refused(path: Path, why: str) -> str:
    return f"{path} is refused: {why}. The built-in tiles are used; `vla-ros tune` measures them again"


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else "unknown"
