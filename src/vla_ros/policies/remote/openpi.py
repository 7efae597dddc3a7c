"""openpi's websocket messages, and three families of servers with small differences.

RoboArena (robo-arena/roboarena 6fa329f) puts an ``endpoint`` into each request and answers a reset with text; its
metadata have six keys that state what the robot must send. vLLM-Omni (0.30.0) returns a bare array or named
actions, closes a connection after 30 s without a request, and treats the first request with a new session name as
the beginning of an episode. SGLang (0.5.23) uses the *model's* keys (``images.base_0_rgb``, ``state``), neither
normalises the state nor un-normalises the actions, and accepts an observation with missing cameras as if it were
complete, so keys are checked against its metadata here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_ros.policies.remote.dialect import NO_METADATA, OWN, Answer, Frame, Metadata, Query, chunk, is_image, read
from vla_ros.policies.remote.messages import WireError, described, pack

_CAMERAS = {"image_resolution", "needs_wrist_camera", "n_external_cameras", "needs_stereo_camera"}
ROBOARENA_KEYS = frozenset({*_CAMERAS, "needs_session_id", "action_space"})


def answer(frame: Frame) -> Answer:
    """Read an answer: a map with ``actions``, a bare array, or a map of named actions."""
    message = read(frame)
    if isinstance(message, np.ndarray):
        return Answer({"actions": chunk(message, "actions")})
    if isinstance(message, Mapping) and "actions" in message:
        extension = message.get(OWN)
        more = extension if isinstance(extension, Mapping) else NO_METADATA
        return Answer({"actions": chunk(message["actions"], "actions")}, _timing(message), more)
    entries = message.items() if isinstance(message, Mapping) else ()
    named = {str(key): chunk(value, str(key)) for key, value in entries if isinstance(value, np.ndarray)}
    if not named:
        raise WireError(f"the answer is {described(message)}, expected a map with actions")
    return Answer(named)


def _timing(message: Mapping[str, Any]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for section in ("server_timing", "policy_timing"):
        entries = message.get(section)
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if isinstance(value, (int, float)) and str(key).endswith("_ms") and not str(key).startswith("prev"):
                found[f"{section.removesuffix('_timing')}/{str(key).removesuffix('_ms')}"] = float(value)
    return found


def _features(query: Query) -> dict[str, Any]:
    """Return the features under their own keys; ``images.NAME`` is put into a map ``images``."""
    message: dict[str, Any] = {}
    for key, value in query.features.items():
        group, dot, name = key.partition(".")
        if dot and group == "images":
            message.setdefault(group, {})[name] = value
        else:
            message[key] = value
    return message


def query(query: Query, metadata: Metadata) -> bytes:
    """Write an observation as openpi's clients do. Images in a map ``images`` are [3, H, W], as for ALOHA."""
    message = _features(query)
    if "images" in message:
        message["images"] = {name: np.moveaxis(image, -1, -3) for name, image in message["images"].items()}
    return pack({**message, "prompt": query.instruction, **query.extras})


def roboarena_query(query: Query, metadata: Metadata) -> bytes:
    """Write an observation with float32 states, and the session's name where the server asks for it."""
    features = _features(query).items()
    message: dict[str, Any] = {key: v if is_image(v) else np.asarray(v, np.float32) for key, v in features}
    if metadata.get("needs_session_id"):
        message["session_id"] = query.session
    return pack({**message, "prompt": query.instruction, **query.extras, "endpoint": "infer"})


def roboarena_reset(session: str) -> bytes:
    """Write the request that begins an episode."""
    return pack({"session_id": session, "endpoint": "reset"} if session else {"endpoint": "reset"})


def vllm_omni_query(query: Query, metadata: Metadata) -> bytes:
    """Write an observation with the session's name."""
    session = {"session_id": query.session} if query.session else {}
    return pack({**_features(query), "prompt": query.instruction, **session, **query.extras})


def vllm_omni_reset(session: str) -> bytes:
    """Write the request that begins an episode."""
    return pack({"endpoint": "reset", "session_id": session} if session else {"endpoint": "reset"})


def sglang_query(query: Query, metadata: Metadata) -> bytes:
    """Write an observation with images [H, W, 3]; raises WireError if the server's metadata name other images."""
    inputs = metadata.get("input")
    wanted = inputs.get("image_keys") if isinstance(inputs, dict) else None
    if isinstance(wanted, list):
        prefixes = ("images.", "observation.images.")
        names = [key for key, value in query.features.items() if is_image(value)]
        bare = {key.removeprefix(prefix) for prefix in prefixes for key in names if key.startswith(prefix)}
        unknown = sorted(bare.symmetric_difference(wanted) if len(bare) == len(names) else names)
        if unknown:
            raise WireError(f"the server takes the images {wanted} under 'images.', and {unknown} do not agree")
    return pack({**_features(query), "prompt": query.instruction, **query.extras})
