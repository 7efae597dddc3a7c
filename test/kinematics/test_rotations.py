"""Every form of a rotation, compared with Pinocchio and converted back."""

import numpy as np
import pinocchio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vla_ros.contract.components import ROTATION_SIZES
from vla_ros.kinematics.rotations import nearest, read_rotation, write_rotation

ANGLES = st.tuples(*[st.floats(-np.pi, np.pi)] * 3)
RIGHT = np.pi / 2


@pytest.mark.parametrize("form", ROTATION_SIZES)
@given(angles=ANGLES)
@example(angles=(0.3, RIGHT, 0.4))
@example(angles=(0.3, -RIGHT, 0.4))
@example(angles=(np.pi, 0.0, 0.0))
@example(angles=(0.0, np.pi, 0.0))
@example(angles=(0.0, 0.0, np.pi))
def test_every_form_is_read_back(form: str, angles: tuple[float, float, float]) -> None:
    matrix = pinocchio.rpy.rpyToMatrix(np.array(angles))
    numbers = write_rotation(matrix, form)
    assert numbers.shape == (ROTATION_SIZES[form],)
    np.testing.assert_allclose(read_rotation(numbers, form), matrix, atol=1e-6)


@given(angles=ANGLES)
def test_quaternions_equal_those_of_pinocchio(angles: tuple[float, float, float]) -> None:
    matrix = pinocchio.rpy.rpyToMatrix(np.array(angles))
    q = pinocchio.Quaternion(matrix).coeffs()
    q = -q if q[3] < 0 else q
    found = write_rotation(matrix, "quaternion_xyzw")
    assert min(np.abs(found - q).max(), np.abs(found + q).max()) < 1e-7
    np.testing.assert_array_equal(write_rotation(matrix, "quaternion_wxyz"), np.roll(found, 1))
    np.testing.assert_array_equal(write_rotation(matrix, "rot6d"), np.concatenate((matrix[0], matrix[1])))
    np.testing.assert_array_equal(
        write_rotation(matrix, "rot6d_columns"), np.concatenate((matrix[:, 0], matrix[:, 1]))
    )


@given(st.lists(st.floats(-10, 10), min_size=6, max_size=6), st.sampled_from(sorted(ROTATION_SIZES)))
def test_any_numbers_are_a_rotation_or_refused(numbers: list[float], form: str) -> None:
    try:
        matrix = read_rotation(np.array(numbers[: ROTATION_SIZES[form]]), form)
    except ValueError:
        return
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(3), atol=1e-6)
    assert np.linalg.det(matrix) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("form", "numbers"),
    [("quaternion_xyzw", [0] * 4), ("rot6d", [0] * 6), ("rot6d_columns", [1, 2, 3, 2, 4, 6])],
)
def test_numbers_without_a_direction_are_refused(form: str, numbers: list[float]) -> None:
    with pytest.raises(ValueError, match="no direction"):
        read_rotation(np.array(numbers), form)


@pytest.mark.parametrize("form", ["rotation_vector", "quaternion_xyzw", "quaternion_wxyz", "euler_xyz"])
@given(angles=ANGLES, to=st.lists(st.floats(-6, 6), min_size=4, max_size=4))
@example(angles=(0.3, RIGHT, 0.4), to=[1.0, 1.5, -2.0, 0.0])
@example(angles=(0.3, -RIGHT, 0.4), to=[1.0, -1.5, -2.0, 0.0])
@example(angles=(0.0, 0.0, 0.0), to=[6.0, 0.0, 0.0, 0.0])
def test_the_nearest_numbers_are_the_same_rotation(
    form: str, angles: tuple[float, float, float], to: list[float]
) -> None:
    matrix = pinocchio.rpy.rpyToMatrix(np.array(angles))
    numbers, reference = write_rotation(matrix, form), np.array(to[: ROTATION_SIZES[form]])
    found = nearest(numbers, form, reference)
    np.testing.assert_allclose(read_rotation(found, form), matrix, atol=3e-6)
    np.testing.assert_allclose(nearest(found, form, found), found, atol=1e-9)
    if form == "euler_xyz":
        assert np.abs(found - reference).max() <= np.abs(numbers - reference).max() + 1e-5
    else:  # quaternions are compared, also those of vectors
        assert np.cos(_half(found, form, reference)) >= -1e-6


def _half(found: np.ndarray, form: str, reference: np.ndarray) -> float:
    """Half the angle between two rotations, with the signs that their numbers stand for."""
    if form == "rotation_vector":
        found, reference = _double_cover(found), _double_cover(reference)
    length = float(np.linalg.norm(reference)) or 1.0
    return float(np.arccos(np.clip(found @ reference / length, -1, 1)))


def _double_cover(vector: np.ndarray) -> np.ndarray:
    angle = float(np.linalg.norm(vector))
    return np.append(np.sinc(angle / 2 / np.pi) * vector / 2, np.cos(angle / 2))
