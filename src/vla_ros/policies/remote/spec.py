"""Determines a served policy's inputs and outputs from the server's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import DeltaTimestamp, ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import ConfigError
from vla_ros.policies.published import UNKNOWN, Loop
from vla_ros.policies.remote.dialect import OWN, Metadata
from vla_ros.policies.remote.messages import WireError
from vla_ros.policies.remote.openpi import ROBOARENA_KEYS
from vla_ros.types import ImageProcessor
from vla_ros.vision.processors import PROCESSORS

_SPACES = {
    "joint_position": "joint_position",
    "joint_velocity": "joint_velocity",
    "cartesian_position": "tip_position",
    "cartesian_velocity": "tip_delta",
}
_MOST = 64  # maximum number of features, of delta timestamps of a feature, and of axes of the noise
_LONGEST = 4096  # maximum number of values in an action, and of actions in a chunk
_FARTHEST = 1e9  # maximum of a number in a state
_OLDEST = -10_000  # minimum of a delta timestamp, in steps or seconds


def learned(metadata: Metadata, horizon: int, loop: Loop = UNKNOWN) -> PolicySpec:
    """Return the features in the metadata; the option ``features`` supplies the rest.

    ``horizon`` is the maximum chunk length if the server does not state one, ``loop`` how its published client
    executes chunks.
    """
    if metadata.get("server") == OWN:
        return from_metadata(metadata)
    stated: Any = metadata.get("action_horizon")
    for group, entry in (("output", "action_horizon"), ("action", "delta_indices")):
        section = metadata.get(group)
        if isinstance(section, Mapping) and entry in section:
            stated = len(section[entry]) if isinstance(section[entry], list) else section[entry]
    known = type(stated) is int and 1 <= stated <= _LONGEST
    steps = stated if known else horizon
    return PolicySpec((), (), (), 0, steps, loop.execute_steps, loop.rate_hz, open=True)


def check(metadata: Metadata, bound: PolicySpec, action_keys: Sequence[str] = ()) -> None:
    """Compare the features ``bound`` with the metadata of a server.

    Only GR00T, SGLang and RoboArena servers have such metadata. Raises ConfigError, which shows both, if they
    differ.
    """
    if metadata.get("version") in ("n1.5", "npy", "nd"):
        _check_modality("video", "features.images", metadata, bound.images)
        _check_modality("state", "features.state", metadata, bound.state)
        theirs = [key.removeprefix("action.") for key in (metadata.get("action") or {}).get("modality_keys") or ()]
        unknown = [key for key in action_keys if key not in theirs]
        if theirs and unknown:
            raise ConfigError(f"the server returns the actions {theirs}, but policy.action_keys has {unknown}")
    if metadata.keys() >= ROBOARENA_KEYS:
        _check_arena(metadata, bound)
    inputs = metadata.get("input") if metadata.get("object") == "action.metadata" else None
    cameras = inputs.get("image_keys") if isinstance(inputs, Mapping) else None
    if isinstance(cameras, list):
        wanted = {f"images.{key}" for key in cameras}
        ours = [image.key + ("" if image.required else "?") for image in bound.images]  # as in features.images
        if wanted != {key.removeprefix("observation.") for key in ours}:
            raise ConfigError(f"the server takes the images {sorted(wanted)}, but features.images has {ours}")


def _check_modality(
    group: str, option: str, metadata: Metadata, features: Sequence[ImageFeature | StateFeature]
) -> None:
    section = metadata.get(group)
    if section is None:
        return
    theirs = {key.removeprefix(f"{group}.") for key in section["modality_keys"]}
    ours = {feature.key.removeprefix(f"{group}.") for feature in features}
    if theirs != ours:
        raise ConfigError(f"the server takes the {group} {sorted(theirs)}, but {option} has {sorted(ours)}")
    indices = section.get("delta_indices")
    for feature in features:
        steps = [delta.steps for delta in feature.delta_timestamps]
        if (
            isinstance(indices, list)
            and not any(delta.seconds for delta in feature.delta_timestamps)
            and steps != indices
        ):
            raise ConfigError(
                f"the server takes the {group} at steps {indices}, but {feature.key} has {steps} "
                "(features.delta_indices)"
            )


def _check_arena(metadata: Metadata, bound: PolicySpec) -> None:
    count = metadata["n_external_cameras"]
    needed = {"observation/wrist_image_left"} if metadata["needs_wrist_camera"] else set()
    cameras = count if type(count) is int and 0 <= count <= 2 else 0
    needed |= {f"observation/exterior_image_{number}_left" for number in range(cameras)}
    missing = sorted(needed - set(bound.image_keys))
    if missing:
        raise ConfigError(f"the server needs the images {missing}, but features.images does not list them")
    space = str(metadata["action_space"])[:40]
    if _SPACES.get(space) not in {part.quantity for part in bound.action}:
        ours = " + ".join(map(str, bound.action)) or "empty"
        raise ConfigError(f"the server returns {space!r}, but features.action is {ours}")


def from_metadata(metadata: Metadata) -> PolicySpec:
    """Return the policy's features, read from the metadata of this package's server.

    Raises WireError if the metadata are invalid.
    """
    try:
        rate = metadata.get("rate_hz")
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
                    _middle(state.get("middle", [])),
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
            instructed=metadata.get("instructed") is not False,
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


def image_size(metadata: Metadata) -> tuple[int, int] | None:
    """Return the images' size (height, width) that the metadata of RoboArena or SGLang state, or None.

    Raises WireError if it is no size.
    """
    section = metadata.get("input")
    stated = section.get("image_size") if isinstance(section, Mapping) else metadata.get("image_resolution")
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


def _middle(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) > _LONGEST:
        raise ValueError(f"found the middle {str(values)[:40]}, expected a list of up to {_LONGEST} numbers")
    return tuple(_number(value, -_FARTHEST, _FARTHEST) for value in values)


def _components(texts: Any, *, action: bool = False) -> tuple[Any, ...]:
    return tuple(component for text in _few(texts) for component in parse_components(text, action=action))


def _number(value: Any, low: Any, high: float = _LONGEST) -> Any:
    """Return a number of the type of ``low``; raises ValueError if out of bounds."""
    good = type(value) is int or (isinstance(low, float) and type(value) is float)
    if not good or not low <= value <= high:
        raise ValueError(f"found {str(value)[:40]}, expected a number from {low} to {high:g}")
    return type(low)(value)
