"""The differences between policy servers: writing requests and reading answers, as data and pure functions.

Each request is one message with one answer. :mod:`~vla_ros.policies.remote.dialects` chooses the dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_ros.policies.remote.messages import Array, WireError, described, finite, unpack

Frame = bytes | str
"""One message as it came: binary, or text."""

Metadata = Mapping[str, Any]
"""A server's description of itself."""

NO_METADATA: Metadata = MappingProxyType({})

OWN = "vla_ros"
"""``server`` in the metadata of this package's server, and the key of what only its own clients understand."""


@dataclass(frozen=True, eq=False)
class Query:
    """One observation, independent of the dialect."""

    # Key to uint8 [H, W, 3] or [T, H, W, 3] (an image, or its moments, oldest first) or to the numbers [D] of a
    # state, in the order in which they are sent.
    features: Mapping[str, Array]
    instruction: str  # the command in natural language
    session: str = ""  # name of this robot's episode, for servers that keep several apart
    # Further entries that the server said it understands.
    extras: Mapping[str, Any] = field(default_factory=lambda: NO_METADATA)


@dataclass(frozen=True, eq=False)
class Answer:
    """One checked answer, with finite numbers of the expected dimensions."""

    # Name to float64 [K, D]; a server with one unnamed action calls it ``actions``.
    actions: Mapping[str, NDArray[np.float64]]
    # Times reported by the server, by stage.
    timing_ms: Mapping[str, float] = field(default_factory=lambda: NO_METADATA)
    # Further information from this package's server.
    extension: Mapping[str, Any] = field(default_factory=lambda: NO_METADATA)


class ServerSaidError(WireError):
    """The server reported an error; the connection may continue.

    It shows only the last line of ``text``, which may be a traceback: at most 300 printable characters.
    """

    def __init__(self, text: str, more: str = "") -> None:
        line = (text.strip().splitlines() or ["(empty)"])[-1]
        shown = "".join(character if character.isprintable() else "?" for character in line)[:300]
        super().__init__(f"the server answered with an error: {shown}{more}")


@dataclass(frozen=True)
class Dialect:
    """The protocol of one family of servers."""

    name: str
    query: Callable[[Query, Metadata], bytes]  # query and metadata to the message that asks
    answer: Callable[[Frame], Answer]  # its answer; raises :class:`WireError` for anything but actions
    schemes: tuple[str, ...] = ("ws", "wss")  # of its servers' addresses
    port: int = 8000  # where its servers listen unless told otherwise
    path: str = "/"  # where its servers take requests; other paths mean that the user named one
    hello: bytes | None = None  # what asks for metadata, or None if the server sends them first (or has none)
    metadata: Callable[[Frame], Metadata] = lambda frame: read_map(frame, "the metadata")  # reads them
    # Session to the message that begins an episode, or None if there is none.
    reset: Callable[[str], bytes] | None = None
    # Adds an API key to a message that carries it inside; None if it travels in a header.
    secret: Callable[[bytes, str], bytes] | None = None


def read_map(frame: Frame, what: str) -> Mapping[str, Any]:
    """Read a binary frame that contains a map with text keys; raises as :func:`read`."""
    message = read(frame)
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise WireError(f"{what}: {described(message)}, expected a map with text keys")
    return message


def read(frame: Frame) -> Any:
    """Read a binary frame; raises ServerSaidError for text and for maps that contain an error."""
    if isinstance(frame, str):
        raise ServerSaidError(frame)
    message = unpack(frame)
    if isinstance(message, Mapping) and "actions" not in message:
        if "error" in message:
            raise ServerSaidError(str(message["error"]))
        if message.get("type") == "error":
            raise ServerSaidError(str(message.get("message")))
    return message


def chunk(value: Any, name: str) -> NDArray[np.float64]:
    """Actions as [K, D] with at least one row; accepts a single row and a leading batch dimension of one."""
    actions = finite(value, name)
    if actions.ndim == 3 and len(actions) == 1:
        actions = actions[0]
    if actions.ndim == 1:
        actions = actions[None]
    if actions.ndim != 2 or not actions.size:
        raise WireError(f"{name}: {described(value)}, expected a chunk [K, D]")
    return actions


def is_image(value: Array) -> bool:
    """Return True for uint8 [H, W, 3] and [T, H, W, 3]."""
    return bool(value.dtype == np.uint8 and value.ndim >= 3)
