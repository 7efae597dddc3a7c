"""Rotations compared with Pinocchio's."""

import math

import numpy as np
import pinocchio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.kinematics.rotations import euler_xyz_matrix, rotation_angle, rotation_vector, rotation_vector_matrix

angles = st.floats(-math.pi, math.pi)


@given(st.tuples(angles, angles, angles))
def test_rotations_equal_those_of_pinocchio(numbers: tuple[float, float, float]) -> None:
    vector = np.array(numbers)
    np.testing.assert_allclose(euler_xyz_matrix(vector), pinocchio.rpy.rpyToMatrix(vector), atol=1e-14)
    rotation = rotation_vector_matrix(vector)
    np.testing.assert_allclose(rotation, pinocchio.exp3(vector), atol=1e-12)
    found = rotation_vector(rotation)
    assert np.linalg.norm(found) <= math.pi + 1e-9
    np.testing.assert_allclose(pinocchio.exp3(found), rotation, atol=1e-6)


@pytest.mark.parametrize("axis", [[1, 0, 0], [0, -1, 0], [0.6, 0, 0.8], [1, 1, 1]])
def test_half_a_turn_has_its_axis(axis: list[float]) -> None:
    unit = np.array(axis) / np.linalg.norm(axis)
    found = rotation_vector(rotation_vector_matrix(math.pi * unit))
    assert np.linalg.norm(found) == pytest.approx(math.pi)
    assert abs(found @ unit) == pytest.approx(math.pi)


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-7, 1e-4, 0.5, 3.1])
def test_the_angle_is_exact_however_small(angle: float) -> None:
    assert rotation_angle(rotation_vector_matrix(np.array([0, angle, 0]))) == pytest.approx(angle, abs=1e-12)
