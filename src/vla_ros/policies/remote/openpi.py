"""The websocket messages of openpi, RoboArena, vLLM-Omni and SGLang.

RoboArena (robo-arena/roboarena 6fa329f) expects an ``endpoint`` in each request and answers a reset with text. Six
keys of its metadata state what the robot must send. vLLM-Omni (0.30.0) returns a bare array or named actions,
closes a connection after 30 s without a request, and begins an episode when the session's name changes. SGLang
(0.5.23) uses the *model's* keys (``images.base_0_rgb``, ``state``) and normalises neither state nor actions. It
answers even if cameras are missing, so ``spec.check`` compares the keys with its metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_ros.policies.remote.dialect import NO_METADATA, OWN, Answer, Metadata, Query, chunk, is_image, read
from vla_ros.policies.remote.messages import WireError, described, pack

_CAMERAS = {"image_resolution", "needs_wrist_camera", "n_external_cameras", "needs_stereo_camera"}
ROBOARENA_KEYS = frozenset({*_CAMERAS, "needs_session_id", "action_space"})


def answer(message: bytes | str) -> Answer:
    """Read an answer: a map with ``actions``, or a bare array."""
    return _actions(read(message))


def vllm_omni_answer(message: bytes | str) -> Answer:
    """Read an answer: a map with ``actions``, a bare array, or a map of nothing but named actions."""
    found = read(message)
    named = isinstance(found, Mapping) and found and "actions" not in found
    if named and all(isinstance(value, np.ndarray) for value in found.values()):
        return Answer({str(key): chunk(value, str(key)) for key, value in found.items()})
    return _actions(found)


def _actions(found: Any) -> Answer:
    if isinstance(found, np.ndarray):
        return Answer({"actions": chunk(found, "actions")})
    if not isinstance(found, Mapping) or "actions" not in found:
        raise WireError(f"the answer is {described(found)}, expected a map with actions")
    extension = found.get(OWN)
    more = extension if isinstance(extension, Mapping) else NO_METADATA
    return Answer({"actions": chunk(found["actions"], "actions")}, _timing(found), more)


def _timing(answer: Mapping[Any, Any]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for source in ("server", "policy"):
        entries = answer.get(f"{source}_timing")
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if isinstance(value, (int, float)) and str(key).endswith("_ms") and not str(key).startswith("prev"):
                found[f"{source}/{str(key).removesuffix('_ms')}"] = float(value)
    return found


def _message(query: Query) -> dict[str, Any]:
    """Return features and prompt, with features ``images.NAME`` in a map ``images``."""
    message: dict[str, Any] = {}
    for key, value in query.features.items():
        group, _, name = key.partition(".")
        if name and group == "images":
            message.setdefault(group, {})[name] = value
        else:
            message[key] = value
    return {**message, "prompt": query.instruction}


def _named(session: str) -> dict[str, str]:
    return {"session_id": session} if session else {}


def query(query: Query, metadata: Metadata) -> bytes:
    """Write an observation as openpi's clients do.

    Images in the map ``images`` are [3, H, W], as openpi expects for ALOHA.
    """
    message = _message(query)
    if "images" in message:
        message["images"] = {name: np.moveaxis(image, -1, -3) for name, image in message["images"].items()}
    return pack({**message, **query.extras})


def roboarena_query(query: Query, metadata: Metadata) -> bytes:
    """Write an observation with float32 states, and the session's name if required."""
    features = {key: v if is_image(v) else np.asarray(v, np.float32) for key, v in query.features.items()}
    session = _named(query.session) if metadata.get("needs_session_id") else {}
    return pack({**features, **session, "prompt": query.instruction, "endpoint": "infer"})


def vllm_omni_query(query: Query, metadata: Metadata) -> bytes:
    """Write an observation with the session's name; images in the map ``images`` are [H, W, 3]."""
    return pack({**_message(query), **_named(query.session)})


def sglang_query(query: Query, metadata: Metadata) -> bytes:
    """Write an observation; images in the map ``images`` are [H, W, 3]."""
    return pack(_message(query))


def reset(session: str) -> bytes:
    """Write the request that begins an episode."""
    return pack({**_named(session), "endpoint": "reset"})
