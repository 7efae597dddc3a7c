"""MoveIt Pro's ``POST /infer``, for both ends: JSON with JPEGs in base64.

Based on the package vla_sim of moveit_pro_example_ws, commit f9f967b: the objective ExecutePolicy asks through an
adapter. It executes absolute joint positions, as many as the state has, and returns the rest of
``action_chunk_raw``, whose numbers it does not read, with its next request.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import simplejpeg

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
from vla_ros.policies.remote.images import is_encoded
from vla_ros.policies.remote.messages import WireError, decode_json, described, finite, text_map
from vla_ros.types import PreviousChunk

_QUALITY = 95  # of OpenCV's imencode, with which the adapter encodes
_REQUIRED = {"state": list, "images": dict, "task": str}
_MOST_STEPS = 1 << 16


class MoveItPro(Dialect):
    """The dialect of MoveIt Pro's policy servers; the joints and gripper are the feature ``state``."""

    name: ClassVar[str] = "moveit_pro"
    family, schemes, port, path = "moveit_pro", ("http", "https"), 8973, "/infer"
    authorization = "Bearer"

    def encode_request(self, request: Request, metadata: Metadata) -> bytes:
        """Write an observation; the rest of a chunk is not sent, since servers want it as they normalised it."""
        images, vectors = {}, []
        for key, value in request.features.items():
            if is_image(value):
                jpeg = simplejpeg.encode_jpeg(np.ascontiguousarray(value), _QUALITY, "RGB", "420")
                images[key] = base64.b64encode(jpeg).decode()
            else:
                vectors += np.asarray(value, np.float64).tolist()
        task = request.instruction or ""
        return json.dumps(
            {"state": vectors, "task": task, "images": images, "new_episode": request.begins}
        ).encode()

    def decode_response(self, message: Message) -> Response:
        content = text_map(decode_json(message), "the response")
        if content.get("error"):
            raise ServerSaidError(str(content["error"]))
        if "action_chunk" not in content:
            raise WireError(f"the response is {described(content)}, expected action_chunk")
        return Response({"actions": action_chunk(content["action_chunk"], "action_chunk")})


MOVEIT_PRO = MoveItPro()


def decode_request(message: Message) -> Request:
    """Read a request; its features are the images, JPEGs, and ``state`` [N]. Raises WireError if it is invalid."""
    content = text_map(decode_json(message), "the request")
    for key, kind in _REQUIRED.items():
        if not isinstance(content.get(key), kind):
            raise WireError(f"{key} is {described(content.get(key))}, expected {kind.__name__}")
    images = {name: _jpeg(name, value) for name, value in content["images"].items()}
    state = finite(content["state"], "state")
    return Request(
        {**images, "state": state},
        content["task"],
        begins=content.get("new_episode") is True,
        previous=_previous(content),
    )


def _jpeg(name: str, value: Any) -> bytes:
    try:
        data = base64.b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise WireError(f"image '{name}' is {described(value)}, expected a JPEG in base64") from None
    if not is_encoded(data):
        raise WireError(f"image '{name}' is not a JPEG in base64")
    return data


def _previous(content: Mapping[str, Any]) -> PreviousChunk | None:
    delay, guided = (content.get(key, 0) for key in ("inference_delay", "guidance_horizon"))
    for key, steps in (("inference_delay", delay), ("guidance_horizon", guided)):
        if type(steps) is not int or not 0 <= steps <= _MOST_STEPS:
            raise WireError(f"{key}: found {described(steps)}, expected a whole number, not negative")
    if not content.get("prev_chunk_left_over"):
        return None
    actions = finite(content["prev_chunk_left_over"], "prev_chunk_left_over")
    if actions.ndim != 2:
        raise WireError(f"prev_chunk_left_over: {described(actions)}, expected a row for each step")
    return PreviousChunk(actions, min(delay, len(actions)), guided)
