"""Predicted beside recorded actions as a bag: for Foxglove, RViz or PlotJuggler, with the recording's own times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.graph.messages import message_types
from vla_ros.replay.records import BagError
from vla_ros.replay.result import Result
from vla_ros.replay.samples import Samples

PREDICTED = "/vla_ros/predicted_action"
RECORDED = "/vla_ros/recorded_action"
ERROR = "/vla_ros/action_error"
COMMAND = "/vla_ros/predicted_command"
LATENCY = "/vla_ros/latency_ms"
INSTRUCTION = "/vla_ros/instruction"

_ARRAY, _FLOAT = "std_msgs/msg/Float64MultiArray", "std_msgs/msg/Float64"
_JOINTS, _STRING = "sensor_msgs/msg/JointState", "std_msgs/msg/String"
_TYPES = {
    PREDICTED: _ARRAY,
    RECORDED: _ARRAY,
    ERROR: _FLOAT,
    COMMAND: _JOINTS,
    LATENCY: _FLOAT,
    INSTRUCTION: _STRING,
}


def write_bag(result: Result, path: Path) -> None:
    """Write an MCAP bag in the folder ``path``.

    ``predicted_action`` and ``recorded_action`` hold the policy's numbers, ``action_error`` the mean absolute
    difference, ``predicted_command`` the joints that would have been commanded, stamped with their frame.

    Raises:
        BagError: The folder exists, or cannot be written.
    """
    from rosbags.rosbag2 import StoragePlugin, Writer, WriterError
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    try:
        with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
            connections = {
                topic: writer.add_connection(topic, kind, typestore=store) for topic, kind in _TYPES.items()
            }
            for time, topic, data in sorted(
                (message for samples in result.samples for message in _messages(samples)), key=lambda item: item[0]
            ):
                writer.write(connections[topic], time, data)
    except (OSError, WriterError) as error:
        raise BagError(f"--write {path}: {error}; name a folder that does not exist yet") from None


def _messages(samples: Samples) -> list[tuple[int, str, bytes]]:
    """(time, topic, CDR) of everything of one bag."""
    types = message_types("jazzy")

    def array(values: Any) -> bytes:
        return types.serialize(types.message(_ARRAY)(data=np.asarray(values, float)))

    def number(value: float) -> bytes:
        return types.serialize(types.message(_FLOAT)(data=float(value)))

    found: list[tuple[int, str, bytes]] = []
    errors = np.abs(samples.predicted - samples.recorded)
    known = set(np.flatnonzero(np.isfinite(errors).any(axis=1)).tolist())
    episode = -1
    for index, time in enumerate(samples.times.tolist()):
        if samples.episodes[index] != episode:
            episode = int(samples.episodes[index])
            text = types.message(_STRING)(data=samples.instructions[episode])
            found.append((time, INSTRUCTION, types.serialize(text)))
        found.append((time, PREDICTED, array(samples.predicted[index])))
        if index in known:
            found.append((time, RECORDED, array(samples.recorded[index])))
            found.append((time, ERROR, number(float(np.nanmean(errors[index])))))
        total = samples.stages_ms.get("total")
        if total is not None:
            found.append((time, LATENCY, number(total[index])))
        if samples.command_names and np.isfinite(samples.commands[index]).all():
            stamp = int(samples.stamps[index])
            clock = types.message("builtin_interfaces/msg/Time")(sec=stamp // 10**9, nanosec=stamp % 10**9)
            header = types.message("std_msgs/msg/Header")(stamp=clock)
            message = types.message(_JOINTS)(
                header=header, name=list(samples.command_names), position=samples.commands[index]
            )
            found.append((time, COMMAND, types.serialize(message)))
    return found
