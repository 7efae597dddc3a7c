"""The protocol of a policy server: how to write a request and read the answer.

Each request is one message and gets one answer. :mod:`~vla_ros.policies.remote.dialects` chooses the dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from vla_ros.policies.remote.messages import Array, WireError, described, finite, text_map, unpack
from vla_ros.types import FloatArray

Message = bytes | str
"""A binary or text message, as received."""

Metadata = Mapping[str, Any]
"""A server's description of itself."""

NO_METADATA: Metadata = MappingProxyType({})

OWN = "vla_ros"
"""Value of ``server`` in the metadata of this package's server, and key of its extensions to openpi's protocol."""


KEY_HINT = "; set policy.api_key_file"
"""Ends the message about a server that refuses this client's key or expects one."""


@dataclass(frozen=True, eq=False)
class Query:
    """One observation, independent of the dialect."""

    # Feature key to an image, uint8 [H, W, 3], or a state vector [D]; at T times [T, ...], oldest first.
    features: Mapping[str, Array]
    instruction: str  # the command in natural language
    session: str = ""  # name of the episode, for servers that tell episodes apart by name
    # Additional entries of the request, only for this package's server.
    extras: Mapping[str, Any] = field(default_factory=lambda: NO_METADATA)


@dataclass(frozen=True, eq=False)
class Answer:
    """One checked answer; all actions are finite."""

    # Name to actions, float64 [K, D]; unnamed actions are called ``actions``.
    actions: Mapping[str, FloatArray]
    timing_ms: Mapping[str, float] = field(default_factory=lambda: NO_METADATA)  # server's stage to its duration
    extension: Mapping[str, Any] = field(default_factory=lambda: NO_METADATA)  # only from this package's server


class ServerSaidError(WireError):
    """The server reported an error; the connection can still be used.

    The message quotes up to 300 characters of the last line of ``text``, which may be a traceback; ``more``
    follows.
    """

    def __init__(self, text: str, more: str = "") -> None:
        line = (text.strip().splitlines() or ["(empty)"])[-1]
        shown = "".join(character if character.isprintable() else "?" for character in line)[:300]
        more += KEY_HINT if "unauthorized" in line.lower() else ""
        super().__init__(f"the server answered with an error: {shown}{more}")


@dataclass(frozen=True)
class Dialect:
    """The protocol of one family of servers."""

    name: str
    family: str  # of its policies, as in :func:`vla_ros.policies.published.loop_of`
    query: Callable[[Query, Metadata], bytes]  # writes a request, given the server's metadata
    answer: Callable[[Message], Answer]  # reads an answer; raises WireError unless it contains actions
    schemes: tuple[str, ...] = ("ws", "wss")  # of the server's address
    port: int = 8000  # default port
    path: str = "/"  # default path
    hello: bytes | None = None  # request for the metadata; None if the server sends them unasked or has none
    metadata: Callable[[Message], Metadata] = lambda message: read_map(message, "the server's description")
    reset: Callable[[str], bytes] | None = None  # writes the request that begins an episode, given its name


def read_map(message: Message, what: str) -> Mapping[str, Any]:
    """Read a map with string keys from a message; raises WireError if it has none."""
    return text_map(read(message), what)


def read(message: Message) -> Any:
    """Read a binary message.

    Raises ServerSaidError if the message is text or a map that reports an error.
    """
    if isinstance(message, str):
        raise ServerSaidError(message)
    found = unpack(message)
    if isinstance(found, Mapping) and "actions" not in found:
        if "error" in found:
            raise ServerSaidError(str(found["error"]))
        if found.get("type") == "error":
            raise ServerSaidError(str(found.get("message")))
    return found


def chunk(value: Any, name: str) -> FloatArray:
    """Return actions as [K, D], K >= 1; accepts one action [D] or a batch [1, K, D]."""
    actions = finite(value, name)
    if actions.ndim == 3 and len(actions) == 1:
        actions = actions[0]
    actions = actions[None] if actions.ndim == 1 else actions
    if actions.ndim != 2 or not actions.size:
        raise WireError(f"{name}: {described(value)}, expected a chunk [K, D]")
    return actions


def is_image(value: Array) -> bool:
    """Return True if a feature is an image: uint8 [H, W, 3] or [T, H, W, 3]."""
    return bool(value.dtype == np.uint8 and value.ndim >= 3)
