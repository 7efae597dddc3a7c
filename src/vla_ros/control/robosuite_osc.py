"""The motion that robosuite's operational space controller makes of a goal.

LIBERO's actions are goals of this controller (robosuite 1.4.0, ``controllers/osc.py``, ``osc_pose.json``), which
pulls the hand towards the goal like a critically damped spring: the acceleration is 150 times the distance, less
2 sqrt(150) times the velocity. A step of 1/20 s has 25 steps of the simulation. Two properties of the simulated
Panda are computed from its model in its home position; nothing is fitted:

- Translation and rotation are controlled as if they were independent, but act on the same joints. An acceleration
  of one disturbs the other, and what corrects the disturbance acts back with 0.42 of its size (mean of three axes).
- The air resists rotation, because the finger tips have a large inertia for their mass: 6.6 N m at 1 rad/s, on a
  hand whose inertia about the axes that turn with the wrist is 1 kg m^2.

Constant translations or rotations have 95 to 107 % of robosuite's length (``test/conventions``). The model leaves
out how far a rotation moves the tip (up to 0.03 m when it begins), which depends on the simulated arm's posture.
"""

from dataclasses import dataclass

import numpy as np

from vla_ros.kinematics.rotations import Pose, rotation_vector, rotation_vector_matrix
from vla_ros.types import FloatArray

STEP = 0.05
"""Seconds in which the controller follows one goal."""

_SUBSTEPS = 25
_STIFFNESS = 150.0  # 1/s^2
_DAMPING = 2.0 * _STIFFNESS**0.5  # 1/s, critical
_COUPLING = 0.42  # share of the counter-motion's control that acts back
_DRAG = 6.6  # 1/rad, angular deceleration per squared angular velocity


@dataclass(frozen=True, eq=False)
class HandState:
    """State of the controlled hand besides its pose: [6] each, translation then rotation, in base axes."""

    velocity: FloatArray  # m/s and rad/s
    counter: FloatArray  # distance that the disturbance of the other group has moved, in its own unit
    counter_velocity: FloatArray


AT_REST = HandState(np.zeros(6), np.zeros(6), np.zeros(6))


def respond(start: Pose, goal: Pose, before: HandState, turning: bool) -> tuple[Pose, HandState]:
    """Return the pose one :data:`STEP` later, and the new state.

    ``turning`` is True if the goal's rotation is new, so that control of the rotation starts from the measured one.
    """
    h = STEP / _SUBSTEPS
    error = np.concatenate((goal.position - start.position, rotation_vector(goal.rotation @ start.rotation.T)))
    velocity, counter, counter_velocity = before.velocity, before.counter.copy(), before.counter_velocity
    counter[3:] = 0.0  # what rotations do to the position: the goal of the position is always new
    if turning:
        counter[:3] = 0.0
    moved = np.zeros(6)
    air = np.repeat([0.0, _DRAG], 3)
    for _ in range(_SUBSTEPS):
        pull = _STIFFNESS * (error - moved) - _DAMPING * velocity - air * np.abs(velocity) * velocity
        back = -_STIFFNESS * counter - _DAMPING * counter_velocity
        velocity = velocity + h * (pull + _COUPLING * back)
        counter_velocity = counter_velocity + h * (pull + back)
        counter = counter + h * counter_velocity
        moved = moved + h * velocity
    end = Pose(start.position + moved[:3], rotation_vector_matrix(moved[3:]) @ start.rotation)
    return end, HandState(velocity, counter, counter_velocity)
