"""The interface of every policy, and the registry that finds policies by name.

A third party adds a policy through the entry-point group ``vla_ros.policies``. The entry point names a class
that extends :class:`Policy` and whose constructor takes the :class:`~vla_ros.config.Config`. Its class attribute
``Options`` is the dataclass of the policy's options (:mod:`vla_ros.config.registry`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from vla_ros.config import Config, PolicyConfig, registry
from vla_ros.config.checkpoints import SHIPPED, chosen, identify, no_checkpoint
from vla_ros.config.loading import assignment
from vla_ros.config.options import AUTO
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.types import ActionChunk, FloatArray, Observation, UInt8Array

T = TypeVar("T", bound=PolicyConfig)

Progress = Callable[[float, str], None]
"""Receives the progress of loading: a fraction in [0, 1] and a short description."""


def no_progress(fraction: float, message: str) -> None:
    """Ignore progress; the default of :meth:`Policy.load`."""


@dataclass(frozen=True)
class Lost:
    """The loss of the connection to a policy's server."""

    seconds: float  # since when
    why: str


class Session:
    """State of one robot between observations; empty in this base class.

    Subclasses add what their policy remembers, such as previous tokens, an encoded instruction or a noise seed.
    """

    def reset(self) -> None:
        """Discard all state from past observations when an episode or instruction begins."""

    @property
    def lost(self) -> Lost | None:
        """The loss of the server that this session needs, noticed during an inference or between two.

        None if the server is connected or none is needed. Any thread may ask.
        """
        return None

    def close(self) -> None:
        """Free the session's resources, such as a connection."""


class Policy(ABC):
    """Infers chunks of actions from observations; loaded once and shared by any number of robots.

    All methods are called from one thread.

    Attributes:
        Options: Dataclass of the configuration section ``policy``.
        spec: The policy's inputs and outputs. Valid after :meth:`load`.
    """

    Options: ClassVar[type[PolicyConfig]] = PolicyConfig
    spec: PolicySpec

    @staticmethod
    def claims(config: Mapping[str, Any]) -> int:
        """Return how well this policy fits a checkpoint, given the content of its ``config.json``.

        0 means that it cannot run the checkpoint, 1 that other policies may run this layout, too, 2 that only this
        policy runs it, and -1 that the policy does not say: it runs only if ``policy.name`` names it.
        """
        return -1

    def load(self, progress: Progress = no_progress) -> None:
        """Read weights, warm up and run the self-test; may take minutes.

        Called once, before the first inference.

        Raises:
            VlaRosError: The policy cannot be loaded; the message says what to do.
        """
        progress(1.0, f"{type(self).__name__}: nothing to load")

    def describe(self) -> PolicySpec:
        """Return the inputs and outputs without weights or a device, for ``vla-ros run --dry-run``.

        Raises VlaRosError if a file, such as the checkpoint's ``config.json``, is missing or invalid.
        """
        if not hasattr(self, "spec"):  # known only from the weights or the server
            raise VlaRosError(f"{type(self).__name__}: its inputs and outputs are unknown until it is loaded")
        return self.spec

    def describe_memory(self) -> str:
        """Return what the policy needs in each format and whether it fits, for ``vla-ros run --dry-run``."""
        return ""

    def start_session(self) -> Session:
        """Start a session for one robot at the beginning of an episode. Called after :meth:`load`."""
        return Session()

    @abstractmethod
    def infer(self, session: Any, observation: Observation) -> ActionChunk:
        """Infer a chunk from one observation; ``session`` is from :meth:`start_session`.

        Raises:
            VlaRosError: Inference failed; the session is unchanged.
        """

    def infer_batch(self, requests: Sequence[tuple[Any, Observation]]) -> list[ActionChunk | VlaRosError]:
        """Infer for several robots; return a chunk or an error for each request.

        Each session occurs at most once. An invalid request does not affect the others.
        """
        answers: list[ActionChunk | VlaRosError] = []
        for session, observation in requests:
            try:
                answers.append(self.infer(session, observation))
            except VlaRosError as error:  # noqa: PERF203 (an error affects only its own robot)
                answers.append(error)
        return answers

    def prepare(self, batch: int) -> bool:
        """Prepare for batches of this size; called after :meth:`load`, which prepares for one request.

        Returns False if the policy infers for one robot at a time. Raises OutOfMemoryError if there is not enough
        memory.
        """
        return type(self).infer_batch is not Policy.infer_batch

    def page_locked(self, size: int) -> UInt8Array | None:
        """Return ``size`` bytes from which the policy's device reads camera messages by itself, or None.

        Called after :meth:`load`, never on the thread that receives messages.
        """
        return None

    def configure(self, options: PolicyConfig) -> None:  # noqa: B027 (most policies have no live options)
        """Apply the policy's live options (``Option.live``); called between two inferences, on their thread.

        Raises ConfigError if they do not fit; the policy then holds until other options are accepted.
        """

    def other_statistics(self, normalized: FloatArray) -> Mapping[str, FloatArray]:
        """Return actions [..., D] un-normalised with every other dataset's statistics, keyed by dataset name.

        Used to diagnose a wrong ``policy.unnorm_key``; empty if the checkpoint has no other datasets.
        """
        return {}

    def close(self) -> None:  # noqa: B027 (some policies hold no memory)
        """Free the memory; the policy can be loaded again."""


@dataclass(frozen=True)
class LazyPolicy:
    """An entry-point target that declares a policy's options without importing its libraries."""

    Options: type[PolicyConfig]  # dataclass of the policy's options
    target: str  # ``module:class`` of the policy
    claims: Callable[[Mapping[str, Any]], int] = lambda config: -1  # see :meth:`Policy.claims`

    def __call__(self, config: Config) -> Policy:
        module, _, name = self.target.partition(":")
        policy: Policy = getattr(import_module(module), name)(config)
        return policy


def create(config: Config) -> Policy:
    """Create the policy named by ``config.policy.name``, without loading it.

    Raises ConfigError if the name is ``auto``, because there is no checkpoint that names a policy.
    """
    name, checkpoint = config.policy.name, getattr(config.policy, "checkpoint", "")
    if name == AUTO and not checkpoint:
        raise ConfigError(no_checkpoint())
    name = chosen(name, checkpoint, getattr(config.policy, "base", ""))
    policy: Policy = registry.make_policy(name, config)
    return policy


def policy_of(checkpoint: str | Path) -> str:
    """Return the name of the policy that claims a checkpoint; raises the errors of :func:`identify`."""
    return identify(str(checkpoint)).name


def selection(config: Config) -> str:
    """Return the policy's name, and what in the checkpoint names it."""
    name, checkpoint = config.policy.name, getattr(config.policy, "checkpoint", "")
    try:
        found = identify(checkpoint, getattr(config.policy, "base", "")) if checkpoint else None
    except VlaRosError:
        found = None
    return f"policy: {name} ({found.why})" if found and found.name == name else f"policy: {name}"


def checkpoint_options(policy: str | None, checkpoint: str | Path | None, files: Sequence[Path]) -> list[str]:
    """Return the assignments that a command's ``--policy`` and ``--checkpoint`` mean.

    Without ``policy`` and without ``files``, which may name a policy, the checkpoint determines it.
    """
    options = [f"policy.name:={policy or AUTO}"] if policy or (checkpoint and not files) else []
    if checkpoint:
        folder = checkpoint if str(checkpoint) in SHIPPED else Path(checkpoint).expanduser().resolve()
        options.append(assignment("policy.checkpoint", str(folder)))
    return options


def options_of(config: Config, kind: type[T]) -> T:
    """Return the section ``policy``; raises ConfigError if its type is not ``kind``."""
    if not isinstance(config.policy, kind):
        raise ConfigError(f"policy.name: '{config.policy.name}' does not have the options {kind.__name__}")
    return config.policy
