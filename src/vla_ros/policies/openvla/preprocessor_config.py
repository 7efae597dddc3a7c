"""Reads a checkpoint's ``preprocessor_config.json`` and refuses unsupported entries.

The published image processor uses only the entries that begin with ``tvf_``, and makes those that are missing from
``input_sizes``, ``interpolations``, ``means`` and ``stds``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from vla_ros.errors import CheckpointError
from vla_ros.policies.fields import Fields

_HARMLESS = {
    "which code reads the file": "image_processor_type feature_extractor_type processor_class auto_map _*",
    "replaced by the entries that begin with tvf_": "input_sizes interpolations means stds",
    "the fill of letterboxing, which is off": "tvf_letterbox_fill",
    "stored, but not used": "use_fused_vision_backbone",
}
"""Keys that do not change the images."""

_ADVICE = "this package cannot process images as in the checkpoint's training"


def normalization(config: Fields, side: int, towers: int) -> list[dict[str, Any]]:
    """Return ``mean`` and ``std`` of each tower; empty if the file does not state them.

    Raises CheckpointError if an entry is unsupported.
    """
    config.advice = _ADVICE
    config.expect("image_resize_strategy", "resize-naive")
    config.expect("tvf_do_letterbox", False, None)
    size = [side, side]
    resizes = list(_entries(config, "tvf_resize_params", towers))
    for params in resizes:
        params.expect("size", size)
        params.expect("interpolation", 3, "bicubic")  # Pillow's number, or torchvision's name
        params.expect("antialias", True)
        params.expect("max_size", None)
        params.finish()
    if not resizes:
        config.expect("interpolations", ["bicubic"] * towers, None)
        config.expect("input_sizes", [[3, side, side]] * towers, None)
    for params in _entries(config, "tvf_crop_params", towers):
        params.expect("output_size", size, side)
        params.finish()
    stated = list(_entries(config, "tvf_normalize_params", towers))
    if not stated and config.get("means") is not None:
        pairs = zip(config["means"], config.get("stds") or (), strict=False)
        stated = [Fields({"mean": mean, "std": std}, f"{config.where}: means and stds") for mean, std in pairs]
        if len(stated) != towers:
            raise CheckpointError(f"{config.where}: means and stds: expected {towers} of each, one per tower")
    found = [{key: _triple(params, key) for key in ("mean", "std")} for params in stated]
    for params in stated:
        params.finish({"the same values": "inplace"})
    config.finish(_HARMLESS)
    return found


def _entries(config: Fields, key: str, count: int) -> Iterator[Fields]:
    """Yield each tower's entry in the list ``key``; nothing if the file has no such list."""
    value = config.get(key)
    if value is None:
        return
    if not isinstance(value, list) or len(value) != count or not all(isinstance(one, dict) for one in value):
        raise CheckpointError(
            f"{config.where}: {key}: found {value!r}, expected a list of {count} objects, one per tower"
        )
    yield from (Fields(one, f"{config.where}: {key}[{index}]", _ADVICE) for index, one in enumerate(value))


def _triple(params: Fields, key: str) -> tuple[float, ...]:
    value: Any = params.get(key)
    numbers = isinstance(value, list) and all(
        isinstance(one, (int, float)) and math.isfinite(one) and (one > 0 or key == "mean") for one in value
    )
    if not numbers or len(value) != 3:
        kind = "numbers" if key == "mean" else "positive numbers"
        raise CheckpointError(f"{params.where}: {key}: found {value!r}, expected three {kind}")
    return tuple(float(one) for one in value)
