"""Opens rosbag2 bags: folders or single files, which may be split, compressed or damaged."""

import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from vla_ros.errors import lfs_pointer
from vla_ros.replay.mcap import McapFile
from vla_ros.replay.sqlite import SqliteFile
from vla_ros.replay.storage import ZSTD_MAGIC, BagError, Loss, Record, decompress, expand_file

_STORAGE = re.compile(r"\.(mcap|db3)(\.zstd)?$")
_METADATA = "metadata.yaml"


def find_bags(paths: Sequence[Path]) -> list[Path]:
    """Find all bags in ``paths`` (storage files, bag folders, or folders of either), sorted by name.

    Raises BagError if a path is missing or contains no bag.
    """
    bags: list[Path] = []
    for path in paths:
        if not path.exists():
            raise BagError(f"{path}: does not exist; expected a rosbag2 folder, or an .mcap or .db3 file")
        below = list(_bags_below(path))
        if not below:
            kind = "a ROS 1 bag (convert it with `rosbags-convert`)" if path.suffix == ".bag" else "no bag"
            raise BagError(f"{path}: found {kind}, expected .mcap or .db3 files, bag folders or folders of bags")
        bags.extend(bag for bag in below if bag not in bags)
    return bags


def _bags_below(path: Path) -> Iterator[Path]:
    if path.is_file():
        if _STORAGE.search(path.name):
            yield path
    elif (path / _METADATA).exists() or any(_STORAGE.search(child.name) for child in path.iterdir()):
        yield path
    else:
        for child in sorted(path.iterdir(), key=_natural):
            if child.is_dir():
                yield from _bags_below(child)


def _natural(path: Path) -> list[Any]:
    """Return a sort key that puts ``bag_10`` after ``bag_9``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


class Bag:
    """An open bag (folder or file), a context manager. Raises BagError if nothing can be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._losses: list[Loss] = []
        self._resources = ExitStack()
        self._storages: list[McapFile | SqliteFile] = []
        self._information = {} if path.is_file() else self._read_metadata()
        for file in [path] if path.is_file() else self._files():
            self._open(file)
        if not self._storages:
            self.close()
            reasons = "; ".join(map(str, self._losses)) or "no storage file"
            raise BagError(f"{path}: nothing can be read: {reasons}")

    def __enter__(self) -> "Bag":
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        self._resources.close()

    @property
    def losses(self) -> list[Loss]:
        """The parts of the bag that could not be read so far."""
        return list(
            dict.fromkeys([*self._losses, *(loss for storage in self._storages for loss in storage.losses)])
        )

    @property
    def topics(self) -> dict[str, str]:
        """Topic name to type (``pkg/msg/Type``), sorted by name."""
        merged: dict[str, str] = {}
        for storage in self._storages:
            merged |= {name: kind for name, kind in storage.topics.items() if kind or name not in merged}
        return dict(sorted(merged.items()))

    @property
    def empty(self) -> frozenset[str]:
        """Topics without messages, from metadata.yaml, which lists all subscribed topics."""
        counts = self._information.get("topics_with_message_count") or ()
        return frozenset(str(item["topic_metadata"]["name"]) for item in counts if not int(item["message_count"]))

    def records(self, topics: Collection[str], start: int = 0, *, verify: bool = True) -> Iterator[Record]:
        """Yield the messages of ``topics`` received at or after ``start`` (nanoseconds), in order of time.

        ``verify`` checks the checksums if the format has checksums.
        """
        for storage in self._storages:
            for record in storage.records(topics, start, verify=verify):
                if record.data[:4] != ZSTD_MAGIC:
                    yield record
                elif (whole := self._decompressed(record)) is not None:
                    yield whole

    def _decompressed(self, record: Record) -> Record | None:
        """Decompress an individually compressed message; return None if it is damaged."""
        try:
            return record._replace(data=decompress(record.data, "zstd"))
        except BagError as error:
            self._lose(self.path.name, f"{record.time} ns", f"message of {record.topic} {error}")
            return None

    def _lose(self, file: str, where: str, what: str) -> None:
        self._losses.append(Loss(file, where, what))

    def _read_metadata(self) -> dict[str, Any]:
        """Return the content of metadata.yaml; empty if the file is missing or damaged."""
        try:
            text = (self.path / _METADATA).read_text(encoding="utf-8")
            metadata: dict[str, Any] = yaml.safe_load(text)["rosbag2_bagfile_information"]
            [Path(name) for name in metadata["relative_file_paths"]]
            return metadata
        except FileNotFoundError:
            problem = "is missing"
        except (OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
            problem = f"is damaged ({error})"
        self._lose(_METADATA, "whole file", f"{problem}; the storage files were read without it")
        return {}

    def _files(self) -> list[Path]:
        present = sorted((child for child in self.path.iterdir() if _STORAGE.search(child.name)), key=_natural)
        by_name = {child.name: child for child in present}
        listed = [Path(name).name for name in self._information.get("relative_file_paths", ())]
        for name in listed:
            if name not in by_name:
                self._lose(name, "whole file", f"{_METADATA} lists this file, but it does not exist")
        ordered = [by_name.pop(name) for name in listed if name in by_name]
        return [*ordered, *by_name.values()]

    def _open(self, file: Path) -> None:
        path = file
        if pointer := lfs_pointer(file):
            self._lose(file.name, "whole file", pointer)
            return
        try:
            if file.suffix == ".zstd":
                folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="vla_ros_bag_"))
                path = Path(folder) / file.stem
                if problem := expand_file(file, path):
                    self._lose(file.name, "compressed file", problem)
            storage = McapFile(path) if path.suffix == ".mcap" else SqliteFile(path)
        except BagError as error:
            self._lose(file.name, "whole file", str(error))
        except OSError as error:
            self._lose(file.name, "whole file", f"cannot be read ({error.strerror or error})")
        else:
            self._storages.append(storage)
            self._resources.callback(storage.close)
