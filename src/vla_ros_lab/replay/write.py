"""Writes predicted and recorded actions as a bag for Foxglove, RViz or PlotJuggler."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.graph.messages import MessageTypes, message_types
from vla_ros.record.bag import BagWriter
from vla_ros.record.topics import Recorded, Topic
from vla_ros_lab.replay.result import Result
from vla_ros_lab.replay.samples import Samples
from vla_ros_lab.replay.storage import BagError

_TYPES = {
    "predicted_action": "std_msgs/msg/Float64MultiArray",
    "recorded_action": "std_msgs/msg/Float64MultiArray",
    "action_error": "std_msgs/msg/Float64",
    "predicted_command": "sensor_msgs/msg/JointState",
    "latency_ms": "std_msgs/msg/Float64",
    "instruction": "std_msgs/msg/String",
}


def write_bag(result: Result, path: Path) -> None:
    """Write an MCAP bag in the folder ``path``, with topics ``/vla_ros/...``; raises BagError if it exists.

    Messages have the recording's times. Actions have the policy's format, ``action_error`` is the mean absolute
    difference between the predicted and the recorded action, and ``predicted_command`` is the joint command with
    the stamp of its frame.
    """
    types = message_types("jazzy")
    topics = {name: Topic(f"/vla_ros/{name}", kind) for name, kind in _TYPES.items()}
    messages = (message for samples in result.samples for message in _messages(samples, types))
    recorded = (
        Recorded(time, time, topics[name].name, types.serialize(types.message(topics[name].type)(**fields)))
        for time, name, fields in sorted(messages, key=lambda item: item[0])
    )
    try:
        with closing(BagWriter(path, list(topics.values()))) as bag:
            bag.write(recorded)
    except OSError as error:
        raise BagError(f"--write {path}: cannot be written ({error.strerror})") from None


def _messages(samples: Samples, types: MessageTypes) -> Iterator[tuple[int, str, dict[str, Any]]]:
    errors = np.abs(samples.predicted - samples.recorded)
    total = samples.stages_ms.get("total")
    episode = -1
    for index, time in enumerate(samples.times.tolist()):
        if samples.episodes[index] != episode:
            episode = int(samples.episodes[index])
            yield time, "instruction", {"data": samples.instructions[episode]}
        yield time, "predicted_action", {"data": samples.predicted[index]}
        if np.isfinite(errors[index]).any():
            yield time, "recorded_action", {"data": samples.recorded[index]}
            yield time, "action_error", {"data": float(np.nanmean(errors[index]))}
        if total is not None:
            yield time, "latency_ms", {"data": float(total[index])}
        command = [float(column[index]) for column in samples.commands.values()]
        if command and np.isfinite(command).all():
            sec, nanosec = divmod(int(samples.stamps[index]), 10**9)
            stamp = types.message("builtin_interfaces/msg/Time")(sec=sec, nanosec=nanosec)
            header = types.message("std_msgs/msg/Header")(stamp=stamp)
            fields = {"header": header, "name": list(samples.commands), "position": np.array(command)}
            yield time, "predicted_command", fields
