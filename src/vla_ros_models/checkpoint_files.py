"""Reads the files in a checkpoint's folder: JSON, statistics, safetensors. Does not import torch.

Weights are read from safetensors only, because other weight files are pickles, which can run code when opened. No
key of a JSON object is ignored silently: reading a key of :class:`Fields` declares that it is obeyed, and
:meth:`Fields.finish` refuses every other key, except those that the reader lists as harmless, with the reason why
they cannot change an inference's numbers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from vla_ros.config.checkpoints import DISTILLED_FILES, WEIGHT_FILES, folder_of, no_folder
from vla_ros.errors import CheckpointError, lfs_pointer
from vla_ros.files import check_regular, read_json_value

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

SINGLE, INDEX = WEIGHT_FILES
_LONGEST_NAME = 255  # bytes of a file name
FLOATS = ("F64", "F32", "F16", "BF16")

Produce = Callable[[Sequence[str]], Iterator[tuple[str, "Tensor"]]]
"""Takes tensor names, and yields each name with its tensor, in any order."""

Cut = Callable[[str], "tuple[slice, ...] | None"]
"""Returns the part of a tensor that is loaded, by its name; None stands for all of it."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError if the file is missing or invalid."""
    try:
        value = read_json_value(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; policy.checkpoint must name a folder in the Hugging Face layout "
            "(config.json, *.safetensors, tokenizer.json)"
        ) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        advice = lfs_pointer(path) or "download the file again"
        raise CheckpointError(f"{path}: not readable as JSON ({why}); {advice}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: found {type(value).__name__}, expected a JSON object")
    return value


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's file, its entry in the file's header, and what is done with it when it is read."""

    file: Path  # safetensors file
    shape: tuple[int, ...]  # size of each axis
    dtype: str  # data type as the file names it, such as ``BF16``
    name: str  # the tensor's name in the file
    # Dequantise, merge an adapter; shape and dtype are those after them.
    changes: tuple[Callable[[Tensor], Tensor], ...] = ()

    def changed(self, change: Callable[[Tensor], Tensor], dtype: str, shape: Sequence[int] = ()) -> StoredTensor:
        """Return the tensor after one more change, which gives this data type, and this shape if it is another."""
        return replace(self, changes=(*self.changes, change), dtype=dtype, shape=tuple(shape) or self.shape)


def checkpoint_folder(text: str) -> Path:
    """Return the folder that ``policy.checkpoint`` names, or a shipped one; raises CheckpointError if missing."""
    if not text:
        raise CheckpointError("policy.checkpoint: not set; name the checkpoint's folder (with its config.json)")
    folder = folder_of(text)
    if not folder.is_dir():
        raise CheckpointError(no_folder(folder))
    return folder


def read_manifest(folder: Path) -> dict[str, StoredTensor]:
    """List every tensor of ``model.safetensors``, or of the index's shards, from the headers.

    A folder with both has the single file's, as in transformers and LeRobot: shards are left over there when a
    model is saved again as one file. Raises CheckpointError if a file is missing or damaged, or lacks a tensor
    that the index lists.
    """
    single, index = weight_names(folder)
    if (folder / single).exists():
        if left := unused_shards(folder):
            logger.warning(
                "%s: %s is read, as transformers and LeRobot do; %s are left over from another save and not read",
                folder, SINGLE, ", ".join(left),
            )  # fmt: skip
        return read_header(folder / single)
    if (folder / index).exists():
        return _read_shards(folder / index)
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    found = f"; {others} are pickles, which are never opened: convert them to safetensors" if others else ""
    raise CheckpointError(f"{folder}: no {INDEX} and no {SINGLE}{found}")


def weight_names(folder: Path) -> tuple[str, str]:
    """Return the names of a checkpoint's single file of weights and of its index of shards."""
    return DISTILLED_FILES if any((folder / name).exists() for name in DISTILLED_FILES) else WEIGHT_FILES


def unused_shards(folder: Path) -> list[str]:
    """Return the index and the shards beside a ``model.safetensors``, which no published code reads then."""
    if not (folder / SINGLE).exists():
        return []
    return sorted(path.name for pattern in (INDEX, "model-*-of-*.safetensors") for path in folder.glob(pattern))


def stored_names(folder: Path) -> list[str]:
    """Return the names of the tensors that :func:`read_manifest` lists; [] without weights."""
    single, index = (folder / name for name in weight_names(folder))
    if single.exists():
        return list(read_header(single))
    names = read_json(index).get("weight_map") if index.exists() else None
    return list(names) if isinstance(names, dict) else []


def from_files(manifest: Mapping[str, StoredTensor], cut: Cut = lambda name: None) -> Produce:
    """Return a function that yields tensors, or the parts that ``cut`` returns, one at a time.

    Names are those in ``manifest``; only these parts are read.
    """

    def read(file: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        try:
            with safe_open(str(file), framework="pt") as shard:
                for name in names:
                    stored, part = manifest[name], cut(name)
                    if part is not None and not stored.changes:
                        yield name, shard.get_slice(stored.name)[part]
                        continue
                    tensor = shard.get_tensor(stored.name)
                    for change in stored.changes:
                        tensor = change(tensor)
                    yield name, tensor if part is None else tensor[part]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not readable ({error}); download it again") from error

    def produce(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for file in sorted({manifest[name].file for name in names}):
            yield from read(file, [name for name in names if manifest[name].file == file])

    return produce


def _read_shards(path: Path) -> dict[str, StoredTensor]:
    folder, index = path.parent, read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{path}: weight_map is missing or empty; download the file again")
    for name in index.values():
        if not isinstance(name, str) or Path(name).name != name or len(name) > _LONGEST_NAME:
            shown = repr(name)[:80]
            raise CheckpointError(f"{path}: names the file {shown}, expected one in the same folder")
    counts = Counter(index.values())
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
        check_regular(file)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; download it again") from None
    try:
        with safe_open(str(file), framework="np") as shard:  # "pt" imports torch
            stored = {}
            for key in shard.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                entry = shard.get_slice(key)
                stored[key] = StoredTensor(file, tuple(entry.get_shape()), str(entry.get_dtype()), key)
            return stored
    except (SafetensorError, OSError) as error:
        if pointer := lfs_pointer(file):
            raise CheckpointError(f"{file}: {pointer}") from None
        raise CheckpointError(
            f"{file}: damaged: its {file.stat().st_size} bytes are not a safetensors file ({error}); download it "
            "again"
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
    first, second = (read_numbers(found[name], f"{where}: {name}", dtype) for name in names)
    if first.ndim != 1 or not first.size or first.shape != second.shape:
        raise CheckpointError(f"{where}: {names} have shapes {first.shape} and {second.shape}, expected equal ones")
    least = 0.0 if names[1] == "std" else first
    if not np.isfinite([first, second]).all() or (second < least).any():
        raise CheckpointError(
            f"{where}: expected finite numbers and {names[1]} >= {'0' if names[1] == 'std' else names[0]}, found "
            f"{names[0]} {first.tolist()} and {names[1]} {second.tolist()}"
        )
    if contradiction := _contradiction(found):
        logger.warning("%s: %s: damaged or edited; compare the file with training's", where, contradiction)
    return first, second


_ORDERS = (("min", "q01"), ("q01", "q99"), ("q99", "max"), ("min", "max"), ("min", "mean"), ("mean", "max"))
_ROUNDING = 1e-3  # of the range; statistics are stored in float32, and quantiles are estimated


def _contradiction(found: Mapping[str, Any]) -> str:
    """Describe the first two statistics of one feature that no data can have; "" if there are none.

    Only those that a reader uses can be refused: published code reads no others.
    """
    known: dict[str, NDArray[np.float64]] = {}
    for name in ("min", "max", "mean", "std", "q01", "q99"):
        with suppress(CheckpointError):
            known[name] = read_numbers(found.get(name), name)
    for low, high in _ORDERS:
        if {low, high} <= known.keys() and known[low].shape == known[high].shape:
            slack = _ROUNDING * np.maximum(1.0, np.abs(known[high]))
            if (bad := np.flatnonzero(known[low] > known[high] + slack)).size:
                first, second = (float(np.ravel(known[name])[bad[0]]) for name in (low, high))
                return f"number {bad[0]} has {low} {first:g} and {high} {second:g}"
    if {"min", "max", "std"} <= known.keys() and known["min"].shape == known["max"].shape == known["std"].shape:
        span = known["max"] - known["min"]
        if (bad := np.flatnonzero(known["std"] > span * (0.5 + _ROUNDING) + _ROUNDING)).size:
            first, second = (float(np.ravel(each)[bad[0]]) for each in (known["std"], span))
            return f"number {bad[0]} has std {first:g}, but min and max are only {second:g} apart"
    return ""


def read_numbers(value: Any, where: str, dtype: type[np.floating[Any]] = np.float64) -> NDArray[Any]:
    """Return a list of numbers, or lists of equal length of them, as an array; NaN and infinity are numbers.

    ``value`` may also be a stored tensor. Raises CheckpointError, which begins with ``where``, for anything else: a
    text or truth value is not a number.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        return value.astype(dtype)
    with suppress(ValueError, OverflowError, RecursionError):
        if isinstance(value, list) and all(type(one) in (int, float) for one in _leaves(value)):
            return np.array(value, dtype)
    raise CheckpointError(f"{where}: found {_shown(value)}, expected a list of numbers")


def read_mask(value: Any, where: str) -> NDArray[np.bool_]:
    """Return a list of truth values as an array [N]; raises CheckpointError, which begins with ``where``."""
    if isinstance(value, list) and all(isinstance(one, bool) for one in value):
        return np.array(value, np.bool_)
    raise CheckpointError(f"{where}: found {_shown(value)}, expected a list of true and false")


def _leaves(value: list[Any]) -> Iterator[Any]:
    for one in value:
        if isinstance(one, list):
            yield from _leaves(one)
        else:
            yield one


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def list_some(what: str, items: Iterable[str]) -> str:
    """Describe ``items`` by their number, ``what`` and the first five; empty without items."""
    entries = list(items)
    if not entries:
        return ""
    shown = ", ".join(entries[:5]) + (", ..." if len(entries) > 5 else "")
    return f"{len(entries)} {what}: {shown}"


Harmless = Mapping[str, str]
"""Maps a reason to the keys that it applies to: names or patterns such as ``optimizer_*``, separated by spaces."""


_COUNTS, _MOST_COUNT, _MOST_SIZE = ("layers", "depth", "head", "steps", "horizon", "chunk_size"), 1000, 1 << 24


class Fields(Mapping[str, Any]):
    """A JSON object that remembers which of its keys were read; ``where`` names it in messages.

    ``advice`` ends the messages about keys that are not supported.
    """

    def __init__(self, content: Any, where: object, advice: str = "") -> None:
        if not isinstance(content, dict):
            raise CheckpointError(f"{where}: found {content!r}, expected a JSON object")
        self.where, self.advice = where, advice
        self._content: dict[str, Any] = content
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def object(self, key: str) -> Fields:
        """Return the JSON object ``key``, empty if missing or null; raises CheckpointError for another type."""
        return Fields(self.get(key) or {}, f"{self.where}: {key}", self.advice)

    def whole(self, key: str, default: int | None, least: int = 1) -> int:
        """Return the whole number ``key`` of at least ``least``; ``default`` replaces a missing value or null.

        Sizes are at most 2^24, and counts of what is built or run one by one at most 1000: a damaged number must
        not fill the memory.
        """
        value = self.get(key)
        value = default if value is None else value
        most = _MOST_COUNT if any(word in key for word in _COUNTS) else _MOST_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise CheckpointError(
                f"{self.where}: {key} is {_shown(value)}, expected a whole number of {least} to {most}"
            )
        return value

    def number(self, key: str, default: float, above: float = 0.0) -> float:
        """Return the number ``key``, which must be greater than ``above``."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < float("inf"):
            raise CheckpointError(f"{self.where}: {key}: found {value!r}, expected a number above {above:g}")
        return float(value)

    def expect(self, key: str, *supported: Any) -> Any:
        """Return the value of ``key``, by default the first one supported; raises CheckpointError for another."""
        value = self.get(key, supported[0])
        if not _among(value, supported):
            expected = " or ".join(repr(one) for one in supported)
            raise CheckpointError(f"{self.where}: {key}: found {value!r}, expected {expected}{self._end}")
        return value

    def finish(self, harmless: Harmless | None = None, off: tuple[Any, ...] = (None, False, {}, [])) -> None:
        """Raise CheckpointError, which names every key that was neither read nor is ``harmless``.

        Keys whose value is in ``off`` are ignored: a feature that newer software added and that is not in use.
        """
        patterns = " ".join((harmless or {}).values()).split()
        unread = {
            key: value
            for key, value in self._content.items()
            if key not in self._read
            and not _among(value, off)
            and not any(fnmatchcase(key, pattern) for pattern in patterns)
        }
        if unread:
            found = ", ".join(f"{key}: {_shown(value)}" for key, value in unread.items())
            raise CheckpointError(
                f"{self.where}: found {found}, expected no such key or null: what this package does not know may "
                f"change the actions{self._end}"
            )

    @property
    def _end(self) -> str:
        return f"; {self.advice}" if self.advice else ""


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether ``value`` equals one of ``values``; False is not 0, and True is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def read_fields(path: Path, advice: str = "") -> Fields:
    """Read a file with a JSON object; raises CheckpointError if it is missing or invalid."""
    return Fields(read_json(path), path, advice)
