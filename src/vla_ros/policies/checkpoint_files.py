"""Reads the files in a checkpoint's folder: JSON, statistics, safetensors. Does not import torch.

Weights are read from safetensors only, because other weight files are pickles, which can run code when opened.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from vla_ros.errors import CheckpointError
from vla_ros.policies.shipped import SHIPPED, folder_of

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")

Produce = Callable[[Sequence[str]], Iterator[tuple[str, "Tensor"]]]
"""Takes tensor names, and yields each name with its tensor, in any order."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError if the file is missing or invalid."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; policy.checkpoint must name a folder in the Hugging Face layout "
            "(config.json, *.safetensors, tokenizer.json)"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: found {type(value).__name__}, expected a JSON object")
    return value


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's file and its entry in the file's header."""

    file: Path  # safetensors file
    shape: tuple[int, ...]  # size of each axis
    dtype: str  # data type as the file names it, such as ``BF16``
    name: str  # the tensor's name in the file


def checkpoint_folder(text: str) -> Path:
    """Return the folder that ``policy.checkpoint`` names; raises CheckpointError if missing.

    The names of checkpoints that come with the package are accepted, too.
    """
    if not text:
        raise CheckpointError("policy.checkpoint: not set; name the checkpoint's folder (with its config.json)")
    if text in SHIPPED:
        return folder_of(text)
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise CheckpointError(
            f"policy.checkpoint: {folder} is neither a folder nor one of {', '.join(SHIPPED)}. Nothing is "
            "downloaded at run time: fetch the checkpoint first (for example: hf download openvla/openvla-7b "
            "--local-dir DIR)"
        )
    return folder


def read_manifest(folder: Path) -> dict[str, StoredTensor]:
    """List every tensor of ``model.safetensors``, or of the index's shards, from the headers.

    Raises CheckpointError if a file is missing or damaged, or lacks a tensor that the index lists.
    """
    if (folder / INDEX).exists():
        return _read_shards(folder)
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    found = f"; {others} are pickles, which are never opened: convert them to safetensors" if others else ""
    raise CheckpointError(f"{folder}: no {INDEX} and no {SINGLE}{found}")


def from_files(manifest: Mapping[str, StoredTensor]) -> Produce:
    """Return a function that yields tensors one at a time, by name in ``manifest``."""

    def read(file: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        try:
            with safe_open(str(file), framework="pt") as shard:
                for name in names:
                    yield name, shard.get_tensor(manifest[name].name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not readable ({error}); download it again") from error

    def produce(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for file in sorted({manifest[name].file for name in names}):
            yield from read(file, [name for name in names if manifest[name].file == file])

    return produce


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{folder / INDEX}: weight_map is missing or empty; download the file again")
    counts = Counter(index.values())
    for name in counts:
        if Path(name).name != name:
            raise CheckpointError(f"{folder / INDEX}: names the file {name!r}, expected one in the same folder")
    absent = [name for name in sorted(counts) if not (folder / name).exists()]
    if absent:
        lost = sum(counts[name] for name in absent)
        raise CheckpointError(f"{folder}: missing shards {absent} with {lost} tensors; download them again")
    manifest: dict[str, StoredTensor] = {}
    for name in sorted(counts):
        stored = read_header(folder / name)
        promised = {key for key, file in index.items() if file == name}
        absent = sorted(promised - stored.keys())
        if absent:
            raise CheckpointError(f"{folder / name}: {list_some('of the tensors in the index missing', absent)}")
        manifest.update(stored)
    return manifest


def read_header(file: Path) -> dict[str, StoredTensor]:
    """List the tensors of one safetensors file; raises CheckpointError if it is damaged."""
    try:
        with safe_open(str(file), framework="pt") as shard:
            stored = {}
            for key in shard.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                entry = shard.get_slice(key)
                stored[key] = StoredTensor(file, tuple(entry.get_shape()), str(entry.get_dtype()), key)
            return stored
    except (SafetensorError, OSError) as error:
        with file.open("rb") as stream:
            pointer = stream.read(64).startswith(b"version https://git-lfs")
        advice = "a git-lfs pointer, not the file itself: run 'git lfs pull'" if pointer else "download it again"
        raise CheckpointError(
            f"{file}: damaged: its {file.stat().st_size} bytes are not a safetensors file ({error}); {advice}"
        ) from error


def read_statistics(
    found: Any, names: tuple[str, str], where: str, dtype: type[np.floating[Any]] = np.float64
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return two lists in ``found`` as arrays [N]: lower and upper bounds, or mean and std.

    ``names`` are the keys of the lists; ``where`` names the file and the feature in error messages.
    """
    missing = [name for name in names if name not in found] if isinstance(found, Mapping) else names
    if missing:
        raise CheckpointError(
            f"{where}: no {missing}; found {list(found) if isinstance(found, Mapping) else found}"
        )
    try:
        first, second = (np.array(found[name], dtype) for name in names)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {names} are not lists of numbers ({error})") from error
    if first.ndim != 1 or not first.size or first.shape != second.shape:
        raise CheckpointError(f"{where}: {names} have shapes {first.shape} and {second.shape}, expected equal ones")
    least = 0.0 if names[1] == "std" else first
    if not np.isfinite([first, second]).all() or (second < least).any():
        raise CheckpointError(
            f"{where}: expected finite numbers and {names[1]} >= {'0' if names[1] == 'std' else names[0]}, found "
            f"{names[0]} {first.tolist()} and {names[1]} {second.tolist()}"
        )
    return first, second


def list_some(what: str, items: Iterable[str]) -> str:
    """Describe ``items`` by their number, ``what`` and the first five; empty without items."""
    entries = list(items)
    if not entries:
        return ""
    shown = ", ".join(entries[:5]) + (", ..." if len(entries) > 5 else "")
    return f"{len(entries)} {what}: {shown}"
