"""What a bag gives: records in order of time, and an account of what could not be read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vla_ros.errors import VlaRosError


class BagError(VlaRosError):
    """A bag cannot be read at all, or holds nothing that can be used; the text says why."""


class Record(NamedTuple):
    """One recorded message.

    Attributes:
        time: Nanoseconds at which the recorder received it.
        topic: Full name of the topic.
        data: CDR bytes with the 4-byte header; may be a view of the file, so copy it to keep it.
    """

    time: int
    topic: str
    data: bytes | memoryview


@dataclass(frozen=True)
class Topic:
    """A topic of a bag: its name and type (``pkg/msg/Type``)."""

    name: str
    type: str


@dataclass(frozen=True)
class Loss:
    """Something that could not be read.

    Attributes:
        file: Name of the storage file.
        where: Byte offset, row or time.
        what: What was found, and what is lost by it.
    """

    file: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}, {self.where}: {self.what}"


class Storage(Protocol):
    """One open storage file, MCAP or SQLite."""

    @property
    def topics(self) -> dict[str, str]:
        """Topic name to type."""

    @property
    def losses(self) -> list[Loss]:
        """What could not be read so far; grows while reading."""

    def records(self, topics: Collection[str], start: int = 0, *, verify: bool = True) -> Iterator[Record]:
        """Records of ``topics`` at or after ``start`` nanoseconds, in order of time.

        Args:
            topics: Names; others are not even decoded.
            start: Nanoseconds.
            verify: Check checksums where the format has them.
        """

    def close(self) -> None:
        """Give the file back."""
