"""Chunks: consumed when executed, blended at the seam, averaged as in ACT."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.config import ControlConfig
from vla_ros.contract.components import ROTATION_SIZES, parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.schedule import ActionSchedule
from vla_ros.kinematics.rotations import read_rotation, rotation_angle, rotation_vector_matrix, write_rotation
from vla_ros.types import ActionChunk


def chunk(values: list[float] | np.ndarray, stamp: int = 0, gripper: float = 0.0) -> ActionChunk:
    """A chunk with one number and a gripper per step."""
    return ActionChunk(np.array([[value, gripper] for value in values]), stamp)


def make(
    horizon: int = 4,
    kind: str = "append",
    *,
    action: str = "arm.joint_delta",
    stated: int = 0,
    unblended: tuple[int, ...] = (),
    rotations: tuple[tuple[slice, str], ...] = (),
    **options: Any,
) -> ActionSchedule:
    spec = PolicySpec(
        action=parse_components(action, action=True), horizon=horizon, execute_steps=stated, continues_chunks=True
    )
    return ActionSchedule(ControlConfig(schedule=kind, **options), spec, unblended, rotations)


def run(schedule: ActionSchedule, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(float(schedule.next().action[0]))
        schedule.sent()
    return found


def test_a_step_is_repeated_until_it_was_executed() -> None:
    schedule = make(3)
    schedule.load(chunk([1, 2, 3], stamp=7))
    for _ in range(5):  # however long the arm holds
        step = schedule.next()
        assert (step.action[0], step.index, step.stamp) == (1, 0, 7)
    schedule.sent()
    step = schedule.next()
    assert (step.action[0], step.index) == (2, 1)
    assert schedule.left_until_inference == 2


def test_a_chunk_is_wanted_after_the_last_step() -> None:
    schedule = make(2)
    assert schedule.wants_chunk
    assert not schedule.left_until_inference
    schedule.load(chunk([1, 2]))
    assert not schedule.wants_chunk
    run(schedule, 2)
    assert schedule.wants_chunk
    assert not schedule.left_until_inference
    with pytest.raises(RuntimeError, match="without next"):
        schedule.sent()


@pytest.mark.parametrize(("stated", "option"), [(0, 2), (2, 0), (3, 2)])
def test_execute_steps_ends_a_chunk_early_unless_overrun(stated: int, option: int) -> None:
    """The number is the option's, else the checkpoint's."""
    schedule = make(4, stated=stated, execute_steps=option)
    schedule.load(chunk([1, 2, 3, 4]))
    run(schedule, 2)
    assert schedule.wants_chunk
    assert not schedule.left_until_inference
    step = schedule.next()
    assert step.action[0] == 3


def test_steps_executed_during_the_inference_are_skipped() -> None:
    schedule = make(6, execute_steps=4)
    schedule.load(chunk([0, 1, 2, 3, 4, 5], stamp=1))
    run(schedule, 2)
    asked = schedule.position
    run(schedule, 2)
    schedule.load(chunk([12, 13, 14, 15, 16, 17], stamp=2), asked)
    step = schedule.next()
    assert (step.action[0], step.index) == (14, 2)


def test_a_chunk_that_is_late_by_all_its_steps_yields_none() -> None:
    schedule = make(2)
    schedule.load(chunk([0, 1]))
    asked = schedule.position
    run(schedule, 2)
    schedule.load(chunk([2, 3], stamp=2), asked)
    assert not schedule.left_until_inference
    assert schedule.wants_chunk


def test_reset_forgets_everything() -> None:
    schedule = make(4, "blend")
    schedule.load(chunk([9, 9, 9, 9]))
    run(schedule, 4)
    schedule.reset()
    assert not schedule.left_until_inference
    schedule.load(chunk([1, 1, 1, 1]))
    assert run(schedule, 4) == [1, 1, 1, 1], "blended with an action from before the reset"


def test_changing_a_step_does_not_change_the_chunk() -> None:
    schedule, given_chunk = make(1), chunk([1.0])
    schedule.load(given_chunk)
    step = schedule.next()
    step.action[:] = 99
    assert given_chunk.actions[0, 0] == 1.0


@pytest.mark.parametrize("shape", [(0, 7), (7,), (1, 2, 3)])
def test_a_chunk_without_steps_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make(1).load(ActionChunk(np.zeros(shape), 0))


@pytest.mark.parametrize("overlap", [0, 2, 4, 8])
def test_a_linear_seam_does_not_jump(overlap: int) -> None:
    schedule = make(8, "blend", execute_steps=8 - overlap, blend_steps=4)
    schedule.load(chunk([0.0] * 8))
    before = run(schedule, 8 - overlap)[-1:] or [0.0]
    if overlap == 8:
        run(schedule, 1)
    schedule.load(chunk([1.0] * 8))
    after = run(schedule, 8)
    np.testing.assert_allclose(after, [0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1], atol=1e-12)
    jumps = np.abs(np.diff([*before, *after]))
    assert jumps.max() == pytest.approx(0.2), "without blending the seam jumps by 1"


def test_a_blend_continues_from_the_last_action_where_the_old_chunk_ends() -> None:
    schedule = make(6, "blend", execute_steps=4, blend_steps=4)
    schedule.load(chunk([0, 1, 2, 3, 4, 5]))
    run(schedule, 4)
    schedule.load(chunk([10] * 6))
    expected = [0.8 * 4 + 0.2 * 10, 0.6 * 5 + 0.4 * 10, 0.4 * 5 + 0.6 * 10, 0.2 * 5 + 0.8 * 10, 10, 10]
    np.testing.assert_allclose(run(schedule, 6), expected)


def test_the_ensemble_is_the_weighted_mean_of_act() -> None:
    decay = 0.3
    schedule = make(3, "ensemble", execute_steps=1, ensemble_decay=decay)
    schedule.load(chunk([10, 11, 12]))
    assert run(schedule, 1) == [10]
    schedule.load(chunk([20, 21, 22]))
    weights = [1.0, math.exp(-decay), math.exp(-2 * decay)]
    assert run(schedule, 1) == [pytest.approx((11 * weights[0] + 20 * weights[1]) / sum(weights[:2]))]
    schedule.load(chunk([30, 31, 32]))
    expected = (12 * weights[0] + 21 * weights[1] + 30 * weights[2]) / sum(weights)
    assert run(schedule, 1) == [pytest.approx(expected)]
    schedule.load(chunk([40, 41, 42]))  # the first chunk says nothing of this step
    expected = (22 * weights[0] + 31 * weights[1] + 40 * weights[2]) / sum(weights)
    assert run(schedule, 1) == [pytest.approx(expected)]


@pytest.mark.parametrize("kind", ["blend", "ensemble"])
def test_a_binary_gripper_is_never_blended(kind: str) -> None:
    schedule = make(4, kind, execute_steps=1, unblended=(1,))
    schedule.load(chunk([0] * 4, gripper=1.0))
    run(schedule, 1)
    schedule.load(chunk([1] * 4, gripper=0.0))
    step = schedule.next()
    assert 0 < step.action[0] < 1
    assert step.action[1] == 0.0


@pytest.mark.parametrize(("kind", "execute", "steps"), [("ensemble", 0, 1), ("ensemble", 3, 3), ("append", 0, 8)])
def test_an_ensemble_infers_after_every_step_by_default(kind: str, execute: int, steps: int) -> None:
    schedule = make(8, kind, execute_steps=execute)
    schedule.load(chunk([0.0] * 8))
    assert schedule.left_until_inference == steps


@given(
    kind=st.sampled_from(["append", "blend", "ensemble"]),
    chunks=st.lists(st.lists(st.floats(-1, 1), min_size=4, max_size=4), min_size=1, max_size=6),
    execute=st.integers(1, 4),
    late=st.integers(0, 3),
)
def test_blended_actions_stay_between_the_predictions(
    kind: str, chunks: list[list[float]], execute: int, late: int
) -> None:
    schedule = make(4, kind, execute_steps=execute, blend_steps=3)
    for number, values in enumerate(chunks):
        asked = schedule.position
        for _ in range(late):
            if schedule.left and schedule.next():
                schedule.sent()
        schedule.load(chunk(values, stamp=number), asked)
        while schedule.left_until_inference:
            step = schedule.next()
            assert -1 - 1e-12 <= step.action[0] <= 1 + 1e-12
            assert 0 <= step.index < 4
            schedule.sent()
        assert schedule.wants_chunk


@pytest.mark.parametrize("kind", ["blend", "ensemble"])
@pytest.mark.parametrize("form", ROTATION_SIZES)
def test_rotations_are_blended_the_short_way(form: str, kind: str) -> None:
    """Two rotations on both sides of half a turn, whose numbers are far apart."""
    matrices = [rotation_vector_matrix(np.array([0.0, 0.0, math.pi + side])) for side in (-0.1, 0.1)]
    old, new = (write_rotation(matrix, form) for matrix in matrices)
    size = len(old)
    schedule = make(2, kind, execute_steps=1, blend_steps=1, rotations=((slice(0, size), form),))
    schedule.load(ActionChunk(np.tile(old, (2, 1)), 1))
    schedule.next()
    schedule.sent()
    schedule.load(ActionChunk(np.tile(new, (2, 1)), 2))
    blended = read_rotation(schedule.next().action, form)
    for matrix in matrices:
        assert rotation_angle(blended @ matrix.T) < 0.11


@pytest.mark.parametrize(
    ("executed", "start", "rested", "positions", "found"),
    [
        (8, 0, False, True, [0.8 * 8 + 0.2 * 18, 0.6 * 8 + 0.4 * 19, 0.4 * 8 + 0.6 * 20, 0.2 * 8 + 0.8 * 21, 22]),
        (8, 0, True, True, [0.8 * 7 + 0.2 * 18, 0.6 * 7 + 0.4 * 19, 0.4 * 7 + 0.6 * 20, 0.2 * 7 + 0.8 * 21, 22]),
        (7, 0, False, True, [17, 18, 19, 20, 21]),  # one step is left, which the policy has continued
        (8, 8, True, True, [10, 11, 12, 13, 14]),  # the arm waited for the answer
        (8, 0, False, False, [18, 19, 20, 21, 22]),  # motions do not jump
        (0, 0, True, True, [10, 11, 12, 13, 14]),
    ],
)
def test_a_plan_that_has_ended_is_continued_by_its_last_motion_or_from_rest(
    executed: int, start: int, rested: bool, positions: bool, found: list[float]
) -> None:
    schedule = make(8, "rtc", unblended=(1,), action=f"arm.joint_{'position' if positions else 'delta'}")
    schedule.load(chunk(np.arange(8.0)))
    run(schedule, executed)
    schedule.load(chunk(np.arange(10.0, 26.0), gripper=1.0), start, rested=rested)
    assert schedule.next().action[1] == 1.0
    assert run(schedule, 5) == pytest.approx(found)


def test_ensembling_continues_when_other_options_change() -> None:
    schedule = make(3, "ensemble")
    schedule.control = ControlConfig(schedule="ensemble", rate_hz=3.0)
    schedule.load(chunk([1, 2, 3]))
    run(schedule, 1)
    assert schedule.wants_chunk, "ACT asks after every step"
