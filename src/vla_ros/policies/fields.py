"""JSON objects of a checkpoint in which no key is ignored silently.

Reading a key of :class:`Fields` declares that it is obeyed. :meth:`Fields.finish` refuses every other key, except
those that the reader lists as harmless, with the reason why they cannot change an inference's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vla_ros.errors import CheckpointError
from vla_ros.policies.checkpoint_files import read_json

Harmless = Mapping[str, str]
"""Maps a reason to the keys that it applies to: names or patterns such as ``optimizer_*``, separated by spaces."""


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
        """Return the JSON object ``key``, empty if it is missing or null."""
        return Fields(self.get(key) or {}, f"{self.where}: {key}", self.advice)

    def whole(self, key: str, default: int | None, least: int = 1) -> int:
        """Return the whole number ``key`` of at least ``least``; ``default`` replaces a missing value or null."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise CheckpointError(f"{self.where}: {key} is {value!r}, expected a whole number of at least {least}")
        return value

    def number(self, key: str, default: float, above: float = 0.0) -> float:
        """Return the number ``key``, which must be greater than ``above``."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < float("inf"):
            raise CheckpointError(f"{self.where}: {key}: found {value!r}, expected a number above {above:g}")
        return float(value)

    def expect(self, key: str, *supported: Any) -> Any:
        """Return the value of ``key``, or the first supported value if it is missing.

        Raises CheckpointError if the value is none of those supported.
        """
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
            found = ", ".join(f"{key}: {value!r}" for key, value in unread.items())
            raise CheckpointError(
                f"{self.where}: found {found}, expected no such key or null, because this package does not "
                f"support it{self._end}"
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
