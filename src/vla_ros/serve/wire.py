"""Converts requests of openpi's, RoboArena's and this package's clients to observations, and chunks to answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import simplejpeg

from vla_ros import __version__
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.policies.remote.dialect import OWN
from vla_ros.policies.remote.messages import WireError, described, finite, pack, unpack
from vla_ros.types import ActionChunk, FloatArray, Observation, PreviousChunk, RawImage, UInt8Array
from vla_ros.vision.lazy_images import LazyImages
from vla_ros.vision.preprocess import process

MAX_SIDE = 4096
_PROMPTS = ("prompt", "task", "instruction")
_PREFIXES = ("", "observation/", "observation.", "images.", "observation.images.")


@dataclass(frozen=True)
class Vocabulary:
    """What a request may contain, fixed once the policy is loaded."""

    spec: PolicySpec  # the policy's inputs and outputs
    # The policy's key to the one that robots use on the wire.
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    max_instruction_length: int = 500  # in characters

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Every feature's key to the names that it may have on the wire."""
        keys = (*self.spec.image_keys, *(state.key for state in self.spec.state))
        prefixed = {key: tuple(prefix + key for prefix in _PREFIXES) for key in keys}
        return prefixed | {key: (name,) for key, name in self.aliases.items()}


@dataclass(frozen=True, eq=False)
class Request:
    """A checked request."""

    reset: bool = False  # True if it begins an episode and contains no observation
    # Key to uint8 [H, W, 3], or [T, H, W, 3] with T moments, or to a JPEG that is still to be decoded.
    images: Mapping[str, UInt8Array | bytes] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)  # key to float64 [N], or [T, N] with T moments
    instruction: str = ""
    begins: bool = False  # True if an episode begins with this observation
    seconds: float = 0.0  # how long its robot waits for the answer; 0 if unstated
    number: int | None = None  # its client's number for it, or None
    noise: FloatArray | None = None  # what a sampling policy starts from, or None
    previous: PreviousChunk | None = None  # what is left of the chunk that the robot executes, or None
    extended: bool = False  # True if the client understands this package's additions
    session: str = ""  # the client's name for the episode


def metadata(name: str, spec: PolicySpec) -> dict[str, Any]:
    """Return the server's metadata: the policy's features, against which a robot checks its preset."""
    sizes = {key: list(one.size) for key, one in spec.processors.items()}
    return {
        "server": OWN,
        "version": __version__,
        "policy": name,
        "images": {
            one.key: {
                "size": sizes.get(one.key),
                "moments": [[moment.steps, moment.seconds] for moment in one.moments],
                "required": one.required,
            }
            for one in spec.images
        },
        "state": {
            one.key: {
                "parts": [str(part) for part in one.parts],
                "size": one.size,
                "moments": [[moment.steps, moment.seconds] for moment in one.moments],
            }
            for one in spec.state
        },
        "action": [str(part) for part in spec.action],
        "dimension": spec.dimension,
        "horizon": spec.horizon,
        "rate_hz": spec.rate_hz,
        "noise": list(spec.noise),
        "continues_chunks": spec.continues_chunks,
        "accepts": ["jpeg", "deadline", "number"],
    }


def read_request(frame: bytes | str, known: Vocabulary, limit: int) -> Request:
    """Read one frame; raises WireError with what was found and what is expected."""
    if isinstance(frame, str):
        raise WireError("a text frame, expected a msgpack map in a binary frame")
    if len(frame) > limit:
        raise WireError(f"a message of {len(frame)} bytes, allowed {limit}")
    message = unpack(frame)
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise WireError(f"the request is {described(message)}, expected a map with text keys")
    session = message.get("session_id", "")
    if not isinstance(session, str) or len(session) > 200:
        raise WireError(f"session_id is {described(session)}, expected a short text")
    if message.get("endpoint") == "reset":
        return Request(reset=True, session=session)
    own = message.get(OWN)
    extension: Mapping[Any, Any] = own if isinstance(own, dict) else {}
    flat = {key: value for key, value in message.items() if not isinstance(value, dict)}
    for group, entries in message.items():
        if isinstance(entries, dict) and group != OWN:
            flat |= {f"{group}.{name}": value for name, value in entries.items()}
    number = extension.get("number")
    images = [(feature.key, _image(flat, feature, known)) for feature in known.spec.images]
    return Request(
        images={key: image for key, image in images if image is not None},
        state={feature.key: _state(flat, feature, known) for feature in known.spec.state},
        instruction=_instruction(message, known.max_instruction_length),
        begins=extension.get("begins") is True,
        seconds=_seconds(extension.get("deadline_ms")),
        number=number if type(number) is int else None,
        noise=_noise(extension.get("noise"), known),
        previous=_previous(extension.get("previous"), known),
        extended=own is not None,
        session=session,
    )


def observation(request: Request, known: Vocabulary, stamp: int) -> Observation:
    """Return the policy's observation of a request; images are processed on first access."""
    processors = known.spec.processors
    pixels = {key: decoded(image, key) for key, image in request.images.items()}
    raw = {
        key: tuple(
            RawImage(each, "none", processors.get(key), stamp) for each in image.reshape(-1, *image.shape[-3:])
        )
        for key, image in pixels.items()
    }
    images = {key: partial(_processed, several, pixels[key].ndim == 4) for key, several in raw.items()}
    single = {key: several[0] for key, several in raw.items() if pixels[key].ndim == 3}
    return Observation(
        LazyImages(images), request.instruction, stamp, request.state, single, request.noise, request.previous
    )


def _processed(images: tuple[RawImage, ...], moments: bool) -> UInt8Array:
    found = [process(image) for image in images]
    return np.stack(found) if moments else found[0]


def decoded(image: UInt8Array | bytes, key: str) -> UInt8Array:
    """Return an image's pixels, uint8 [H, W, 3] RGB; decoding a JPEG takes milliseconds."""
    if not isinstance(image, bytes):
        return image
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(image)
        if max(height, width) > MAX_SIDE:
            raise WireError(f"image '{key}': a JPEG of {width}x{height}, allowed {MAX_SIDE} a side")
        pixels: UInt8Array = simplejpeg.decode_jpeg(image, colorspace="RGB")
    except ValueError as error:
        raise WireError(f"image '{key}': a damaged JPEG ({str(error)[:80]})") from None
    return pixels


def answer(chunk: ActionChunk, request: Request, timing: Mapping[str, float]) -> bytes:
    """Return a chunk as openpi's clients expect it: ``actions`` [K, D] and ``server_timing``."""
    message: dict[str, Any] = {"actions": chunk.actions, "server_timing": dict(timing)}
    if request.extended:
        plain = {key: value for key, value in chunk.info.items() if isinstance(value, (bool, int, float, str))}
        listed = {key: list(value) for key, value in chunk.info.items() if isinstance(value, tuple)}
        extension = {"number": request.number, "info": plain | listed, "stages_ms": dict(chunk.stages_ms)}
        arrays = {"normalized": chunk.normalized, "tokens": chunk.tokens}
        message[OWN] = extension | {key: value for key, value in arrays.items() if value is not None}
    return pack(message)


def _find(flat: Mapping[str, Any], key: str, known: Vocabulary) -> Any:
    return next((flat[name] for name in known.names[key] if name in flat), None)


def _image(flat: Mapping[str, Any], feature: ImageFeature, known: Vocabulary) -> UInt8Array | bytes | None:
    key, moments = feature.key, len(feature.moments)
    value = _find(flat, key, known)
    if value is None and not feature.required:
        return None
    if value is None:
        images = {name: entry for name, entry in flat.items() if _is_image(entry)}
        if len(images) != 1 or len(known.spec.images) != 1:
            raise WireError(
                f"no image '{known.aliases.get(key, key)}'; the request has {list(flat)[:20]}, and the policy "
                f"takes the images {list(known.spec.image_keys)} (`vla-ros serve --image KEY=NAME` maps names)"
            )
        [value] = images.values()
    if moments == 1 and isinstance(value, bytes) and value[:2] == b"\xff\xd8":
        return value
    shape = "[H, W, 3]" if moments == 1 else f"[{moments}, H, W, 3]"
    wanted = (3,) if moments == 1 else (4, moments)
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or (value.ndim, *value.shape[:-3]) != wanted:
        raise WireError(f"image '{key}' is {described(value)}, expected uint8 {shape} or a JPEG")
    if value.shape[-3] == 3 and value.shape[-1] != 3:
        value = np.moveaxis(value, -3, -1)
    height, width, channels = value.shape[-3:]
    if channels != 3 or not 1 <= min(height, width) <= max(height, width) <= MAX_SIDE:
        expected = f"uint8 {shape} of 1 to {MAX_SIDE} a side"
        raise WireError(f"image '{key}' is {described(value)}, expected {expected}")
    return np.ascontiguousarray(value)


def _is_image(value: Any) -> bool:
    if isinstance(value, bytes):
        return value[:2] == b"\xff\xd8"
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3


def _state(flat: Mapping[str, Any], feature: StateFeature, known: Vocabulary) -> Any:
    value = _find(flat, feature.key, known)
    if value is None:
        raise WireError(
            f"no state '{known.aliases.get(feature.key, feature.key)}'; the request has {list(flat)[:20]}"
        )
    numbers = finite(value, f"state '{feature.key}'")
    numbers = numbers if numbers.ndim else numbers[None]
    leading = () if len(feature.moments) == 1 else (len(feature.moments),)
    if numbers.shape[:-1] != leading or (feature.size and numbers.shape[-1] != feature.size):
        expected = [*leading, feature.size or "N"]
        raise WireError(f"state '{feature.key}' is {described(value)}, expected {expected}")
    return numbers


def _noise(value: Any, known: Vocabulary) -> FloatArray | None:
    if value is None:
        return None
    noise = finite(value, "noise")
    if noise.shape != known.spec.noise:
        raise WireError(f"the noise is {described(value)}, expected {list(known.spec.noise)}")
    return noise


def _previous(value: Any, known: Vocabulary) -> PreviousChunk | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not known.spec.continues_chunks:
        takes = "a map" if known.spec.continues_chunks else "none, which this policy cannot continue"
        raise WireError(f"the previous chunk is {described(value)}, expected {takes}")
    actions, delay = finite(value.get("actions"), "the previous actions"), value.get("delay")
    longest, dimension = known.spec.horizon, known.spec.dimension
    good = actions.ndim == 2 and len(actions) <= longest and actions.shape[1] == (dimension or actions.shape[1])
    if not good or type(delay) is not int or not 0 <= delay <= len(actions):
        expected = f"[0 to {longest}, {dimension or 'D'}] and a delay of at most as many steps"
        raise WireError(
            f"the previous chunk is {list(actions.shape)} with the delay {str(delay)[:20]}, expected {expected}"
        )
    return PreviousChunk(actions, delay)


def _instruction(message: Mapping[str, Any], longest: int) -> str:
    value = next((message[key] for key in _PROMPTS if key in message), None)
    if not isinstance(value, str) or not value.strip():
        raise WireError(f"the prompt is {described(value)}, expected the instruction as text")
    if len(value) > longest:
        raise WireError(f"the prompt has {len(value)} characters, allowed {longest}")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not value < 1e7:
        return 0.0
    return max(float(value), 1e-6) / 1e3  # one that has passed is answered as such, not computed
