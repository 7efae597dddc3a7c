"""Opens rosbag2 bags: folders or single files, which may be split, compressed or damaged."""

import bisect
import heapq
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from vla_ros.errors import ImageError, lfs_pointer
from vla_ros.vision.messages import IMAGE_TYPES
from vla_ros_lab.replay.mcap import McapFile
from vla_ros_lab.replay.sqlite import SqliteFile
from vla_ros_lab.replay.storage import ZSTD_MAGIC, BagError, Expansion, Loss, Record, decompress, expand_file
from vla_ros_lab.replay.video import VIDEO, VideoDecoder, is_key

_STORAGE = re.compile(r"\.(mcap|db3)(\.zstd)?$")
_METADATA = "metadata.yaml"
_MOST_METADATA = 4 << 20  # characters; thousands of topics and files need less
_MOST_TEXT = 200  # characters of a parser's error


def find_bags(paths: Sequence[Path]) -> list[Path]:
    """Find all bags in ``paths`` (storage files, bag folders, or folders of either), sorted by name.

    Raises BagError if a path is missing, cannot be read or contains no bag.
    """
    bags: list[Path] = []
    for path in paths:
        if not path.exists():
            raise BagError(f"{path}: does not exist; expected a rosbag2 folder, or an .mcap or .db3 file")
        try:
            below = list(_bags_below(path, set()))
        except OSError as error:
            raise BagError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from None
        if not below:
            kind = "a ROS 1 bag (convert it with `rosbags-convert`)" if path.suffix == ".bag" else "no bag"
            raise BagError(f"{path}: found {kind}, expected .mcap or .db3 files, bag folders or folders of bags")
        bags.extend(bag for bag in below if bag not in bags)
    return bags


def _bags_below(path: Path, visited: set[Path]) -> Iterator[Path]:
    """Yield bags; ``visited`` are the folders that need no second look, because links may lead back to them."""
    if not path.is_dir():
        if _STORAGE.search(path.name):
            yield path
    elif (path / _METADATA).exists() or any(_is_storage(child) for child in path.iterdir()):
        yield path
    elif (whole := path.resolve()) not in visited:
        visited.add(whole)
        for child in sorted(path.iterdir(), key=_natural):
            if child.is_dir():
                yield from _bags_below(child, visited)


def _is_storage(path: Path) -> bool:
    return bool(_STORAGE.search(path.name)) and not path.is_dir()


def _other_formats(topics: object) -> dict[str, str]:
    """Return each topic whose serialisation metadata.yaml states as other than cdr, with what it states."""
    found = {}
    for one in topics if isinstance(topics, list) else ():
        about = one.get("topic_metadata") if isinstance(one, dict) else None
        if isinstance(about, dict) and (form := about.get("serialization_format") or "cdr") != "cdr":
            found[str(about.get("name"))] = str(form)
    return found


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
        self._names: list[str] = []  # of their files
        self._keys: dict[str, list[int]] = {}  # topic of video to times of its key frames
        self._formats: dict[str, str] = {}  # topic to its serialisation in metadata.yaml, where it is not cdr
        listed = self._read_metadata() if path.is_dir() else None
        for file in self._files(listed) if path.is_dir() else [path]:
            self._open(file)
        if not self._storages:
            self.close()
            reasons = "; ".join(map(str, self._losses)) or "no storage file"
            raise BagError(f"{path}: nothing can be read: {reasons}")
        for topic in sorted(self._formats.keys() & self.topics.keys()):
            difference = (
                f"says that messages are in {self._formats[topic]!r}; they are read as cdr, as the storage says"
            )
            self._lose(_METADATA, f"topic {topic}", difference)

    def __enter__(self) -> "Bag":
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        self._resources.close()

    @property
    def losses(self) -> list[Loss]:
        """The parts of the bag that could not be read so far."""
        of_storages = (loss for storage in self._storages for loss in storage.losses)
        return list(dict.fromkeys([*self._losses, *of_storages]))

    @property
    def topics(self) -> dict[str, str]:
        """Topic name to type (``pkg/msg/Type``), sorted by name; of video, the type to which it is decoded."""
        return {name: IMAGE_TYPES["raw"] if kind == VIDEO else kind for name, kind in self._types.items()}

    @cached_property
    def _types(self) -> dict[str, str]:
        """Topic name to recorded type; of two types, the first file's."""
        merged: dict[str, str] = {}
        for storage in self._storages:
            merged = storage.topics | {name: kind for name, kind in merged.items() if kind}
        return dict(sorted(merged.items()))

    @cached_property
    def empty(self) -> frozenset[str]:
        """Topics without messages in any file; recorders list all topics that they subscribed to."""
        filled = (storage.topics.keys() - storage.silent for storage in self._storages)
        return frozenset(self.topics).difference(*filled)

    def records(self, topics: Collection[str], start: int = 0) -> Iterator[Record]:
        """Yield the messages of ``topics`` received at or after ``start`` (nanoseconds), in order of time.

        Messages of one time are in the order of the files, and in a file in the order of their recording: the
        n-th message of a topic and a time is always the same one. Video is decoded to images.
        """
        decoders = {topic: VideoDecoder() for topic in topics if self._types.get(topic) == VIDEO}
        if not decoders:
            yield from self._recorded(topics, start)
            return
        begin = min(self._key_before(topic, start) for topic in decoders)
        for record in self._recorded(topics, begin):
            decoder = decoders.get(record.topic)
            try:
                data = record.data if decoder is None else decoder.decode(record.data)
            except ImageError as error:
                self._lose(self.path.name, f"{record.time} ns", f"{record.topic}: {error}")
                continue
            if data is not None and record.time >= start:
                yield record if decoder is None else record._replace(data=data, place=None)

    def _key_before(self, topic: str, start: int) -> int:
        """Return the time of the last key frame before ``start``, at which decoding begins."""
        if not start:
            return 0
        if topic not in self._keys:
            self._keys[topic] = [record.time for record in self._recorded([topic]) if is_key(record.data)]
        earlier = bisect.bisect_left(self._keys[topic], start)
        return self._keys[topic][earlier - 1] if earlier else 0

    def _recorded(self, topics: Collection[str], start: int = 0) -> Iterator[Record]:
        types = self._types
        parts = []
        for storage, file in zip(self._storages, self._names, strict=True):
            others = {name for name, kind in storage.topics.items() if kind and kind != types[name]}
            for name in sorted(others.intersection(topics)):
                kinds = f"{storage.topics[name]}, elsewhere of {types[name]}"
                self._lose(file, f"topic {name}", f"has messages of {kinds}; the former are left out")
            parts.append(storage.records([name for name in topics if name not in others], start))
        expansion = Expansion(sum(storage.size for storage in self._storages))
        for record in heapq.merge(*parts, key=itemgetter(0)):  # files overlap in time, or have a camera each
            if record.data[:4] != ZSTD_MAGIC:
                yield record
            elif (whole := self._decompressed(record)) is not None:
                yield whole
                if why := expansion.spend(len(whole.data)):
                    self._lose(self.path.name, f"{record.time} ns", why)
                    return

    def _decompressed(self, record: Record) -> Record | None:
        """Decompress an individually compressed message; return None if it is damaged."""
        try:
            return record._replace(data=decompress(record.data, "zstd"), place=None)
        except BagError as error:
            self._lose(self.path.name, f"{record.time} ns", f"message of {record.topic} {error}")
            return None

    def _lose(self, file: str, where: str, what: str) -> None:
        self._losses.append(Loss(file, where, what))

    def _read_metadata(self) -> list[str] | None:
        """Return the names of the files in metadata.yaml; None if it is missing or damaged.

        Nothing else of it is used: its counts, times and types may be wrong, and the files have them. Another
        serialisation than the storage's is kept, to be named.
        """
        path = self.path / _METADATA
        problem = "is missing"
        if path.exists():
            try:
                if not path.is_file():
                    raise ValueError("not a regular file")
                with path.open(encoding="utf-8") as file:
                    text = file.read(_MOST_METADATA + 1)
                if len(text) > _MOST_METADATA:
                    raise ValueError(f"more than {_MOST_METADATA} characters")
                metadata = yaml.safe_load(text)["rosbag2_bagfile_information"]
                names = [Path(name).name for name in metadata["relative_file_paths"]]
                self._formats = _other_formats(metadata.get("topics_with_message_count"))
                return names
            except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
                problem = f"is damaged ({str(error)[:_MOST_TEXT] or type(error).__name__})"
        self._lose(_METADATA, "whole file", f"{problem}; the storage files were read without it")
        return None

    def _files(self, listed: list[str] | None) -> list[Path]:
        present = sorted(filter(_is_storage, self.path.iterdir()), key=_natural)
        by_name = {child.name: child for child in present}
        ordered = [by_name.pop(name) for name in dict.fromkeys(listed or ()) if name in by_name]
        used = {child.name for child in ordered}
        for name in listed or ():
            if name not in used:
                self._lose(name, "whole file", f"{_METADATA} lists this file, but it does not exist")
        for name, child in by_name.items():
            whole, packed = name.removesuffix(".zstd"), f"{name.removesuffix('.zstd')}.zstd"
            twin = packed if name == whole else whole
            if twin in used or (name == packed and twin in by_name):
                # `ros2 bag play` leaves decompressed files beside the compressed ones.
                self._lose(name, "whole file", f"left out, because it has the messages of {twin}")
                continue
            if listed is not None:
                self._lose(name, "whole file", f"{_METADATA} does not list this file; it was read, too")
            ordered.append(child)
        return ordered

    def _open(self, file: Path) -> None:
        path = file
        if pointer := lfs_pointer(file):
            self._lose(file.name, "whole file", pointer)
            return
        try:
            if not file.is_file():
                raise BagError("is not a regular file")
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
            self._names.append(file.name)
            self._resources.callback(storage.close)
