"""The expert's chunks for picking, for many states at once: a vectorised :func:`vla_ros_lab.sim.expert.plan`."""

import numpy as np

from vla_ros.types import FloatArray
from vla_ros_lab.sim import arm, expert


def pick_chunks(
    joints: FloatArray, fingers: FloatArray, places: FloatArray, horizon: int, rate_hz: float
) -> FloatArray:
    """Return the next ``horizon`` joint positions and gripper values of B picks, float64 [B, horizon, 8].

    Args:
        joints: [B, 7], radians.
        fingers: Opening of one finger [B], metres.
        places: Centre of the object [B, 3], metres in the base frame.
        horizon: Steps of a chunk.
        rate_hz: Steps per second.
    """
    chunks = np.empty((len(joints), horizon, 8))
    for step in range(horizon):
        tool, turned = _chain(joints)[:2]
        motion, turn, closed = _decide(tool, turned, fingers, places, rate_hz)
        goal = _solve(tool + motion, _rotation(turn) @ turned, joints)
        chunks[:, step, :7], chunks[:, step, 7] = goal, ~closed
        reach = expert._FINGER_SPEED / rate_hz
        wanted = np.where(closed, 0.0, arm.FINGER_TRAVEL)
        after = np.clip(wanted, fingers - reach, fingers + reach)
        after = np.where(closed, np.maximum(after, expert._GRASPED), after)
        held = closed & (np.maximum(after, fingers) < expert._HELD)
        places = places + np.where(held[:, None], motion, 0.0)
        joints, fingers = goal, after
    return chunks


def _decide(
    tool: FloatArray, turned: FloatArray, fingers: FloatArray, places: FloatArray, rate_hz: float
) -> tuple[FloatArray, FloatArray, np.ndarray]:
    share = expert.RATE_HZ / rate_hz
    gain = 1 - (1 - expert.GAIN) ** share
    way = places - tool
    error = np.hypot(way[:, 0], way[:, 1])
    closed = (error < expert._GRASP_RADIUS) & (np.abs(way[:, 2]) < expert._GRASP_HEIGHT)
    near, far = expert._FUNNEL
    height = -way[:, 2]
    over = way + np.stack([0 * error, 0 * error, expert.HOVER * np.clip((error - near) / (far - near), 0, 1)], 1)
    over[(error > far) & (height < expert._LOW), :2] = 0.0
    opening = (fingers < 0.75 * arm.FINGER_TRAVEL) & (height < expert._LOW)
    over[opening, 2] = np.maximum(over[opening, 2], 0.0)
    lift = np.zeros_like(way)
    lift[:, 2] = np.where(fingers < expert._HELD, expert.LIFT_TO - places[:, 2], 0.0)
    step = gain * np.where(closed[:, None], lift, over)
    length, longest = np.linalg.norm(step, axis=1), expert.MAX_STEP * share
    step *= np.minimum(1.0, longest / np.maximum(length, 1e-12))[:, None]
    turn = gain * _rotation_vector(arm.TOOL_DOWN @ turned.transpose(0, 2, 1))
    return step, np.clip(turn, -expert.MAX_TURN * share, expert.MAX_TURN * share), closed


def _chain(joints: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return the tool positions [B, 3] and rotations [B, 3, 3], axes and origins of the joints [B, 7, 3]."""
    count = len(joints)
    x, y, z = (np.tile(row, (count, 1)) for row in np.eye(3))
    origin, axes, origins = np.zeros((count, 3)), np.empty((count, 7, 3)), np.empty((count, 7, 3))
    for index, joint in enumerate(arm.CHAIN):
        origin = origin + z * joint.offset
        origins[:, index] = origin
        cos, sin = np.cos(joints[:, index, None]), np.sin(joints[:, index, None])
        if joint.axis == "y":
            axes[:, index] = y
            x, z = cos * x - sin * z, sin * x + cos * z
        else:
            axes[:, index] = z
            x, y = cos * x + sin * y, cos * y - sin * x
    return origin + z * arm._TOOL_OFFSET, np.stack([x, y, z], 2), axes, origins


def _solve(position: FloatArray, rotation: FloatArray, joints: FloatArray) -> FloatArray:
    for _ in range(expert._ITERATIONS):
        tool, turned, axes, origins = _chain(joints)
        jacobian = np.concatenate([np.cross(axes, tool[:, None] - origins), axes], 2).transpose(
            0, 2, 1
        )  # [B, 6, 7]
        error = np.concatenate([position - tool, _rotation_vector(rotation @ turned.transpose(0, 2, 1))], 1)
        moved = jacobian.transpose(0, 2, 1)
        inverted = moved @ np.linalg.inv(jacobian @ moved + arm._DAMPING)
        rest = (arm._EYE - inverted @ jacobian) @ (arm.HOME - joints)[..., None]
        joints = np.clip(joints + (inverted @ error[..., None] + 0.1 * rest)[..., 0], *arm._LIMITS)
    return joints


def _rotation_vector(rotation: FloatArray) -> FloatArray:
    skew = np.stack([rotation[:, j, k] - rotation[:, k, j] for j, k in ((2, 1), (0, 2), (1, 0))], 1)
    sine = np.linalg.norm(skew, axis=1) / 2
    angle = np.arctan2(sine, (np.trace(rotation, axis1=1, axis2=2) - 1) / 2)
    factor = np.where(sine < 1e-9, 0.5, angle / np.maximum(2 * sine, 1e-18))
    return factor[:, None] * skew


def _rotation(vector: FloatArray) -> FloatArray:
    """Return the rotation matrices [B, 3, 3] of rotation vectors [B, 3] (Rodrigues)."""
    angle = np.linalg.norm(vector, axis=1)[:, None, None]
    cross = np.zeros((len(vector), 3, 3))
    for (j, k), axis in zip(((2, 1), (0, 2), (1, 0)), vector.T, strict=True):
        cross[:, j, k], cross[:, k, j] = axis, -axis
    sinc = np.sinc(angle / np.pi)
    half = 0.5 * np.sinc(angle / (2 * np.pi)) ** 2
    matrices: FloatArray = np.eye(3) + sinc * cross + half * cross @ cross
    return matrices
