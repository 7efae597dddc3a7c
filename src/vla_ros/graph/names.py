"""Names on the ROS 2 graph: validation, expansion of relative names, and remaps.

Follows "Topic and Service name mapping to DDS" and "Static Remapping via Command Line" of design.ros2.org.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vla_ros.errors import ConfigError

_TOKEN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NODE_KEYS = ("__node", "__name")


def check_node_name(name: str) -> str:
    """Check a node name and return it."""
    if not _TOKEN.fullmatch(name):
        raise ConfigError(
            f"node name '{name}' is not valid; use letters, digits and underscores, no digit first (and no '/': "
            "the namespace is given separately, with -r __ns:=/name)"
        )
    return name


def check_absolute(name: str, kind: str = "topic") -> str:
    """Check a fully qualified name and return it."""
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


def expand(name: str, node: str, namespace: str, kind: str = "topic") -> str:
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
        """Return whether the rule applies to this node and kind of name (``topic`` or ``service``)."""
        return self.node in (None, node) and self.kind in (None, kind)


@dataclass(frozen=True)
class RosArguments:
    """Remaps and parameters of ``--ros-args``."""

    rules: tuple[Rule, ...] = ()
    parameters: dict[str, str] = field(default_factory=dict)
    """Values of ``-p name:=value`` as text; the embedded participant uses only ``use_sim_time``."""
    files: tuple[str, ...] = ()
    """Parameter files (``--params-file``), in the order given; this module does not read them."""

    def node_name(self, name: str) -> str:
        """Return the name of a node after remapping (``-r __node:=``)."""
        return self._special(_NODE_KEYS, name) or name

    def namespace(self, namespace: str, name: str) -> str:
        """Return the namespace of the node created as ``name``, after remapping (``-r __ns:=``)."""
        return self._special(("__ns",), name) or namespace

    def _special(self, keys: Sequence[str], node: str) -> str:
        return next((rule.target for rule in self.rules if rule.source in keys and rule.node in (None, node)), "")

    def resolve(self, name: str, node: str, namespace: str, kind: str = "topic") -> str:
        """Return the full name of a topic or service of a node, remapped by the first rule that matches."""
        full = expand(name, node, namespace, kind)
        for rule in self.rules:
            if rule.source.startswith("__") or not rule.meets(node, kind):
                continue
            if expand(rule.source, node, namespace, kind) == full:
                return expand(rule.target, node, namespace, kind)
        return full

    def flag(self, name: str) -> bool:
        """Return whether ``-p name:=true`` was given."""
        return self.parameters.get(name, "false").strip().lower() == "true"


def _rule(text: str) -> Rule:
    source, separator, target = text.partition(":=")
    if not separator or not source or not target:
        raise ConfigError(f"remap '{text}' is not of the form from:=to")
    scheme = re.match(r"(?:(?P<node>[A-Za-z_]\w*):(?!//))?(?:ros(?P<kind>topic|service)://)?(?P<name>.+)", source)
    assert scheme is not None
    node, kind, source = scheme["node"], scheme["kind"], scheme["name"]
    target = re.sub(r"^ros(topic|service)://", "", target)
    if source in _NODE_KEYS:
        check_node_name(target)
    if source == "__ns":
        check_absolute(target, "namespace")
    return Rule(source, target, node, kind)


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
    """Return remaps and parameters between ``--ros-args`` and ``--``; other ROS flags are accepted and ignored."""
    rules = []
    parameters = {}
    files = []
    rest = _ros_sections(args)
    for flag in rest:
        if flag == "--params-file":
            file = next(rest, None)
            if file is None:
                raise ConfigError("--params-file needs the path of a parameter file")
            files.append(file)
        elif flag in ("-r", "--remap", "-p", "--param"):
            text = next(rest, None)
            if text is None:
                raise ConfigError(f"{flag} needs an argument of the form name:=value")
            if flag in ("-r", "--remap"):
                rules.append(_rule(text))
            else:
                name, separator, value = text.partition(":=")
                if not separator or not name:
                    raise ConfigError(f"parameter '{text}' is not of the form name:=value")
                parameters[name.rpartition(":")[2]] = value
    return RosArguments(tuple(rules), parameters, tuple(files))
