"""Determines what a served policy needs and returns, from the server's metadata or from ``features``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_ros.contract.parts import parse_parts
from vla_ros.contract.spec import ImageFeature, Moment, PolicySpec, StateFeature
from vla_ros.errors import ConfigError
from vla_ros.policies.remote.dialect import OWN, Metadata
from vla_ros.policies.remote.messages import WireError, described
from vla_ros.policies.remote.openpi import ROBOARENA_KEYS

_SPACES = {
    "joint_position": "joint_position",
    "joint_velocity": "joint_velocity",
    "cartesian_position": "tip_position",
    "cartesian_velocity": "tip_delta",
}
_MOST = 64  # features, and moments of each
_LONGEST = 4096  # numbers of an action, and actions of a chunk


def learned(metadata: Metadata, horizon: int) -> PolicySpec:
    """Return a policy's features as far as its server describes them; ``features`` completes them.

    ``horizon`` is the maximum chunk length if the server does not state it.
    """
    if metadata.get("server") == OWN:
        return from_metadata(metadata)
    said: Any = metadata.get("action_horizon")
    for group, entry in (("output", "action_horizon"), ("action", "delta_indices")):
        section = metadata.get(group)
        if isinstance(section, Mapping) and entry in section:
            said = len(section[entry]) if isinstance(section[entry], list) else section[entry]
    known = type(said) is int and 1 <= said <= _LONGEST
    return PolicySpec((), (), (), 0, said if known else horizon, open=True)


def check(metadata: Metadata, bound: PolicySpec, action_keys: Sequence[str] = ()) -> None:
    """Refuse features (``bound``) that a GR00T or RoboArena server does not accept according to its metadata.

    Raises ConfigError, which names both.
    """
    if "version" in metadata:
        _check_modality("video", "features.images", metadata, bound.images)
        _check_modality("state", "features.state", metadata, bound.state)
        theirs = list((metadata.get("action") or {}).get("modality_keys") or ())
        known = [key.removeprefix("action.") for key in theirs]
        unknown = [key for key in action_keys if key not in known]
        if theirs and unknown:
            raise ConfigError(f"the server returns the actions {known}, but policy.action_keys has {unknown}")
    if metadata.keys() >= ROBOARENA_KEYS:
        _check_arena(metadata, bound)


def _check_modality(
    group: str, option: str, metadata: Metadata, features: Sequence[ImageFeature | StateFeature]
) -> None:
    section = metadata.get(group)
    if not isinstance(section, Mapping):
        return
    theirs = {str(key).removeprefix(f"{group}.") for key in section.get("modality_keys") or ()}
    ours = {feature.key.removeprefix(f"{group}.") for feature in features}
    if theirs != ours:
        raise ConfigError(f"the server takes the {group} {sorted(theirs)}, but {option} has {sorted(ours)}")
    indices = section.get("delta_indices")
    for feature in features:
        steps = [-moment.steps for moment in feature.moments]
        if isinstance(indices, list) and not any(moment.seconds for moment in feature.moments) and steps != indices:
            raise ConfigError(
                f"the server takes the {group} at steps {indices}, but {feature.key} has {steps} (features.moments)"
            )


def _check_arena(metadata: Metadata, bound: PolicySpec) -> None:
    wrist, count = metadata["needs_wrist_camera"], metadata["n_external_cameras"]
    needed = {"observation/wrist_image_left"} if wrist else set()
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
    """Return the policy's features according to the metadata of this package's server."""
    images = tuple(
        ImageFeature(key, moments=_moments(one), required=one.get("required") is not False)
        for key, one in _features(metadata, "images")
    )
    state = tuple(
        StateFeature(key, _parts(one.get("parts"), action=False), _count(one.get("size"), 0), _moments(one))
        for key, one in _features(metadata, "state")
    )
    if not images:
        raise WireError("the server's metadata name no images")
    rate, noise = metadata.get("rate_hz"), metadata.get("noise", [])
    if not isinstance(noise, list) or len(noise) > 8:
        raise WireError(f"the server's noise is {described(noise)}, expected its shape")
    return PolicySpec(
        images,
        state,
        _parts(metadata.get("action"), action=True),
        _count(metadata.get("dimension"), 0),
        _count(metadata.get("horizon"), 1),
        float(rate) if isinstance(rate, (int, float)) and 0 < rate < 1e4 else None,
        noise=tuple(_count(length, 1) for length in noise),
        continues_chunks=metadata.get("continues_chunks") is True,
    )


def _features(metadata: Metadata, group: str) -> list[tuple[str, Mapping[str, Any]]]:
    found = metadata.get(group)
    if not isinstance(found, Mapping) or len(found) > _MOST:
        raise WireError(f"the server's {group} are {described(found)}, expected a map of features")
    for key, entry in found.items():
        if not isinstance(key, str) or not isinstance(entry, Mapping):
            raise WireError(f"the server's {group} have {described(entry)} for {str(key)[:40]!r}, expected a map")
    return list(found.items())


def _moments(entry: Mapping[str, Any]) -> tuple[Moment, ...]:
    found = entry.get("moments")
    if not isinstance(found, list) or not 1 <= len(found) <= _MOST:
        raise WireError(f"a feature's moments are {described(found)}, expected a list")
    for pair in found:
        good = (
            isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and isinstance(pair[1], (int, float))
        )
        if not good or not 0 <= pair[0] <= 1e4 or not 0 <= pair[1] <= 1e4:
            raise WireError(f"a feature's moment is {str(pair)[:40]}, expected [steps, seconds]")
    return tuple(Moment(steps, float(seconds)) for steps, seconds in found)


def _parts(found: Any, *, action: bool) -> tuple[Any, ...]:
    if not isinstance(found, list) or len(found) > _MOST or not all(isinstance(part, str) for part in found):
        raise WireError(f"the server's parts are {described(found)}, expected a list of texts")
    try:
        return tuple(part for text in found for part in parse_parts(text, action=action))
    except ConfigError as error:
        raise WireError(f"the server's features: {error}") from None


def _count(value: Any, low: int) -> int:
    if type(value) is not int or not low <= value <= _LONGEST:
        raise WireError(f"the server's metadata have {str(value)[:40]}, expected a number of {low} to {_LONGEST}")
    return value
