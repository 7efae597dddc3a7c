"""Writes rosbag2 bags, and finishes those that a killed recorder left."""

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from vla_ros.graph.messages import ros_distro
from vla_ros.record.mcap import RecordError, RecordingFile
from vla_ros.record.topics import Recorded, Topic

METADATA = "metadata.yaml"
"""File with which a bag is complete."""

_VERSION = 9  # of metadata.yaml: Jazzy's
_LARGEST = 32 << 20  # bytes of a chunk, unless one message has more


class BagWriter:
    """Writes a new bag in the folder ``path``, which must not exist.

    After an OSError, the bag ends with the last whole chunk: :meth:`close` it.
    """

    def __init__(self, path: Path, topics: Sequence[Topic]) -> None:
        path.mkdir(parents=True)
        self.path = path
        self._file = RecordingFile((path / f"{path.name}_0.mcap").open("xb+", buffering=0))
        try:
            self._file.begin(topics)
        except BaseException:
            self._file.__exit__()
            raise

    def define(self, topic: Topic) -> None:
        """Add a topic to the bag's."""
        self._file.define([topic])

    def write(self, messages: Iterable[Recorded]) -> None:
        """Append messages of the bag's topics; they outlive this process when this returns.

        Raises OSError if the disk does not take them, or if the file was removed or moved.
        """
        if not self._file.is_there:
            raise FileNotFoundError(errno.ENOENT, "the bag was removed or moved", str(self.path))
        size, waiting = 0, list[Recorded]()
        for message in messages:
            if waiting and size + len(message.data) > _LARGEST:
                self._file.write(waiting)
                size, waiting = 0, []
            waiting.append(message)
            size += len(message.data)
        if waiting:
            self._file.write(waiting)

    @property
    def is_removed(self) -> bool:
        """True if what was written is lost."""
        return self._file.is_removed

    def sync(self) -> None:
        """Wait until what was written is on the disk, and so outlives this machine."""
        self._file.sync()

    def close(self) -> None:
        """Append the summary and write metadata.yaml. Raises OSError if the bag is not complete then."""
        with self._file as file:
            if not file.is_there:
                raise FileNotFoundError(errno.ENOENT, "the bag was removed or moved", str(self.path))
            file.finish()
            _write_metadata(self.path, [file])


def unfinished(folder: Path) -> list[Path]:
    """Return the bags in ``folder`` that :func:`repair` can finish; what cannot be read there is left alone."""
    found = sorted(path.parent for path in folder.glob("*/*.mcap") if _has_content(path))
    return [path for path in dict.fromkeys(found) if not os.path.lexists(path / METADATA)]


def _has_content(path: Path) -> bool:
    """Return True for a file with bytes in it; False for a link to nowhere, a folder or a device."""
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0


def repair(path: Path) -> str:
    """Finish the bag in the folder ``path``; return what was done.

    Raises RecordError if another process records it, or it was not written by this module.
    """
    names = sorted(path.glob("*.mcap"))
    if not names:
        raise RecordError(f"{path}: found no .mcap file; expected the folder of a bag")
    done = []
    with ExitStack() as stack:
        files = [stack.enter_context(RecordingFile(name.open("rb+", buffering=0))) for name in names]
        for name, file in zip(names, files, strict=True):
            size = name.stat().st_size
            if not file.scan():
                file.finish()
                done.append(f"{name.name}: {size} bytes, {file.counts.total()} messages")
        if not done and (path / METADATA).exists():
            return f"{path}: nothing to repair"
        _write_metadata(path, files)
    return f"{path}: repaired {', '.join(done) or METADATA}"


def _write_metadata(path: Path, files: Sequence[RecordingFile]) -> None:
    """Write metadata.yaml; a bag that has it is complete."""
    topics: dict[str, dict[str, Any]] = {}
    for channel, kind, count in (one for file in files for one in file.described()):
        more = channel.metadata
        about = {
            "name": channel.topic,
            "type": kind,
            "serialization_format": "cdr",
            "offered_qos_profiles": yaml.safe_load(more.get("offered_qos_profiles", "[]")),
            "type_description_hash": more.get("topic_type_hash", ""),
        }
        entry = topics.setdefault(channel.topic, {"topic_metadata": about, "message_count": 0})
        entry["message_count"] += count
    spans = [file.span for file in files]
    start, end = min(start for start, _ in spans), max(end for _, end in spans)

    def times(start: int, end: int) -> dict[str, Any]:
        return {"starting_time": {"nanoseconds_since_epoch": start}, "duration": {"nanoseconds": end - start}}

    information = {
        "version": _VERSION,
        "storage_identifier": "mcap",
        **times(start, end),
        "message_count": sum(file.counts.total() for file in files),
        "topics_with_message_count": list(topics.values()),
        "compression_format": "",
        "compression_mode": "",
        "relative_file_paths": [file.name for file in files],
        "files": [{"path": file.name, **times(*file.span), "message_count": file.counts.total()} for file in files],
        "custom_data": None,
        "ros_distro": ros_distro(),
    }
    part = path / f"{METADATA}.part"
    part.write_text(yaml.safe_dump({"rosbag2_bagfile_information": information}, sort_keys=False), encoding="utf-8")
    part.replace(path / METADATA)
