"""Finds parameter files and reads them as flat values."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vla_ros.errors import ConfigError, did_you_mean

_MOST_BYTES, _MOST_VALUES, _DEEPEST = 1 << 20, 10_000, 16  # aliases can make a small YAML file expand without end


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
    known = sorted({path.stem for folder in folders for path in folder.rglob("*.yaml")})
    expected = f"a file or one of {', '.join(known)}" if known else "a file (the package's own are missing)"
    found = "a folder" if Path(name).expanduser().is_dir() else "no such file"
    raise ConfigError(f"config '{name}': {found}; expected {expected}")


@cache
def preset_values(name: str) -> Mapping[str, Any]:
    """Return the values of a preset by flat name."""
    known = {path.stem: path for path in (Path(__file__).parent / "presets").glob("*.yaml")}
    if name not in known:
        expected = ", ".join(sorted(known))
        raise ConfigError(f"preset: found '{name}', expected one of {expected}{did_you_mean(name, known)}")
    return read_file(known[name])


class _Loader(yaml.SafeLoader):
    """Rejects repeated keys; PyYAML would silently drop the first of two ``limits:`` sections."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str):
                if key in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"'{key}' appears here for the second time; merge the two",
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


def read_bytes(path: Path, most: int = _MOST_BYTES) -> bytes:
    """Return a file's content; raises OSError if it exceeds ``most`` bytes, as ``/dev/zero`` does."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB")
    return content


def read_file(path: Path, node_name: str = "vla_policy") -> dict[str, Any]:
    """Return a ROS parameter file's values for a node by flat name; later sections override earlier ones.

    ``node_name`` includes the node's namespace, if any (``/robot_1/vla_policy``). Raises ConfigError if the file is
    not YAML, repeats a key, has no ``ros__parameters`` for ``/**`` or this node, or has sections for several nodes
    of this name.
    """
    try:
        document = _parse(read_bytes(path).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
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
            for name, value in _flat(section["ros__parameters"], ""):
                flat[name] = value
                if len(flat) > _MOST_VALUES or name.count(".") >= _DEEPEST:
                    raise ConfigError(f"{path}: found too many values or levels; does an alias contain itself?")
    if not flat:
        raise ConfigError(
            f"{path}: found no parameters for '/**' or '{node_name}', only {list(document)}; a parameter file "
            "begins with '/**:' and 'ros__parameters:' below it, as `vla-ros config` prints"
        )
    return flat


def _sections(keys: Sequence[str], node_name: str, path: Path) -> set[str]:
    """Return the keys of the sections that apply to a node; sections for another robot's node do not."""
    full = node_name.strip("/")
    own = full.split("/")[-1]
    namesakes = [key for key in keys if key.strip("/") != own and key.strip("/").endswith(f"/{own}")]
    if full != own:
        namesakes = [key for key in namesakes if key.strip("/") == full]
    if len(namesakes) > 1:
        raise ConfigError(
            f"{path}: has parameters for {', '.join(namesakes)}, but this node's namespace is unknown; "
            "set it (--ros-args -r __ns:=/...) or use a separate file"
        )
    return {"/**", "/*", own, f"/{own}", *namesakes}


def _where(error: Exception) -> str:
    """Return the parser's message and the position of the error on one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error)
    hint = "; indent with spaces, YAML does not allow tabs" if "\\t" in problem else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{hint}"


def _flat(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and prefix.count(".") < _DEEPEST:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
