"""Around the player: the bag's cameras in the options, one model for all bags, the pictures of single moments."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from vla_ros.config import Config
from vla_ros.errors import ConfigError, ImageError
from vla_ros.node.stepper import Stepper
from vla_ros.policies.base import Policy, Progress, Session, no_progress
from vla_ros.replay.bag import Bag
from vla_ros.replay.topics import Selection
from vla_ros.types import ActionChunk, ActionSpec, FloatArray, Observation, UInt8Array
from vla_ros.vision.preprocess import Preprocessor


class LoadedOnce(Policy):
    """A policy that loads at the first request only: several bags need several steppers around one model."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._loaded = False

    def load(self, progress: Progress = no_progress) -> None:
        """Load, the first time."""
        if not self._loaded:
            self._policy.load(progress)
            self._loaded = True
        self.spec = self._policy.spec

    def start_session(self) -> Session:
        """A session of the policy's."""
        return self._policy.start_session()

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        """Ask the policy."""
        return self._policy.infer(session, observation)

    def other_statistics(self, normalized: FloatArray) -> Mapping[str, FloatArray]:
        """What normalised answers [M, D] would mean with each of the checkpoint's other statistics, by name."""
        self.load()
        return self._policy.other_statistics(normalized)

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


def pictures_at(
    bag: Bag, selection: Selection, config: Config, spec: ActionSpec, times: Sequence[int]
) -> dict[int, dict[str, UInt8Array]]:
    """What the model saw at the frames with these times: prepared once more, which gives the same pixels.

    Args:
        bag: Open.
        selection: Which topics are the cameras.
        config: As :func:`fit` gives it.
        spec: Which pictures, and how large.
        times: Nanoseconds of the recorder.

    Returns:
        Time to picture key to uint8 [H, W, 3]; times at which no picture can be had are left out.
    """
    preprocess = Preprocessor(config.camera, spec.image_size)
    cameras = {key: config.camera.keys.index(key) for key in spec.image_keys}
    found: dict[int, dict[str, UInt8Array]] = {}
    for time, newest in newest_frames(bag, selection, times):
        with contextlib.suppress(ImageError, KeyError):
            found[time] = {
                key: preprocess(newest[selection.cameras[index]], index).image for key, index in cameras.items()
            }
    return found


def newest_frames(bag: Bag, selection: Selection, times: Sequence[int]) -> Iterator[tuple[int, dict[str, bytes]]]:
    """The newest message of each camera at frames of the first one: (time, topic to message).

    Args:
        bag: Open.
        selection: Which topics are the cameras.
        times: Nanoseconds of the recorder; those at which there is no frame are left out.
    """
    several = len(selection.cameras) > 1  # the others' newest frames lie before
    for wanted in times:
        newest: dict[str, bytes] = {}
        for record in bag.records(selection.cameras, wanted - 2_000_000_000 if several else wanted):
            if record.time > wanted:
                break
            newest[record.topic] = bytes(record.data)
            if record.time == wanted and record.topic == selection.cameras[0]:
                yield wanted, newest
                break
