"""What wants to move the arm: a policy, a person, a replayed chunk, the expert of an environment.

A source proposes actions. The schedule decides when they are due, the robot's controller and
:class:`~vla_ros.control.safety.Safety` decide what may reach the arm.
"""

from abc import ABC, abstractmethod

from vla_ros.config import Config
from vla_ros.contract.spec import PolicySpec
from vla_ros.policies.base import Lost, Policy, Progress, Session, no_progress
from vla_ros.types import ActionChunk, Observation, UInt8Array


class ActionSource(ABC):
    """Proposes chunks of actions. One thread at a time uses it; any thread may ask for :attr:`lost`.

    Attributes:
        spec: What a source needs in an observation, and what its actions mean. Valid after :meth:`load`.
    """

    spec: PolicySpec

    def load(self, progress: Progress = no_progress) -> None:  # noqa: B027 (most sources have nothing to load)
        """Load what the source needs; may take minutes. Raises VlaRosError with what to do."""

    @abstractmethod
    def infer(self, observation: Observation) -> ActionChunk:
        """Propose the actions from the time of the observation on; at least one.

        ``observation.previous`` is the rest of the chunk that is being executed, for a source whose spec says
        ``continues_chunks``. If an error is raised, the arm holds: a :class:`~vla_ros.control.reasons.Refused`
        names the reason, any other error is ``inference_error``.
        """

    def page_locked(self, size: int) -> UInt8Array | None:
        """Return ``size`` bytes for camera messages that a device reads by itself, or None. After :meth:`load`."""
        return None

    def reset(self) -> None:  # noqa: B027 (most sources remember nothing)
        """Begin another task or episode: forget past observations."""

    def configure(self, config: Config) -> None:  # noqa: B027 (most sources have no live options)
        """Apply changed options, between two inferences."""

    @property
    def lost(self) -> Lost | None:
        """The loss of what the source depends on, such as a policy's server, or None."""
        return None

    def close(self) -> None:  # noqa: B027 (most sources hold nothing)
        """Free the source's resources."""


class PolicySource(ActionSource):
    """A policy with a session for this robot; if it is loaded already, call only :meth:`start`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._session = Session()

    def load(self, progress: Progress = no_progress) -> None:
        self._policy.load(progress)
        self.start()

    def start(self) -> "PolicySource":
        """Start a new session of the loaded policy, which ends the previous one."""
        self._session.close()
        self._session = self._policy.start_session()
        self.spec = self._policy.spec
        return self

    def infer(self, observation: Observation) -> ActionChunk:
        return self._policy.infer(self._session, observation)

    def page_locked(self, size: int) -> UInt8Array | None:
        return self._policy.page_locked(size)

    def reset(self) -> None:
        self._session.reset()

    def configure(self, config: Config) -> None:
        self._policy.configure(config.policy)

    @property
    def lost(self) -> Lost | None:
        return self._session.lost

    def close(self) -> None:
        self._session.close()
        self._policy.close()
