"""Messages of a bag, and what of it could not be read."""

from __future__ import annotations

from typing import NamedTuple

from vla_ros.errors import VlaRosError


class BagError(VlaRosError):
    """A bag cannot be read or contains nothing usable."""


class Record(NamedTuple):
    """One recorded message.

    Attributes:
        time: Receive time of the recorder in nanoseconds.
        topic: Fully qualified topic name.
        data: CDR bytes with their 4-byte header; may be a view of the file, so copy it to keep it.
    """

    time: int
    topic: str
    data: bytes | memoryview


class Loss(NamedTuple):
    """Something that could not be read.

    Attributes:
        file: Name of the storage file.
        where: Byte offset, row or time.
        what: What was found and what is lost because of it.
    """

    file: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}, {self.where}: {self.what}"
