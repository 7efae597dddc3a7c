"""Wire dialects: how a client and a server write and read requests, responses and metadata.

Each request is one message and gets one response. A dialect is a subclass of :class:`Dialect`, or of
:class:`ServedDialect` if this package's server speaks it too, and a line in
:mod:`~vla_ros.policies.remote.dialects`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from vla_ros.contract.spec import PolicySpec
from vla_ros.policies.published import UNKNOWN, Loop
from vla_ros.policies.remote.messages import AnyArray, WireError, described, finite, text_map, unpack
from vla_ros.types import FloatArray, PreviousChunk

Message = bytes | str
"""A binary or text message, as received."""

Metadata = Mapping[str, Any]
"""A server's description of itself."""

EMPTY: Mapping[str, Any] = MappingProxyType({})

KEY_HINT = "; set policy.api_key_file"
"""Ends the message about a server that refuses this client's key or expects one."""

MAX_HORIZON = 4096
"""Maximum number of actions in a chunk."""


@dataclass(frozen=True, eq=False)
class Request:
    """One observation, or the beginning of an episode, independent of the dialect."""

    # Feature key to an image, uint8 [H, W, 3] or an encoded JPEG, or to a state vector [D]; at T times [T, ...],
    # oldest first.
    features: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    instruction: str | None = None  # the command in natural language
    session: str = ""  # name of the episode, for servers that tell episodes apart by name
    reset: bool = False  # True if it only begins an episode, without an observation
    begins: bool = False  # True if an episode begins with this observation
    # Only between this package's client and server:
    number: int | None = None  # the client's number for the request
    deadline_s: float = 0.0  # how long the client waits for the response; 0 if unknown
    noise: FloatArray | None = None  # initial noise of a sampling policy
    previous: PreviousChunk | None = None  # the rest of the chunk that the robot executes


@dataclass(frozen=True, eq=False)
class Response:
    """One chunk of finite actions, independent of the dialect."""

    # Name to actions, float64 [K, D]; unnamed actions are called ``actions``.
    actions: Mapping[str, FloatArray]
    timing_ms: Mapping[str, float] = field(default_factory=lambda: EMPTY)  # server's stage to its duration
    # Only from this package's server:
    number: int | None = None  # number of the request
    normalized: AnyArray | None = None  # as in ActionChunk
    tokens: AnyArray | None = None  # as in ActionChunk
    info: Mapping[str, Any] = field(default_factory=lambda: EMPTY)  # as in ActionChunk


class ServerSaidError(WireError):
    """The server reported an error; the connection can still be used.

    The message quotes up to 300 characters of the last line of ``text``, which may be a traceback; ``more``
    follows.
    """

    def __init__(self, text: str, more: str = "") -> None:
        line = (text.strip().splitlines() or ["(empty)"])[-1]
        shown = "".join(character if character.isprintable() else "?" for character in line)[:300]
        more += KEY_HINT if "unauthorized" in line.lower() else ""
        super().__init__(f"the server responded with an error: {shown}{more}")


class Dialect(ABC):
    """The protocol of one family of servers, as clients speak it; without state."""

    name: ClassVar[str]
    family: ClassVar[str] = "openpi"  # of its policies, as in :func:`vla_ros.policies.published.loop_of`
    schemes: ClassVar[tuple[str, ...]] = ("ws", "wss")  # of the server's address
    port: ClassVar[int] = 8000  # default port
    path: ClassVar[str] = "/"  # default path
    authorization: ClassVar[str] = "Api-Key"  # scheme of the header with the API key
    hello: ClassVar[bytes | None] = None  # request for the metadata; None if sent unasked, or if there are none
    answers_reset: ClassVar[bool] = True  # False if the request that begins an episode gets no response

    @abstractmethod
    def encode_request(self, request: Request, metadata: Metadata) -> bytes:
        """Write a request for a server with these metadata."""

    @abstractmethod
    def decode_response(self, message: Message) -> Response:
        """Read a response; raises WireError unless it contains actions."""

    def encode_reset(self, session: str, metadata: Metadata) -> bytes | None:
        """Write the request that begins an episode, given its name; None if the server knows no such request."""
        return None

    def check_reset(self, message: Message) -> None:
        """Raise WireError unless the message says that an episode has begun."""
        read(message)

    def decode_metadata(self, message: Message) -> Metadata:
        return read_map(message, "the server's description")

    def recognizes(self, metadata: Metadata) -> bool:
        """Return True if the metadata show this variant of the dialect that the address indicates."""
        return False

    def spec(self, metadata: Metadata, horizon: int, loop: Loop = UNKNOWN) -> PolicySpec:
        """Return the features in the metadata; the option ``features`` supplies the rest.

        ``horizon`` is the maximum chunk length if the server does not state one, ``loop`` how its published client
        executes chunks.
        """
        stated = self.horizon(metadata)
        steps = stated if type(stated) is int and 1 <= stated <= MAX_HORIZON else horizon
        return PolicySpec((), (), (), 0, steps, loop.execute_steps, loop.rate_hz, takes_any_state=True)

    def horizon(self, metadata: Metadata) -> Any:
        """Return the chunk length that the metadata state, if any; it need not be valid."""
        return None

    def check(  # noqa: B027 (most servers state nothing that could be compared)
        self, metadata: Metadata, bound: PolicySpec, action_keys: Sequence[str] = ()
    ) -> None:
        """Raise ConfigError, which shows both, if features or ``action_keys`` differ from the metadata."""

    def image_size(self, metadata: Metadata) -> tuple[int, int] | None:
        """Return the (height, width) to which the server's clients resize images, or None."""
        return None


class ServedDialect(Dialect):
    """A dialect that this package's server speaks, too."""

    greets: ClassVar[bool] = True  # True if the server sends the metadata unasked
    row_by_row: ClassVar[bool] = False  # True if each request gets one action of a chunk, and an episode a session
    reset_response: Message  # to a request that only begins an episode; empty for none

    @abstractmethod
    def encode_metadata(self, name: str, spec: PolicySpec) -> bytes:
        """Write the metadata of the policy ``name``."""

    @abstractmethod
    def decode_request(self, message: Message) -> Request:
        """Read a request, whose features may have any names and shapes; raises WireError if it is invalid."""

    @abstractmethod
    def encode_response(self, response: Response) -> bytes: ...

    @abstractmethod
    def encode_error(self, text: str) -> Message: ...


def read_map(message: Message, what: str) -> Mapping[str, Any]:
    """Read a map with string keys from a message; raises WireError if it has none."""
    return text_map(read(message), what)


def read(message: Message) -> Any:
    """Read a binary message; raises ServerSaidError if it is text or a map that reports an error."""
    if isinstance(message, str):
        raise ServerSaidError(message)
    content = unpack(message)
    if isinstance(content, Mapping) and "actions" not in content:
        if "error" in content:
            raise ServerSaidError(str(content["error"]))
        if content.get("type") == "error":
            raise ServerSaidError(str(content.get("message")))
    return content


def action_chunk(value: Any, name: str) -> FloatArray:
    """Return actions as [K, D], K >= 1; accepts one action [D] or a batch [1, K, D]."""
    actions = finite(value, name)
    if actions.ndim == 3 and len(actions) == 1:
        actions = actions[0]
    actions = actions[None] if actions.ndim == 1 else actions
    if actions.ndim != 2 or not actions.size:
        raise WireError(f"{name}: {described(value)}, expected a chunk [K, D]")
    return actions


def is_image(value: AnyArray) -> bool:
    """Return True if a feature is an image: uint8 [H, W, 3] or [T, H, W, 3]."""
    return bool(value.dtype == np.uint8 and value.ndim >= 3)
