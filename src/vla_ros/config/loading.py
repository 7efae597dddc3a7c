"""Values into the tree and out of it: parameter files, ``name:=value`` overrides, flat names, checks.

Flat names are the ROS parameter names (``policy.checkpoint``). Values are Python's bool, int, float, str or
lists of one of these, as YAML and ROS parameters have them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import yaml

from vla_ros.config.contradictions import contradictions
from vla_ros.config.options import Option, option_of
from vla_ros.config.policy import PolicyConfig
from vla_ros.config.registry import options_class, owner
from vla_ros.config.tree import Config
from vla_ros.errors import ConfigError, did_you_mean

ROS_OWN = ("use_sim_time", "start_type_description_service", "qos_overrides.", "autostart")
"""Parameters (or prefixes) of every ROS node, and of the lifecycle node, that are no options of the tree."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One leaf of the tree: its flat name, Python type (``tuple[float, ...]`` for lists), default and option."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def is_list(self) -> bool:
        """True where the value is a list (a tuple here, an array in ROS)."""
        return getattr(self.type, "__origin__", None) is tuple

    @property
    def item_type(self) -> type:
        """Type of the value, or of a list's items: bool, int, float or str."""
        kind = self.type.__args__[0] if self.is_list else self.type
        assert isinstance(kind, type)
        return kind

    @property
    def expectation(self) -> str:
        """What a value must be, as a phrase."""
        kind = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[self.item_type]
        if self.option.choices:
            kind = "one of " + ", ".join(self.option.choices)
        if self.option.low is not None or self.option.high is not None:
            kind += f" from {_number(self.option.low)} to {_number(self.option.high)}"
        if self.option.unit:
            kind += f" ({self.option.unit})"
        if self.option.per_camera:
            return f"{kind}; one for all cameras, or a list with one for each"
        if not self.is_list:
            return kind
        sizes = f" of length {' or '.join(map(str, self.option.length))}" if self.option.length else ""
        return f"a list{sizes}, each item {kind}"


def _number(value: float | None) -> str:
    return "any" if value is None else f"{value:g}"


def entries(policy: PolicyConfig | None = None) -> Mapping[str, Entry]:
    """Every leaf of the tree by flat name, in the order of declaration.

    Args:
        policy: Some section ``policy``, whose class says which options it has; None takes the default policy's.
    """
    declared: Any = type(policy or Config().policy)  # mypy takes no class of dataclasses for hashable
    return _entries(declared)


@cache
def _entries(policy: Any) -> Mapping[str, Entry]:
    return MappingProxyType({entry.name: entry for entry in _walk(policy)})


def _walk(policy: type[PolicyConfig]) -> Iterator[Entry]:
    for section in dataclasses.fields(Config):
        cls: Any = policy if section.name == "policy" else get_type_hints(Config)[section.name]
        hints = get_type_hints(cls)
        for leaf in dataclasses.fields(cls):
            yield Entry(f"{section.name}.{leaf.name}", hints[leaf.name], leaf.default, option_of(leaf.metadata))


def flatten(config: Config) -> dict[str, Any]:
    """Flat name to value; lists as Python lists."""
    flat = {}
    for name in entries(config.policy):
        section, leaf = name.split(".")
        value = getattr(getattr(config, section), leaf)
        flat[name] = list(value) if isinstance(value, tuple) else value
    return flat


def build(values: Mapping[str, Any], base: Config | None = None) -> Config:
    """A checked tree with ``values`` (flat names) put over ``base`` (the defaults where None).

    Raises:
        ConfigError: Unknown name, wrong type, out of range, or values that contradict each other. All that is
            wrong is listed, one line each.
        MissingDependencyError: The options of ``policy.name`` cannot be imported.
    """
    base = base or Config()
    problems: list[str] = []
    named = values.get("policy.name", base.policy.name)
    try:
        base = _with_policy(base, named)
    except ConfigError as error:
        # Whose options the others are is not known then.
        problems.append(str(error))
        values = {name: value for name, value in values.items() if not name.startswith("policy.")}
    known = entries(base.policy)
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        entry = known.get(name)
        if entry is None:
            problems.append(unknown(name, base.policy))
            continue
        try:
            section, leaf = name.split(".")
            changes.setdefault(section, {})[leaf] = convert(entry, value)
        except ConfigError as error:
            problems.append(str(error))
    sections = {name: dataclasses.replace(getattr(base, name), **change) for name, change in changes.items()}
    config = dataclasses.replace(base, **sections)
    problems.extend(contradictions(config))
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _with_policy(base: Config, name: Any) -> Config:
    """``base`` with the options of another policy at their defaults; what all policies have stays."""
    if name == base.policy.name or not isinstance(name, str):  # a wrong type is found with the others
        return base
    common = {leaf.name: getattr(base.policy, leaf.name) for leaf in dataclasses.fields(PolicyConfig)}
    return dataclasses.replace(base, policy=options_class(name)(**{**common, "name": name}))


def is_ros_own(name: str) -> bool:
    """Whether a parameter is one of every ROS node (:data:`ROS_OWN`), and so no option of the tree."""
    return name.startswith(ROS_OWN)


def unknown(name: str, policy: PolicyConfig) -> str:
    """Why a name is refused, and what was probably meant."""
    if is_ros_own(name):
        return (
            f"{name}: belongs to the ROS node, not to the tree of options; take it out of the file "
            f"(a node takes it as: --ros-args -p {name}:=...)"
        )
    section, _, leaf = name.rpartition(".")
    of = owner(leaf) if section == "policy" else None
    if of is not None:
        return f"{name}: an option of the policy '{of}', and policy.name is '{policy.name}'; leave it out"
    known = entries(policy)
    elsewhere = [other for other in known if other.split(".")[1] == leaf]  # a right leaf in a wrong section
    hint = did_you_mean(name, known, 0.4) or did_you_mean(name, elsewhere, 0.0)
    return f"{name}: no such parameter{hint or '; `vla-ros config` lists all names'}"


def convert(entry: Entry, value: Any) -> Any:
    """``value`` as the entry's type, checked against its range and choices.

    Integers are accepted where a float is meant (YAML writes ``5``), nothing else is converted.

    Raises:
        ConfigError: Naming the parameter, the value and the expectation.
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
    if type(item) is not kind:
        raise _wrong(entry, whole)
    low, high = entry.option.low, entry.option.high
    if kind in (int, float) and not math.isfinite(item):
        raise _wrong(entry, whole)
    if (low is not None and item < low) or (high is not None and item > high):
        raise _wrong(entry, whole)
    if entry.option.choices and item not in entry.option.choices:
        raise _wrong(entry, whole)
    return item


def _wrong(entry: Entry, value: Any) -> ConfigError:
    found = list(value) if isinstance(value, tuple) else value
    hint = did_you_mean(str(value), entry.option.choices or ())
    if not entry.is_list and entry.item_type is str and not isinstance(value, str):
        hint = "; to YAML this is no text: put it into quotes"
    return ConfigError(
        f"{entry.name}: found {found!r} ({type(value).__name__}), expected {entry.expectation}{hint}"
    )


def parse_assignment(text: str) -> tuple[str, Any]:
    """``name:=value`` as ROS's ``-p`` has it; the value is YAML.

    Raises:
        ConfigError: There is no ``:=`` or the value is no YAML.
    """
    name, separator, value = text.partition(":=")
    if not separator or not name:
        raise ConfigError(f"-p {text}: expected name:=value, for example -p policy.device:=cuda")
    try:
        return name, yaml.safe_load(value) if value else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"-p {text}: the value is not YAML ({error})") from None


class _Loader(yaml.SafeLoader):
    """YAML in which a key stands once: of two sections ``limits:`` the first would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str):
                if key in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"'{key}' stands here for the second time; put both into one",
                        problem_mark=key_node.start_mark,
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


def _parse(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_file(path: Path, node_name: str = "vla_policy") -> dict[str, Any]:
    """Flat values of a ROS parameter file; sections for ``/**`` and for this node are read, later ones win.

    ``node_name`` has the node's namespace (``/robot_1/vla_policy``) where it has one.

    Raises:
        ConfigError: The file is missing, is no YAML, says something twice, has no ``ros__parameters`` for this
            node, or has some for several nodes of its name.
    """
    try:
        document = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not a YAML file ({_where(error)})") from None
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path}: found {type(document).__name__}, expected '/**:' with 'ros__parameters:' below it"
        )
    flat: dict[str, Any] = {}
    wanted = _sections([str(key) for key in document], node_name, path)
    for key, section in document.items():
        if str(key) in wanted:
            if not isinstance(section, dict) or not isinstance(section.get("ros__parameters"), dict):
                raise ConfigError(f"{path}: '{key}' lacks 'ros__parameters:'")
            flat.update(_flat(section["ros__parameters"], ""))
    if not flat:
        raise ConfigError(
            f"{path}: found no parameters for '/**' or '{node_name}', only {list(document)}; a parameter file "
            "begins with '/**:' and 'ros__parameters:' below it, as `vla-ros config` prints"
        )
    return flat


def _sections(keys: Sequence[str], node_name: str, path: Path) -> set[str]:
    """Which sections of a file are for this node; another robot's limits must not be taken for this one's."""
    full = node_name.strip("/")
    own = full.split("/")[-1]
    namesakes = [key for key in keys if key.strip("/") != own and key.strip("/").endswith(f"/{own}")]
    if full != own:
        namesakes = [key for key in namesakes if key.strip("/") == full]
    if len(namesakes) > 1:
        raise ConfigError(
            f"{path}: has parameters for {', '.join(namesakes)}, and which of them this node is, it was not told; "
            "give it its namespace (--ros-args -r __ns:=/...) or a file of its own"
        )
    return {"/**", "/*", own, f"/{own}", *namesakes}


def _where(error: Exception) -> str:
    """What a parser found, in one line instead of the library's five."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error)
    hint = "; indent with spaces, YAML knows no tabs" if "\\t" in problem else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{hint}"


def _flat(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def load(
    files: Sequence[Path] = (),
    assignments: Sequence[str] = (),
    node_name: str = "vla_policy",
    base: Config | None = None,
) -> Config:
    """The tree from parameter files and then ``name:=value`` overrides; later ones win.

    A file or the command line that names another policy than what lies below it takes no options of that one.

    Raises:
        ConfigError: As :func:`build`, :func:`read_file` and :func:`parse_assignment`.
    """
    layers = [*(read_file(path, node_name) for path in files), dict(map(parse_assignment, assignments))]
    name = (base.policy if base else PolicyConfig).name
    values: dict[str, Any] = {}
    for layer in layers:
        below, name = name, layer.get("policy.name", name)
        if name != below:
            values = {key: value for key, value in values.items() if not _is_own(key, below)}
        values.update(layer)
    return build(values, base)


def _is_own(name: str, policy: str) -> bool:
    """Whether an option is the policy's own, and not one that all policies have."""
    section, _, leaf = name.partition(".")
    own = {field.name for field in dataclasses.fields(options_class(policy))}
    return section == "policy" and leaf in own - {field.name for field in dataclasses.fields(PolicyConfig)}


def to_yaml(config: Config, *, comments: bool = True) -> str:
    """The tree as a ROS parameter file, each line preceded by its description, unit and range."""
    lines = ["/**:", "  ros__parameters:"]
    section, known = "", entries(config.policy)
    for name, value in flatten(config).items():
        head, leaf = name.split(".")
        if head != section:
            section = head
            lines.append(f"    {head}:")
        entry = known[name]
        if comments:
            live = "; may change while running" if entry.option.live else ""
            lines.append(
                f"      # {entry.option.description}. {entry.expectation[0].upper()}{entry.expectation[1:]}{live}."
            )
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
        lines.append(f"      {leaf}: {text}")
    return "\n".join(lines) + "\n"
