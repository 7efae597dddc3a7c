"""Reads a checkpoint's ``preprocessor_config.json`` and refuses unsupported entries.

The published image processor uses only the entries that begin with ``tvf_``; the name of the resize strategy must
agree with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_ros.errors import CheckpointError

_BICUBIC = (3, "bicubic")  # Pillow's number, or torchvision's name


def normalization(config: Mapping[str, Any], path: Path, side: int, towers: int) -> list[dict[str, Any]]:
    """Return ``mean`` and ``std`` of each tower; empty if the file does not state them.

    Raises CheckpointError if an entry is unsupported.
    """
    _require(path, "image_resize_strategy", config.get("image_resize_strategy", "resize-naive"), ("resize-naive",))
    _require(path, "tvf_do_letterbox", config.get("tvf_do_letterbox", False), (False, None))
    size = [side, side]
    for where, params in _entries(config, "tvf_resize_params", towers, path):
        _require(path, f"{where}.size", params.get("size", size), (size,))
        _require(path, f"{where}.interpolation", params.get("interpolation", 3), _BICUBIC)
        _require(path, f"{where}.antialias", params.get("antialias", True), (True,))
        _require(path, f"{where}.max_size", params.get("max_size"), (None,))
    for where, params in _entries(config, "tvf_crop_params", towers, path):
        _require(path, f"{where}.output_size", params.get("output_size", size), (size, side))
    return [
        {key: _triple(path, f"{where}.{key}", params.get(key)) for key in ("mean", "std")}
        for where, params in _entries(config, "tvf_normalize_params", towers, path)
    ]


def _entries(
    config: Mapping[str, Any], key: str, count: int, path: Path
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and value of each tower's entry in the list ``key``; nothing if the file has no such list."""
    value = config.get(key)
    if value is None:
        return
    if not isinstance(value, list) or len(value) != count or not all(isinstance(one, dict) for one in value):
        raise CheckpointError(f"{path}: {key}: found {value!r}, expected a list of {count} objects, one per tower")
    yield from ((f"{key}[{index}]", one) for index, one in enumerate(value))


def _require(path: Path, key: str, found: Any, supported: tuple[Any, ...]) -> None:
    if found not in supported:
        expected = " or ".join(repr(one) for one in supported)
        raise CheckpointError(
            f"{path}: {key}: found {found!r}, expected {expected}; this package cannot process "
            "images as in the checkpoint's training"
        )


def _triple(path: Path, key: str, value: Any) -> tuple[float, ...]:
    numbers = isinstance(value, list) and all(
        isinstance(one, (int, float)) and math.isfinite(one) and (one > 0 or key.endswith("mean")) for one in value
    )
    if not numbers or len(value) != 3:
        kind = "numbers" if key.endswith("mean") else "positive numbers"
        raise CheckpointError(f"{path}: {key}: found {value!r}, expected three {kind}")
    return tuple(float(one) for one in value)
