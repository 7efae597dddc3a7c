"""Decides which page is let in, and which of its requests counts. No sockets, no graph."""

import hmac
import json
import secrets
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from vla_ros.errors import VlaRosError

REPEATABLE = ("stop", "disarm")
"""What may be repeated, and is neither too old nor about another state."""
HELD = ("arm", "continue")
"""What lets the arm move: counts only after a press that is held."""
OF_A_STATE = (*HELD, "reset", "correct")
"""What is about the state that was on the screen: void after any change of it."""
ACTS = (*REPEATABLE, *OF_A_STATE, "press", "release", "pause", "instruct", "label", "record")
VALID = 1.0
"""Seconds for which what was on the screen may be acted upon."""
HOLD = 0.5
"""Seconds for which the button must be pressed, on this side of the connection."""
_LONGEST = 5.0  # s from a press to what it is for


class RequestRefusedError(VlaRosError):
    """A request of a page that does not count, and why."""


@dataclass(frozen=True)
class PageRequest:
    """What a page asks for."""

    do: str  # one of :data:`ACTS`
    id: int = 0  # of this connection, counting up
    beat: str = ""  # what was on the screen: the newest one that the page has shown
    number: int = -1  # of the state that was on the screen
    text: str = ""  # instruction, label, or what a press is for
    by: str = ""  # key or pointer, for the log


@dataclass(frozen=True)
class Gate:
    """Lets in who knows the token, from a page of this server, under one of its names.

    Attributes:
        token: The secret of this start.
        names: Host names and addresses under which pages may reach this server, at any port: a tunnel has its own.
        scheme: ``http`` or ``https``.
    """

    token: str
    names: Collection[str]
    scheme: str = "http"

    def knows(self, tokens: list[str]) -> bool:
        """Whether a request has the token, once; compared in constant time."""
        return len(tokens) == 1 and hmac.compare_digest(tokens[0].encode(errors="replace"), self.token.encode())

    def is_host(self, hosts: list[str]) -> bool:
        """Whether the Host header names this server: a foreign name is a page that was rebound to this address."""
        try:
            return len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in self.names
        except ValueError:
            return False

    def is_origin(self, origins: list[str], hosts: list[str]) -> bool:
        """Whether a websocket comes from a page that this server has sent."""
        return len(origins) == 1 and origins == [f"{self.scheme}://{host}" for host in hosts]


class Desk:
    """Admits the requests of one connection; ``clock`` returns monotonic seconds. One thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._key = clock, secrets.token_hex(8)
        self._shown: deque[tuple[str, int, float]] = deque(maxlen=256)  # beat, number of the state, when
        self._count = self._last = 0
        self._press: tuple[str, int, float] | None = None  # what for, number of the state, when

    def show(self, number: int) -> str:
        """Return the beat of what is shown now, with the ``number`` of its state; it is valid for a second."""
        self._count += 1
        beat = f"{self._key}-{self._count}"
        self._shown.append((beat, number, self._clock()))
        return beat

    def lag(self, beat: str) -> float:
        """Return how long ago ``beat`` was sent; infinite if it is not one of the last."""
        return self._clock() - next((at for known, _, at in self._shown if known == beat), -float("inf"))

    def admit(self, request: PageRequest, number: int) -> float:
        """Return until when a request counts (monotonic, s); ``number`` is that of the state now.

        Raises RequestRefusedError for one that is repeated, older than a second, of another connection, about
        another state, or not preceded by a press that was held.
        """
        now, do = self._clock(), request.do
        if do in REPEATABLE:
            return float("inf")
        if request.id <= self._last:
            raise RequestRefusedError("this request was made before")
        self._last, press = request.id, self._press
        if do in (*HELD, "press", "release"):  # whatever becomes of the request, no press counts twice
            self._press = None
        if do == "release":
            return now
        shown = next(((was, at) for beat, was, at in self._shown if beat == request.beat), None)
        if shown is None or now - shown[1] > VALID:
            raise RequestRefusedError("too late: what was on the screen is over a second old; look, and ask again")
        if do in (*OF_A_STATE, "press") and not request.number == shown[0] == number:
            raise RequestRefusedError("the state has changed since: look, and ask again")
        if do == "press":
            self._press = request.text, number, now
        elif do in HELD and not (press and press[0] == do and HOLD <= now - press[2] <= _LONGEST):
            raise RequestRefusedError("press the button, and hold it")
        elif do in HELD and press and press[1] != number:
            raise RequestRefusedError("the state has changed since the press: look, and ask again")
        return shown[1] + VALID


def read_request(text: str) -> PageRequest | None:
    """Return the request of a message, or None if it is none: every field has its type, and nothing is long."""
    try:
        said = json.loads(text)
        fields = {name: said.get(name, "") for name in ("do", "beat", "text", "by")}
        numbers = {name: said.get(name, -1) for name in ("id", "number")}
    except (ValueError, AttributeError, RecursionError):
        return None
    if not all(isinstance(value, str) and len(value) <= 1000 for value in fields.values()):
        return None
    if not all(type(value) is int for value in numbers.values()) or fields["do"] not in ACTS:
        return None
    return PageRequest(**fields, **numbers)
