"""Finds policies by name through an entry-point group, and the options that they declare.

An entry point names a callable, such as the policy's class, that takes the :class:`~vla_ros.config.Config` and
returns the policy. The callable may have two attributes: ``Options``, a dataclass that extends
:class:`~vla_ros.config.options.PolicyConfig`, declares further options; ``claims`` tells whether the policy can run
a checkpoint (:meth:`vla_ros.policies.base.Policy.claims`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vla_ros.config.options import PolicyConfig
from vla_ros.errors import ConfigError, MissingDependencyError, did_you_mean

_GROUP = "vla_ros.policies"


def available() -> tuple[str, ...]:
    return tuple(sorted({point.name for point in entry_points(group=_GROUP)}))


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
    point = _find(name)
    with _explained(point):
        options = getattr(point.load(), "Options", PolicyConfig)
    if not (isinstance(options, type) and issubclass(options, PolicyConfig)):
        raise ConfigError(
            f"policy.name: '{name}' ({point.value}) declares Options {options!r}, expected a dataclass that "
            "extends vla_ros.config.PolicyConfig"
        )
    return options


def owner(leaf: str) -> str | None:
    owners = [name for name in available() if leaf in _own(name)]
    return max(owners, key=lambda name: name == PolicyConfig.name, default=None)


def _own(name: str) -> frozenset[str]:
    try:
        options = options_class(name)
    except (ConfigError, MissingDependencyError):  # a broken policy declares nothing
        return frozenset()
    return frozenset(options.__dataclass_fields__)


def claimant(config: Mapping[str, Any]) -> str:
    """Return the policy with the highest claim to a checkpoint with this ``config.json``, by default openvla."""
    claims = {name: _claim(name, config) for name in available()}
    best = max(claims, key=lambda name: claims[name])
    return best if claims[best] else PolicyConfig.name


def _claim(name: str, config: Mapping[str, Any]) -> int:
    point = _find(name)
    try:
        with _explained(point):
            claims = getattr(point.load(), "claims", None)
    except MissingDependencyError:  # without its library, the policy cannot run the checkpoint
        return 0
    return int(claims(config)) if claims else 0


def _find(name: str) -> EntryPoint:
    for point in entry_points(group=_GROUP):
        if point.name == name:
            return point
    hint = did_you_mean(name, available())
    raise ConfigError(f"policy.name: found '{name}', expected one of {', '.join(available())}{hint}")


@contextmanager
def _explained(point: EntryPoint) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        package = point.dist.name if point.dist else point.module
        extras = (point.dist.metadata.get_all("Provides-Extra") if point.dist else None) or ()
        needed = f"{package}[{point.name}]" if point.name in extras else package
        raise MissingDependencyError(
            f"policy.name: '{point.name}' needs a library that cannot be imported ({error}); "
            f"install it with: pip install '{needed}'"
        ) from error
