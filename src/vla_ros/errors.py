"""Errors for users: each says what was found, what was expected and what to do."""

from __future__ import annotations

import difflib
import logging
import re
import shlex
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

_LONGEST = 4000  # characters of a message
_ALIKE = 0.6  # share of letters in common
# Characters that a terminal obeys or that change the order of what it shows, and halves of characters.
_OBEYED = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_OF_A_LINE, _OF_LINES = re.compile(f"[{_OBEYED}]"), re.compile(f"(?![\n\t])[{_OBEYED}]")


def printable(text: str) -> str:
    r"""Return ``text`` with escapes (``\x1b``) for all control characters but newlines and tabs.

    For text of messages, files and peers that a log or a terminal shows; see also :func:`one_line`.
    """
    return _OF_LINES.sub(_escape, text)


def one_line(text: str, longest: int = 200) -> str:
    """Return a name from a message, a file or a peer: at most ``longest`` characters, no control characters."""
    return _OF_A_LINE.sub(_escape, text if len(text) <= longest else f"{text[:longest]}...")


class PrintableFormatter(logging.Formatter):
    """Formats log records as :func:`printable` text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


EXTRAS = {
    "accelerate": "train",
    "av": "export",
    "bitsandbytes": "train",
    "cyclonedds": "dds",
    "mcap": "replay",
    "msgpack": "serve",
    "mujoco": "sim",
    "peft": "train",
    "prometheus_client": "metrics",
    "pyarrow": "export",
    "ray": "ray",
    "rosbags": "replay",
    "safetensors": "openvla",
    "sentencepiece": "openvla",
    "tokenizers": "openvla",
    "torch": "openvla",
    "websockets": "serve",
    "starlette": "console",
    "uvicorn": "console",
    "zmq": "remote",
}
"""Optional libraries by their import names, and the extra of setup.py that installs each."""


class VlaRosError(Exception):
    """Base of all errors that this package raises on purpose; the text is meant for users."""

    def __str__(self) -> str:
        """Return the text, as :func:`printable`; if it is very long, the middle is left out."""
        text = super().__str__()
        return printable(
            text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"
        )


class ConfigError(VlaRosError):
    """A parameter has an unknown name, a wrong type or a value out of range."""


class CheckpointError(VlaRosError):
    """A checkpoint is missing, damaged or not of the expected kind."""


class ImageError(VlaRosError):
    """A camera message cannot be turned into an image (encoding, size, damaged bytes)."""


class MissingDependencyError(VlaRosError):
    """An optional library is not installed; the text names the extra or the system package."""


def missing_library(error: ImportError) -> MissingDependencyError | None:
    """Return the error for users if an optional library cannot be imported, or None if it is no such library."""
    library = (error.name or "").partition(".")[0]
    if library not in EXTRAS:
        return None
    return MissingDependencyError(
        f"the library {library} cannot be imported ({error}); install it with: {install(EXTRAS[library])}"
    )


def install(extra: str) -> str:
    """Return the command that installs the libraries of an extra of setup.py; it works in any folder.

    The package is on no index, so that its name and an extra would not be found.
    """
    try:
        required = requires("vla_ros") or []
    except PackageNotFoundError:  # a source tree that is not installed
        return f"pip install '.[{extra}]' in the repository's folder"
    own = [line.partition(";") for line in required]
    libraries = [name.strip() for name, _, marker in own if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
    return f"pip install {' '.join(map(shlex.quote, dict.fromkeys(libraries)))}"


class DeviceLostError(VlaRosError):
    """The GPU stopped responding; this process can no longer use it or the data on it."""


class OutOfMemoryError(VlaRosError):
    """The model does not fit into the available memory; the text lists options that would fit."""


class WriteError(VlaRosError):
    """A command could not be written to its driver; ``arms`` are those that have got theirs, or a part of it."""

    def __init__(self, text: str, arms: frozenset[str] = frozenset()) -> None:
        super().__init__(text)
        self.arms = arms


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``; did you mean 'x'?`` with the closest match in ``known``, or "" if none is close.

    Words that both names have do not make them close: nobody who writes "base_link" means "hand_link".
    """
    near = difflib.get_close_matches(name[:200], list(known), n=5, cutoff=cutoff)
    meant = next((each for each in near if _own_words_are_close(name[:200], each)), None)
    return f"; did you mean '{meant}'?" if meant is not None else ""


def _own_words_are_close(name: str, other: str) -> bool:
    """Return True if the words that only one of the names has are alike, or one name has no other words."""
    left, right = (re.findall(r"[A-Za-z]+|\d+|[^\W_]+", text) for text in (name, other))
    ours, theirs = ("".join(w for w in one if w not in two) for one, two in ((left, right), (right, left)))
    return not ours or not theirs or difflib.SequenceMatcher(None, ours, theirs).ratio() >= _ALIKE


def lfs_pointer(path: Path) -> str:
    """Return what to do about a git-lfs pointer, which git leaves in place of a file; "" for other files."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return ""
        with path.open("rb") as stream:
            pointer = stream.read(64).startswith(b"version https://git-lfs")
    except OSError:
        return ""
    return "a git-lfs pointer, not the file itself; run 'git lfs pull' in its folder" if pointer else ""


class ServerLostError(VlaRosError):
    """The policy server cannot be reached or does not answer; the text names the server and the cause."""
