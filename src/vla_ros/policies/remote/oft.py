"""OpenVLA-OFT's ``POST /act``: JSON with base64 arrays; the answer is one list of actions.

Written after openvla-oft 213c5ff and json-numpy. Errors have status 200 and the text ``error``.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

import numpy as np

from vla_ros.policies.remote.dialect import Answer, Frame, Metadata, Query, ServerSaidError, chunk
from vla_ros.policies.remote.messages import MAX_BYTES, Array, WireError, array, described


def query(query: Query, metadata: Metadata) -> bytes:
    """Write an observation: ``full_image``, ``wrist_image`` (or left and right), ``state``, ``instruction``."""
    message = {**query.features, "instruction": query.instruction, **query.extras}
    return json.dumps(message, default=_written).encode()


def answer(frame: Frame) -> Answer:
    """Read actions [K, D]: a list of arrays [D], or one array; ``{"encoded": ...}`` answers are decoded again."""
    message = _read(frame if isinstance(frame, bytes) else frame.encode())
    if isinstance(message, str) and message[:1] in ("[", "{"):
        message = _read(message.encode())
    if isinstance(message, str):
        raise ServerSaidError(message, "; its log says more")
    if isinstance(message, list) and message:
        rows = [chunk(row, "actions")[0] for row in message]
        lengths = sorted({len(row) for row in rows})
        if len(lengths) > 1:
            raise WireError(f"the answer holds actions of {lengths} numbers, expected one length")
        return Answer({"actions": np.stack(rows)})
    if isinstance(message, np.ndarray):
        return Answer({"actions": chunk(message, "actions")})
    raise WireError(f"the answer is {described(message)}, expected a list of actions")


def _written(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        held = np.asarray(value)
        data = base64.b64encode(held.tobytes()).decode()
        return {"__numpy__": data, "dtype": held.dtype.str, "shape": list(held.shape)}
    raise TypeError(f"{type(value).__name__} cannot be sent in a message")


def _read(data: bytes) -> Any:
    if len(data) > MAX_BYTES:
        raise WireError(f"a message of {len(data)} bytes, allowed {MAX_BYTES}")
    try:
        return json.loads(data, object_hook=_revived, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not valid JSON: {str(error)[:200]}") from None


def _revived(found: dict[str, Any]) -> Any | Array:
    if "__numpy__" not in found:
        return found
    try:
        data = base64.b64decode(found["__numpy__"], validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise WireError("an array that is not base64") from None
    return array(found.get("dtype"), found.get("shape"), data)


def _refused(text: str) -> Any:
    raise WireError(f"the number {text}, expected a finite one")
