"""The seam behind which every model family lives, and how one is found by name.

A third party adds a policy with the entry-point group ``vla_ros.policies``: the entry point names a class
whose constructor takes the :class:`~vla_ros.config.Config` and which satisfies :class:`Policy`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vla_ros.errors import ConfigError, MissingDependencyError
from vla_ros.types import ActionChunk, ActionSpec, Observation

if TYPE_CHECKING:
    from vla_ros.config import Config

GROUP = "vla_ros.policies"

Progress = Callable[[float, str], None]
"""Told how far loading has come: a fraction in [0, 1] and a few words."""


def no_progress(fraction: float, message: str) -> None:
    """Ignore progress; the default of :meth:`Policy.load`."""


@runtime_checkable
class Policy(Protocol):
    """A model that answers an observation with a chunk of actions."""

    @property
    def spec(self) -> ActionSpec:
        """What it expects and returns. Valid after :meth:`load`."""

    def load(self, progress: Progress = no_progress) -> None:
        """Read weights, warm up, test itself. May take minutes; called once, before the first inference.

        Raises:
            VlaRosError: With what is missing or wrong, and what to do about it.
        """

    def infer(self, observation: Observation) -> ActionChunk:
        """Answer one observation. Called from one thread only."""

    def reset(self) -> None:
        """Forget everything that depends on past observations (new episode, new instruction)."""

    def close(self) -> None:
        """Free the memory that :meth:`load` took; the policy can be loaded again."""


def available() -> tuple[str, ...]:
    """Names of the policies that are installed, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def create(config: Config) -> Policy:
    """Make (not load) the policy that ``config.policy.name`` names.

    Raises:
        ConfigError: No such policy is installed.
        MissingDependencyError: A library that the policy needs is not installed.
    """
    name = config.policy.name
    for point in entry_points(group=GROUP):
        if point.name == name:
            policy: Policy = _load(point)(config)
            return policy
    near = difflib.get_close_matches(name, available(), n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise ConfigError(f"policy.name: no policy '{name}' is installed; there are {list(available())}{hint}")


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ImportError as error:
        package = point.dist.name if point.dist else point.module
        extras = (point.dist.metadata.get_all("Provides-Extra") if point.dist else None) or ()
        needed = f"{package}[{point.name}]" if point.name in extras else package
        raise MissingDependencyError(
            f"policy.name: '{point.name}' needs a library that does not import ({error}); "
            f"install it with: pip install '{needed}'"
        ) from error
