"""The ZeroMQ messages of GR00T's policy server: N1.5, N1.6, N1.7 and the main branch.

Based on Isaac-GR00T n1.5, n1.6, n1.7 and commit 626af89. Each version encodes arrays differently and reads only its
own layout. The answer to ``get_modality_config`` reveals the version. Feature keys are ``video.NAME`` and
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
    Message,
    Metadata,
    Query,
    ServerSaidError,
    chunk,
    is_image,
    read,
    read_map,
)
from vla_ros.policies.remote.messages import WireError, described, nd, npy, pack, text_map

HELLO = pack({"endpoint": "get_modality_config"})
_OLD, _NEW = "__ModalityConfig_class__", "__ModalityConfig__"


def metadata(message: Message) -> Metadata:
    """Map each modality to its configuration, and ``version`` to the server's version.

    The versions are ``n1.5``, ``npy`` (N1.6 and the N1.7 tag) and ``nd`` (the main branch).
    """
    version, modalities = "nd", {}
    for name, entry in read_map(_checked(message), "the modality configuration").items():
        if not isinstance(entry, Mapping) or not (entry.get(_OLD) or entry.get(_NEW)):
            raise WireError(f"the modality '{name[:40]}' is {described(entry)}, expected a ModalityConfig")
        body = entry.get("as_json")
        if isinstance(body, str):
            version, body = "n1.5", _json(body)
        elif entry.get(_OLD):
            version = "npy"
        keys = text_map(body, f"the modality '{name[:40]}'").get("modality_keys")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise WireError(f"the modality '{name[:40]}' is {described(body)}, expected modality_keys")
        modalities[name] = body
    return {**modalities, "version": version}


def query(query: Query, metadata: Metadata, flat: bool = False) -> bytes:
    """Write a ``get_action`` request in the layout of the server's version.

    Images are uint8 [1, T, H, W, 3], states float32 [1, T, D]. N1.5 expects flat keys and no batch axis; ``flat``
    uses flat keys for other versions too, for a server with ``--use-sim-policy-wrapper``.
    """
    version = metadata.get("version", "nd")
    old = version == "n1.5"
    groups: dict[str, dict[str, Any]] = {"video": {}, "state": {}}
    for key, value in query.features.items():
        group, axes = ("video", 3) if is_image(value) else ("state", 1)
        past = value[None] if value.ndim == axes else value
        batch = past if old else past[None]
        numbers = batch if old or group == "video" else batch.astype(np.float32)
        groups[group][key.removeprefix(f"{group}.")] = numbers
    language = metadata.get("language") or metadata.get("annotation") or {}
    [name, *_] = language.get("modality_keys") or ["annotation.human.task_description"]
    observation: dict[str, Any] = {**groups, "language": {name: [[query.instruction]]}}
    if old or flat:
        observation = {f"{group}.{key}": value for group in groups for key, value in groups[group].items()}
        observation[name] = [query.instruction]
    data = observation if old else {"observation": observation, "options": None}
    return pack({"endpoint": "get_action", "data": data}, nd if version == "nd" else npy)


FLAT: Callable[[Query, Metadata], bytes] = partial(query, flat=True)


def answer(message: Message) -> Answer:
    """Return the actions by name.

    The answer is a map of actions, or a list of such a map and a map of other outputs of the policy.
    """
    found = read(_checked(message))
    if isinstance(found, list) and len(found) == 2:
        found = found[0]
    if not isinstance(found, Mapping) or not found:
        raise WireError(f"the answer is {described(found)}, expected a map of actions")
    return Answer({str(key).removeprefix("action."): _columns(value, str(key)) for key, value in found.items()})


def reset(session: str) -> bytes:
    """Write the request that begins an episode."""
    return pack({"endpoint": "reset", "data": {"options": None}})


def _columns(value: Any, name: str) -> Any:
    """Return actions [K, D]; N1.5 sends [K] if D is 1."""
    return chunk(value[:, None] if isinstance(value, np.ndarray) and value.ndim == 1 else value, name)


def _checked(message: Message) -> bytes:
    if isinstance(message, str) or message == b"ERROR":
        raise ServerSaidError("ERROR", " and nothing else")
    return message


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("the modality configuration is not JSON") from None
