"""Reads the tree of options from parameter files and ``name:=value`` overrides, and writes it as YAML.

Flat names are the ROS parameter names (``policy.checkpoint``). Values are bool, int, float, str, or a list of one
of these types, as in YAML and ROS parameters.
"""

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import yaml

from vla_ros.config.checkpoints import chosen, identify, runs_no_checkpoint
from vla_ros.config.contradictions import contradictions
from vla_ros.config.files import dump_yaml, parse_yaml, preset_values, read_file
from vla_ros.config.options import AUTO, Option, PolicyConfig, option_of
from vla_ros.config.registry import options_class, owners
from vla_ros.config.removed import REMOVED
from vla_ros.config.tree import OF_AN_ARM, Config
from vla_ros.errors import CheckpointError, ConfigError, did_you_mean

ROS_OWN = ("use_sim_time", "start_type_description_service", "qos_overrides.", "autostart")
"""Names or prefixes of parameters that every ROS node or the lifecycle node has; not options of the tree."""
PRESET = "preset"
SECTIONS = tuple(leaf.name for leaf in dataclasses.fields(Config) if leaf.name not in (PRESET, "own"))


@dataclasses.dataclass(frozen=True)
class Entry:
    """One leaf of the tree: its flat name, Python type (``tuple[float, ...]`` for lists), default and option."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def is_list(self) -> bool:
        return getattr(self.type, "__origin__", None) is tuple

    @property
    def item_type(self) -> type:
        """Type of the value, or of a list's items: bool, int, float or str."""
        kind = self.type.__args__[0] if self.is_list else self.type
        assert isinstance(kind, type)
        return kind

    @property
    def expectation(self) -> str:
        kind = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[self.item_type]
        if self.option.choices:
            kind = "one of " + ", ".join(self.option.choices)
        if self.option.low is not None or self.option.high is not None:
            kind += f" {_range(self.option.low, self.option.high)}"
        if self.option.unit:
            kind += f" ({self.option.unit})"
        if self.option.unset is not None:
            kind += f", or {self.option.unset:g}"
        if self.option.per_camera:
            return f"{kind}; one for all cameras, or a list with one per camera"
        if not self.is_list:
            return kind
        sizes = f" of length {' or '.join(map(str, self.option.length))}" if self.option.length else ""
        return f"a list{sizes}, each item {kind}"


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return f"up to {high:g}"
    return f"from {low:g}" + (" on" if high is None else f" to {high:g}")


def entries(config: Config | None = None) -> Mapping[str, Entry]:
    """Return every leaf of the tree by flat name, in the order of declaration.

    ``config`` determines the policy's options and the arms; None means the default tree.
    """
    config = config or Config()
    declared: Any = type(config.policy)  # for mypy, classes of dataclasses are not hashable
    return _entries(declared, config.robot.arms)


@cache
def _entries(policy: Any, arms: tuple[str, ...]) -> Mapping[str, Entry]:
    shared = {entry.name: entry for entry in _walk(policy)}
    of_arms = {
        f"{arm}.{leaf}": dataclasses.replace(shared[name], name=f"{arm}.{leaf}")
        for arm in arms
        for leaf, name in OF_AN_ARM.items()
    }
    return MappingProxyType({**shared, **of_arms})


def _walk(policy: type[PolicyConfig]) -> Iterator[Entry]:
    types = get_type_hints(Config)
    preset = next(leaf for leaf in dataclasses.fields(Config) if leaf.name == PRESET)
    yield Entry(PRESET, str, preset.default, option_of(preset.metadata))
    for section in SECTIONS:
        cls: Any = policy if section == "policy" else types[section]
        hints = get_type_hints(cls)
        for leaf in dataclasses.fields(cls):
            yield Entry(f"{section}.{leaf.name}", hints[leaf.name], leaf.default, option_of(leaf.metadata))


def flatten(config: Config) -> dict[str, Any]:
    """Return the values by flat name; tuples become lists."""
    flat = {name: _value(config, name) for name in entries(config)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def _value(config: Config, name: str) -> Any:
    if name == PRESET:
        return config.preset
    section, leaf = name.split(".")
    return config.of_arm(section, leaf) if section in config.robot.arms else getattr(getattr(config, section), leaf)


def build(
    values: Mapping[str, Any], base: Config | None = None, *, complete: bool = True, live: bool = False
) -> Config:
    """Check ``values`` (by flat name) and return ``base`` (None: the defaults) with these values.

    A preset named in ``values`` is applied to ``base`` first. Contradictions are errors only if ``complete``;
    ``live`` allows those of options that change one after the other (:func:`contradictions`).

    Raises:
        ConfigError: A name is unknown, a value has the wrong type or is out of range, or values contradict each
            other. The text lists all errors, one per line.
        MissingDependencyError: The options of ``policy.name`` cannot be imported.
    """
    base = base or Config()
    problems: list[str] = []
    preset = values.get(PRESET, base.preset)
    if preset != base.preset and isinstance(preset, str) and preset:
        values = {**preset_values(preset), **values}
    asked = values.get("policy.name", base.policy.name)
    try:
        if isinstance(asked, str) and {"policy.name", "policy.checkpoint"} & values.keys():
            values = {**values, "policy.name": _choose(asked, base, values)}
        base = _with_policy(base, values.get("policy.name", asked))
    except (ConfigError, CheckpointError) as error:
        problems.append(str(error))  # the options of an unknown policy cannot be checked
        values = {name: value for name, value in values.items() if not name.startswith("policy.")}
    try:
        base = _with_arms(base, values.get("robot.arms", base.robot.arms))
    except ConfigError as error:
        problems.append(str(error))
    leaves = entries(base)
    own, changes = dict(base.own), dict[str, dict[str, Any]]()
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        try:
            if name not in leaves:
                raise ConfigError(unknown_option(name, base, value))
            group = own if section in base.robot.arms else changes.setdefault(section, {})
            group[name if group is own else leaf] = convert_value(leaves[name], value)
        except ConfigError as error:
            problems.append(str(error))
    top = changes.pop("", {})
    sections = {name: dataclasses.replace(getattr(base, name), **change) for name, change in changes.items()}
    config = dataclasses.replace(base, **sections, **top, own=MappingProxyType(own))
    problems += contradictions(config, live=live) if complete else []
    if problems and asked == AUTO != config.policy.name:
        found = identify(config.policy.checkpoint, getattr(config.policy, "base", ""))  # type: ignore[attr-defined]
        problems.append(f"(policy.name: auto is {config.policy.name}, because {found.why})")
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _choose(name: str, base: Config, values: Mapping[str, Any]) -> str:
    """Return the policy that ``policy.name`` means for ``policy.checkpoint``, for an adapter that of its base."""
    checkpoint, model = (
        str(values.get(f"policy.{leaf}", getattr(base.policy, leaf, "")) or "") for leaf in ("checkpoint", "base")
    )
    return chosen(name, checkpoint, model)


def _with_policy(base: Config, name: Any) -> Config:
    """Return ``base`` with another policy; common options are kept, the policy's own options are defaults."""
    if name == base.policy.name or not isinstance(name, str):  # convert_value() refuses other types
        return base
    common = {leaf.name: getattr(base.policy, leaf.name) for leaf in dataclasses.fields(PolicyConfig)}
    return dataclasses.replace(base, policy=options_class(name)(**{**common, "name": name}))


def _with_arms(base: Config, names: Any) -> Config:
    """Return ``base`` with these arms; arms that ``base`` already has keep their options."""
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        return base  # convert_value() refuses other types
    taken = {*SECTIONS, "topic", "unused"}
    if len(set(names)) < len(names) or any(
        not re.fullmatch(r"[A-Za-z]\w*", name) or name in taken for name in names
    ):
        expected = f"different names such as left and right, each one word and none of {', '.join(sorted(taken))}"
        raise ConfigError(f"robot.arms: found {list(names)}, expected {expected}")
    own = {name: value for name, value in base.own.items() if name.split(".")[0] in names}
    return dataclasses.replace(base, robot=dataclasses.replace(base.robot, arms=tuple(names)), own=own)


def is_ros_own(name: str) -> bool:
    return name.startswith(ROS_OWN)


def unknown_option(name: str, config: Config, value: Any = "") -> str:
    if is_ros_own(name):
        return (
            f"{name}: belongs to the ROS node and is not an option; remove it from the file and set it with "
            f"--ros-args -p {name}:=..."
        )
    if name in REMOVED:
        return f"{name}: removed; {REMOVED[name]}"
    section, _, leaf = name.rpartition(".")
    of, now = owners(leaf) if section == "policy" else [], config.policy.name
    if of and leaf == "checkpoint":
        return runs_no_checkpoint(now, value)
    if len(of) == 1:
        other = f"an option of the policy '{of[0]}', and policy.name is '{now}'"
        return f"{name}: {other}; set policy.name:={of[0]} or leave it out"
    if of:
        advice = "set policy.checkpoint, set" if now == AUTO else "set"
        other = f"an option of the policies {', '.join(of)}, and policy.name is '{now}'"
        return f"{name}: {other}; {advice} policy.name to one of them or leave it out"
    leaves = entries(config)
    if leaf in OF_AN_ARM and section not in SECTIONS:
        found = ", ".join(config.robot.arms) or "none"
        return f"{name}: no such parameter; '{section}' is not one of robot.arms, which are: {found}"
    elsewhere = [other for other in leaves if other.rpartition(".")[2] == leaf]  # right leaf, wrong section
    hint = did_you_mean(name, leaves) or did_you_mean(name, elsewhere, 0.0)
    return f"{name}: no such parameter{hint or '; `vla-ros config` lists all names'}"


def convert_value(entry: Entry, value: Any) -> Any:
    """Convert ``value`` to the entry's type, and check range and choices; raises ConfigError if it does not fit.

    Integers are accepted as floats (``5`` in YAML), and true and false where they are among the choices; nothing
    else is converted.
    """
    if entry.is_list:
        if entry.option.per_camera and (isinstance(value, str) or not isinstance(value, Sequence)):
            value = [value]
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _wrong(entry, value)
        if entry.option.length and len(value) not in entry.option.length:
            raise _wrong(entry, value)
        return tuple(_convert_item(entry, item, value) for item in value)
    return _convert_item(entry, value, value)


def _convert_item(entry: Entry, item: Any, whole: Any) -> Any:
    kind = entry.item_type
    if kind is float and isinstance(item, int) and not isinstance(item, bool):
        item = float(item)
    if isinstance(item, bool) and str(item).lower() in entry.option.choices:  # beside other texts
        item = str(item).lower()
    if type(item) is not kind:
        raise _wrong(entry, whole)
    low, high = entry.option.low, entry.option.high
    if kind in (int, float) and not math.isfinite(item):
        raise _wrong(entry, whole)
    outside = (low is not None and item < low) or (high is not None and item > high)
    if outside and item != entry.option.unset:
        raise _wrong(entry, whole)
    if entry.option.choices and item not in entry.option.choices:
        raise _wrong(entry, whole)
    if kind is str and any("\ud800" <= character <= "\udfff" for character in item):
        raise ConfigError(f"{entry.name}: found {whole!r}, which is not valid Unicode; write it in UTF-8")
    return item


_SHORT = reprlib.Repr()  # repr() of a list of YAML aliases may never end
_SHORT.maxlist, _SHORT.maxdict, _SHORT.maxlevel = 30, 30, 2
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def _wrong(entry: Entry, value: Any) -> ConfigError:
    shown = _SHORT.repr(list(value) if isinstance(value, tuple) else value)
    hint = did_you_mean(value if isinstance(value, str) else shown, entry.option.choices or ())
    if not entry.is_list and entry.item_type is str and not isinstance(value, str):
        hint = "; YAML does not read this as text, so put it in quotes"
    elif entry.is_list and entry.item_type is str and isinstance(value, str):
        hint = f"; for a list of one item, write [{value:.200}]"
    return ConfigError(f"{entry.name}: found {shown} ({type(value).__name__}), expected {entry.expectation}{hint}")


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse ``name:=value`` as in ROS's ``-p``; the value is YAML."""
    name, separator, value = text.partition(":=")
    if not separator or not name:
        raise ConfigError(f"-p {text}: expected name:=value, for example -p policy.device:=cuda")
    try:
        return name, parse_yaml(value) if value else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"-p {text}: the value is not YAML ({error})") from None


def assignment(name: str, text: str) -> str:
    """Return ``name:=text``, quoted so that :func:`parse_assignment` returns the same text."""
    return f"{name}:={json.dumps(text, ensure_ascii=False)}"


def load(
    files: Sequence[Path] = (),
    assignments: Sequence[str] = (),
    node_name: str = "vla_policy",
    ros_values: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """Return the tree from parameter files, ``name:=value`` overrides and the values of ``--ros-args``.

    Later ones win, in this order. Selecting another policy drops the previous policy's own options. Raises the
    errors of :func:`~vla_ros.config.files.read_file` and :func:`build`.
    """
    layers = [*(read_file(path, node_name) for path in files), dict(map(parse_assignment, assignments)), ros_values]
    origins = {key: path for path, layer in zip((*files, None, None), layers, strict=True) for key in layer}
    name = PolicyConfig.name
    values: dict[str, Any] = {}
    for layer in layers:
        below, name = name, layer.get("policy.name", name)
        if name != below and below != AUTO:  # what auto was given is for whatever policy it is
            values = {key: value for key, value in values.items() if not _is_own(key, below)}
        values.update(layer)
    try:
        return build(values)
    except ConfigError as error:
        raise ConfigError("\n".join(_with_origin(line, origins) for line in str(error).splitlines())) from None


def _with_origin(problem: str, origins: Mapping[str, Path | None]) -> str:
    """Add the file that an option's value came from, where it came from one."""
    path = origins.get(problem.partition(":")[0])
    return problem if path is None else f"{problem} ({path})"


def _is_own(name: str, policy: str) -> bool:
    section, _, leaf = name.partition(".")
    own = {field.name for field in dataclasses.fields(options_class(policy))}
    return section == "policy" and leaf in own - {field.name for field in dataclasses.fields(PolicyConfig)}


def to_yaml(config: Config, *, comments: bool = True) -> str:
    """Return the tree as a ROS parameter file; ``comments`` adds each option's description, unit and range."""
    lines = ["/**:", "  ros__parameters:"]
    section, leaves = "", entries(config)
    for name, value in flatten(config).items():
        head, _, leaf = name.rpartition(".")
        if head != section:
            section = head
            lines.append(f"    {head}:")
        entry, margin = leaves[name], "      " if head else "    "
        if comments:
            live = "; may change while running" if entry.option.live else ""
            lines.append(
                f"{margin}# {entry.option.description}. "
                f"{entry.expectation[0].upper()}{entry.expectation[1:]}{live}."
            )
        lines.append(f"{margin}{leaf}: {dump_yaml(value)}")
    return "\n".join(lines) + "\n"
