"""Reads JSON files strictly, and writes a command's output files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from vla_ros.errors import ConfigError, VlaRosError

STANDARD_OUTPUT = Path("-")
_MOST_OPTIONS = 1 << 20  # bytes of a file of options
_MOST_JSON = 32 << 20  # bytes of a JSON file; the largest published ones have 2 MB


def check_regular(path: Path) -> None:
    """Raise OSError unless ``path`` is a regular file: a pipe may never have data, and a device never end."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a pipe, socket or device, expected a regular file", str(path))


def read_bytes(path: Path, most: int = _MOST_OPTIONS) -> bytes:
    """Return a regular file's content; raises OSError for another kind of file, or one of over ``most`` bytes."""
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
    return content


def read_json_value(path: Path) -> Any:
    """Return the value of a JSON file of at most 32 MiB.

    Raises OSError if it cannot be read or is no regular file, and ValueError, with the reason, if it is not JSON,
    is nested too deeply, has a number with too many digits, or has a key twice in one object with two values.
    """
    return parse_json(read_bytes(path, _MOST_JSON))


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text in UTF-8; raises ValueError as :func:`read_json_value` does."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if value != found[key]:
                raise ValueError(f"the key {key[:80]!r} appears twice in one object, with different values")
    return found


def check_output(option: str, path: Path | None) -> None:
    """Raise ConfigError unless the file of ``option`` can be written: it is no folder, and its folder is there.

    A command calls it before the work whose result it writes. No folder is created: a misspelt path is an error.
    """
    if path is None or path == STANDARD_OUTPUT:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder, expected a file name")
    check_parent(option, path)
    if not os.access(path if path.exists() and not keeps_files(path) else path.resolve().parent, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written; check its permissions and those of its folder")


def check_parent(option: str, path: Path) -> None:
    """Raise ConfigError if the folder that ``path``, a file or folder to write, would lie in does not exist."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: cannot be written, there is no folder {path.parent}; create it first")


def save_text(path: Path, text: str) -> None:
    """Write a text file; ``-`` is standard output.

    A regular file is replaced as a whole or not at all, and one behind a symbolic link stays there. What is written
    to a device or pipe goes through it. Raises VlaRosError if the folder does not exist or nothing can be written.
    """
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        target = path.resolve()
        if keeps_files(target):
            _replace(target, text)
        else:
            _write_through(target, text)
    except OSError as error:
        raise VlaRosError(
            f"{path}: cannot be written ({error.strerror}); check the path, permissions and free space"
        ) from None


def keeps_files(path: Path) -> bool:
    """Return whether ``path`` is, or can become, a regular file: not ``-``, a device or a pipe."""
    try:
        return path != STANDARD_OUTPUT and stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_text(text, encoding="utf-8")
        if path.exists():
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _write_through(path: Path, text: str) -> None:
    """Write to what is no regular file; a pipe without a reader is an error instead of a wait."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), "wb") as file:
        os.set_blocking(file.fileno(), True)
        file.write(text.encode("utf-8"))
