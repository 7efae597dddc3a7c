"""Service servers in the format of rmw_cyclonedds: a request header before the payload, on a pair of topics."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from cyclonedds.core import DDSException

from vla_ros.errors import VlaRosError
from vla_ros.graph.dds.endpoints import Inbox
from vla_ros.graph.dds.participant import Participant
from vla_ros.graph.dds.wire import REPLY_PREFIX, REQUEST_PREFIX
from vla_ros.graph.qos import PROFILES

_CDR_HEADER = 4
# cdds_request_header_t: the client's GUID half and the sequence number, both 64 bit, echoed in the reply. Sixteen
# bytes keep the payload's alignment, so the payload is the plain CDR of the request.
_REQUEST_HEADER = 16


class DdsService(Inbox):
    """Answers requests."""

    def __init__(
        self, participant: Participant, srv_type: Any, name: str, callback: Callable[[Any, Any], Any]
    ) -> None:
        self.srv_name = name
        self.srv_type = srv_type
        self.callback = callback
        profile = PROFILES["default"]
        # Clients wait until they see reader and writer of one service id, so that no response is lost.
        identity = ".".join(f"{byte:x}" for byte in uuid.uuid4().bytes)
        extra = f"serviceid={identity};"
        self._writer, self._sample = participant.writer(
            f"{REPLY_PREFIX}{name}Reply", f"{srv_type.TYPE}_Response", profile, extra
        )
        self.writer_guid = self._writer.guid.bytes
        request = f"{srv_type.TYPE}_Request"
        reader = participant.reader(f"{REQUEST_PREFIX}{name}Request", request, profile, extra)
        super().__init__(participant, reader, name, profile.depth)
        self._entities += (self._writer,)

    def dispatch(self, sample: tuple[bytes, bytes]) -> None:
        """Answer one request.

        Raises:
            VlaRosError: The request is incomplete, or the response cannot be sent.
        """
        cdr, _ = sample
        types = self._participant.types
        begin = _CDR_HEADER + _REQUEST_HEADER
        if len(cdr) < begin:
            raise VlaRosError(f"a request to {self.srv_name} has {len(cdr)} bytes; at least {begin} are expected")
        request = types.deserialize(cdr[:_CDR_HEADER] + cdr[begin:], self.srv_type.Request)
        answer = types.serialize(self.callback(request, self.srv_type.Response()))
        packet = answer[:_CDR_HEADER] + cdr[_CDR_HEADER:begin] + answer[_CDR_HEADER:]
        with self._lock:
            if self._reader is None:
                return
            try:
                self._writer.write(self._sample(packet))
            except DDSException as error:
                raise VlaRosError(f"the answer of {self.srv_name} could not be sent: {error}") from error
