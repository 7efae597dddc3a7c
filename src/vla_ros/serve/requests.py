"""Checks clients' requests against the policy's features, and converts them to observations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from vla_ros.config.options import LONGEST_INSTRUCTION
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.policies.remote.dialect import Request
from vla_ros.policies.remote.images import MAX_SIDE, decode_encoded, encoded_size, is_encoded
from vla_ros.policies.remote.messages import WireError, described, finite
from vla_ros.types import Observation, RawImage, UInt8Array
from vla_ros.vision.jpeg import count_scans
from vla_ros.vision.preprocess import LazyImages, process
from vla_ros.vision.processors import ResizeWithPad

_PREFIXES = ("", "observation/", "observation.", "images.", "observation.images.")


@dataclass(frozen=True)
class RequestSchema:
    """The names and shapes that a request may contain."""

    spec: PolicySpec  # the policy's inputs and outputs
    # Feature key to the name that robots use instead.
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    instruction: str = ""  # of requests without one, as openpi's servers have a default prompt; "" refuses them
    max_pixels: int = 1 << 22  # of one image

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Map each feature key to the names that it may have in a request."""
        keys = (*self.spec.image_keys, *(state.key for state in self.spec.state))
        prefixed = {key: tuple(prefix + key for prefix in _PREFIXES) for key in keys}
        return prefixed | {key: (name,) for key, name in self.aliases.items()}


def check_request(request: Request, schema: RequestSchema) -> Request:
    """Return the request with only the policy's features, by their keys; raises WireError if it is invalid.

    Images are uint8 [H, W, 3] or JPEGs, states float64 [N]; at T times, [T, H, W, 3] and [T, N].
    """
    if request.reset:
        return request
    sent, spec = request.features, schema.spec
    images = {feature.key: _image(sent, feature, schema) for feature in spec.images}
    state = {feature.key: _state(sent, feature, schema) for feature in spec.state}
    noise = request.noise
    if noise is not None and noise.shape != spec.noise:
        raise WireError(f"the noise is {described(noise)}, expected {list(spec.noise)}")
    _check_previous(request, spec)
    return replace(
        request,
        features={key: image for key, image in images.items() if image is not None} | state,
        instruction=_instruction(request, schema),
    )


def observation(request: Request, schema: RequestSchema, stamp: int) -> Observation:
    """Convert a checked request to an observation; images are processed on first access."""
    state = {feature.key: request.features[feature.key] for feature in schema.spec.state}
    sizes = {image.key: ResizeWithPad(image.size) for image in schema.spec.images if image.size}
    processors = sizes | dict(schema.spec.processors)
    images: dict[str, Callable[[], UInt8Array]] = {}
    single: dict[str, RawImage] = {}
    for key in schema.spec.image_keys:
        if key not in request.features:
            continue
        pixels = _pixels(request.features[key], key, schema.max_pixels)
        past = [
            RawImage(each, processor=processors.get(key), stamp=stamp)
            for each in pixels.reshape(-1, *pixels.shape[-3:])
        ]
        if pixels.ndim == 3:
            [single[key]] = past
            images[key] = partial(process, single[key])
        else:
            images[key] = partial(_stacked, past)
    instruction = request.instruction or ""
    return Observation(LazyImages(images), instruction, stamp, state, single, request.noise, request.previous)


def _stacked(images: Sequence[RawImage]) -> UInt8Array:
    return np.stack([process(image) for image in images])


def split_state(vector: Any, features: Sequence[StateFeature]) -> dict[str, Any]:
    """Return the state vectors by key that ``vector`` [..., N] holds in turn; {} if their sizes are others."""
    if len(features) == 1:
        return {features[0].key: vector}
    sizes, values = [feature.size for feature in features], np.atleast_1d(vector)
    if not all(sizes) or sum(sizes) != values.shape[-1]:
        return {}
    parts = np.split(values, np.cumsum(sizes)[:-1], axis=-1) if sizes else []
    return {feature.key: part for feature, part in zip(features, parts, strict=True)}


_SCANS = 10  # of an ordinary progressive JPEG


def pixels_to_decode(request: Request) -> int:
    """Return the number of pixels of all encoded images of a checked request; those that are damaged count 0.

    A JPEG of more scans than usual, or of more bytes than pixels, takes longer and counts as so many more pixels.
    """
    total = 0
    for image in request.features.values():
        if isinstance(image, bytes):
            with contextlib.suppress(WireError):
                height, width = encoded_size(image)
                total += max(height * width * max(1, count_scans(image) // _SCANS), len(image))
    return total


def _pixels(image: UInt8Array | bytes, key: str, most: int) -> UInt8Array:
    """Return the pixels of an image of at most ``most`` pixels, uint8 [H, W, 3] RGB.

    Decoding takes milliseconds.
    """
    if not isinstance(image, bytes):
        return image
    try:
        return decode_encoded(image, most)
    except WireError as error:
        hint = " (vla-ros serve --max-image)" if "allowed" in str(error) else ""
        raise WireError(f"image '{key}': {error}{hint}") from None


def _find(flat: Mapping[str, Any], key: str, schema: RequestSchema) -> Any:
    return next((flat[name] for name in schema.names[key] if name in flat), None)


def _image(flat: Mapping[str, Any], feature: ImageFeature, schema: RequestSchema) -> UInt8Array | bytes | None:
    key, leading = feature.key, _leading(feature)
    value = _find(flat, key, schema)
    if value is None and not feature.required:
        return None
    if value is None:
        images = [entry for entry in flat.values() if _is_image(entry)]
        if len(images) != 1 or len(schema.spec.images) != 1:
            raise WireError(
                f"no image '{schema.aliases.get(key, key)}'; the request has {list(flat)[:20]}, and the policy "
                f"takes the images {list(schema.spec.image_keys)} (`vla-ros serve --image KEY=NAME` maps names)"
            )
        [value] = images
    if not leading and is_encoded(value):
        return value
    good = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 + len(leading)
    if good and value.shape[-3] == 3 and value.shape[-1] != 3:
        value = np.moveaxis(value, -3, -1)
    *found, height, width, channels = value.shape if good else (0, 0, 0)
    if (*found, channels) != (*leading, 3) or not 1 <= min(height, width) <= max(height, width) <= MAX_SIDE:
        shape = [*leading, "H", "W", 3]
        raise WireError(
            f"image '{key}' is {described(value)}, expected uint8 {shape} with sides of 1 to {MAX_SIDE}, or a JPEG "
            "or PNG"
        )
    return np.ascontiguousarray(value)


def _leading(feature: ImageFeature | StateFeature) -> tuple[int, ...]:
    """Return the leading axes of a feature: () at one time, (T,) at T times."""
    return () if len(feature.delta_timestamps) == 1 else (len(feature.delta_timestamps),)


def _is_image(value: Any) -> bool:
    return is_encoded(value) or (isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3)


def _state(flat: Mapping[str, Any], feature: StateFeature, schema: RequestSchema) -> Any:
    key, leading = feature.key, _leading(feature)
    value = _find(flat, key, schema)
    if value is None:
        raise WireError(f"no state '{schema.aliases.get(key, key)}'; the request has {list(flat)[:20]}")
    numbers = finite(value, f"state '{key}'")
    numbers = numbers if numbers.ndim else numbers[None]
    if numbers.shape[:-1] != leading or (feature.size and numbers.shape[-1] != feature.size):
        raise WireError(f"state '{key}' is {described(value)}, expected {[*leading, feature.size or 'N']}")
    return numbers


def _check_previous(request: Request, spec: PolicySpec) -> None:
    if request.previous is None:
        return
    if not spec.continues_chunks:
        raise WireError("found a previous chunk, expected none, because this policy cannot continue chunks")
    actions, delay = request.previous.actions, request.previous.delay
    if len(actions) > spec.horizon or actions.shape[1] != (spec.dimension or actions.shape[1]):
        found, expected = list(actions.shape), f"[0 to {spec.horizon}, {spec.dimension or 'D'}]"
        raise WireError(f"the previous chunk has shape {found} and delay {delay}, expected {expected}")


def _instruction(request: Request, schema: RequestSchema) -> str:
    text = request.instruction if request.instruction is not None else schema.instruction or None
    if text is None and not schema.spec.uses_instruction:
        return ""
    if text is None:
        found = list(request.features)[:20]
        raise WireError(
            f"no instruction: found {found}, expected 'prompt' with the instruction as text, or a "
            "server with a default (-p policy.instruction:=TEXT)"
        )
    if not text.strip():
        raise WireError(f"the prompt is {described(text)}, expected the instruction as text")
    if len(text) > LONGEST_INSTRUCTION:
        raise WireError(f"the prompt has {len(text)} characters, allowed {LONGEST_INSTRUCTION}")
    return text
