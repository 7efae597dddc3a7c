"""Recorded messages, and what could not be read."""

from __future__ import annotations

from typing import NamedTuple

from vla_ros.errors import VlaRosError


class BagError(VlaRosError):
    """A bag cannot be read or contains nothing usable."""


class Record(NamedTuple):
    """One recorded message."""

    time: int  # time at which the recorder received the message, nanoseconds
    topic: str  # fully qualified topic name
    data: bytes | memoryview  # CDR bytes with their 4-byte header; may be a view of the file, so copy it to keep it


class Loss(NamedTuple):
    """Something that could not be read."""

    file: str  # name of the storage file
    where: str  # byte offset, row or time
    what: str  # the damage found, and what is lost

    def __str__(self) -> str:
        return f"{self.file}, {self.where}: {self.what}"
