"""Bags on disk: folders and files of rosbag2, split or not, compressed or not, whole or damaged."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from vla_ros.replay.compression import ZSTD_MAGIC, decompress, expand_file
from vla_ros.replay.mcap import McapFile
from vla_ros.replay.records import BagError, Loss, Record, Storage, Topic
from vla_ros.replay.sqlite import SqliteFile

_STORAGE = re.compile(r"\.(mcap|db3)(\.zstd)?$")
_METADATA = "metadata.yaml"


def find_bags(paths: Sequence[Path]) -> list[Path]:
    """The bags that ``paths`` name: storage files, bag folders, and folders of these, in order of name.

    Raises:
        BagError: A path is missing or holds no bag.
    """
    bags: list[Path] = []
    for path in paths:
        if not path.exists():
            raise BagError(f"{path}: does not exist")
        found = list(_bags_below(path))
        if not found:
            kind = "a ROS 1 bag; convert it with `rosbags-convert`" if path.suffix == ".bag" else "no bag"
            raise BagError(f"{path}: is {kind}, expected a .mcap or .db3 file, a bag folder, or a folder of bags")
        bags.extend(bag for bag in found if bag not in bags)
    return bags


def _bags_below(path: Path) -> Iterator[Path]:
    if path.is_file():
        if _STORAGE.search(path.name):
            yield path
        return
    if (path / _METADATA).exists() or any(_STORAGE.search(child.name) for child in path.iterdir()):
        yield path
        return
    for child in sorted(path.iterdir(), key=_natural):
        if child.is_dir():
            yield from _bags_below(child)


def _natural(path: Path) -> list[Any]:
    """Sort key under which ``bag_10`` comes after ``bag_9``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


class Bag:
    """One bag, open for reading. A context manager.

    Attributes:
        path: The folder or file.
        losses: What could not be read so far; grows while reading.

    Raises:
        BagError: Nothing of it can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._losses: list[Loss] = []
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._storages: list[Storage] = []
        for file in self._files():
            self._open(file)
        if not self._storages:
            reasons = "; ".join(str(loss) for loss in self._losses) or "no storage file"
            self.close()
            raise BagError(f"{path}: nothing can be read: {reasons}")

    def __enter__(self) -> Bag:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def losses(self) -> list[Loss]:
        """What could not be read so far."""
        return [*self._losses, *(loss for storage in self._storages for loss in storage.losses)]

    @property
    def topics(self) -> list[Topic]:
        """Topics of all its files, in order of name."""
        merged: dict[str, str] = {}
        for storage in self._storages:
            for name, kind in storage.topics.items():
                if kind or name not in merged:
                    merged[name] = kind
        return [Topic(name, merged[name]) for name in sorted(merged)]

    def records(self, topics: Collection[str], start: int = 0, *, verify: bool = True) -> Iterator[Record]:
        """Records of ``topics`` at or after ``start`` nanoseconds, in order of time (files follow each other)."""
        for storage in self._storages:
            for record in storage.records(topics, start, verify=verify):
                if record.data[:4] != ZSTD_MAGIC:
                    yield record
                elif (whole := self._decompressed(record)) is not None:
                    yield whole

    def _decompressed(self, record: Record) -> Record | None:
        """A message that was compressed by itself; None where it is damaged."""
        try:
            return record._replace(data=decompress(record.data, "zstd"))
        except BagError as error:
            loss = Loss(self.path.name, f"{record.time} ns", f"message of {record.topic} {error}")
            if loss not in self._losses:
                self._losses.append(loss)
            return None

    @property
    def empty(self) -> frozenset[str]:
        """Topics that metadata.yaml says hold no message; a recorder lists what it subscribed to."""
        counts: dict[str, int] = {}
        for item in self._information().get("topics_with_message_count") or ():
            counts[str(item["topic_metadata"]["name"])] = int(item["message_count"])
        return frozenset(name for name, count in counts.items() if not count)

    def close(self) -> None:
        """Close all files and remove what was decompressed."""
        for storage in self._storages:
            storage.close()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _files(self) -> list[Path]:
        """Storage files in order of recording."""
        if self.path.is_file():
            return [self.path]
        present = sorted((child for child in self.path.iterdir() if _STORAGE.search(child.name)), key=_natural)
        listed = self._listed()
        by_name = {child.name: child for child in present}
        for name in listed:
            if name not in by_name:
                self._losses.append(Loss(name, "whole file", f"{_METADATA} names it, but it is not there"))
        ordered = [by_name[name] for name in listed if name in by_name]
        return [*ordered, *(child for child in present if child not in ordered)]

    def _information(self) -> dict[str, Any]:
        """Content of metadata.yaml, {} where it cannot be used."""
        try:
            found = self._read_metadata()
            return found if isinstance(found, dict) else {}
        except (OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
            return {}

    def _read_metadata(self) -> Any:
        text = (self.path / _METADATA).read_text(encoding="utf-8")
        return yaml.safe_load(text)["rosbag2_bagfile_information"]

    def _listed(self) -> list[str]:
        """File names in metadata.yaml; a bag without it, or with a damaged one, is read all the same."""
        try:
            information = self._read_metadata()
            return [Path(name).name for name in information["relative_file_paths"]]
        except FileNotFoundError:
            self._losses.append(Loss(_METADATA, "whole file", "is missing; the storage files were read without it"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
            self._losses.append(
                Loss(_METADATA, "whole file", f"is damaged ({error}); the storage files were read without it")
            )
        return []

    def _open(self, file: Path) -> None:
        path = file
        try:
            if file.suffix == ".zstd":
                if self._temporary is None:
                    self._temporary = tempfile.TemporaryDirectory(prefix="vla_ros_bag_")
                path = Path(self._temporary.name) / file.stem
                problem = expand_file(file, path)
                if problem:
                    self._losses.append(Loss(file.name, "compressed file", problem))
            self._storages.append(McapFile(path) if path.suffix == ".mcap" else SqliteFile(path))
        except BagError as error:
            self._losses.append(Loss(file.name, "whole file", str(error)))
        except OSError as error:
            self._losses.append(Loss(file.name, "whole file", f"cannot be read ({error.strerror or error})"))
