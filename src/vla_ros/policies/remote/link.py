"""A connection to a policy server, restored by a background thread after a loss."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vla_ros.errors import ServerLostError, VlaRosError
from vla_ros.policies.base import Lost
from vla_ros.policies.remote.dialect import EMPTY, Dialect, Message, Metadata, Request, Response, ServerSaidError
from vla_ros.policies.remote.dialects import by_metadata
from vla_ros.policies.remote.transport import Target, Transport, connect

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # s
_LOOK = 0.1  # s between checks of an idle connection, and the longest duration of a check
_CONNECT = 5.0  # s to connect and get the metadata; openpi's servers accept no connection during an inference
_LEAST = 1.0  # s for an attempt, also for the last one before the timeout of :meth:`Link.start`


def pause(failures: int, chance: float = 0.5) -> float:
    """Return the pause in seconds after a number of consecutive failures.

    The pause doubles with each failure, up to ``LONGEST_PAUSE``; ``chance``, in [0, 1), scales it by 0.5 to 1.
    """
    return float(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures, 30)) * (0.5 + 0.5 * chance))


@dataclass(frozen=True)
class Peer:
    """A connected server."""

    transport: Transport
    metadata: Metadata  # the server's description of itself
    dialect: Dialect


class Link:
    """A connection to one server, which a thread keeps alive and restores after a loss.

    ``accept`` checks a connected server and raises VlaRosError to refuse it. ``chance`` returns numbers in [0, 1)
    that randomise the pauses; ``wait`` waits for an event with a timeout in seconds.
    """

    def __init__(
        self,
        target: Target,
        accept: Callable[[Peer], None] = lambda peer: None,
        chance: Callable[[], float] = random.random,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._target, self._accept, self._chance, self._wait = target, accept, chance, wait
        self._peer: Peer | None = None
        self._why = "not connected yet"
        self._failures = 0
        self._lost: float | None = None  # time of ``time.monotonic``
        self._unanswered = False  # the last request was lost with the connection
        self._deadline = float("inf")  # of the pending request, a time of ``time.monotonic``
        self._using = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._keep, name="vla_remote", daemon=True)

    def start(self, timeout: float) -> Peer:
        """Connect within ``timeout`` seconds; the thread then keeps the connection.

        Raises ServerLostError if no server could be reached, another VlaRosError if the server was refused.
        """
        deadline = time.monotonic() + timeout
        while (peer := self._peer) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                advice = "check that the server runs and that host and port are right"
                raise ServerLostError(f"policy.server: {self._why} (tried for {timeout:g} s); {advice}")
            error = self._attempt(min(max(left, _LEAST), _CONNECT))
            if error is not None and not isinstance(error, ServerLostError):
                raise error
            if self._peer is None:
                self._wait(self._wake, min(pause(self._failures, self._chance()), left))
        self._thread.start()
        return peer

    @property
    def peer(self) -> Peer:
        """The connected server; raises ServerLostError while there is no connection."""
        peer = self._peer
        if peer is None:
            raise ServerLostError(f"{self._why}; reconnecting")
        return peer

    @property
    def lost(self) -> Lost | None:
        """Since when the server has been lost, or None.

        A loss ends when the server is connected again; if a request was lost, it ends with the next response.
        """
        since = self._lost
        return None if since is None else Lost(time.monotonic() - since, self._why)

    def request(self, request: Request, seconds: float) -> Response:
        """Send one request and return the response within ``seconds``.

        A server that supports resets receives one before the first request of an episode.

        Raises:
            ServerLostError: There is no connection, or no response came in time; the link then reconnects.
            WireError: The server returned an error, or something other than actions.
        """
        deadline = time.monotonic() + seconds
        with self._using:  # _look() holds it briefly
            self._deadline = deadline
            self._unanswered |= self._peer is None
            peer = self.peer
            dialect, transport = peer.dialect, peer.transport
            message = dialect.encode_request(request, peer.metadata)
            reset = dialect.encode_reset(request.session, peer.metadata) if request.begins else None
            try:
                transport.poll(deadline)
                if reset is not None and dialect.answers_reset:
                    dialect.check_reset(_exchange(transport, reset, deadline))
                elif reset is not None:
                    transport.send(reset, deadline)
                response = dialect.decode_response(_exchange(transport, message, deadline))
            except ServerSaidError:
                self._responded()
                raise
            except ServerLostError as error:
                self._unanswered = True
                self._drop(str(error))
                raise ServerLostError(f"{error}; reconnecting") from None
            except BaseException as error:
                self._drop(str(error))
                raise
            self._responded()
            return response

    def _responded(self) -> None:
        self._failures, self._lost, self._unanswered = 0, None, False

    def close(self) -> None:
        """Disconnect and stop the thread."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2 * _CONNECT)
        self.drop("closed")

    def drop(self, why: str) -> None:
        """Close the connection because of ``why``, and reconnect."""
        with self._using:
            self._drop(why)

    def _drop(self, why: str) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            self._why = why
            self._lost = self._lost or time.monotonic()
            peer.transport.abort()
            peer.transport.close()
            self._wake.set()

    def _attempt(self, seconds: float) -> VlaRosError | None:
        """Connect and read the metadata; return the error if that fails."""
        target, deadline = self._target, time.monotonic() + seconds
        transport = None
        try:
            transport = connect(target, deadline)
            metadata: Metadata = EMPTY
            if target.dialect.hello is not None:
                transport.send(target.dialect.hello, deadline)
            if target.dialect.hello is not None or transport.greets:
                metadata = target.dialect.decode_metadata(transport.receive(deadline))
            peer = Peer(transport, metadata, by_metadata(target.dialect, metadata))
            self._accept(peer)
        except VlaRosError as error:
            if transport is not None:
                transport.close()
            if str(error) != self._why:
                logger.warning("policy.server: %s", error)
            self._why = str(error)
            self._failures += 1
            return error
        with self._using:
            self._peer = peer
            if not self._unanswered:
                self._lost = None
        logger.info("policy.server: connected to %s", self._target.shown)
        return None

    def _keep(self) -> None:
        """Reconnect, or keep the connection alive, until :meth:`close`."""
        while True:
            self._wake.clear()
            if self._closing:
                return
            try:
                connected = self._peer is not None
                self._wait(self._wake, _LOOK if connected else pause(self._failures, self._chance()))
                if connected:
                    self._look()
                elif not self._closing:
                    self._attempt(_CONNECT)
            except Exception as error:  # without this thread, nobody would reconnect
                logger.exception("policy.server: %s", error)
                self._failures += 1
                self.drop(f"{type(error).__name__}: {error}")

    def _look(self) -> None:
        peer = self._peer
        if not self._using.acquire(blocking=False):  # a request is pending
            if peer is not None and time.monotonic() > self._deadline:
                peer.transport.abort()  # a server that sends but does not read may block it beyond its deadline
            return
        try:
            if self._peer is not None:
                self._peer.transport.poll(time.monotonic() + _LOOK)
        except VlaRosError as error:
            self._drop(str(error))
        finally:
            self._using.release()


def _exchange(transport: Transport, message: bytes, deadline: float) -> Message:
    transport.send(message, deadline)
    return transport.receive(deadline)
