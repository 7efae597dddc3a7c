"""Completes a policy's spec with the options of the section ``features``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vla_ros.config import Config
from vla_ros.contract.parts import BY_OPTIONS, Part, parse_parts
from vla_ros.contract.spec import NOW, ImageFeature, Moment, PolicySpec, StateFeature
from vla_ros.errors import ConfigError, did_you_mean

_IMAGE = re.compile(
    r"(?P<key>[^\s=?\[\]]+)(?P<optional>\?)?(\s*=\s*(?P<camera>[^\s\[\]]+))?"
    r"(\s*\[\s*(?P<width>[1-9]\d{0,4})\s*x\s*(?P<height>[1-9]\d{0,4})\s*\])?"
)
_STATE = re.compile(r"(?P<key>[^\s=\[\]]+)(\s*\[\s*(?P<size>[1-9]\d{0,4})\s*\])?\s*=\s*(?P<parts>.+)")
_FORMS = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
_MOMENTS = re.compile(r"(?P<key>[^\s=]+)\s*=\s*(?P<moments>.+)")
_MOMENT = re.compile(r"-?(?P<number>\d+(\.\d+)?)(?P<seconds>\s*s)?")


def complete(spec: PolicySpec, config: Config) -> PolicySpec:
    """Return ``spec``, with options filled in where the checkpoint leaves it open.

    Features that the policy does not take are ignored, so that one preset fits several policies. Raises ConfigError
    if an option contradicts the spec.
    """
    section = config.features
    action, wanted = (
        [_in_one_form(text, section.joint_form) for text in texts] for texts in (section.action, section.state)
    )
    images = {image.key: image for image in map(_image, section.images)}
    states = {state.key: state for state in map(_state, wanted)}
    moments = dict(map(_moments, section.moments))
    given = [*map(_key, section.images), *map(_key, section.state)]
    twice = sorted({key for key in given if given.count(key) > 1})
    if twice:
        raise ConfigError(f"features.images and features.state: found {', '.join(twice)} twice, expected it once")
    own_images = spec.images or tuple(images.values()) or tuple(map(ImageFeature, config.camera.keys))
    own_states = spec.state
    if spec.open:
        own_states += tuple(state for key, state in states.items() if key not in {own.key for own in spec.state})
    keys = {*images, *states, *(image.key for image in own_images), *(state.key for state in own_states)}
    unknown = [key for key in moments if key not in keys]
    if unknown:
        raise ConfigError(
            f"features.moments: found '{unknown[0]}', expected one of {', '.join(sorted(keys))}"
            f"{did_you_mean(unknown[0], keys)}"
        )
    return replace(
        spec,
        images=tuple(_with_image(image, images.get(image.key), moments) for image in own_images),
        state=tuple(_with_state(state, states.get(state.key), moments) for state in own_states),
        action=_action(spec, action),
        rate_hz=spec.rate_hz or section.rate_hz or None,
    )


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
    match = _STATE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"features.state: found {text!r}, expected KEY = PART + PART, such as "
            "'observation/state = arm.joint_position + arm.gripper'"
        )
    try:
        return StateFeature(match["key"], parse_parts(match["parts"]), int(match["size"] or 0))
    except ConfigError as error:
        raise ConfigError(f"features.state: {error}") from None


def _moments(text: str) -> tuple[str, tuple[Moment, ...]]:
    match = _MOMENTS.fullmatch(text.strip())
    found = [_MOMENT.fullmatch(moment.strip()) for moment in match["moments"].split(",")] if match else []
    moments = tuple(
        Moment(seconds=float(one["number"])) if one["seconds"] else Moment(int(one["number"]))
        for one in found
        if one and (one["seconds"] or one["number"].isdigit())
    )
    if match is None or len(moments) != len(found):
        raise ConfigError(f"features.moments: found {text!r}, expected steps or seconds, such as 'front = -15, 0'")
    return match["key"], moments


Moments = Mapping[str, tuple[Moment, ...]]


def _with_image(image: ImageFeature, said: ImageFeature | None, moments: Moments) -> ImageFeature:
    if said is not None:
        size = image.size if image.processor or image.size else said.size
        if size and image.takes and size != image.takes:
            found, taken = (f"{width}x{height}" for height, width in (size, image.takes))
            raise ConfigError(f"features.images: found {found} for '{image.key}', the policy takes {taken}")
        image = replace(image, camera=said.camera or image.camera, size=size)
    return replace(image, moments=_when(image.key, image.moments, moments))


def _with_state(state: StateFeature, said: StateFeature | None, moments: Moments) -> StateFeature:
    if said is not None:
        if state.size and said.size and state.size != said.size:
            raise ConfigError(
                f"features.state: found {said.size} numbers for '{state.key}', the policy expects {state.size}"
            )
        if state.parts and said.parts != state.parts:
            found = f"found {_text(said.parts)} for '{state.key}'"
            raise ConfigError(f"features.state: {found}, the policy expects {_text(state.parts)}")
        state = replace(state, parts=said.parts, size=state.size or said.size)
    return replace(state, moments=_when(state.key, state.moments, moments))


def _when(key: str, own: tuple[Moment, ...], said: Moments) -> tuple[Moment, ...]:
    wanted = said.get(key, own)
    if own not in (NOW, wanted):
        raise ConfigError(f"features.moments: found {len(wanted)} for '{key}', but the policy requires {own}")
    return wanted


def _action(spec: PolicySpec, section: Sequence[str]) -> tuple[Part, ...]:
    """Return the policy's action parts, with open forms set from ``features.action``.

    If the policy has no action parts, return those of ``features.action``.
    """
    try:
        said = parse_parts(" + ".join(section), action=True) if section else ()
    except ConfigError as error:
        raise ConfigError(f"features.action: {error}") from None
    if not spec.action or not said:
        return spec.action or said
    fitting = len(said) == len(spec.action) and all(
        ours == theirs or (not ours.form and ours.quantity in BY_OPTIONS and replace(theirs, form="") == ours)
        for ours, theirs in zip(spec.action, said, strict=True)
    )
    if not fitting:
        raise ConfigError(
            f"features.action: found {_text(said)}, but the policy's actions are {_text(spec.action)}; leave "
            "features.action out, or run another policy"
        )
    return said


def _text(parts: Sequence[Part]) -> str:
    return " + ".join(map(str, parts))
