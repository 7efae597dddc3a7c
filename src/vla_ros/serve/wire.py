"""Converts clients' requests to observations, and chunks to answers.

Reads the requests of openpi's and RoboArena's clients and of this package's client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import simplejpeg

from vla_ros import __version__
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.policies.remote.dialect import OWN
from vla_ros.policies.remote.messages import WireError, described, finite, pack, text_map, unpack
from vla_ros.types import ActionChunk, FloatArray, Observation, PreviousChunk, RawImage, UInt8Array
from vla_ros.vision.lazy_images import LazyImages
from vla_ros.vision.preprocess import process
from vla_ros.vision.processors import client_pipeline

MAX_SIDE = 4096  # pixels
_MAX_ENTRIES = 4096  # of all maps and lists of a request; the numbers of arrays do not count
_JPEG = b"\xff\xd8"
_PROMPTS = ("prompt", "task", "instruction")
_PREFIXES = ("", "observation/", "observation.", "images.", "observation.images.")


@dataclass(frozen=True)
class RequestSchema:
    """The names and shapes that a request may contain."""

    spec: PolicySpec  # the policy's inputs and outputs
    # Feature key to the name that robots use instead.
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    max_instruction_length: int = 500  # in characters
    max_pixels: int = 1 << 22  # of one image

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Map each feature key to the names that it may have in a request."""
        keys = (*self.spec.image_keys, *(state.key for state in self.spec.state))
        prefixed = {key: tuple(prefix + key for prefix in _PREFIXES) for key in keys}
        return prefixed | {key: (name,) for key, name in self.aliases.items()}


@dataclass(frozen=True, eq=False)
class Request:
    """A checked request."""

    reset: bool = False  # True if it only begins an episode, without an observation
    # Key to an image, uint8 [H, W, 3] ([T, H, W, 3] at T times), or to an encoded JPEG.
    images: Mapping[str, UInt8Array | bytes] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)  # key to float64 [N], or [T, N] at T times
    instruction: str = ""
    begins: bool = False  # True if an episode begins with this observation
    seconds: float = 0.0  # how long the robot waits for the answer; 0 if unstated
    number: int | None = None  # the client's number for the request
    noise: FloatArray | None = None  # initial noise of a sampling policy
    previous: PreviousChunk | None = None  # the rest of the chunk that the robot executes
    extended: bool = False  # True if the client understands our extensions to openpi's protocol
    session: str = ""  # the client's name for the episode


def metadata(name: str, spec: PolicySpec) -> dict[str, Any]:
    """Return the server's metadata, which describe the policy's features."""

    def size(image: ImageFeature) -> tuple[int, int] | None:
        return image.processor.size if image.processor else image.takes

    def times(feature: ImageFeature | StateFeature) -> list[list[float]]:
        return [[delta.steps, delta.seconds] for delta in feature.delta_timestamps]

    return {
        "server": OWN,
        "version": __version__,
        "policy": name,
        "images": {
            image.key: {
                "size": size(image),
                "resized": image.processor is not None,
                "pipeline": client_pipeline(image.processor),
                "delta_timestamps": times(image),
                "required": image.required,
            }
            for image in spec.images
        },
        "state": {
            state.key: {
                "components": list(map(str, state.components)),
                "size": state.size,
                "delta_timestamps": times(state),
                "middle": list(state.middle),
            }
            for state in spec.state
        },
        "action": list(map(str, spec.action)),
        "dimension": spec.dimension,
        "horizon": spec.horizon,
        "execute_steps": spec.execute_steps,
        "rate_hz": spec.rate_hz,
        "noise": list(spec.noise),
        "continues_chunks": spec.continues_chunks,
        "instructed": spec.instructed,
        "accepts": ["jpeg", "deadline", "number"],
    }


def read_request(data: bytes | str, known: RequestSchema, limit: int) -> Request:
    """Read one request of at most ``limit`` bytes; raises WireError if it is invalid."""
    if isinstance(data, str):
        raise WireError("found a text message, expected a msgpack map in a binary message")
    if len(data) > limit:
        raise WireError(f"found a message of {len(data)} bytes, allowed {limit}")
    message = text_map(unpack(data, _MAX_ENTRIES), "the request")
    session = message.get("session_id", "")
    if not isinstance(session, str) or len(session) > 200:
        raise WireError(f"session_id is {described(session)}, expected a short string")
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
        instruction=_instruction(message, known),
        begins=extension.get("begins") is True,
        seconds=_seconds(extension.get("deadline_ms")),
        number=number if type(number) is int else None,
        noise=_noise(extension.get("noise"), known),
        previous=_previous(extension.get("previous"), known),
        extended=own is not None,
        session=session,
    )


def observation(request: Request, known: RequestSchema, stamp: int) -> Observation:
    """Convert a request to an observation; images are processed on first access."""
    processors = known.spec.processors
    images: dict[str, Callable[[], UInt8Array]] = {}
    single: dict[str, RawImage] = {}
    for key, image in request.images.items():
        pixels = decoded(image, key, known.max_pixels)
        past = [
            RawImage(each, processor=processors.get(key), stamp=stamp)
            for each in pixels.reshape(-1, *pixels.shape[-3:])
        ]
        if pixels.ndim == 3:
            [single[key]] = past
            images[key] = partial(process, single[key])
        else:
            images[key] = partial(_stacked, past)
    return Observation(
        LazyImages(images), request.instruction, stamp, request.state, single, request.noise, request.previous
    )


def _stacked(images: Sequence[RawImage]) -> UInt8Array:
    return np.stack([process(image) for image in images])


def pixels_to_decode(request: Request) -> int:
    """Return the number of pixels of all JPEGs of a request; those that are damaged count 0."""
    total = 0
    for image in request.images.values():
        if isinstance(image, bytes):
            with contextlib.suppress(ValueError):
                height, width, _, _ = simplejpeg.decode_jpeg_header(image)
                total += height * width
    return total


def decoded(image: UInt8Array | bytes, key: str, most: int) -> UInt8Array:
    """Return the pixels of an image of at most ``most`` pixels, uint8 [H, W, 3] RGB.

    Decoding a JPEG takes milliseconds.
    """
    if not isinstance(image, bytes):
        return image
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(image)
        if max(height, width) > MAX_SIDE or height * width > most:
            raise WireError(
                f"image '{key}': found a JPEG of {width}x{height}, allowed {MAX_SIDE} per side and "
                f"{most / 1e6:.1f} million pixels (vla-ros serve --max-image)"
            )
        pixels: UInt8Array = simplejpeg.decode_jpeg(image, colorspace="RGB")
    except ValueError as error:
        raise WireError(f"image '{key}': found a damaged JPEG ({str(error)[:80]})") from None
    return pixels


def answer(chunk: ActionChunk, request: Request, timing: Mapping[str, float]) -> bytes:
    """Encode a chunk for openpi's clients: ``actions`` [K, D] and ``server_timing``."""
    message: dict[str, Any] = {"actions": chunk.actions, "server_timing": dict(timing)}
    if request.extended:
        info = {key: value for key, value in chunk.info.items() if isinstance(value, (int, float, str, tuple))}
        extension = {"number": request.number, "info": info, "stages_ms": dict(chunk.stages_ms)}
        arrays = {"normalized": chunk.normalized, "tokens": chunk.tokens}
        message[OWN] = extension | {key: value for key, value in arrays.items() if value is not None}
    return pack(message)


def _find(flat: Mapping[str, Any], key: str, known: RequestSchema) -> Any:
    return next((flat[name] for name in known.names[key] if name in flat), None)


def _image(flat: Mapping[str, Any], feature: ImageFeature, known: RequestSchema) -> UInt8Array | bytes | None:
    key, leading = feature.key, _leading(feature)
    value = _find(flat, key, known)
    if value is None and not feature.required:
        return None
    if value is None:
        images = [entry for entry in flat.values() if _is_image(entry)]
        if len(images) != 1 or len(known.spec.images) != 1:
            raise WireError(
                f"no image '{known.aliases.get(key, key)}'; the request has {list(flat)[:20]}, and the policy "
                f"takes the images {list(known.spec.image_keys)} (`vla-ros serve --image KEY=NAME` maps names)"
            )
        [value] = images
    if not leading and isinstance(value, bytes) and value[:2] == _JPEG:
        return value
    good = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 + len(leading)
    if good and value.shape[-3] == 3 and value.shape[-1] != 3:
        value = np.moveaxis(value, -3, -1)
    *found, height, width, channels = value.shape if good else (0, 0, 0)
    if (*found, channels) != (*leading, 3) or not 1 <= min(height, width) <= max(height, width) <= MAX_SIDE:
        shape = [*leading, "H", "W", 3]
        raise WireError(
            f"image '{key}' is {described(value)}, expected uint8 {shape} with sides of 1 to {MAX_SIDE}, or a JPEG"
        )
    return np.ascontiguousarray(value)


def _leading(feature: ImageFeature | StateFeature) -> tuple[int, ...]:
    """Return the leading axes of a feature: () at one time, (T,) at T times."""
    return () if len(feature.delta_timestamps) == 1 else (len(feature.delta_timestamps),)


def _is_image(value: Any) -> bool:
    if isinstance(value, bytes):
        return value[:2] == _JPEG
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3


def _state(flat: Mapping[str, Any], feature: StateFeature, known: RequestSchema) -> Any:
    key, leading = feature.key, _leading(feature)
    value = _find(flat, key, known)
    if value is None:
        raise WireError(f"no state '{known.aliases.get(key, key)}'; the request has {list(flat)[:20]}")
    numbers = finite(value, f"state '{key}'")
    numbers = numbers if numbers.ndim else numbers[None]
    if numbers.shape[:-1] != leading or (feature.size and numbers.shape[-1] != feature.size):
        raise WireError(f"state '{key}' is {described(value)}, expected {[*leading, feature.size or 'N']}")
    return numbers


def _noise(value: Any, known: RequestSchema) -> FloatArray | None:
    noise = None if value is None else finite(value, "noise")
    if noise is not None and noise.shape != known.spec.noise:
        raise WireError(f"the noise is {described(value)}, expected {list(known.spec.noise)}")
    return noise


def _previous(value: Any, known: RequestSchema) -> PreviousChunk | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not known.spec.continues_chunks:
        takes = "a map" if known.spec.continues_chunks else "none, because this policy cannot continue chunks"
        raise WireError(f"the previous chunk is {described(value)}, expected {takes}")
    actions, delay = finite(value.get("actions"), "the previous actions"), value.get("delay")
    longest, dimension = known.spec.horizon, known.spec.dimension
    good = actions.ndim == 2 and len(actions) <= longest and actions.shape[1] == (dimension or actions.shape[1])
    if not good or type(delay) is not int or not 0 <= delay <= len(actions):
        expected = f"[0 to {longest}, {dimension or 'D'}] and a delay within the chunk"
        raise WireError(
            f"the previous chunk has shape {list(actions.shape)} and delay {str(delay)[:20]}, expected {expected}"
        )
    return PreviousChunk(actions, delay)


def _instruction(message: Mapping[str, Any], known: RequestSchema) -> str:
    longest, value = known.max_instruction_length, next((message[key] for key in _PROMPTS if key in message), None)
    if value is None and not known.spec.instructed:
        return ""
    if value is None:
        raise WireError(
            f"no instruction: found {list(message)[:20]}, expected 'prompt' with the instruction as text"
        )
    if not isinstance(value, str) or not value.strip():
        raise WireError(f"the prompt is {described(value)}, expected the instruction as text")
    if len(value) > longest:
        raise WireError(f"the prompt has {len(value)} characters, allowed {longest}")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not value < 1e7:
        return 0.0
    return max(float(value), 1e-6) / 1e3  # not 0, so that a deadline in the past counts as expired
