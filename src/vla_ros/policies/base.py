"""The seam behind which every model family lives, and how one is found by name.

A third party adds a policy with the entry-point group ``vla_ros.policies``: the entry point names a class
that extends :class:`Policy` and whose constructor takes the :class:`~vla_ros.config.Config`. Its options are a
dataclass of its own, the attribute ``Options`` (:mod:`vla_ros.config.registry`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeVar

from vla_ros.config import Config, PolicyConfig, registry
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.types import ActionChunk, ActionSpec, FloatArray, Observation

T = TypeVar("T", bound=PolicyConfig)

Progress = Callable[[float, str], None]
"""Told how far loading has come: a fraction in [0, 1] and a few words."""


def no_progress(fraction: float, message: str) -> None:
    """Ignore progress; the default of :meth:`Policy.load`."""


class Session:
    """What a policy keeps of one robot from one observation to the next; this one keeps nothing.

    Policies extend it with previous tokens or chunks, an encoded instruction, history, a noise seed.
    """

    def reset(self) -> None:
        """Forget what depends on past observations: a new episode or another instruction."""

    def close(self) -> None:
        """Free what the session holds, such as a connection."""


class Policy(ABC):
    """A model that answers observations with chunks of actions: loaded once, asked by any number of robots.

    All methods are called from one thread.

    Attributes:
        Options: Dataclass of the section ``policy`` of the tree.
        spec: What it expects and returns. Valid after :meth:`load`.
    """

    Options: ClassVar[type[PolicyConfig]] = PolicyConfig
    spec: ActionSpec

    def load(self, progress: Progress = no_progress) -> None:
        """Read weights, warm up, test itself. May take minutes; called once, before the first inference.

        Raises:
            VlaRosError: With what is missing or wrong, and what to do about it.
        """
        progress(1.0, f"{type(self).__name__}: nothing to load")

    def start_session(self) -> Session:
        """What belongs to one robot, as it is at the start of an episode. Called after :meth:`load`."""
        return Session()

    @abstractmethod
    def infer(self, session: Any, observation: Observation) -> ActionChunk:
        """Answer one observation of the robot to which ``session`` (of :meth:`start_session`) belongs.

        Raises:
            VlaRosError: It cannot be answered; the session is as it was.
        """

    def infer_batch(self, requests: Sequence[tuple[Any, Observation]]) -> list[ActionChunk | VlaRosError]:
        """Answer observations of several robots; what is wrong with one keeps no other from its answer.

        Args:
            requests: Session and observation, each session once.

        Returns:
            A chunk, or why there is none, for each request.
        """
        return [_tried(self, *request) for request in requests]

    def configure(self, options: PolicyConfig) -> None:  # noqa: B027 (most policies have none)
        """Take own options that may change while running (``Option.live``)."""

    def other_statistics(self, normalized: FloatArray) -> Mapping[str, FloatArray]:
        """What normalised actions [..., D] would mean with each other data set of the checkpoint, by its name.

        For the diagnosis of a wrong choice; empty where there is none.
        """
        return {}

    def close(self) -> None:  # noqa: B027 (nor memory of their own)
        """Free the memory that :meth:`load` took; the policy can be loaded again."""


def _tried(policy: Policy, session: Any, observation: Observation) -> ActionChunk | VlaRosError:
    try:
        return policy.infer(session, observation)
    except VlaRosError as error:
        return error


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
