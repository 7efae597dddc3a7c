"""Rotations compared with their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.kinematics.transforms import euler_xyz_matrix, rotation_angle, rotation_vector, rotation_vector_matrix

angles = st.floats(-math.pi, math.pi)


def test_euler_xyz_turns_about_fixed_axes_x_then_y_then_z() -> None:
    def about(axis: int, angle: float) -> np.ndarray:
        vector = np.zeros(3)
        vector[axis] = angle
        return rotation_vector_matrix(vector)

    roll, pitch, yaw = 0.3, -0.7, 1.9
    expected = about(2, yaw) @ about(1, pitch) @ about(0, roll)
    np.testing.assert_allclose(euler_xyz_matrix(np.array([roll, pitch, yaw])), expected, atol=1e-15)


def test_a_quarter_turn_about_z_takes_x_to_y() -> None:
    turn = rotation_vector_matrix(np.array([0, 0, math.pi / 2]))
    np.testing.assert_allclose(turn @ [1, 0, 0], [0, 1, 0], atol=1e-15)


@given(st.tuples(angles, angles, angles))
def test_the_rotation_vector_of_a_matrix_gives_that_matrix(vector: tuple[float, float, float]) -> None:
    rotation = rotation_vector_matrix(np.array(vector))
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(rotation) == pytest.approx(1.0)
    found = rotation_vector(rotation)
    assert np.linalg.norm(found) <= math.pi + 1e-9
    np.testing.assert_allclose(rotation_vector_matrix(found), rotation, atol=1e-6)


@pytest.mark.parametrize("axis", [[1, 0, 0], [0, -1, 0], [0.6, 0, 0.8], [1, 1, 1]])
def test_half_a_turn_has_its_axis(axis: list[float]) -> None:
    unit = np.array(axis) / np.linalg.norm(axis)
    found = rotation_vector(rotation_vector_matrix(math.pi * unit))
    assert np.linalg.norm(found) == pytest.approx(math.pi)
    assert abs(found @ unit) == pytest.approx(math.pi)


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-7, 1e-4, 0.5, 3.1])
def test_the_angle_is_exact_however_small(angle: float) -> None:
    assert rotation_angle(rotation_vector_matrix(np.array([0, angle, 0]))) == pytest.approx(angle, abs=1e-12)
