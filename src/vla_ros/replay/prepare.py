"""Around the player: the bag's cameras in the options, one model for all bags, the images of single moments."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vla_ros.config import Config
from vla_ros.errors import ConfigError, ImageError, VlaRosError
from vla_ros.node.stepper import Stepper
from vla_ros.policies.base import Policy, Progress, Session, no_progress
from vla_ros.replay.bag import Bag
from vla_ros.replay.samples import Samples
from vla_ros.replay.topics import Selection, select
from vla_ros.types import ActionChunk, ActionSpec, FloatArray, Observation, UInt8Array
from vla_ros.vision.preprocess import Preprocessor, process


class LoadedOnce(Policy):
    """Loads a policy at the first request only: several bags need several steppers around one model."""

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
        """Run the policy."""
        return self._policy.infer(session, observation)

    def other_statistics(self, normalized: FloatArray) -> Mapping[str, FloatArray]:
        """Normalised actions [M, D] un-normalised with each of the checkpoint's other statistics, by name."""
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
    """Makes a loaded stepper; without a URDF, one that makes no joint commands, and a note.

    Raises:
        VlaRosError: The policy does not load, or does not fit the options.
    """
    try:
        return _loaded(config, policy, progress), ""
    except ConfigError:
        if config.robot.urdf:
            raise
        control = dataclasses.replace(config.control, output="twist_stamped")
        limits = dataclasses.replace(config.limits, workspace_low=(), workspace_high=())
        bare = dataclasses.replace(config, control=control, limits=limits)
        with contextlib.suppress(ConfigError):
            note = "robot.urdf is not set: actions are compared, joint commands are not made"
            return _loaded(bare, policy, progress), note
        raise


def _loaded(config: Config, policy: LoadedOnce, progress: Progress) -> Stepper:
    stepper = Stepper(config, policy)
    stepper.load(progress)
    return stepper


def images_at(
    bag: Bag, selection: Selection, config: Config, spec: ActionSpec, times: Sequence[int]
) -> dict[int, dict[str, UInt8Array]]:
    """Prepares the images that the model saw at the frames with these times.

    Args:
        bag: Open.
        selection: Topics of the cameras.
        config: As :func:`fit` returns it.
        spec: Which images, and their size.
        times: Nanoseconds of the recorder.

    Returns:
        Time to image key to uint8 [H, W, 3]; times without a usable image are left out.
    """
    preprocess = Preprocessor(config.camera, spec)
    cameras = {key: config.camera.keys.index(key) for key in spec.image_keys}
    found: dict[int, dict[str, UInt8Array]] = {}
    for time, newest in newest_frames(bag, selection, times):
        with contextlib.suppress(ImageError, KeyError):
            found[time] = {
                key: process(preprocess(newest[selection.cameras[index]], index)) for key, index in cameras.items()
            }
    return found


@contextlib.contextmanager
def reopened(
    samples: Samples, config: Config, overrides: Mapping[str, str]
) -> Iterator[tuple[Bag, Selection, Config] | None]:
    """Reopens a bag that was played: the bag, its topics and the fitted options; None if it cannot be read."""
    with contextlib.ExitStack() as stack:
        named = {"camera": samples.topics["camera"].replace(", ", ",")}
        try:
            bag = stack.enter_context(Bag(Path(samples.bag)))
            selection = select(bag.topics, config, {**overrides, **named}, empty=bag.empty)
        except VlaRosError:
            yield None
        else:
            yield bag, selection, fit(config, selection)


def newest_frames(bag: Bag, selection: Selection, times: Sequence[int]) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yields (time, topic to newest message of each camera) for frames of the first camera.

    Args:
        bag: Open.
        selection: Topics of the cameras.
        times: Nanoseconds of the recorder; times without a frame are left out.
    """
    before = 2_000_000_000 if len(selection.cameras) > 1 else 0  # where the other cameras' newest frames are
    for wanted in times:
        newest: dict[str, bytes] = {}
        for record in bag.records(selection.cameras, wanted - before):
            if record.time > wanted:
                break
            newest[record.topic] = bytes(record.data)
            if record.time == wanted and record.topic == selection.cameras[0]:
                yield wanted, newest
                break
