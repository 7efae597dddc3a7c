"""Errors for users: each says what was found, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 4000  # characters of a message

EXTRAS = {
    "av": "export",
    "cyclonedds": "dds",
    "mcap": "replay",
    "msgpack": "serve",
    "mujoco": "sim",
    "prometheus_client": "metrics",
    "pyarrow": "export",
    "ray": "ray",
    "rosbags": "replay",
    "safetensors": "openvla",
    "sentencepiece": "openvla",
    "tokenizers": "openvla",
    "torch": "openvla",
    "websockets": "serve",
    "zmq": "remote",
}
"""Optional libraries by their import names, and the extra of setup.py that installs each."""


class VlaRosError(Exception):
    """Base of all errors that this package raises on purpose; the text is meant for users."""

    def __str__(self) -> str:
        """Return the text; if it is very long, the middle is left out."""
        text = super().__str__()
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"


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
        f"the library {library} cannot be imported ({error}); "
        f"install it with: pip install 'vla_ros[{EXTRAS[library]}]'"
    )


class DeviceLostError(VlaRosError):
    """The GPU stopped responding; this process can no longer use it or the data on it."""


class OutOfMemoryError(VlaRosError):
    """The model does not fit into the available memory; the text lists options that would fit."""


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``; did you mean 'x'?`` with the closest match in ``known``, or "" if there is none."""
    near = difflib.get_close_matches(name[:200], list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{near[0]}'?" if near else ""


class ServerLostError(VlaRosError):
    """The policy server cannot be reached or does not answer; the text names the server and the cause."""
