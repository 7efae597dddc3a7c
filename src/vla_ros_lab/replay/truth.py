"""Pairs recorded actions with frames and converts them to the policy's action format (rules: docs/replay.md)."""

from dataclasses import dataclass

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.action import ActionWriter
from vla_ros.contract.binding import make_arms
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.types import FloatArray, IntArray, JointState
from vla_ros_lab.replay.series import Recording, Table
from vla_ros_lab.replay.skill import motion_columns
from vla_ros_lab.replay.storage import BagError
from vla_ros_lab.replay.topics import ARRAY, TWIST, TopicSelection

RULES = {
    "stamp": "the recorded message with the frame's own stamp",
    "after": "the first recorded message from the frame on, before the next frame and within the tolerance",
    "difference": "motion of the measured joints from the frame to one period later",
    "none": "no recorded action could be compared",
}


@dataclass(frozen=True)
class Truth:
    """Recorded actions for the frames of one bag."""

    actions: FloatArray  # float64 [F, D], NaN where unknown
    rule: str  # key of :data:`RULES`
    problem: str = ""  # why nothing can be compared, or ""


def pair(frame_times: IntArray, frame_stamps: IntArray, table: Table, tolerance: int) -> tuple[IntArray, str]:
    """Pair frames with recorded messages by stamp, or else by the recorder's times.

    Returns the row of ``table`` for each frame (-1: no message) and the rule: ``stamp``, ``after`` (within
    ``tolerance`` ns) or ``none``.
    """
    rows = np.full(len(frame_times), -1, np.int64)
    if not len(frame_times) or not len(table.times):
        return rows, "none"
    by_stamp = {int(stamp): row for row, stamp in reversed(list(enumerate(table.stamps))) if stamp}
    exact = np.array([by_stamp.get(int(stamp), -1) for stamp in frame_stamps], np.int64)
    if (exact >= 0).sum() * 2 >= min(len(frame_times), len(table.times)):
        return exact, "stamp"
    row = np.searchsorted(table.times, frame_times, side="left")
    when = table.times[np.minimum(row, len(table.times) - 1)]
    following = np.append(frame_times[1:], np.iinfo(np.int64).max)
    # A message with the time of the next frame belongs to that frame.
    paired = (row < len(table.times)) & (when < following) & (when - frame_times <= tolerance)
    rows[paired] = row[paired]
    return rows, "after"


def align(
    frame_times: IntArray,
    frame_stamps: IntArray,
    recording: Recording,
    selection: TopicSelection,
    spec: PolicySpec,
    config: Config,
    tolerance: int,
    period: int,
) -> Truth:
    """Convert the recorded action of every frame to the policy's action format.

    ``frame_times`` [F] are the recorder's times, ascending; ``frame_stamps`` [F] are header stamps; ``tolerance``
    is passed to :func:`pair`; ``period`` is the length of a step. All are in nanoseconds.
    """
    actions = np.full((len(frame_times), spec.dimension), np.nan)
    try:
        if not selection.truth_type:
            raise BagError("the bag has neither actions, commands nor joint states")
        if selection.truth:
            rule, known, target = _paired(frame_times, frame_stamps, recording, selection, tolerance)
        else:
            rule, known, target = "difference", *_differenced(frame_times, recording, period)
        if selection.truth_type == ARRAY:
            if target.values.shape[1] != spec.dimension:
                raise BagError(
                    f"{selection.truth[0]} has {target.values.shape[1]} values, but the policy's actions have "
                    f"{spec.dimension}; name the recorded commands, or use the measured motion: "
                    "--topics truth=/COMMANDS, or truth=joint_states"
                )
            actions[known] = target.values
        elif selection.truth_type == TWIST:
            if spec.motion != "tip_delta":
                raise BagError("twists cannot be compared with joint actions")
            scale = np.repeat([config.control.translation_scale, config.control.rotation_scale], 3)
            actions[known[:, None], motion_columns(spec)] = target.values * (period * 1e-9) / scale
        else:
            joints = recording.joints.main if recording.joints else None
            actions[known] = _motions(joints, target, spec, config, period)
    except BagError as problem:
        return Truth(np.full_like(actions, np.nan), "none", str(problem))
    return Truth(actions, rule)


def _paired(
    frame_times: IntArray, frame_stamps: IntArray, recording: Recording, selection: TopicSelection, tolerance: int
) -> tuple[str, IntArray, Table]:
    """Return the rule, the frames that have a recorded message on every topic, and these messages."""
    named = " and ".join(selection.truth)
    if recording.truth is None:
        raise BagError(f"{named} has no usable message")
    tables: list[Table] = []
    for table in recording.truth.tables:  # each topic's most frequent set of names
        if len(tables) < len(selection.truth) and not any(set(table.names) & set(one.names) for one in tables):
            tables.append(table)
    pairs = [pair(frame_times, frame_stamps, table, tolerance) for table in tables]
    known = np.flatnonzero(np.all([rows >= 0 for rows, _ in pairs], axis=0))
    if not known.size:
        raise BagError(f"no message of {named} was received within {tolerance / 1e9:g} s after a frame")
    names = tuple(name for table in tables for name in table.names)
    values = np.hstack([table.values[rows[known]] for table, (rows, _) in zip(tables, pairs, strict=True)])
    stamps = tables[0].stamps[pairs[0][0][known]]
    return pairs[0][1], known, Table(names, frame_times[known], stamps, values)


def _differenced(frame_times: IntArray, recording: Recording, period: int) -> tuple[IntArray, Table]:
    """Return the frames with known joint states, and the joint positions one period after each frame."""
    if recording.joints is None:
        raise BagError("the bag has no usable joint states")
    joints = recording.joints.main
    known = np.flatnonzero((frame_times >= joints.times[0]) & (frame_times + period <= joints.times[-1]))
    times = frame_times[known]
    return known, Table(joints.names, times, times, _interpolated(joints, times + period))


def _interpolated(table: Table, times: IntArray) -> FloatArray:
    """Return the values at ``times`` [N], linearly interpolated, [N, C]."""
    origin = table.times[0]
    at, known = (times - origin).astype(float), (table.times - origin).astype(float)
    return np.stack([np.interp(at, known, column) for column in table.values.T], axis=1)


def _motions(joints: Table | None, target: Table, spec: PolicySpec, config: Config, period: int) -> FloatArray:
    """Return the actions [N, D] that lead from the measured joints to ``target``; NaN where unknown."""
    try:
        arms = make_arms(config)
        writer = ActionWriter(spec.action, arms, config.control)
    except ConfigError as error:
        raise BagError(str(error)) from None
    if writer.dimension != spec.dimension:
        raise BagError(f"the actions have {spec.dimension} values, but the robot's joints need {writer.dimension}")
    starts = np.zeros((len(target.times), 0)) if joints is None else _interpolated(joints, target.times)
    names = joints.names if joints else ()
    rows = [
        writer.write(JointState(names, start, 0), JointState(target.names, goal, 0), period * 1e-9)
        for start, goal in zip(starts, target.values, strict=True)
    ]
    actions = np.array(rows).reshape(len(rows), spec.dimension)
    if np.isnan(actions[:, motion_columns(spec)]).all():
        if not names:
            raise BagError("the bag has no joint states, which are needed to turn recorded commands into motions")
        for what, available in (("recorded commands", target.names), ("joint states", names)):
            if missing := [name for arm in arms.values() for name in arm.joints if name not in available]:
                raise BagError(f"the {what} lack the joints {missing}; they have {list(available)}")
    return actions


def finger_openings(frame_times: IntArray, recording: Recording, spec: PolicySpec, config: Config) -> FloatArray:
    """Return each gripper's measured opening at each frame, [F, G]: 0 closed, 1 open, NaN if not measured."""
    arms, unknown = {arm.name: arm for arm in config.arms}, np.full(len(frame_times), np.nan)
    openings = []
    for arm in (arms[part.arm] for part in spec.action if part.quantity == "gripper"):
        measured = (
            _interpolated(table, frame_times)[:, table.names.index(finger)]
            for table in (recording.joints.tables if recording.joints else ())
            for finger in arm.robot.gripper_joint_names
            if finger in table.names
        )
        closed, opened = arm.gripper.closed_position, arm.gripper.open_position
        openings.append((next(measured, unknown) - closed) / (opened - closed))
    return np.array(openings).reshape(len(openings), len(frame_times)).T
