"""Numbers of published code, stored under ``test/data/conventions``.

Set ``VLA_ROS_GOLDEN`` to a folder with a ``cases.npz`` of the same entries, and optionally a ``states.npz`` of
LIBERO's trajectories, to run the same tests on other inputs.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DATA = Path(__file__).resolve().parents[1] / "data" / "conventions"
OTHER = Path(os.environ["VLA_ROS_GOLDEN"]) if "VLA_ROS_GOLDEN" in os.environ else None
INDEX: Mapping[str, Mapping[str, str]] = json.loads((DATA / "index.json").read_text(encoding="utf-8"))
"""Entry to ``repository``, ``commit``, ``file`` and ``function``."""

Array = np.ndarray[Any, Any]


def entry(name: str) -> dict[str, Array]:
    """Return the arrays of an entry such as ``rot6d.groot_rows``; skips the test if the entry is not there."""
    found = {key.removeprefix(f"{name}."): array for key, array in _cases().items() if key.startswith(f"{name}.")}
    if not found:
        pytest.skip(f"no entry {name}")
    return found


def expected_image(arrays: Mapping[str, Array], key: str, image: Array) -> tuple[Array, Array]:
    """Return ``image`` and the stored image ``key``, both reduced to every third row and fifth column if it was."""
    if key in arrays:
        return image, arrays[key]
    return image[..., ::3, ::5, :] if image.shape[-1] == 3 else image[..., ::3, ::5], arrays[f"{key}_probe"]


def libero() -> dict[str, dict[str, Array]]:
    """Return LIBERO's trajectories by suite; keys are those of ``libero_states.npz`` without the suite."""
    path = OTHER / "states.npz" if OTHER and (OTHER / "states.npz").exists() else DATA / "libero_states.npz"
    suites = ("libero_object", "libero_spatial", "libero_goal", "libero_10")
    return {
        suite: {key.removeprefix(f"{suite}_"): array for key, array in _read(path).items() if key.startswith(suite)}
        for suite in suites
    }


@cache
def _cases() -> dict[str, Array]:
    if OTHER:
        return _read(OTHER / "cases.npz")
    return {
        key: array for path in (DATA / "observation.npz", DATA / "action.npz") for key, array in _read(path).items()
    }


@cache
def _read(path: Path) -> dict[str, Array]:
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)
