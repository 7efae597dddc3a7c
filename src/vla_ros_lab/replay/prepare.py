"""Adapts options to a bag, and reads single frames again."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vla_ros.config import Config
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.clock import SimulatedClock
from vla_ros.errors import ConfigError, ImageError, VlaRosError
from vla_ros.graph.messages import message_types
from vla_ros.node.observer import Observer
from vla_ros.node.pipeline import ActionPipeline, build_pipeline
from vla_ros.node.receiver import joint_state_of
from vla_ros.record.topics import TRANSFORMS
from vla_ros.types import IntArray
from vla_ros.vision.messages import image_stamp
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.samples import Samples
from vla_ros_lab.replay.topics import TopicSelection, topics_of


def fit(config: Config, selection: TopicSelection) -> Config:
    """Return ``config`` with the camera topics of the bag."""
    camera = dataclasses.replace(config.camera, topics=selection.cameras, transport=selection.transport)
    return dataclasses.replace(config, camera=camera)


def step_seconds(config: Config, spec: PolicySpec) -> float:
    return 1.0 / (max(config.control.rate_hz, 0.0) or spec.rate_hz or 30.0)


def build_pipeline_for(config: Config, spec: PolicySpec) -> tuple[ActionPipeline, str]:
    """Return a pipeline, and a note if it makes no joint commands for lack of a URDF."""
    try:
        return build_pipeline(config, spec), ""
    except ConfigError:
        if any(arm.robot.urdf for arm in config.arms):
            raise
        control = dataclasses.replace(config.control, output="twist_stamped")
        with contextlib.suppress(ConfigError):
            pipeline = build_pipeline(dataclasses.replace(config, control=control), spec)
            return pipeline, "robot.urdf is not set: actions are compared, but no joint commands are made"
        raise


def read_transforms(bag: Bag, observer: Observer, joints: Sequence[str]) -> None:
    """Pass an observer of depth images all that a bag says of where cameras are, so that it never waits.

    ``joints`` are the topics of joint states.
    """
    depth, store = observer.depth, message_types()
    depth.transforms, depth.clock = depth.buffer(math.inf), SimulatedClock()
    for record in bag.records(bag.topics.keys() & {*depth.infos, *TRANSFORMS, *joints}) if depth.infos else ():
        read = partial(store.deserialize, cls=store.message(bag.topics[record.topic]))
        with contextlib.suppress(VlaRosError):  # what is damaged is missing, which the observer says
            if record.topic in joints:
                depth.transforms.measure(joint_state_of(read(record.data), record.time))
            else:
                depth.hear(record.topic, record.data, read)


class RecordedFrame(NamedTuple):
    """A frame of a bag that was read again."""

    row: int  # row in the samples
    time: int  # receive time of the recorder in nanoseconds
    images: tuple[bytes | None, ...]  # newest message of each camera at that time
    bag: Bag
    selection: TopicSelection
    config: Config  # from :func:`fit`


def read_again(
    samples: Samples, rows: IntArray, config: Config, topics: Mapping[str, str]
) -> Iterator[RecordedFrame]:
    """Read the frames ``rows`` of a bag again; yield nothing if the bag can no longer be read."""
    if not len(rows):
        return
    with contextlib.ExitStack() as stack:
        named = {"camera": samples.topics["camera"].replace(", ", ",")}
        try:
            bag = stack.enter_context(Bag(Path(samples.bag)))
            selection = topics_of(bag, config, {**topics, **named})
        except VlaRosError:
            return
        fitted = fit(config, selection)
        before = 2_000_000_000 if len(selection.cameras) > 1 else 0  # for the newest frames of the other cameras
        for row in sorted(rows.tolist()):
            wanted = int(samples.times[row])
            newest: dict[str, bytes] = {}
            images: tuple[bytes | None, ...] = ()
            for record in bag.records(selection.cameras, max(0, wanted - before)):
                if record.time > wanted:
                    break
                newest[record.topic] = bytes(record.data)
                if record.time == wanted and record.topic == selection.cameras[0]:
                    is_it = _stamp(record.data) == samples.stamps[row]  # several may have one receive time
                    images = tuple(map(newest.get, selection.cameras)) if is_it or not images else images
                    if is_it:
                        break
            if images:
                yield RecordedFrame(row, wanted, images, bag, selection, fitted)


def _stamp(cdr: bytes | memoryview) -> int | None:
    try:
        return image_stamp(cdr)
    except ImageError:
        return None
