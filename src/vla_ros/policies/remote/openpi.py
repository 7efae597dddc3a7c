"""The dialects of openpi, RoboArena, vLLM-Omni and SGLang: msgpack maps over a websocket.

``vla-ros serve`` speaks openpi's. Between this package's client and server, requests and responses have one more
map, ``vla_ros`` (docs/remote.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.policies.published import UNKNOWN, Loop
from vla_ros.policies.remote.dialect import (
    EMPTY,
    Message,
    Metadata,
    Request,
    Response,
    ServedDialect,
    action_chunk,
    is_image,
    read,
)
from vla_ros.policies.remote.messages import WireError, described, finite, pack, text_map, unpack
from vla_ros.policies.remote.spec import OWN, decode_spec, encode_spec, image_size
from vla_ros.types import PreviousChunk

_MAX_ENTRIES = 4096  # of all maps and lists of a request; the numbers of arrays do not count
_PROMPTS = ("prompt", "task", "instruction")
_CAMERAS = {"image_resolution", "needs_wrist_camera", "n_external_cameras", "needs_stereo_camera"}
_ARENA = frozenset({*_CAMERAS, "needs_session_id", "action_space"})
_ARENA_ACTIONS = {
    "joint_position": "joint_position",
    "joint_velocity": "joint_velocity",
    "cartesian_position": "tip_position",
    "cartesian_velocity": "tip_delta",
}


class OpenPi(ServedDialect):
    """openpi's dialect, both ends; its servers have no reset, but this package's server accepts RoboArena's."""

    name = "openpi"
    reset_response = "reset successful"

    def encode_request(self, request: Request, metadata: Metadata) -> bytes:
        """Write an observation; images in the map ``images`` are [3, H, W], as openpi expects for ALOHA."""
        message = _message(request)
        if "images" in message:
            message["images"] = {name: np.moveaxis(image, -1, -3) for name, image in message["images"].items()}
        if metadata.get("server") == OWN:
            message[OWN] = {
                "number": request.number,
                "deadline_ms": 1e3 * request.deadline_s,
                "begins": request.begins,
                "noise": request.noise,
                "previous": request.previous and vars(request.previous),
            }
        return pack(message)

    def decode_request(self, message: Message) -> Request:
        if isinstance(message, str):
            raise WireError("found a text message, expected a msgpack map in a binary message")
        content = text_map(unpack(message, _MAX_ENTRIES), "the request")
        session = content.get("session_id", "")
        if not isinstance(session, str) or len(session) > 200:
            raise WireError(f"session_id is {described(session)}, expected a short string")
        if content.get("endpoint") == "reset":
            return Request(session=session, reset=True)
        instruction = next((content[key] for key in _PROMPTS if key in content), None)
        if instruction is not None and not isinstance(instruction, str):
            raise WireError(f"the prompt is {described(instruction)}, expected the instruction as text")
        features = {key: value for key, value in content.items() if not isinstance(value, dict)}
        for group, entries in content.items():
            if isinstance(entries, dict) and group != OWN:
                features |= {f"{group}.{name}": value for name, value in entries.items()}
        extension = _extension(content)
        noise = extension.get("noise")
        return Request(
            features,
            instruction,
            session,
            begins=extension.get("begins") is True,
            number=_number(extension),
            deadline_s=_seconds(extension.get("deadline_ms")),
            noise=None if noise is None else finite(noise, "the noise"),
            previous=_previous(extension.get("previous")),
        )

    def encode_response(self, response: Response) -> bytes:
        message: dict[str, Any] = {**response.actions, "server_timing": dict(response.timing_ms)}
        if response.number is not None:
            message[OWN] = {
                "number": response.number,
                "normalized": response.normalized,
                "tokens": response.tokens,
                "info": response.info,
            }
        return pack(message)

    def decode_response(self, message: Message) -> Response:
        """Read a map with ``actions``, or a bare array."""
        return _response(read(message))

    def check_reset(self, message: Message) -> None:
        if message != self.reset_response:  # otherwise a map, which may report an error
            read(message)

    def encode_error(self, text: str) -> Message:
        return text

    def encode_metadata(self, name: str, spec: PolicySpec) -> bytes:
        return pack(encode_spec(name, spec))

    def spec(self, metadata: Metadata, horizon: int, loop: Loop = UNKNOWN) -> PolicySpec:
        return decode_spec(metadata) if metadata.get("server") == OWN else super().spec(metadata, horizon, loop)

    def horizon(self, metadata: Metadata) -> Any:
        output = metadata.get("output")
        section = output if isinstance(output, Mapping) and "action_horizon" in output else metadata
        return section.get("action_horizon")

    def image_size(self, metadata: Metadata) -> tuple[int, int] | None:
        section = metadata.get("input")
        stated = section.get("image_size") if isinstance(section, Mapping) else metadata.get("image_resolution")
        return image_size(stated)

    def check(self, metadata: Metadata, bound: PolicySpec, action_keys: Sequence[str] = ()) -> None:
        if metadata.keys() >= _ARENA:
            _check_arena(metadata, bound)
        inputs = metadata.get("input") if metadata.get("object") == "action.metadata" else None
        cameras = inputs.get("image_keys") if isinstance(inputs, Mapping) else None
        if isinstance(cameras, list):
            wanted = {f"images.{key}" for key in cameras}
            ours = [image.key + ("" if image.required else "?") for image in bound.images]  # as in features.images
            if wanted != {key.removeprefix("observation.") for key in ours}:
                raise ConfigError(f"the server takes the images {sorted(wanted)}, but features.images has {ours}")


class RoboArena(OpenPi):
    """RoboArena's dialect (robo-arena/roboarena 6fa329f).

    Each request has an ``endpoint``; six keys of the metadata state what the robot must send.
    """

    name = "roboarena"

    def recognizes(self, metadata: Metadata) -> bool:
        return metadata.keys() >= _ARENA

    def encode_request(self, request: Request, metadata: Metadata) -> bytes:
        """Write an observation with float32 states, and the session's name if required."""
        features = {key: v if is_image(v) else np.asarray(v, np.float32) for key, v in request.features.items()}
        session = _named(request.session) if metadata.get("needs_session_id") else {}
        return pack({**features, **session, "prompt": request.instruction, "endpoint": "infer"})

    def encode_reset(self, session: str, metadata: Metadata) -> bytes:
        return pack({**_named(session), "endpoint": "reset"})


class VllmOmni(OpenPi):
    """vLLM-Omni's dialect (0.30.0).

    The server closes a connection after 30 s without a request, and begins an episode with a new session name.
    """

    name, path = "vllm_omni", "/v1/realtime/robot/openpi"
    encode_reset = RoboArena.encode_reset

    def encode_request(self, request: Request, metadata: Metadata) -> bytes:
        """Write an observation with the session's name; images in the map ``images`` are [H, W, 3]."""
        return pack({**_message(request), **_named(request.session)})

    def decode_response(self, message: Message) -> Response:
        """Read a map with ``actions``, a bare array, or a map of nothing but named actions."""
        content = read(message)
        named = isinstance(content, Mapping) and content and "actions" not in content
        if named and all(isinstance(value, np.ndarray) for value in content.values()):
            return Response({str(key): action_chunk(value, str(key)) for key, value in content.items()})
        return _response(content)


class SgLang(OpenPi):
    """SGLang's dialect (0.5.23), with the *model's* keys (``images.base_0_rgb``, ``state``).

    The server normalises neither state nor actions, and responds even if cameras are missing.
    """

    name, port, path = "sglang", 30000, "/openpi/policy"

    def recognizes(self, metadata: Metadata) -> bool:
        return metadata.get("object") == "action.metadata"

    def encode_request(self, request: Request, metadata: Metadata) -> bytes:
        """Write an observation; images in the map ``images`` are [H, W, 3]."""
        return pack(_message(request))


OPENPI, ROBOARENA, VLLM_OMNI, SGLANG = OpenPi(), RoboArena(), VllmOmni(), SgLang()


def _message(request: Request) -> dict[str, Any]:
    """Return features and prompt, with features ``images.NAME`` in a map ``images``."""
    message: dict[str, Any] = {}
    for key, value in request.features.items():
        group, _, name = key.partition(".")
        if name and group == "images":
            message.setdefault(group, {})[name] = value
        else:
            message[key] = value
    return {**message, "prompt": request.instruction}


def _named(session: str) -> dict[str, str]:
    return {"session_id": session} if session else {}


def _extension(message: Mapping[str, Any]) -> Mapping[str, Any]:
    extension = message.get(OWN)
    return extension if isinstance(extension, Mapping) else EMPTY


def _number(extension: Mapping[str, Any]) -> int | None:
    number = extension.get("number")
    return number if type(number) is int else None


def _seconds(milliseconds: Any) -> float:
    if type(milliseconds) not in (int, float) or not milliseconds < 1e7:
        return 0.0
    return max(float(milliseconds), 1e-6) / 1e3  # not 0, so that a deadline in the past counts as expired


def _previous(value: Any) -> PreviousChunk | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise WireError(f"the previous chunk is {described(value)}, expected a map")
    actions, delay = finite(value.get("actions"), "the previous actions"), value.get("delay")
    if actions.ndim != 2 or type(delay) is not int or not 0 <= delay <= len(actions):
        found = f"shape {list(actions.shape)} and delay {str(delay)[:20]}"
        raise WireError(f"the previous chunk has {found}, expected [T, D] and a delay of 0 to T")
    return PreviousChunk(actions, delay)


def _response(content: Any) -> Response:
    if isinstance(content, np.ndarray):
        return Response({"actions": action_chunk(content, "actions")})
    if not isinstance(content, Mapping) or "actions" not in content:
        raise WireError(f"the response is {described(content)}, expected a map with actions")
    extension = _extension(content)
    normalized, tokens = (
        None if extension.get(name) is None else finite(extension[name], name) for name in ("normalized", "tokens")
    )
    info = extension.get("info")
    return Response(
        {"actions": action_chunk(content["actions"], "actions")},
        _timing(content),
        _number(extension),
        normalized,
        None if tokens is None else tokens.astype(np.int64),
        info if isinstance(info, dict) else EMPTY,
    )


def _timing(response: Mapping[Any, Any]) -> Mapping[str, float]:
    times: dict[str, float] = {}
    for source in ("server", "policy"):
        entries = response.get(f"{source}_timing")
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if isinstance(value, (int, float)) and str(key).endswith("_ms") and not str(key).startswith("prev"):
                times[f"{source}/{str(key).removesuffix('_ms')}"] = float(value)
    return times


def _check_arena(metadata: Metadata, bound: PolicySpec) -> None:
    count = metadata["n_external_cameras"]
    needed = {"observation/wrist_image_left"} if metadata["needs_wrist_camera"] else set()
    cameras = count if type(count) is int and 0 <= count <= 2 else 0
    needed |= {f"observation/exterior_image_{number}_left" for number in range(cameras)}
    missing = sorted(needed - set(bound.image_keys))
    if missing:
        raise ConfigError(f"the server needs the images {missing}, but features.images does not list them")
    space = str(metadata["action_space"])[:40]
    if _ARENA_ACTIONS.get(space) not in {component.quantity for component in bound.action}:
        ours = " + ".join(map(str, bound.action)) or "empty"
        raise ConfigError(f"the server returns {space!r}, but features.action is {ours}")
