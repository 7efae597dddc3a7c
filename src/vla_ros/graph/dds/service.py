"""Service servers in the format of rmw_cyclonedds: a request header before the payload, on a pair of topics."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

from cyclonedds.core import DDSException, ReadCondition

from vla_ros.errors import VlaRosError
from vla_ros.graph.dds.participant import Participant, delete
from vla_ros.graph.dds.wire import ANY_UNREAD, REPLY_PREFIX, REQUEST_PREFIX, sample
from vla_ros.graph.qos import PROFILES

_CDR_HEADER = 4
# cdds_request_header_t: the client's GUID half and the sequence number, both 64 bit, echoed in the reply. Sixteen
# bytes keep the payload's alignment, so the payload is the plain CDR of the request.
_REQUEST_HEADER = 16


class DdsService:
    """Answers requests; the graph's spin calls :meth:`dispatch`."""

    def __init__(
        self, participant: Participant, srv_type: Any, name: str, callback: Callable[[Any, Any], Any]
    ) -> None:
        self.srv_name = name
        self.srv_type = srv_type
        self.callback = callback
        self._participant = participant
        self._lock = threading.Lock()
        self._open = True
        profile = PROFILES["default"]
        # Clients wait until they see reader and writer of one service id, lest an answer be lost.
        identity = ".".join(f"{byte:x}" for byte in uuid.uuid4().bytes)
        extra = f"serviceid={identity};"
        self._writer, self._sample = participant.writer(
            f"{REPLY_PREFIX}{name}Reply", f"{srv_type.TYPE}_Response", profile, extra
        )
        self._reader = participant.reader(
            f"{REQUEST_PREFIX}{name}Request", f"{srv_type.TYPE}_Request", profile, extra
        )
        self.reader_guid = self._reader.guid.bytes
        self.writer_guid = self._writer.guid.bytes
        self._condition = ReadCondition(self._reader, ANY_UNREAD)
        participant.waitset.attach(self._condition)

    def take(self) -> list[bytes]:
        """CDR of the waiting requests, header included."""
        with self._lock:
            if not self._open:
                return []
            taken = self._reader.take(N=PROFILES["default"].depth, condition=self._condition)
        return [item.cdr for item in taken if item.sample_info.valid_data]

    def dispatch(self, cdr: bytes) -> None:
        """Answer one request.

        Raises:
            VlaRosError: The request is incomplete, or the response cannot be sent.
        """
        types = self._participant.types
        begin = _CDR_HEADER + _REQUEST_HEADER
        if len(cdr) < begin:
            raise VlaRosError(f"a request to {self.srv_name} has {len(cdr)} bytes; at least {begin} are expected")
        request = types.deserialize(cdr[:_CDR_HEADER] + cdr[begin:], self.srv_type.Request)
        response = self.callback(request, self.srv_type.Response())
        answer = types.serialize(response)
        packet = answer[:_CDR_HEADER] + cdr[_CDR_HEADER:begin] + answer[_CDR_HEADER:]
        with self._lock:
            if not self._open:
                return
            try:
                self._writer.write(sample(self._sample, packet))
            except DDSException as error:
                raise VlaRosError(f"the answer of {self.srv_name} could not be sent: {error}") from error

    def destroy(self) -> None:
        """Leave the graph. Safe to call twice."""
        with self._lock:
            if self._open:
                self._open = False
                self._participant.waitset.detach(self._condition)
                for entity in (self._condition, self._reader, self._writer):
                    delete(entity)
