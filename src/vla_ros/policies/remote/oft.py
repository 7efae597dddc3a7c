"""The dialect of OpenVLA-OFT's ``POST /act``: JSON with arrays in base64.

Based on openvla-oft commit 213c5ff and json-numpy. The server reports an error with status 200 and the text
``error``.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from vla_ros.policies.remote.dialect import (
    Dialect,
    Message,
    Metadata,
    Request,
    Response,
    ServerSaidError,
    action_chunk,
)
from vla_ros.policies.remote.messages import WireError, array, decode_json, described


class Oft(Dialect):
    """The dialect of OpenVLA-OFT's ``deploy.py``."""

    name, family, schemes, port, path = "oft", "oft", ("http", "https"), 8777, "/act"

    def encode_request(self, request: Request, metadata: Metadata) -> bytes:
        """Write an observation: ``instruction``, and features such as ``full_image``."""
        return json.dumps({**request.features, "instruction": request.instruction}, default=_encode_array).encode()

    def decode_response(self, message: Message) -> Response:
        """Read actions, a list of K arrays [D] or one array [K, D]; the server may encode the JSON twice."""
        content = _decode(message)
        if isinstance(content, str) and content[:1] in ("[", "{"):
            content = _decode(content)
        if isinstance(content, str):
            raise ServerSaidError(content, "; see the server's log")
        if isinstance(content, list) and content:
            rows = [action_chunk(row, "actions")[0] for row in content]
            lengths = sorted({len(row) for row in rows})
            if len(lengths) > 1:
                raise WireError(f"the response contains actions of {lengths} numbers, expected equal lengths")
            return Response({"actions": np.stack(rows)})
        if isinstance(content, np.ndarray):
            return Response({"actions": action_chunk(content, "actions")})
        raise WireError(f"the response is {described(content)}, expected a list of actions")


OFT_HTTP = Oft()


def _encode_array(value: Any) -> Any:
    held = np.asarray(value)
    data = base64.b64encode(held.tobytes()).decode()
    return {"__numpy__": data, "dtype": held.dtype.str, "shape": list(held.shape)}


def _decode(data: Message) -> Any:
    return decode_json(data, _decode_array)


def _decode_array(entry: dict[str, Any]) -> Any:
    if "__numpy__" not in entry:
        return entry
    try:
        data = base64.b64decode(entry["__numpy__"], validate=True)
    except (TypeError, ValueError):
        raise WireError("found an array that is not base64") from None
    return array(entry.get("dtype"), entry.get("shape"), data)
