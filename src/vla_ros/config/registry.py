"""Finds policies by name through an entry-point group, and the options that they declare.

An entry point names a callable, such as the policy's class, that takes the :class:`~vla_ros.config.Config` and
returns the policy. The callable may have two attributes: ``Options``, a dataclass that extends
:class:`~vla_ros.config.options.PolicyConfig`, declares further options; ``claims`` tells whether the policy can run
a checkpoint (:meth:`vla_ros.policies.base.Policy.claims`).
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from vla_ros.config.options import AUTO, AutoOptions, PolicyConfig
from vla_ros.errors import ConfigError, MissingDependencyError, did_you_mean, install

_GROUP = "vla_ros.policies"


def available() -> tuple[str, ...]:
    return tuple(sorted(_points(*sys.path)))


def make_policy(name: str, config: Any) -> Any:
    """Create the policy of that name without loading it; raises the errors of :func:`options_class`."""
    point = _find(name)
    with _explained(point):
        return point.load()(config)


@cache
def options_class(name: str) -> type[PolicyConfig]:
    """Return the dataclass of a policy's options.

    Raises:
        ConfigError: No such policy is installed, or its ``Options`` do not extend :class:`PolicyConfig`.
        MissingDependencyError: The module that declares them cannot be imported.
    """
    if name == AUTO:
        return AutoOptions
    point = _find(name)
    with _explained(point):
        options = getattr(point.load(), "Options", PolicyConfig)
    if not (isinstance(options, type) and issubclass(options, PolicyConfig)):
        raise ConfigError(
            f"policy.name: '{name}' ({point.value}) declares Options {options!r}, expected a dataclass that "
            "extends vla_ros.config.PolicyConfig"
        )
    return options


def module_of(name: str) -> str:
    """Return the module of a policy's entry point, without importing it; raises ConfigError if there is none."""
    return _find(name).module


def owners(leaf: str) -> list[str]:
    """Return the policies that have the option ``policy.leaf``."""
    return [name for name in available() if leaf in _own(name)]


def _own(name: str) -> frozenset[str]:
    try:
        options = options_class(name)
    except (ConfigError, MissingDependencyError):  # a broken policy declares nothing
        return frozenset()
    return frozenset(options.__dataclass_fields__)


def claims(name: str, config: Mapping[str, Any]) -> int:
    """Return how well a policy fits a checkpoint with this ``config.json``; -1 if the policy does not say."""
    point = _find(name)
    try:
        with _explained(point):
            asked = getattr(point.load(), "claims", None)
    except MissingDependencyError:  # without its library, the policy cannot run the checkpoint
        return 0
    return int(asked(config)) if asked else -1


def refined(name: str, folder: Path) -> str:
    """Return the policy that runs a folder which ``name`` claims: another if its other files say so."""
    refine = getattr(_find(name).load(), "refine", None)
    return str(refine(folder)) if refine else name


@cache
def _points(*path: str) -> Mapping[str, EntryPoint]:
    """Return the entry points by their names; the search reads a file of every package on ``path``."""
    return {point.name: point for point in reversed(list(entry_points(group=_GROUP)))}


def _find(name: str) -> EntryPoint:
    if point := _points(*sys.path).get(name):
        return point
    hint = did_you_mean(name, (AUTO, *available()))
    raise ConfigError(f"policy.name: found '{name}', expected auto or one of {', '.join(available())}{hint}")


@contextmanager
def _explained(point: EntryPoint) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        package = point.dist.name if point.dist else point.module
        extras = (point.dist.metadata.get_all("Provides-Extra") if point.dist else None) or ()
        known = point.name in extras
        needed = f"{package}[{point.name}]" if known else package
        command = install(point.name) if known and package == "vla_ros" else f"pip install '{needed}'"
        raise MissingDependencyError(
            f"policy.name: '{point.name}' needs a library that cannot be imported ({error}); "
            f"install it with: {command}"
        ) from error
