"""The seam behind which every model family lives, and how one is found by name.

A third party adds a policy with the entry-point group ``vla_ros.policies``: the entry point names a class
whose constructor takes the :class:`~vla_ros.config.Config` and which satisfies :class:`Policy`. Its options are a
dataclass of its own, the attribute ``Options`` (:mod:`vla_ros.config.registry`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, TypeVar, runtime_checkable

from vla_ros.config import Config, PolicyConfig, registry
from vla_ros.errors import ConfigError
from vla_ros.types import ActionChunk, ActionSpec, Observation

T = TypeVar("T", bound=PolicyConfig)

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


@dataclass(frozen=True)
class LazyPolicy:
    """A policy whose options are known before its libraries are imported; what an entry point may name.

    Attributes:
        Options: Dataclass of its options.
        target: ``module:class`` of the policy.
    """

    Options: type[PolicyConfig]
    target: str

    def __call__(self, config: Config) -> Policy:
        """Import and make it."""
        module, _, name = self.target.partition(":")
        policy: Policy = getattr(import_module(module), name)(config)
        return policy


def create(config: Config) -> Policy:
    """Make (not load) the policy that ``config.policy.name`` names.

    Raises:
        ConfigError: No such policy is installed.
        MissingDependencyError: A library that the policy needs is not installed.
    """
    policy: Policy = registry.make(config.policy.name, config)
    return policy


def options_of(config: Config, kind: type[T]) -> T:
    """The section ``policy`` as the options of one policy.

    Raises:
        ConfigError: They are another policy's.
    """
    if not isinstance(config.policy, kind):
        raise ConfigError(f"policy.name: '{config.policy.name}' has other options than {kind.__name__}")
    return config.policy
