"""The HTTP messages of OpenVLA-OFT's ``POST /act``: JSON with arrays in base64.

Based on openvla-oft commit 213c5ff and json-numpy. The server reports an error with status 200 and the text
``error``.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from vla_ros.policies.remote.dialect import Answer, Message, Metadata, Query, ServerSaidError, chunk
from vla_ros.policies.remote.messages import WireError, array, described


def query(query: Query, metadata: Metadata) -> bytes:
    """Write an observation: ``instruction``, and features such as ``full_image``."""
    return json.dumps({**query.features, "instruction": query.instruction}, default=_encoded).encode()


def answer(message: Message) -> Answer:
    """Read actions, a list of K arrays [D] or one array [K, D].

    The server may encode the JSON twice.
    """
    found = _read(message)
    if isinstance(found, str) and found[:1] in ("[", "{"):
        found = _read(found)
    if isinstance(found, str):
        raise ServerSaidError(found, "; see the server's log")
    if isinstance(found, list) and found:
        rows = [chunk(row, "actions")[0] for row in found]
        lengths = sorted({len(row) for row in rows})
        if len(lengths) > 1:
            raise WireError(f"the answer contains actions of {lengths} numbers, expected equal lengths")
        return Answer({"actions": np.stack(rows)})
    if isinstance(found, np.ndarray):
        return Answer({"actions": chunk(found, "actions")})
    raise WireError(f"the answer is {described(found)}, expected a list of actions")


def _encoded(value: Any) -> Any:
    held = np.asarray(value)
    data = base64.b64encode(held.tobytes()).decode()
    return {"__numpy__": data, "dtype": held.dtype.str, "shape": list(held.shape)}


def _read(data: Message) -> Any:
    try:
        return json.loads(data, object_hook=_revived, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not valid JSON: {str(error)[:200]}") from None


def _revived(found: dict[str, Any]) -> Any:
    if "__numpy__" not in found:
        return found
    try:
        data = base64.b64decode(found["__numpy__"], validate=True)
    except (TypeError, ValueError):
        raise WireError("found an array that is not base64") from None
    return array(found.get("dtype"), found.get("shape"), data)


def _refused(text: str) -> Any:
    raise WireError(f"found the number {text}, expected a finite number")
