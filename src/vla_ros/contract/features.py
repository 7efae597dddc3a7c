"""Completes a policy's spec with the options of the section ``features``."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vla_ros.config import Config
from vla_ros.contract.components import BY_OPTIONS, Component, parse_components
from vla_ros.contract.spec import NOW, DeltaTimestamp, ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import ConfigError, did_you_mean

_IMAGE = re.compile(
    r"(?P<key>[^\s=?\[\]]+)(?P<optional>\?)?(\s*=\s*(?P<camera>[^\s\[\]]+))?"
    r"(\s*\[\s*(?P<width>[1-9]\d{0,4})\s*x\s*(?P<height>[1-9]\d{0,4})\s*\])?"
)
_VECTOR = re.compile(r"(?P<key>[^\s=\[\]]+)(\s*\[\s*(?P<size>[1-9]\d{0,4})\s*\])?")
_BOTH = "delta_timestamps and features.delta_indices"
_FORMS = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
_TIMES = {
    "delta_timestamps": (re.compile(r"0(\.0+)?|-\d+(\.\d+)?"), "seconds", "-0.5, 0"),
    "delta_indices": (re.compile(r"0|-\d+"), "steps", "-15, 0"),
}
_Times = Mapping[str, tuple[DeltaTimestamp, ...]]


def complete_spec(spec: PolicySpec, config: Config) -> PolicySpec:
    """Return ``spec``, with options filled in where the checkpoint leaves it open.

    Features that the policy does not take are ignored, so that one preset fits several policies. Raises ConfigError
    if an option contradicts the spec.
    """
    section = config.features
    action, wanted = (
        [_in_one_form(text, section.joint_form) for text in texts] for texts in (section.action, section.state)
    )
    images = {image.key: image for image in map(_image, section.images)}
    entries = [_state(text) for text in wanted]
    states = {state.key: state for state in entries if not state.parts}
    states |= {key: StateFeature(key, size=size) for state in entries for key, size in state.parts}
    stated = [_time(option, text) for option in _TIMES for text in getattr(section, option)]
    times = dict(stated)
    given = [*map(_key, section.images), *(key for state in entries for key, _ in state.parts or [(state.key, 0)])]
    for options, listed in (("images and features.state", given), (_BOTH, [key for key, _ in stated])):
        twice = sorted({key for key in listed if listed.count(key) > 1})
        if twice:
            raise ConfigError(f"features.{options}: found {', '.join(twice)} twice, expected it once")
    own_images = spec.images or tuple(images.values()) or tuple(map(ImageFeature, config.camera.keys))
    own_states = spec.state
    if spec.takes_any_state:
        own_states += tuple(state for key, state in states.items() if key not in {own.key for own in spec.state})
    keys = {*images, *states, *(image.key for image in own_images), *(state.key for state in own_states)}
    unknown = [key for key in times if key not in keys]
    if unknown:
        raise ConfigError(
            f"features.{_BOTH}: found '{unknown[0]}', expected one of {', '.join(sorted(keys))}"
            f"{did_you_mean(unknown[0], keys)}"
        )
    return replace(
        spec,
        images=tuple(_with_image(image, images.get(image.key), times) for image in own_images),
        state=tuple(_with_state(state, states.get(state.key), times) for state in own_states),
        action=_action(spec, action),
        rate_hz=spec.rate_hz or section.rate_hz or None,
    )


def join_states(states: Sequence[StateFeature], config: Config) -> tuple[StateFeature, ...]:
    """Return the vectors to read: those that an entry of ``features.state`` names together are one.

    Raises ConfigError if the policy takes only some of them, or does not say how long they are.
    """
    left, joined = {state.key: state for state in states}, list[StateFeature]()
    for text in config.features.state:
        entry = _state(_in_one_form(text, config.features.joint_form))
        known = [key for key, _ in entry.parts if key in left]
        if not known:
            continue
        own = [left.pop(key) for key in known]
        if len(known) < len(entry.parts):
            raise ConfigError(f"features.state: found '{entry.key}', but the policy takes only {', '.join(known)}")
        for state in own:
            if not state.size or state.delta_timestamps != own[0].delta_timestamps:
                why = "has other times than the first" if state.size else f"needs a size, as in '{state.key}[3]'"
                raise ConfigError(f"features.state: found '{entry.key}', but '{state.key}' {why}")
        joined.append(
            replace(
                entry,
                size=sum(state.size for state in own),
                delta_timestamps=own[0].delta_timestamps,
                middle=_concatenated([state.middle for state in own]),
                largest=_concatenated([state.largest for state in own]),
                parts=tuple((state.key, state.size) for state in own),
            )
        )
    return (*left.values(), *joined)


def _concatenated(known: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the numbers of all vectors; () if those of one are unknown."""
    return tuple(number for numbers in known for number in numbers) if all(known) else ()


def _in_one_form(text: str, chosen: str) -> str:
    """Return ``text`` with ``chosen`` in place of forms to choose from, as in ``[deg|-100..100]``."""

    def choose(match: re.Match[str]) -> str:
        forms = {form.split()[0]: form.strip() for form in match[1].split("|") if form.strip()}
        if chosen not in forms:
            found = f"found '{chosen}'" if chosen else "not set"
            raise ConfigError(
                f"features.joint_form: {found}, expected one of {', '.join(forms)}. The checkpoint does not say "
                "in which unit its joints were recorded. LeRobot records SO-100 and SO-101 in degrees since "
                "release 0.4.4 (deg); before, in -100 to 100 over the calibrated range of each joint (-100..100)"
            )
        return f"[{forms[chosen]}]"

    return _FORMS.sub(choose, text)


def _key(text: str) -> str:
    return re.split(r"[\s=?\[]", text.strip(), maxsplit=1)[0]


def _image(text: str) -> ImageFeature:
    match = _IMAGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"features.images: found {text!r}, expected KEY or KEY = CAMERA [WIDTHxHEIGHT], such as "
            "'observation/image = front [224x224]'"
        )
    size = (int(match["height"]), int(match["width"])) if match["width"] else None
    return ImageFeature(match["key"], required=not match["optional"], camera=match["camera"] or "", size=size)


def _state(text: str) -> StateFeature:
    left, _, right = text.partition("=")
    vectors = [_VECTOR.fullmatch(each.strip()) for each in re.split(r"\s\+\s", left)]
    if not right.strip() or None in vectors:
        raise ConfigError(
            f"features.state: found {text!r}, expected KEY = COMPONENT + COMPONENT, such as "
            "'observation/state = arm.joint_position + arm.gripper', or KEY + KEY = COMPONENT"
        )
    parts = tuple((each["key"], int(each["size"] or 0)) for each in vectors if each)
    try:
        components = parse_components(right.strip())
    except ConfigError as error:
        raise ConfigError(f"features.state: {error}") from None
    if len(parts) > 1:
        return StateFeature(" + ".join(key for key, _ in parts), components, parts=parts)
    return StateFeature(parts[0][0], components, parts[0][1])


def _time(option: str, text: str) -> tuple[str, tuple[DeltaTimestamp, ...]]:
    pattern, unit, example = _TIMES[option]
    key, _, listed = (piece.strip() for piece in text.partition("="))
    numbers = [number.strip() for number in listed.split(",")]
    if not key or not all(map(pattern.fullmatch, numbers)):
        wanted = f"KEY = {unit}, zero or negative, such as 'front = {example}'"
        raise ConfigError(f"features.{option}: found {text!r}, expected {wanted}")
    if option == "delta_indices":
        return key, tuple(DeltaTimestamp(int(number)) for number in numbers)
    return key, tuple(DeltaTimestamp(seconds=float(number)) for number in numbers)


def _with_image(image: ImageFeature, entry: ImageFeature | None, times: _Times) -> ImageFeature:
    if entry is not None:
        size = image.size if image.processor or image.size else entry.size
        if size and image.takes and size != image.takes:
            found, taken = (f"{width}x{height}" for height, width in (size, image.takes))
            raise ConfigError(f"features.images: found {found} for '{image.key}', the policy takes {taken}")
        image = replace(image, camera=entry.camera or image.camera, size=size)
    return replace(image, delta_timestamps=_when(image.key, image.delta_timestamps, times))


def _with_state(state: StateFeature, entry: StateFeature | None, times: _Times) -> StateFeature:
    if entry is not None:
        if state.size and entry.size and state.size != entry.size:
            raise ConfigError(
                f"features.state: found {entry.size} numbers for '{state.key}', the policy expects {state.size}"
            )
        if state.components and entry.components != state.components:
            found = f"found {_text(entry.components) or 'a part of a longer vector'} for '{state.key}'"
            raise ConfigError(f"features.state: {found}, the policy expects {_text(state.components)}")
        state = replace(state, components=entry.components, size=state.size or entry.size)
    return replace(state, delta_timestamps=_when(state.key, state.delta_timestamps, times))


def _when(key: str, own: tuple[DeltaTimestamp, ...], times: _Times) -> tuple[DeltaTimestamp, ...]:
    wanted = times.get(key, own)
    if own not in (NOW, wanted):
        raise ConfigError(f"features.{_BOTH}: found {wanted} for '{key}', but the policy requires {own}")
    return wanted


def _action(spec: PolicySpec, section: Sequence[str]) -> tuple[Component, ...]:
    """Return the policy's action components, with open forms set from ``features.action``.

    If the policy has no action components, return those of ``features.action``.
    """
    try:
        configured = parse_components(" + ".join(section), action=True) if section else ()
    except ConfigError as error:
        raise ConfigError(f"features.action: {error}") from None
    if not spec.action or not configured:
        return spec.action or configured
    fitting = len(configured) == len(spec.action) and all(
        ours == theirs or (not ours.form and ours.quantity in BY_OPTIONS and replace(theirs, form="") == ours)
        for ours, theirs in zip(spec.action, configured, strict=True)
    )
    if not fitting:
        raise ConfigError(
            f"features.action: found {_text(configured)}, but the policy's actions are {_text(spec.action)}; leave "
            "features.action out, or run another policy"
        )
    return configured


def _text(components: Sequence[Component]) -> str:
    return " + ".join(map(str, components))
