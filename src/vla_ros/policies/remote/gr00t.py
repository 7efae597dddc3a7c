"""GR00T's policy server over ZeroMQ: N1.5, N1.6, N1.7 and the main branch, which write arrays differently.

Written after Isaac-GR00T n1.5, n1.6, n1.7 and 626af89. The answer to ``get_modality_config`` reveals the server's
version; each version reads only its own layout, so requests use that one. Features are ``video.NAME`` and
``state.NAME``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from vla_ros.policies.remote.dialect import (
    Answer,
    Frame,
    Metadata,
    Query,
    ServerSaidError,
    chunk,
    is_image,
    read,
    read_map,
)
from vla_ros.policies.remote.messages import WireError, described, nd, npy, pack

HELLO = pack({"endpoint": "get_modality_config"})
_OLD, _NEW = "__ModalityConfig_class__", "__ModalityConfig__"


def metadata(frame: Frame) -> Metadata:
    """Modality configurations as plain maps by modality, and ``version``: ``n1.5``, ``npy`` or ``nd``."""
    found = read_map(_checked(frame), "the modality configuration")
    version, modalities = "nd", {}
    for name, entry in found.items():
        if not isinstance(entry, Mapping) or not (entry.get(_OLD) or entry.get(_NEW)):
            raise WireError(f"the modality '{str(name)[:40]}' is {described(entry)}, expected a ModalityConfig")
        body = entry.get("as_json")
        if isinstance(body, str):
            version, body = "n1.5", _json(body)
        elif entry.get(_OLD):
            version = "npy"
        keys = body.get("modality_keys") if isinstance(body, Mapping) else None
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise WireError(f"the modality '{str(name)[:40]}' is {described(body)}, expected modality_keys")
        modalities[name] = body
    return {**modalities, "version": version}


def query(query: Query, metadata: Metadata, flat: bool = False) -> bytes:
    """Write ``get_action`` in the server's layout; ``flat`` is that of a server with the simulation wrapper."""
    version = metadata.get("version", "nd")
    if version == "n1.5":
        return pack({"endpoint": "get_action", "data": _n15(query, metadata)}, npy)
    video, state = {}, {}
    for key, value in query.features.items():
        name = key.removeprefix("video.").removeprefix("state.")
        if is_image(value):
            video[name] = value[None, None] if value.ndim == 3 else value[None]
        else:
            state[name] = np.asarray(value, np.float32).reshape(1, -1, value.shape[-1])
    language = _language(metadata, "annotation.human.task_description")
    observation: dict[str, Any]
    if flat:
        observation = {f"video.{name}": value for name, value in video.items()}
        observation |= {f"state.{name}": value for name, value in state.items()} | {language: [query.instruction]}
    else:
        observation = {"video": video, "state": state, "language": {language: [[query.instruction]]}}
    options = dict(query.extras) or None
    return pack(
        {"endpoint": "get_action", "data": {"observation": observation, "options": options}},
        npy if version == "npy" else nd,
    )


def answer(frame: Frame) -> Answer:
    """Return the actions by name, from a map or from a map with further output of the policy."""
    message = read(_checked(frame))
    if isinstance(message, list) and len(message) == 2:
        message = message[0]
    if not isinstance(message, Mapping) or not message:
        raise WireError(f"the answer is {described(message)}, expected a map of actions")
    actions = {str(key).removeprefix("action."): _columns(value, str(key)) for key, value in message.items()}
    return Answer(actions)


def reset(session: str) -> bytes:
    """Return the request that begins an episode."""
    return pack({"endpoint": "reset", "data": {"options": None}})


def secret(request: bytes, key: str) -> bytes:
    """Return a request with the API token in the place where GR00T's client puts it."""
    assert request[:1] in (b"\x81", b"\x82")  # a map of one or two entries, as written here
    return bytes([request[0] + 1]) + request[1:] + pack("api_token") + pack(key)


FLAT: Callable[[Query, Metadata], bytes] = partial(query, flat=True)


def _columns(value: Any, name: str) -> Any:
    """[1, K, D] or [K, D]; N1.5 sends a single number a step as [K]."""
    return chunk(value[:, None] if isinstance(value, np.ndarray) and value.ndim == 1 else value, name)


def _n15(query: Query, metadata: Metadata) -> dict[str, Any]:
    """Write an observation for N1.5: flat and without a batch axis."""
    message: dict[str, Any] = {}
    for key, value in query.features.items():
        image = is_image(value)
        name = key if key.startswith(("video.", "state.")) else f"{'video' if image else 'state'}.{key}"
        one = value.ndim == (3 if image else 1)
        message[name] = value[None] if one else value
    return {**message, _language(metadata, "annotation.human.task_description"): [query.instruction]}


def _language(metadata: Metadata, usual: str) -> str:
    entry = metadata.get("language") or metadata.get("annotation")
    return str(entry["modality_keys"][0]) if entry and entry["modality_keys"] else usual


def _checked(frame: Frame) -> bytes:
    if isinstance(frame, str) or frame == b"ERROR":
        raise ServerSaidError("ERROR", " and nothing else")
    return frame


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("a modality configuration that is not JSON") from None
