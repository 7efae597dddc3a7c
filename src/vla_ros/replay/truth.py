"""What the robot really did, in the policy's own numbers, and which recorded action belongs to which frame.

The rule of time
----------------
1. A recorded message whose header has exactly a frame's stamp belongs to that frame: this package's own commands
   carry the stamp of the frame from which they came.
2. Else the first recorded message at or after the frame's time and before the next frame's belongs to it, if it
   came within the tolerance: what a robot does about a picture, it does after it. Both times are the recorder's,
   since a ``Float64MultiArray`` has no stamp and drivers' clocks are often wrong.
3. Where joint states are differenced, the action of a frame is the motion from the frame's time to one period
   later, both interpolated.

Frames to which nothing belongs are answered by the policy, but not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_ros.config import Config
from vla_ros.control.kinematics import Kinematics
from vla_ros.control.transforms import rotation_vector
from vla_ros.replay.series import Recording, Table
from vla_ros.replay.topics import ARRAY, JOINTS, TWIST, Selection
from vla_ros.types import ActionSpec, ControlMode, FloatArray, IntArray

RULES = {
    "stamp": "the recorded message with the frame's own stamp",
    "after": "the first recorded message from the frame on, before the next frame and within the tolerance",
    "difference": "motion of the measured joints from the frame to one period later",
    "none": "nothing was recorded that could be compared",
}


@dataclass(frozen=True)
class Truth:
    """Recorded actions for the frames of one bag.

    Attributes:
        actions: Float64 [F, D]; rows of NaN for frames to which nothing belongs, NaN for unknown numbers.
        rule: Key of :data:`RULES`.
        problem: Why nothing can be compared, or "".
    """

    actions: FloatArray
    rule: str
    problem: str = ""


def pair(frame_times: IntArray, frame_stamps: IntArray, table: Table, tolerance: int) -> tuple[IntArray, str]:
    """Row of ``table`` for each frame by rules 1 and 2, -1 for none, and the rule.

    Args:
        frame_times: [F], nanoseconds of the recorder, ascending.
        frame_stamps: [F], nanoseconds of the headers.
        table: What was recorded.
        tolerance: Nanoseconds that rule 2 allows between frame and message.
    """
    rows = np.full(len(frame_times), -1, np.int64)
    if not len(frame_times) or not len(table.times):
        return rows, "none"
    by_stamp = {int(stamp): row for row, stamp in reversed(list(enumerate(table.stamps))) if stamp}
    exact = np.array([by_stamp.get(int(stamp), -1) for stamp in frame_stamps], np.int64)
    if (exact >= 0).sum() * 2 >= min(len(frame_times), len(table.times)):
        return exact, "stamp"
    row = np.searchsorted(table.times, frame_times, side="left")
    found = row < len(table.times)
    when = table.times[np.minimum(row, len(table.times) - 1)]
    following = np.append(frame_times[1:], np.iinfo(np.int64).max)
    # A message with the time of the next frame is that frame's.
    found &= (when < following) & (when - frame_times <= tolerance)
    rows[found] = row[found]
    return rows, "after"


def align(
    frame_times: IntArray,
    frame_stamps: IntArray,
    recording: Recording,
    selection: Selection,
    spec: ActionSpec,
    config: Config,
    kinematics: Kinematics | None,
    tolerance: int,
    period: int,
) -> Truth:
    """The recorded action of every frame in the policy's numbers.

    Args:
        frame_times: [F], nanoseconds of the recorder, ascending.
        frame_stamps: [F], nanoseconds of the headers.
        recording: Joint states and commands.
        selection: What they are.
        spec: What the policy's numbers mean.
        config: Scales, frames and the gripper convention.
        kinematics: The arm; needed to turn joint positions into end-effector deltas.
        tolerance: Nanoseconds, see :func:`pair`.
        period: Nanoseconds of one step, for velocities and differences.
    """
    nothing = np.full((len(frame_times), spec.dimension), np.nan)
    if not selection.truth_type:
        return Truth(nothing, "none", "the bag has neither actions, commands nor joint states")
    if selection.truth is None:
        return _by_difference(nothing, frame_times, recording, spec, config, kinematics, period)
    if recording.truth is None:
        return Truth(nothing, "none", f"{selection.truth} holds no message that can be used")
    table = recording.truth.main
    joints = recording.joints.main if recording.joints else None
    rows, rule = pair(frame_times, frame_stamps, table, tolerance)
    known = np.flatnonzero(rows >= 0)
    if not known.size:
        limit = f"{tolerance / 1e9:g} s"
        return Truth(nothing, "none", f"no message of {selection.truth} came within {limit} after a frame")
    values = table.values[rows[known]]
    if selection.truth_type == ARRAY:
        if values.shape[1] != spec.dimension:
            text = f"{selection.truth} has {values.shape[1]} numbers, the policy's actions have {spec.dimension}"
            return Truth(nothing, "none", text)
        nothing[known] = values
        return Truth(nothing, rule)
    if selection.truth_type == TWIST:
        if spec.control_mode is not ControlMode.END_EFFECTOR_DELTA:
            return Truth(nothing, "none", "twists cannot be compared with joint actions")
        motion = _motion_columns(spec)
        scale = np.repeat([config.control.translation_scale, config.control.rotation_scale], 3)
        nothing[np.ix_(known, motion)] = values * (period * 1e-9) / scale
        return Truth(nothing, rule)
    measured = _interpolated(joints, frame_times[known])
    commanded = Table(table.names, frame_times[known], table.stamps[rows[known]], values)
    problem = _fill_from_joints(nothing, known, joints, measured, commanded, spec, config, kinematics)
    return Truth(nothing, "none" if problem else rule, problem)


def _by_difference(
    result: FloatArray,
    frame_times: IntArray,
    recording: Recording,
    spec: ActionSpec,
    config: Config,
    kinematics: Kinematics | None,
    period: int,
) -> Truth:
    if recording.joints is None:
        return Truth(result, "none", "the bag has no usable joint states")
    joints = recording.joints.main
    known = np.flatnonzero((frame_times >= joints.times[0]) & (frame_times + period <= joints.times[-1]))
    now = _interpolated(joints, frame_times[known])
    later = _interpolated(joints, frame_times[known] + period)
    assert later is not None
    target = Table(joints.names, frame_times[known], frame_times[known], later)
    problem = _fill_from_joints(result, known, joints, now, target, spec, config, kinematics)
    return Truth(result, "none" if problem else "difference", problem)


def _interpolated(table: Table | None, times: IntArray) -> FloatArray | None:
    """Values at ``times``, linear between messages, [N, C]."""
    if table is None:
        return None
    origin = table.times[0]
    at, known = (times - origin).astype(float), (table.times - origin).astype(float)
    return np.stack([np.interp(at, known, column) for column in table.values.T], axis=1)


def _motion_columns(spec: ActionSpec) -> IntArray:
    return np.array([index for index in range(spec.dimension) if index != spec.gripper_index], np.int64)


def _fill_from_joints(
    result: FloatArray,
    rows: IntArray,
    joints: Table | None,
    measured: FloatArray | None,
    target: Table,
    spec: ActionSpec,
    config: Config,
    kinematics: Kinematics | None,
) -> str:
    """Write actions that lead from ``measured`` to ``target`` into ``result``; why not, or ""."""
    names = kinematics.joint_names if kinematics else config.robot.joint_names or target.names
    missing = [name for name in names if name not in target.names]
    if missing:
        return f"the recorded commands lack the joints {missing}; they have {list(target.names)}"
    goal = target.values[:, [target.names.index(name) for name in names]]
    motion = _motion_columns(spec)
    if spec.control_mode is ControlMode.JOINT_POSITION:
        if len(names) != len(motion):
            return f"the policy moves {len(motion)} joints, the recorded commands {len(names)}"
        result[np.ix_(rows, motion)] = goal
    else:
        if joints is None or measured is None:
            return "the bag has no joint states, from which the recorded commands' motions would count"
        absent = [name for name in names if name not in joints.names]
        if absent:
            return f"the joint states lack the joints {absent}; they have {list(joints.names)}"
        start = measured[:, [joints.names.index(name) for name in names]]
        if spec.control_mode is ControlMode.JOINT_DELTA:
            result[np.ix_(rows, motion)] = goal - start
        elif kinematics is None:
            return "robot.urdf is not set, and recorded joint positions become end-effector motions only with it"
        else:
            deltas = [_delta(kinematics, a, b, config) for a, b in zip(start, goal, strict=True)]
            result[np.ix_(rows, motion)] = np.array(deltas).reshape(len(rows), 6)
    _fill_gripper(result, rows, target, spec, config)
    return ""


def _delta(kinematics: Kinematics, start: FloatArray, goal: FloatArray, config: Config) -> FloatArray:
    """The end-effector action [6] that leads from joint positions ``start`` to ``goal``."""
    a, b = kinematics.forward(start), kinematics.forward(goal)
    control = config.control
    if control.delta_frame == "tip":
        moved, turned = a.rotation.T @ (b.position - a.position), a.rotation.T @ b.rotation
    else:
        moved, turned = b.position - a.position, b.rotation @ a.rotation.T
    angles = _euler_xyz(turned) if control.rotation == "euler_xyz" else rotation_vector(turned)
    return np.concatenate((moved / control.translation_scale, angles / control.rotation_scale))


def _euler_xyz(rotation: FloatArray) -> FloatArray:
    """Roll, pitch, yaw [3] about fixed axes (REP 103), the inverse of ``transforms.euler_xyz_matrix``."""
    pitch = np.arcsin(np.clip(-rotation[2, 0], -1.0, 1.0))
    return np.array([np.arctan2(rotation[2, 1], rotation[2, 2]), pitch, np.arctan2(rotation[1, 0], rotation[0, 0])])


def _fill_gripper(result: FloatArray, rows: IntArray, target: Table, spec: ActionSpec, config: Config) -> None:
    """Finger positions back into the action's gripper number; NaN stays where there are no finger joints."""
    fingers = [target.names.index(name) for name in config.robot.gripper_joint_names if name in target.names]
    if spec.gripper_index is None or not fingers:
        return
    gripper = config.gripper
    opening = (target.values[:, fingers[0]] - gripper.closed_position) / (
        gripper.open_position - gripper.closed_position
    )
    opening = np.clip(opening, 0.0, 1.0)
    result[rows, spec.gripper_index] = gripper.closed_value + opening * (gripper.open_value - gripper.closed_value)


def finger_openings(frame_times: IntArray, recording: Recording, config: Config) -> FloatArray:
    """How far open the measured fingers were at each frame, [F], 0 closed to 1 open; empty where not measured."""
    joints = recording.joints
    table = (
        next((t for t in joints.tables if set(config.robot.gripper_joint_names) & set(t.names)), None)
        if joints
        else None
    )
    measured = _interpolated(table, frame_times)
    if table is None or measured is None:
        return np.zeros(0)
    finger = next(table.names.index(name) for name in config.robot.gripper_joint_names if name in table.names)
    gripper = config.gripper
    return (measured[:, finger] - gripper.closed_position) / (gripper.open_position - gripper.closed_position)


def needs_urdf(selection: Selection, spec: ActionSpec) -> bool:
    """True where the recorded truth is joint positions and the policy's numbers are end-effector deltas."""
    joints = selection.truth_type == JOINTS or "JointTrajectory" in selection.truth_type
    return joints and spec.control_mode is ControlMode.END_EFFECTOR_DELTA
