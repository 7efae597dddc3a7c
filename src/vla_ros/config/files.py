"""Finds parameter files and reads them as flat values, by the rules of ROS 2's own parser (rcl and rclpy, Jazzy).

The key of a section names nodes. ``*`` is one level of a node's full name, ``**`` any number of levels;
``robot_1/vla_policy`` stands for ``/robot_1/vla_policy``, and keys may be nested. Every section that matches a
node's full name applies, in the order in which the keys first appear, so the last one wins.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vla_ros.errors import ConfigError, did_you_mean
from vla_ros.files import read_bytes

Sections = dict[str, dict[str, Any]]
"""The values of each section, by flat name."""

_MOST_BYTES, _DEEPEST = 1 << 20, 16
_VALUES = "ros__parameters"
_LEVEL = re.compile(r"[A-Za-z_]\w*|\*\*?", re.ASCII)
_TRUE, _FALSE = (
    {form for word in words for form in (word, word.capitalize(), word.upper())}
    for words in (("y", "yes", "true", "on"), ("n", "no", "false", "off"))
)
_SCALARS = {
    "null": re.compile(r"~?|null|Null|NULL"),
    "int": re.compile(r"[-+]?(0x[0-9a-f]+|0[0-7]*|[1-9]\d*)", re.ASCII | re.IGNORECASE),
    "float": re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?\.?inf|\.?nan", re.ASCII | re.IGNORECASE),
}


def config_file(name: str) -> Path:
    """Return the parameter file at the path ``name``, or the package's file of that name (``demo``, ``ur5e``).

    The package's files are in the source tree, or where pip or colcon installed them; their relative paths
    (``config/robots/ur5e.yaml``) work from any folder. Raises ConfigError, which lists their names, if there is no
    such file.
    """
    here = Path(__file__).resolve()
    folders = [here.parents[3] / "config", *(prefix / "share" / "vla_ros" / "config" for prefix in here.parents)]
    paths = [folder / where for folder in folders for where in (f"{name}.yaml", f"robots/{name}.yaml")]
    if name.startswith("config/"):
        paths += [folder.parent / name for folder in folders]
    for path in (Path(name).expanduser(), *paths):
        if path.is_file():
            return path
    names = sorted({path.stem for folder in folders for path in folder.rglob("*.yaml")})
    expected = f"a file or one of {', '.join(names)}" if names else "a file (the package's own are missing)"
    found = "a folder" if Path(name).expanduser().is_dir() else "no such file"
    raise ConfigError(f"config '{name}': {found}; expected {expected}")


@cache
def preset_values(name: str) -> Mapping[str, Any]:
    presets = {path.stem: path for path in (Path(__file__).parent / "presets").glob("*.yaml")}
    if name not in presets:
        expected = ", ".join(sorted(presets))
        raise ConfigError(f"preset: found '{name}', expected one of {expected}{did_you_mean(name, presets)}")
    return read_file(presets[name])


class _Scalars:
    """Tells numbers and truth from text as rcl does: ``1e-3`` is a number, ``y`` is true, ``1_000`` is text."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is not yaml.ScalarNode:
            return f"tag:yaml.org,2002:{'map' if kind is yaml.MappingNode else 'seq'}"
        if not implicit[0]:
            return "tag:yaml.org,2002:str"
        if value in _TRUE or value in _FALSE:
            return "tag:yaml.org,2002:bool"
        return "tag:yaml.org,2002:" + next((tag for tag, form in _SCALARS.items() if form.fullmatch(value)), "str")


class _Dumper(_Scalars, yaml.SafeDumper):
    """Quotes text that rcl would not read as text."""


class _Loader(_Scalars, yaml.SafeLoader):
    """Reads keys as text. Refuses repeated keys, of which PyYAML drops the first, and aliases, as rcl does."""

    def construct_yaml_bool(self, node: yaml.ScalarNode) -> bool:
        return node.value in _TRUE

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be one word", problem_mark=key.start_mark)
            if key.value in values:
                raise yaml.MarkedYAMLError(
                    problem=f"'{key.value}' appears here for the second time; merge the two",
                    problem_mark=key.start_mark,
                )
            values[key.value] = self.construct_object(value, deep=deep)
        return values

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem=f"'*{event.anchor}' is an alias, which ROS 2 does not read; write the value itself",
                problem_mark=event.start_mark,
            )
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.SequenceNode):  # rcl ignores its tag; launch writes lists as !!python/tuple
            node.tag = "tag:yaml.org,2002:seq"
        return node


_Loader.add_constructor("tag:yaml.org,2002:bool", _Loader.construct_yaml_bool)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, as rcl reads it; raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def dump_yaml(value: Any) -> str:
    """Return a value as YAML, one line unless it has line breaks; :func:`parse_yaml` and rcl read it back."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def parameter_file(header: Sequence[str], sections: Mapping[str, Sequence[str]]) -> str:
    """Return a parameter file for any node; ``header`` becomes comments, ``sections`` have their lines."""
    lines = [*(f"# {line}" for line in header), "/**:", "  ros__parameters:"]
    for name, body in sections.items():
        lines += [f"    {name}:", *(f"      {line}" for line in body)] if body else []
    return "\n".join(lines) + "\n"


def read_sections(path: Path) -> Sections:
    """Return the sections of a ROS parameter file, in its order.

    Raises ConfigError if the file is not YAML, repeats a key, or has a key that names no node.
    """
    try:
        document = parse_yaml(read_bytes(path).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not a YAML file ({_where(error)})") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: found {type(document).__name__}, expected '/**:' with '{_VALUES}:' below it")
    sections: Sections = {}
    try:
        for key, values in _nested(document, ""):
            sections.setdefault(key, {}).update(_flat(values, ""))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return sections


def _nested(tree: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if (
        not isinstance(tree, dict)
        or not tree
        or (_VALUES in tree and (len(tree) > 1 or not isinstance(tree[_VALUES], dict)))
    ):
        raise ConfigError(f"'{key}' lacks '{_VALUES}:' with names and values below it, and nothing beside it")
    for name, below in tree.items():
        if name != _VALUES:
            yield from _nested(below, f"{key}/{name}" if key and not key.endswith("/") else key + name)
            continue
        for level in key.removeprefix("/").split("/"):
            if not _LEVEL.fullmatch(level):
                raise ConfigError(
                    f"'{key}' names no node: found '{level}' between slashes, expected letters, digits and "
                    "underscores, '*' for any one level or '**' for any number of levels"
                )
        yield key, below


def matches(key: str, node: str) -> bool:
    """Return whether the section ``key`` applies to the node with this full name (``/robot_1/vla_policy``)."""
    pattern = f"/{key.removeprefix('/')}".replace("/*", r"(/\w+)")  # and so "/**" becomes "(/\w+)*"
    return re.fullmatch(pattern, node, re.ASCII) is not None


def values_of(sections: Sections, node: str) -> dict[str, Any]:
    """Return the values for the node with this full name; later sections override earlier ones."""
    return {name: value for key, values in sections.items() if matches(key, node) for name, value in values.items()}


def read_file(path: Path, node: str = "vla_policy") -> dict[str, Any]:
    """Return a ROS parameter file's values for a node by flat name.

    ``node`` is the node's full name (``/robot_1/vla_policy``). Without a slash, the namespace is unknown: it is the
    one that the file names, if any. Raises ConfigError as :func:`read_sections` does, if no section applies, or if
    sections name several namespaces for a node whose namespace is unknown.
    """
    sections = read_sections(path)
    if not node.startswith("/"):
        node = _full_name(sections, node, path)
    if not any(matches(key, node) for key in sections):
        raise ConfigError(
            f"{path}: found no parameters for '{node}', only {list(sections)}; begin the file with '/**:' and "
            f"'{_VALUES}:' below it, as `vla-ros config` prints, or start the node in the file's namespace "
            "(--ros-args -r __ns:=/...)"
        )
    return values_of(sections, node)


def _full_name(sections: Sections, name: str, path: Path) -> str:
    names = set()
    for key in sections:
        *space, last = key.strip("/").split("/")
        if space and last in (name, "*", "**") and "*" not in "".join(space):
            names.add("/".join(["", *space, name]))
    if len(names) > 1:
        raise ConfigError(
            f"{path}: has parameters for {', '.join(sorted(names))}, but this node's namespace is unknown; "
            "set it (--ros-args -r __ns:=/...) or use a separate file"
        )
    return names.pop() if names else f"/{name}"


def _where(error: Exception) -> str:
    """Return the parser's message and the position of the error on one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error)
    hint = "; indent with spaces, YAML does not allow tabs" if "\\t" in problem else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{hint}"


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            if prefix.count(".") >= _DEEPEST:
                raise ConfigError(f"'{prefix}{key}' has too many levels")
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
