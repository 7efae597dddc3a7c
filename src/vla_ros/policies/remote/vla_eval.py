"""vla-eval's protocol (0.8.0), for both ends: one msgpack map a message over a websocket.

The client runs the benchmark and speaks first, with ``hello``, which the server answers. ``episode_start`` and
``episode_end`` have no answer; each ``observation`` is answered with an ``action`` of the same ``seq``, or with an
``error``, after which the connection can still be used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
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
    is_image,
)
from vla_ros.policies.remote.images import encoded_size
from vla_ros.policies.remote.messages import WireError, array, described, pack, str_keys, text_map, unpack

PATH = "/vla-eval"
"""Path of this protocol on this package's server; vla-eval's own servers accept any path."""
PROTOCOL_VERSION = 1
MESSAGE_TYPES = ("hello", "observation", "action", "episode_start", "episode_end", "error")
_MAX_ENTRIES = 4096  # of all maps and lists of a message; the numbers of arrays do not count
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, eq=False)
class EvalMessage:
    """A decoded message of the protocol."""

    kind: str  # one of :data:`MESSAGE_TYPES`
    # Arrays are read-only views of the message; images are uint8 [H, W, C], or an encoded JPEG or PNG in bytes
    # (:func:`~vla_ros.policies.remote.images.decode_encoded`).
    payload: Mapping[str, Any]
    seq: int = 0  # the client's number for the message; an answer repeats it


def pack_message(kind: str, payload: Mapping[str, Any], seq: int = 0) -> bytes:
    """Write a message of plain data and of numeric or boolean arrays; raises WireError for anything else."""
    return pack({"type": kind, "payload": payload, "seq": seq, "timestamp": time.time()}, str_keys)


def unpack_message(message: Message) -> EvalMessage:
    """Read a message; images that are encoded stay so.

    Raises WireError if the message is damaged, has more than 4096 entries, is of an unknown type, or contains an
    array or image that is not numeric or boolean or does not have the stated size.
    """
    if isinstance(message, str):
        raise WireError("found a text message, expected a msgpack map in a binary message")
    content = text_map(unpack(message, _MAX_ENTRIES), "the message")
    missing = [key for key in ("type", "payload", "seq") if key not in content]
    if missing:
        raise WireError(f"the message has no {', '.join(missing)}; found the keys {[k[:40] for k in content][:8]}")
    kind, seq = content["type"], content["seq"]
    if kind not in MESSAGE_TYPES:
        raise WireError(f"found a message of type {str(kind)[:40]!r}, expected one of {', '.join(MESSAGE_TYPES)}")
    if type(seq) is not int or not 0 <= seq < 1 << 63:
        raise WireError(f"the message's seq is {described(seq)}, expected a whole number")
    payload = text_map(_with_images(content["payload"]), "the payload")
    return EvalMessage(kind, payload, seq)


def hello(**more: Any) -> dict[str, Any]:
    """Return the payload of a hello."""
    return {"protocol_version": PROTOCOL_VERSION, **more}


def check_hello(payload: Mapping[str, Any]) -> None:
    """Raise WireError unless a hello states this version of the protocol."""
    version = payload.get("protocol_version")
    if version != PROTOCOL_VERSION:
        raise WireError(
            f"found protocol_version {str(version)[:40]}, expected {PROTOCOL_VERSION}, which vla-eval 0.8 speaks"
        )


class VlaEval(Dialect):
    """The dialect of vla-eval's model servers, which answer each observation with one action or a chunk.

    Features ``images.NAME`` are images; others, such as ``states``, have the names that the server expects.
    """

    name, family, path, answers_reset = "vla_eval", "vla_eval", PATH, False
    hello = pack_message("hello", hello())

    def encode_request(self, request: Request, metadata: Metadata) -> bytes:
        images = {key.removeprefix("images."): v for key, v in request.features.items() if is_image(v)}
        others = {key: v for key, v in request.features.items() if not is_image(v)}
        payload = {"images": images, "task_description": request.instruction or "", **others}
        return pack_message("observation", payload, request.number or 0)

    def decode_response(self, message: Message) -> Response:
        response = unpack_message(message)
        if response.kind == "error":
            raise ServerSaidError(str(response.payload.get("error")))
        if response.kind != "action" or "actions" not in response.payload:
            raise WireError(f"the response is {response.kind} with {described(response.payload)}, expected actions")
        return Response({"actions": action_chunk(response.payload["actions"], "actions")}, number=response.seq)

    def encode_reset(self, session: str, metadata: Metadata) -> bytes:
        return pack_message("episode_start", {"task": {"name": session}})

    def decode_metadata(self, message: Message) -> Metadata:
        hello = unpack_message(message)
        if hello.kind != "hello":
            raise ServerSaidError(str(hello.payload.get("error", f"{hello.kind}, expected hello")))
        check_hello(hello.payload)
        return hello.payload


VLA_EVAL = VlaEval()


def _with_images(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_images(entry) for entry in value]
    if isinstance(value, dict):
        return _image(value) if "__image__" in value else {k: _with_images(v) for k, v in value.items()}
    return value


def _image(entry: Mapping[Any, Any]) -> Any:
    """Return an image's pixels, or the bytes of a JPEG or PNG whose header states the same size."""
    kind, data, shape = (entry.get(key) for key in ("format", "data", "shape"))
    if not isinstance(shape, list) or len(shape) != 3 or shape[2] not in _CHANNELS:
        raise WireError(f"found an image of shape {str(shape)[:80]}, expected [H, W, 1, 3 or 4]")
    if kind == "raw":
        pixels = array(entry.get("dtype"), shape, data)
        if pixels.dtype != np.uint8:
            raise WireError(f"found an image of {described(pixels)}, expected uint8")
        return pixels
    if kind not in ("png", "jpeg") or not isinstance(data, bytes):
        raise WireError(f"found an image of format {str(kind)[:40]!r}, expected the bytes of a png, jpeg or raw")
    if shape[2] == 3 and [*encoded_size(data)] != shape[:2]:
        raise WireError(f"found an image of {list(encoded_size(data))} pixels, but its message says {shape}")
    return data
