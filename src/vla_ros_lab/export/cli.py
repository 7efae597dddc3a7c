"""Export recorded bags as a training data set (LeRobotDataset v3.0).

Reads the same bags as `vla-ros replay`. Images, state and action are resampled to one rate; see docs/export.md.
Repeat the same command to resume an interrupted export.
"""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_ros.config import load
from vla_ros.config.show import add_config_arguments
from vla_ros.errors import ConfigError, MissingDependencyError, install
from vla_ros.files import check_parent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vla_ros.config import Config
    from vla_ros.types import UInt8Array
    from vla_ros_lab.export.dataset import DatasetWriter, Schema
    from vla_ros_lab.export.episodes import ExportOptions, ResampledEpisode, Resampler


_MOST_NOTES = 20
_EPISODES = ("auto", "events", "corrections", "taught", "bag", "armed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bags", nargs="+", type=Path, metavar="BAG", help="bag, or a folder of bags")
    add_config_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--fps", type=int, default=0, metavar="N", help="frames per second; 0: the first camera's")
    parser.add_argument("--crf", type=int, default=20, metavar="N", help="quality of the videos; lower is better")
    parser.add_argument("--gap", type=float, default=2.0, metavar="S", help="a longer pause ends an episode")
    for name, metavar, text in (
        ("--state", "PARTS", "state vector; default: every arm's joint_position and gripper"),
        ("--action", "PARTS", "action; default: features.action, else as the state"),
        ("--instruction", "TEXT", "instruction, instead of the recorded one"),
        ("--robot", "NAME", "robot_type of the data set; default: the URDF's"),
    ):
        parser.add_argument(name, default="", metavar=metavar, help=text)
    for name, choices, text in (
        ("--format", ("lerobot",), "layout of the data set: LeRobotDataset v3.0"),
        ("--goal", ("commands", "measured"), "actions lead to the commanded position, or to the next measured one"),
        ("--clock", ("received", "stamp", "frames"), "recorder's times, header stamps, or every image is a frame"),
    ):
        parser.add_argument(name, default=choices[0], choices=choices, help=text)
    text = (
        "an episode is an episode of the recorded events (auto: if there are any), a person's correction in one, "
        "the corrections of an episode that has any and else the whole (taught), a bag without pauses, the time "
        "armed, or the time in which a std_msgs/Bool is true"
    )
    parser.add_argument("--episodes", default="auto", metavar="|".join((*_EPISODES, "/TOPIC")), help=text)
    text = "leave out episodes that a person labelled failure"
    parser.add_argument("--no-failures", dest="failures", action="store_false", help=text)
    text = "as for replay: camera, joint_states, instruction"
    parser.add_argument("--topics", nargs="+", default=[], metavar="ROLE=/TOPIC", help=text)
    parser.add_argument("--restart", action="store_true", help="discard the results of an interrupted export")


def run(arguments: argparse.Namespace) -> int:
    try:
        from vla_ros_lab.export.dataset import DatasetWriter, ExportError, OutputError
    except ImportError as error:
        raise MissingDependencyError(f"{error}; install it with: {install('export')}") from error
    from rich.console import Console
    from rich.progress import Progress

    from vla_ros_lab.export.episodes import Resampler
    from vla_ros_lab.replay.bag import Bag, find_bags
    from vla_ros_lab.replay.storage import BagError

    options, config = _options(arguments), load(arguments.config, arguments.param)
    check_parent("--output", arguments.output)
    if arguments.restart:
        shutil.rmtree(arguments.output.with_name(arguments.output.name + ".partial"), ignore_errors=True)
    writer: DatasetWriter | None = None
    left_out: Counter[str] = Counter()
    remarks: dict[str, None] = {}
    bags = find_bags(arguments.bags)
    frames = count = 0
    console = Console(stderr=True)
    try:
        for number, path in enumerate(bags):
            title = f"bag {number + 1} of {len(bags)}, {path.name}"
            bar = Progress(console=console, transient=True, disable=not console.is_terminal)
            bag: Bag | None = None
            resampler: Resampler | None = None
            try:
                with Bag(path) as bag, bar:
                    resampler = Resampler(bag, config, options)
                    if writer is None:
                        schema = _schema(resampler, config, arguments)
                        writer = DatasetWriter(arguments.output, schema)
                    task = bar.add_task(title, total=resampler.ticks(schema.rate))
                    name = f"{number:05d}-{path.name}"
                    for length in _add(resampler, writer, schema, name, partial(bar.advance, task)):
                        frames += length
            except OutputError:
                raise
            except (BagError, ExportError) as error:
                where = "" if str(path) in str(error) else f"{path}: "
                left_out[f"what follows in this bag: {where}{error}"] += 1
            left_out.update(map(str, bag.losses if bag is not None else ()))
            if resampler is not None:
                left_out.update(resampler.notes)
                remarks |= resampler.remarks
            print(f"{title}: {frames} frames so far", flush=True)
        if writer is not None and frames:
            count = writer.finish()
    except OSError as error:
        raise ExportError(f"{error.filename or arguments.output}: {error.strerror or error}") from error
    listed = [f"\n  left out: {note} ({times})" for note, times in left_out.most_common() if times]
    listed[_MOST_NOTES:] = [f"\n  left out: {len(listed) - _MOST_NOTES} more"] if len(listed) > _MOST_NOTES else []
    notes = "".join(listed)
    if not count:
        raise ExportError(f"no episode of the {len(bags)} bags can be exported{notes}")
    notes += "".join(f"\n  note: {remark}" for remark in remarks)
    print(f"{arguments.output}: {count} episodes, {frames} frames, {schema.rate} per second{notes}")
    return 0


def _options(arguments: argparse.Namespace) -> ExportOptions:
    from vla_ros_lab.export.episodes import ExportOptions
    from vla_ros_lab.replay.topics import parse_overrides

    for name, value, low, high in (("fps", arguments.fps, 0, 1000), ("crf", arguments.crf, 0, 63)):
        if not low <= value <= high:
            raise ConfigError(f"--{name} {value}: expected {low} to {high}")
    if not 0 < arguments.gap < 1e6:
        raise ConfigError(f"--gap {arguments.gap:g}: expected more than 0 seconds")
    if arguments.episodes not in _EPISODES and not arguments.episodes.startswith("/"):
        known = ", ".join(_EPISODES)
        raise ConfigError(f"--episodes {arguments.episodes}: expected {known} or a topic such as /episode")
    given = {field.name: getattr(arguments, field.name) for field in fields(ExportOptions)}
    return ExportOptions(**{**given, "topics": parse_overrides(arguments.topics)})


def _schema(resampler: Resampler, config: Config, arguments: argparse.Namespace) -> Schema:
    from vla_ros_lab.export.dataset import Schema

    state, action = resampler.names
    return Schema(
        resampler.rate(),
        arguments.robot or Path(config.arms[0].robot.urdf).stem or "robot",
        {"observation.state": state, "action": action, "next.reward": ()},
        {f"observation.images.{key}": size for key, size in resampler.image_sizes().items()},
        arguments.crf,
        ("intervention", "next.success", "next.done"),
        tuple(f"observation.images.{key}" for key in resampler.depths),
        tuple(f"{name}: {value}" for name, value in vars(arguments).items() if name != "restart"),
    )


def _outcome(episode: ResampledEpisode) -> dict[str, NDArray[Any]]:
    """Return who moved the arm and how it ended, each [T, 1], under LeRobot's names."""
    done = np.zeros((len(episode.state), 1), np.bool_)
    done[-1] = True
    success = done & episode.success
    flags = {"intervention": episode.intervention[:, None], "next.success": success, "next.done": done}
    return {**flags, "next.reward": success.astype(np.float32)}


def _add(
    resampler: Resampler, writer: DatasetWriter, schema: Schema, bag: str, advance: Callable[[float], None]
) -> Iterator[int]:
    """Write a bag's missing episodes; yields the number of frames of each."""
    from vla_ros_lab.export.images import DamagedImagesError

    step = 1 / max(1, len(schema.videos))

    def counted(images: Iterable[UInt8Array]) -> Iterator[UInt8Array]:
        for image in images:
            yield image
            advance(step)

    for episode in resampler.episodes(schema.rate):
        parts = [episode]
        while parts:
            part, *parts = parts
            # The times make the name of a part the same if an interrupted export is resumed.
            name, length = f"{bag}-{part.times[0]:020d}-{len(part.times):06d}", len(part.times)
            if writer.has(name):
                advance(length)
                yield length
                continue
            vectors = {"observation.state": part.state, "action": part.action, **_outcome(part)}
            cameras = zip(schema.videos.items(), resampler.recorded.cameras, part.frames, strict=True)
            images = {key: counted(camera.read(rows, size)) for (key, size), camera, rows in cameras}
            try:
                writer.add(name, part.task, vectors, images)
            except DamagedImagesError as damage:
                parts = [*part.without(damage.ticks), *parts]
                resampler.notes.update(damage.reasons)
                resampler.notes["ticks with a damaged image"] += int(damage.ticks.sum())
            else:
                yield length
