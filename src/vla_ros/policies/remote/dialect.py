"""How policy servers differ: writing requests and reading answers, as data and pure functions.

A request is one message and has one answer. :mod:`~vla_ros.policies.remote.dialects` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_ros.policies.remote.messages import Array, WireError, described, finite, pack, unpack

Frame = bytes | str
"""One message as it came: binary, or text."""

Metadata = Mapping[str, Any]
"""What a server says about itself."""

NO_METADATA: Metadata = MappingProxyType({})

OWN = "vla_ros"
"""``server`` in the metadata of this package's server, and the key of what only its own clients understand."""


@dataclass(frozen=True, eq=False)
class Query:
    """One observation, for any dialect."""

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
    """The server reported an error; the connection may continue."""


@dataclass(frozen=True)
class Dialect:
    """How one family of servers speaks."""

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
    """Read a binary frame that contains a map with text keys.

    Raises:
        ServerSaidError: It is text, which servers send for errors.
        WireError: It is not such a map.
    """
    message = read(frame)
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise WireError(f"{what}: {described(message)}, expected a map with text keys")
    return message


def read(frame: Frame) -> Any:
    """Read a binary frame; text and maps that contain an error are raised.

    Raises:
        ServerSaidError: The server reports an error.
        WireError: The frame is damaged.
    """
    if isinstance(frame, str):
        raise ServerSaidError(f"the server answered with an error: {last_line(frame)}")
    message = unpack(frame)
    if isinstance(message, Mapping) and "actions" not in message:
        if "error" in message:
            raise ServerSaidError(f"the server answered with an error: {last_line(str(message['error']))}")
        if message.get("type") == "error":
            raise ServerSaidError(f"the server answered with an error: {last_line(str(message.get('message')))}")
    return message


def check_reset(frame: Frame) -> None:
    """Read a server's answer to a reset, which is text or a map.

    Raises:
        ServerSaidError: It is an error.
    """
    if frame != "reset successful":
        read(frame)


def last_line(text: str) -> str:
    """Return the line of a traceback that says what happened, at most 300 printable characters."""
    lines = text.strip().splitlines() or ["(empty)"]
    return "".join(character if character.isprintable() else "?" for character in lines[-1])[:300]


def chunk(value: Any, name: str) -> NDArray[np.float64]:
    """Actions as [K, D] with at least one row; accepts a single row and a leading batch dimension of one.

    Raises:
        WireError: They are not numbers, not finite, empty or of another shape.
    """
    actions = finite(value, name)
    if actions.ndim == 3 and len(actions) == 1:
        actions = actions[0]
    if actions.ndim == 1:
        actions = actions[None]
    if actions.ndim != 2 or not actions.size:
        raise WireError(f"{name}: {described(value)}, expected a chunk [K, D]")
    return actions


def openpi_answer(frame: Frame) -> Answer:
    """Return an answer in openpi's framing: a map with ``actions``, a bare array, or a map of named actions.

    Raises:
        WireError: It contains no actions; the text says what it is instead.
    """
    message = read(frame)
    if isinstance(message, np.ndarray):
        return Answer({"actions": chunk(message, "actions")})
    if not isinstance(message, Mapping):
        raise WireError(f"the answer is {described(message)}, expected a map with actions")
    if "actions" in message:
        extension = message.get(OWN)
        more = extension if isinstance(extension, Mapping) else NO_METADATA
        return Answer({"actions": chunk(message["actions"], "actions")}, _timing(message), more)
    named = {key: value for key, value in message.items() if isinstance(value, np.ndarray)}
    if not named:
        raise WireError(f"the answer is {described(message)}, expected one with actions")
    return Answer({str(key): chunk(value, str(key)) for key, value in named.items()})


def openpi_features(query: Query) -> dict[str, Any]:
    """Return the features under their own keys; ``images.NAME`` is put into a map ``images``."""
    message: dict[str, Any] = {}
    for key, value in query.features.items():
        group, dot, name = key.partition(".")
        if dot and group == "images":
            message.setdefault(group, {})[name] = value
        else:
            message[key] = value
    return message


def openpi_query(query: Query, metadata: Metadata) -> bytes:
    """Return an observation as openpi's clients send it. Images in a map ``images`` are [3, H, W], as for ALOHA."""
    message = openpi_features(query)
    if "images" in message:
        message["images"] = {name: channels_first(value) for name, value in message["images"].items()}
    return pack({**message, "prompt": query.instruction, **query.extras})


def channels_first(image: Array) -> Array:
    """[..., H, W, 3] to [..., 3, H, W]."""
    return np.moveaxis(image, -1, -3)


def is_image(value: Array) -> bool:
    """Return True for uint8 [H, W, 3] and [T, H, W, 3]."""
    return bool(value.dtype == np.uint8 and value.ndim >= 3)


def _timing(message: Mapping[str, Any]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for section in ("server_timing", "policy_timing"):
        entries = message.get(section)
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if isinstance(value, (int, float)) and str(key).endswith("_ms") and not str(key).startswith("prev"):
                found[f"{section.removesuffix('_timing')}/{str(key).removesuffix('_ms')}"] = float(value)
    return found
