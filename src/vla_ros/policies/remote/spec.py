"""A served policy's inputs and outputs, as this package's server states them in its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_ros import __version__
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import DeltaTimestamp, ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import ConfigError
from vla_ros.policies.remote.dialect import MAX_HORIZON, Metadata
from vla_ros.policies.remote.messages import WireError
from vla_ros.types import ImageProcessor
from vla_ros.vision.processors import PROCESSORS, client_pipeline

OWN = "vla_ros"
"""Value of ``server`` in the metadata of this package's server, and key of its extensions to openpi's protocol."""

_MOST = 64  # maximum number of features, of delta timestamps of a feature, and of axes of the noise
_LONGEST = MAX_HORIZON  # maximum number of values in an action, too
_FARTHEST = 1e9  # maximum of a number in a state
_STEEPEST = 100.0  # maximum magnitude of temporal ensembling's m
_OLDEST = -10_000  # minimum of a delta timestamp, in steps or seconds


def encode_spec(name: str, spec: PolicySpec) -> dict[str, Any]:
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
                "largest": list(state.largest),
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
        "instructed": spec.uses_instruction,
        "ensemble_decay": spec.ensemble_decay,
        "view": spec.view,
    }


def decode_spec(metadata: Metadata) -> PolicySpec:
    """Return the policy's features; raises WireError if the metadata are invalid."""
    try:
        rate, decay = metadata.get("rate_hz"), metadata.get("ensemble_decay")
        if not metadata["images"]:
            raise ValueError("found no images")
        return PolicySpec(
            tuple(
                ImageFeature(
                    str(key),
                    _processor(image),
                    delta_timestamps=_delta_timestamps(image),
                    required=image.get("required") is not False,
                    takes=_size(image["size"]) if image.get("resized") is False else None,
                )
                for key, image in _few(metadata["images"]).items()
            ),
            tuple(
                StateFeature(
                    str(key),
                    _components(state["components"]),
                    _number(state["size"], 0),
                    _delta_timestamps(state),
                    _learned(state, "middle"),
                    _learned(state, "largest"),
                )
                for key, state in _few(metadata["state"]).items()
            ),
            _components(metadata["action"], action=True),
            _number(metadata["dimension"], 0),
            _number(metadata["horizon"], 1),
            _number(metadata.get("execute_steps", 0), 0),
            None if rate is None else float(_number(rate, 0.001)),
            noise=tuple(_number(length, 1) for length in _few(metadata.get("noise", []))),
            continues_chunks=metadata.get("continues_chunks") is True,
            uses_instruction=metadata.get("instructed") is not False,
            ensemble_decay=None if decay is None else float(_number(decay, -_STEEPEST, _STEEPEST)),
            view=str(metadata.get("view", ""))[:64],
        )
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        text = f"{type(error).__name__}: {str(error)[:200]}"
        raise WireError(
            f"the server's metadata do not describe a policy ({text}); use the same version of vla_ros on both "
            "machines"
        ) from None


def _few(entries: Any) -> Any:
    if len(entries) > _MOST:
        raise ValueError(f"found {len(entries)} entries, expected up to {_MOST}")
    return entries


def image_size(stated: Any) -> tuple[int, int] | None:
    """Return the (height, width) of images that metadata state; raises WireError if it is no size."""
    try:
        return _size(stated)
    except (TypeError, ValueError):
        raise WireError(f"the server takes images of the size {str(stated)[:80]}, expected [H, W]") from None


def _processor(image: Mapping[str, Any]) -> ImageProcessor | None:
    """Return the processor that the server lets its clients apply, so that they send small images."""
    kind, size = PROCESSORS.get(str(image.get("pipeline"))), _size(image.get("size"))
    return kind(size) if kind and size else None


def _size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    height, width = (_number(side, 1) for side in size)
    return height, width


def _delta_timestamps(feature: Mapping[str, Any]) -> tuple[DeltaTimestamp, ...]:
    pairs = [
        (_number(steps, _OLDEST, 0), _number(seconds, float(_OLDEST), 0))
        for steps, seconds in _few(feature["delta_timestamps"])
    ]
    if not pairs:
        raise ValueError("found no delta timestamp, expected at least one")
    return tuple(DeltaTimestamp(*pair) for pair in pairs)


def _learned(state: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = state.get(name, [])
    if not isinstance(values, list) or len(values) > _LONGEST:
        raise ValueError(f"found the {name} {str(values)[:40]}, expected a list of up to {_LONGEST} numbers")
    return tuple(_number(value, -_FARTHEST, _FARTHEST) for value in values)


def _components(texts: Any, *, action: bool = False) -> tuple[Any, ...]:
    return tuple(component for text in _few(texts) for component in parse_components(text, action=action))


def _number(value: Any, low: Any, high: float = _LONGEST) -> Any:
    """Return a number of the type of ``low``; raises ValueError if out of bounds."""
    good = type(value) is int or (isinstance(low, float) and type(value) is float)
    if not good or not low <= value <= high:
        raise ValueError(f"found {str(value)[:40]}, expected a number from {low} to {high:g}")
    return type(low)(value)
