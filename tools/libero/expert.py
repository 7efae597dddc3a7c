"""A scripted expert over LIBERO's privileged state: takes the black bowl by its rim and puts it on the plate.

It keeps no state, so any situation can be labelled, and answers in the benchmark's own actions: goals of
robosuite's controller relative to the pose, and a gripper that closes at 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

BOWL, PLATE = "akita_black_bowl_1", "plate_1"
TASKS = (0, 1, 2, 6, 8)
"""The tasks of ``libero_spatial`` in which the bowl stands on the table."""

RIM = np.array([0.0, 0.049, 0.019])
"""Where the tip holds the bowl, relative to its centre: its wall, on this side or on the other."""

_UP = np.array([0.0, 0.0, 1.0])
_STEP = 0.05  # metres that an action of 1 moves the goal
_TURN = 0.5  # radians, likewise
_GAIN, _TURN_GAIN, _FASTEST = 1.5, 0.5, 0.9
_HOVER = 0.09  # metres above the rim while approaching
_CARRY = 0.10  # height of the bowl above the plate while carrying it


def act(obs: Mapping[str, Any]) -> np.ndarray:
    """Return the action, float64 [7], for robosuite's observation."""
    tip, bowl, plate = (np.asarray(obs[f"{name}_pos"]) for name in ("robot0_eef", BOWL, PLATE))
    fingers = obs["robot0_gripper_qpos"]
    width = float(fingers[0] - fingers[1])
    goal, closed = _goal(tip, bowl, plate, width)
    action = np.zeros(7)
    action[:3] = _limited(_GAIN * (goal - tip) / _STEP)
    action[3:6] = np.clip(_TURN_GAIN * _turn(np.asarray(obs["robot0_eef_quat"])) / _TURN, -0.3, 0.3)
    action[6] = 1.0 if closed else -1.0
    return action


def _goal(tip: np.ndarray, bowl: np.ndarray, plate: np.ndarray, width: float) -> tuple[np.ndarray, bool]:
    """Return where the tip goes, and whether the gripper closes."""
    rim = _rim(tip, bowl)
    off = tip - rim
    aside = float(np.linalg.norm(off[:2]))
    away = plate - bowl
    apart = float(np.linalg.norm(away[:2]))
    if apart < 0.025 and bowl[2] - plate[2] < 0.025:  # it stands on the plate: let go
        return tip + np.array([0.0, 0.0, 0.1]), False
    at_rim = aside < 0.03 and abs(off[2]) < 0.03
    if at_rim and width < 0.0145:  # it is held
        height = bowl[2] - plate[2]
        if apart < 0.012 or (apart < 0.03 and height < 0.06):
            return tip + np.array([away[0], away[1], -0.03]), True
        clear = np.clip((height - 0.02) / 0.05, 0.0, 1.0)  # sideways only once it is off the table
        return tip + np.array(
            [*(0.7 * clear * away[:2]), min(_CARRY - height, 0.06 if height > 0.02 else 0.015)]
        ), True
    if at_rim and (width < 0.07 or (aside < 0.012 and off[2] < 0.01)):  # closing
        return rim, True
    if aside < 0.012 or (aside < 0.02 and off[2] < 0.05):
        return rim, False
    if aside > 0.04:
        return rim + _HOVER * _UP, False
    return rim + (_HOVER * (aside - 0.01) / 0.03) * _UP, False


def _rim(tip: np.ndarray, bowl: np.ndarray) -> np.ndarray:
    """Return the place on the rim: the one where the tip is, or else the one away from the other objects."""
    left: np.ndarray = bowl + RIM
    right: np.ndarray = bowl + RIM * [1.0, -1.0, 1.0]
    far = float(np.linalg.norm(tip - left)), float(np.linalg.norm(tip - right))
    if min(far) < 0.04:
        return left if far[0] < far[1] else right
    return left if bowl[1] < -0.035 or bowl[1] > 0.255 else right  # the cabinet, and plate or ramekin


def _limited(wanted: np.ndarray) -> np.ndarray:
    """Shorten ``wanted`` until no number exceeds the limit, so that its direction stays."""
    return wanted * min(1.0, _FASTEST / max(float(np.abs(wanted).max()), 1e-9))


def _turn(quaternion: np.ndarray) -> np.ndarray:
    """Return the rotation vector from the pose (x, y, z, w) to the lowered tool."""
    x, y, z, w = (float(each) for each in quaternion)
    # The lowered tool is the quaternion (1, 0, 0, 0), half a turn about x; times the inverse of the pose.
    vx, vy, vz, vw = w, z, -y, x
    if vw < 0:
        vx, vy, vz, vw = -vx, -vy, -vz, -vw
    vector = np.array([vx, vy, vz])
    sine = float(np.linalg.norm(vector))
    return vector * (2 * math.atan2(sine, vw) / sine) if sine > 1e-9 else np.zeros(3)
