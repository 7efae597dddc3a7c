"""Services in the format of rmw_cyclonedds: a request header before the payload, on a pair of topics.

Peers on rmw_fastrtps cannot be reached: they match responses by RTPS headers that this library cannot write.
"""

import itertools
import struct
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from logging import Logger
from typing import Any

from cyclonedds.core import DDSException

from vla_ros.errors import VlaRosError
from vla_ros.graph.dds.endpoints import Inbox
from vla_ros.graph.dds.participant import Participant
from vla_ros.graph.dds.wire import REPLY_PREFIX, REQUEST_PREFIX
from vla_ros.graph.origin import Origin
from vla_ros.graph.qos import PROFILES

_CDR_HEADER = 4
# cdds_request_header_t: the client's GUID half and the sequence number, both 64 bit, echoed in the reply. Sixteen
# bytes keep the payload's alignment, so the payload is the plain CDR of the request.
_REQUEST_HEADER = 16


_PENDING = 100  # most calls that wait for a response
_DISCOVERY = 1.0  # s; to discover the reader of a client whose request has arrived
_HEADER = struct.Struct("<Qq")


class _End(Inbox):
    """One side of a service: a reader and a writer that announce the same id."""

    def __init__(self, participant: Participant, srv_type: Any, name: str, kind: str) -> None:
        self.srv_name, self.srv_type = name, srv_type
        profile = PROFILES["default"]
        # Peers wait until they have discovered a reader and a writer with the same id, so that no message is lost.
        identity = f"{kind}id={'.'.join(f'{byte:x}' for byte in uuid.uuid4().bytes)};"
        request = f"{REQUEST_PREFIX}{name}Request", f"{srv_type.TYPE}_Request"
        reply = f"{REPLY_PREFIX}{name}Reply", f"{srv_type.TYPE}_Response"
        read, written = (request, reply) if kind == "service" else (reply, request)
        self._writer, self._sample = participant.writer(*written, profile, identity)
        self.writer_guid = self._writer.guid.bytes
        super().__init__(participant, participant.reader(*read, profile, identity), name, profile.depth)
        self._entities += (self._writer,)

    def _read(self, cdr: bytes, cls: Any) -> tuple[bytes, Any]:
        begin = _CDR_HEADER + _REQUEST_HEADER
        if len(cdr) < begin:
            raise VlaRosError(f"{self.srv_name}: found {len(cdr)} bytes, expected {begin} or more")
        message = self._participant.types.deserialize(cdr[:_CDR_HEADER] + cdr[begin:], cls)
        return cdr[_CDR_HEADER:begin], message

    def _write(self, header: bytes, message: Any) -> None:
        cdr = self._participant.types.serialize(message)
        with self._lock:
            if self._reader is None:
                return
            try:
                self._writer.write(self._sample(cdr[:_CDR_HEADER] + header + cdr[_CDR_HEADER:]))
            except DDSException as error:
                raise VlaRosError(f"{self.srv_name} could not be sent: {error}") from error


class DdsService(_End):
    """A service; ``callback(request, response)`` returns the response, or a future of it."""

    def __init__(
        self,
        participant: Participant,
        srv_type: Any,
        name: str,
        callback: Callable[[Any, Any], Any],
        logger: Logger,
    ) -> None:
        self.callback, self._logger = callback, logger
        self._held: list[tuple[bytes, Any]] = []  # headers and responses that wait for discovery
        super().__init__(participant, srv_type, name, "service")

    def dispatch(self, sample: tuple[bytes, Origin]) -> None:
        header, request = self._read(sample[0], self.srv_type.Request)
        answer = self.callback(request, self.srv_type.Response())
        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: self._respond(header, done.result()))
        else:
            self._respond(header, answer)

    def _respond(self, header: bytes, response: Any) -> None:
        """Send a response as soon as all clients can receive one.

        A client's writer may be discovered before its reader; the client does not know this and would lose the
        response. Responses keep their order.
        """
        if not self._held and self._reaches_all():
            self._write(header, response)
            return
        with self._lock:
            self._held.append((header, response))
            first = len(self._held) == 1
        if first:  # the thread that spins does not wait for a client
            threading.Thread(target=self._release, name="vla_responses", daemon=True).start()

    def _release(self) -> None:
        try:
            self._release_held()
        except Exception as error:  # no response waits for ever
            self._logger.exception(f"{self.srv_name}: {type(error).__name__}: {error}")
            self._release_held()

    def _release_held(self) -> None:
        deadline = time.monotonic() + _DISCOVERY
        while not self._reaches_all() and time.monotonic() < deadline:
            time.sleep(0.002)
        while True:
            self._write_or_log(*self._held[0])
            with self._lock:
                self._held.pop(0)
                if not self._held:
                    return

    def _write_or_log(self, header: bytes, response: Any) -> None:
        """Write a response; log an error, so that later responses are still written."""
        try:
            self._write(header, response)
        except Exception as error:
            self._logger.exception(f"{self.srv_name}: response lost: {type(error).__name__}: {error}")

    def _reaches_all(self) -> bool:
        """Return True if as many readers of responses as writers of requests are known."""
        with self._lock:
            if self._reader is None:
                return True
            readers, writers = self._writer.get_matched_subscriptions(), self._reader.get_matched_publications()
            return len(readers) >= len(writers)


class DdsClient(_End):
    """A service client. Responses arrive on the thread that spins."""

    def __init__(self, participant: Participant, srv_type: Any, name: str) -> None:
        super().__init__(participant, srv_type, name, "client")
        self._own = uuid.uuid4().int >> 64
        self._count = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}

    def service_is_ready(self) -> bool:
        with self._lock:
            if self._reader is None:
                return False
            return bool(self._writer.get_matched_subscriptions() and self._reader.get_matched_publications())

    def call_async(self, request: Any) -> Future[Any]:
        """Send a request; the future yields the response, which may never come."""
        number, future = next(self._count), Future[Any]()
        self._waiting[number] = future
        self._waiting.pop(number - _PENDING, None)
        self._write(_HEADER.pack(self._own, number), request)
        return future

    def dispatch(self, sample: tuple[bytes, Origin]) -> None:
        """Handle a response; responses to other clients arrive on the same topic and are ignored."""
        header, response = self._read(sample[0], self.srv_type.Response)
        client, number = _HEADER.unpack(header)
        future = self._waiting.pop(number, None) if client == self._own else None
        if future is not None:
            future.set_result(response)
