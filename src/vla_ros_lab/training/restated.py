"""A checkpoint with the statistics of other data: a folder that links to its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vla_ros.errors import ConfigError

_LINKED = 1_000_000  # bytes; larger files are weights


def restate(checkpoint: Path, target: Path, layout: str, content: Mapping[str, Any]) -> Path:
    """Write a checkpoint with other statistics to ``target``; return it.

    ``content`` is what the family's file of statistics has, ``layout`` says which file that is. Raises ConfigError
    if the checkpoint has no such file, or several.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(checkpoint, target, copy_function=_copy, symlinks=False)
    for place in checkpoint.resolve().parents[:2]:
        if (place / "architecture.json").is_file() and not (target / "architecture.json").exists():
            shutil.copyfile(place / "architecture.json", target / "architecture.json")
    files = _files(target, layout)
    if not files:
        raise ConfigError(f"--statistics data: {checkpoint} has no file with statistics of the layout {layout}")
    for path in files:
        if path.is_symlink():
            path.unlink()
        if path.suffix == ".json":
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            after = _in_steps(before, content) if layout == "gr00t_lerobot" else _merged(before, content)
            path.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
        else:
            tensors, new = load_file(path), content.get("tensors", content)
            own = {name: torch.as_tensor(new[name]) for name in tensors if name in new}
            save_file({**tensors, **own}, path)
            path.chmod(0o644)
    return target


def _files(folder: Path, layout: str) -> list[Path]:
    if layout == "openpi":
        found = sorted(folder.glob("assets/**/norm_stats.json"))
        if len(found) > 1:
            raise ConfigError(
                f"--statistics data: {folder.name} has statistics of several robots, {[str(one) for one in found]};"
                " leave only those of this robot in a copy of the checkpoint"
            )
        return found
    if layout == "lerobot":
        return sorted(folder.glob("policy_*normalizer*.safetensors"))
    if layout == "gr00t_lerobot":
        return sorted([*folder.glob("policy_*.safetensors"), *folder.glob("policy_*processor.json")])
    return [folder / "dataset_statistics.json"] if layout == "openvla" else sorted(folder.rglob("statistics.json"))


def _merged(before: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Replace entries, also within objects; the statistics of a part or feature are replaced as a whole."""
    found = dict(before)
    for name, value in new.items():
        own = before.get(name)
        inner = isinstance(own, Mapping) and all(isinstance(one, Mapping) for one in own.values())
        found[name] = _merged(own or {}, value) if inner and isinstance(value, Mapping) else value
    return found


def _in_steps(processor: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the statistics that LeRobot's steps for GR00T have in their options."""
    steps = []
    for step in processor["steps"]:
        options = step.get("config", {})
        if "raw_stats" in options:
            options = {**options, "raw_stats": _merged(options["raw_stats"], content["raw_stats"])}
            step = {**step, "config": options}
        steps.append(step)
    return {**processor, "steps": steps}


def _copy(source: str, target: str) -> str:
    """Copy a small file; link to a large one."""
    if Path(source).stat().st_size < _LINKED:
        return str(shutil.copyfile(source, target))
    Path(target).symlink_to(Path(source).resolve())
    return target
