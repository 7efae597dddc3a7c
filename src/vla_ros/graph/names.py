"""Names on the ROS 2 graph: validation, expansion of relative names, remaps and parameters of ``--ros-args``.

Follows "Topic and Service name mapping to DDS" of design.ros2.org, and rcl of Jazzy for ``--ros-args``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vla_ros.config.files import Sections, parse_yaml, read_sections, values_of
from vla_ros.errors import ConfigError, did_you_mean

_WORD = r"[A-Za-z_]\w*"
_TOKEN = re.compile(_WORD, re.ASCII)
_NODE_KEYS = ("__node", "__name")
_REMAP = re.compile(
    rf"(?:(?P<node>{_WORD}):)?(?P<source>__ns|__node|__name|(?:ros(?P<kind>topic|service)://)?(?P<name>~?/?{_WORD}"
    rf"(?:/{_WORD})*)):=(?P<target>/|~?/?{_WORD}(?:/{_WORD})*)",
    re.ASCII,
)
_PARAMETER = re.compile(
    rf"(?:(?P<node>{_WORD}):)?(?P<name>[\w/]+(?:\.[\w/]+)*):=(?P<value>.+)", re.ASCII | re.DOTALL
)
_FLAGS = ("-r", "--remap", "-p", "--param", "--params-file")
_IGNORED = ("--log-level", "--log-config-file", "--log-file-name", "-e", "--enclave")  # each has a value
_SWITCHES = tuple(
    f"--{do}-{what}-logs" for do in ("enable", "disable") for what in ("rosout", "stdout", "external-lib")
)


def rcl_reach(variables: Mapping[str, str]) -> str:
    """Return how far rcl discovers other nodes with these environment variables, and why.

    ``ROS_AUTOMATIC_DISCOVERY_RANGE`` exists since Iron.
    """
    if variables.get("ROS_LOCALHOST_ONLY") == "1":
        return "LOCALHOST (ROS_LOCALHOST_ONLY)"
    value = variables.get("ROS_AUTOMATIC_DISCOVERY_RANGE", "")
    if value and variables.get("ROS_DISTRO") == "humble":
        return f"SUBNET (Humble ignores ROS_AUTOMATIC_DISCOVERY_RANGE={value}; it has ROS_LOCALHOST_ONLY=1)"
    return value or "SUBNET (default)"


def check_node_name(name: str) -> str:
    if not _TOKEN.fullmatch(name):
        raise ConfigError(
            f"node name '{name}' is not valid; use letters, digits and underscores, no digit first (and no '/': "
            "the namespace is given separately, with -r __ns:=/name)"
        )
    return name


def check_absolute(name: str, kind: str = "topic") -> str:
    wrong = ""
    if not name.startswith("/"):
        wrong = "it does not start with '/'"
    elif name == "/" and kind == "namespace":
        return name
    elif name.endswith("/"):
        wrong = "it ends with '/'"
    elif "//" in name:
        wrong = "it has '//'"
    else:
        for token in name[1:].split("/"):
            if not _TOKEN.fullmatch(token):
                wrong = f"'{token}' must consist of letters, digits and underscores and not begin with a digit"
    if wrong:
        raise ConfigError(f"{kind} name '{name}' is not valid: {wrong}")
    return name


def expand_name(name: str, node: str, namespace: str, kind: str = "topic") -> str:
    """Return the fully qualified form of ``name``: ``~`` is the node, other names are relative to ``namespace``."""
    base = "" if namespace == "/" else namespace
    full = name.replace("{node}", node).replace("{ns}", base).replace("{namespace}", base)
    if full == "~" or full.startswith("~/"):
        full = f"{base}/{node}{full[1:]}"
    elif not full.startswith("/"):
        if not full:
            raise ConfigError(f"a {kind} name is empty; give one such as '/camera/image_raw'")
        full = f"{base}/{full}"
    return check_absolute(full, kind)


@dataclass(frozen=True)
class Rule:
    """One remap ``[node:][rostopic://|rosservice://]source:=target``."""

    source: str
    target: str
    node: str | None = None
    kind: str | None = None

    def meets(self, node: str, kind: str) -> bool:
        return self.node in (None, node) and self.kind in (None, kind)


@dataclass(frozen=True)
class RosArguments:
    """Remaps and parameters of ``--ros-args``."""

    rules: tuple[Rule, ...] = ()
    parameters: tuple[Path | Sections, ...] = ()
    """Files of ``--params-file``, and the section of each ``-p [node:]name:=value``, in the order given."""

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(given for given in self.parameters if isinstance(given, Path))

    def values(self, node: str) -> dict[str, Any]:
        """Return the parameters of the node with this full name.

        As in rcl, ``-p name:=value`` belongs to the section ``/**`` and ``-p node:name:=value`` to ``node``, and
        all files share their sections: a section's place is where its key first appeared. Raises ConfigError for
        a file that cannot be read.
        """
        merged: Sections = {}
        for given in self.parameters:
            for key, values in (read_sections(given) if isinstance(given, Path) else given).items():
                merged.setdefault(key, {}).update(values)
        return values_of(merged, node)

    def node_name(self, name: str) -> str:
        """Return the name of a node after remapping (``-r __node:=``)."""
        return self._special(_NODE_KEYS, name) or name

    def namespace(self, namespace: str, name: str) -> str:
        """Return the namespace of the node created as ``name``, after remapping (``-r __ns:=``)."""
        return self._special(("__ns",), self.node_name(name)) or namespace

    def full_name(self, name: str) -> str:
        """Return the full name of the node created as ``name`` without a namespace."""
        return f"{self.namespace('/', name).rstrip('/')}/{self.node_name(name)}"

    def _special(self, keys: Sequence[str], node: str) -> str:
        return next((rule.target for rule in self.rules if rule.source in keys and rule.node in (None, node)), "")

    def resolve(self, name: str, node: str, namespace: str, kind: str = "topic") -> str:
        """Return the full name of a topic or service of a node, remapped by the first rule that matches."""
        full = expand_name(name, node, namespace, kind)
        for rule in self.rules:
            if rule.source.startswith("__") or not rule.meets(node, kind):
                continue
            if expand_name(rule.source, node, namespace, kind) == full:
                return expand_name(rule.target, node, namespace, kind)
        return full


def _rule(text: str) -> Rule:
    match = _REMAP.fullmatch(text)
    if match is None:
        hint = "; ROS 2 has no wildcards in remaps" if "*" in text else ""
        raise ConfigError(f"remap '{text}' is not of the form [node:]from:=to{hint}")
    source, target = match["name"] or match["source"], match["target"]
    if source in _NODE_KEYS:
        check_node_name(target)
    if source == "__ns":
        check_absolute(target, "namespace")
    return Rule(source, target, match["node"], match["kind"])


def _parameter(text: str) -> Sections:
    match = _PARAMETER.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"parameter '{text}' is not of the form [node:]name:=value; the node is a name without namespace"
        )
    try:
        return {match["node"] or "/**": {match["name"]: parse_yaml(match["value"])}}
    except yaml.YAMLError as error:
        raise ConfigError(f"parameter '{text}': the value is not YAML ({error})") from None


def _ros_sections(args: Sequence[str]) -> Iterator[str]:
    inside = False
    for argument in args:
        if argument == "--ros-args":
            inside = True
        elif argument == "--":
            inside = False
        elif inside:
            yield argument


def parse_ros_arguments(args: Sequence[str]) -> RosArguments:
    """Return remaps and parameters between ``--ros-args`` and ``--``.

    Logging and security flags are ignored; raises ConfigError for what rcl does not know either.
    """
    rules: list[Rule] = []
    parameters: list[Path | Sections] = []
    rest = _ros_sections(args)
    for flag in rest:
        if flag in _SWITCHES:
            continue
        if flag not in (*_FLAGS, *_IGNORED):
            raise ConfigError(f"--ros-args: found '{flag}'{did_you_mean(flag, (*_FLAGS, *_IGNORED, *_SWITCHES))}")
        text = next(rest, None)
        if text is None:
            raise ConfigError(f"{flag} needs {'a file' if 'file' in flag else 'an argument such as name:=value'}")
        if flag in ("-r", "--remap"):
            rules.append(_rule(text))
        elif flag in ("-p", "--param"):
            parameters.append(_parameter(text))
        elif flag == "--params-file":
            parameters.append(Path(text))
    return RosArguments(tuple(rules), tuple(parameters))
