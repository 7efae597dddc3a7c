"""Around the player: the bag's cameras in the options, one model for all bags, the pictures of single moments."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np

from vla_ros.config import Config
from vla_ros.control.inputs import Snapshot
from vla_ros.control.reasons import Refused
from vla_ros.errors import ConfigError, ImageError
from vla_ros.policies.base import Policy, Progress, no_progress
from vla_ros.replay.bag import Bag
from vla_ros.replay.topics import Selection
from vla_ros.stepper import Stepper
from vla_ros.types import ActionChunk, ActionSpec, JointState, Observation


class LoadedOnce:
    """A policy that loads at the first request only: several bags need several steppers around one model."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._loaded = False

    @property
    def spec(self) -> ActionSpec:
        """The policy's."""
        return self._policy.spec

    def load(self, progress: Progress = no_progress) -> None:
        """Load, the first time."""
        if not self._loaded:
            self._policy.load(progress)
            self._loaded = True

    def infer(self, observation: Observation) -> ActionChunk:
        """Ask the policy."""
        return self._policy.infer(observation)

    def reset(self) -> None:
        """Reset the policy."""
        self._policy.reset()

    def close(self) -> None:
        """Free the policy."""
        self._policy.close()
        self._loaded = False


def fit(config: Config, selection: Selection) -> Config:
    """The options with the bag's cameras in place of the live ones."""
    camera = dataclasses.replace(config.camera, topics=selection.cameras, transport=selection.transport)
    return dataclasses.replace(config, camera=camera)


def make_stepper(config: Config, policy: LoadedOnce, progress: Progress = no_progress) -> tuple[Stepper, str]:
    """A loaded stepper, and what it cannot do.

    Without a URDF there are no joint commands to judge, but actions can be compared all the same.

    Raises:
        VlaRosError: The policy does not load, or does not fit the options.
    """
    try:
        stepper = Stepper(config, policy)
        stepper.load(progress)
        return stepper, ""
    except ConfigError as error:
        if config.robot.urdf:
            raise
        bare = dataclasses.replace(
            config,
            control=dataclasses.replace(config.control, output="twist_stamped"),
            limits=dataclasses.replace(config.limits, workspace_low=(), workspace_high=()),
        )
        try:
            stepper = Stepper(bare, policy)
            stepper.load(progress)
        except ConfigError:
            raise error from None
        return stepper, "robot.urdf is not set: actions are compared, joint commands are not made"


def pictures_at(bag: Bag, selection: Selection, stepper: Stepper, times: Sequence[int]) -> dict[int, Observation]:
    """What the model saw at the frames with these times: prepared once more, which gives the same pixels."""
    found: dict[int, Observation] = {}
    nothing = JointState((), np.zeros(0), 0)  # only pictures are wanted, whatever else the policy needs
    inputs = Snapshot(nothing, dict.fromkeys(stepper.spec.state_keys, nothing), "-")
    for wanted in times:
        newest: list[bytes | None] = [None] * len(selection.cameras)
        for record in bag.records(selection.cameras, wanted - 2_000_000_000 if len(newest) > 1 else wanted):
            if record.time > wanted:
                break
            newest[selection.cameras.index(record.topic)] = bytes(record.data)
            if record.time == wanted and record.topic == selection.cameras[0]:
                with contextlib.suppress(ImageError, Refused):
                    found[wanted] = stepper.observe(newest, inputs)
                break
    return found
