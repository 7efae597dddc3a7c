import numpy as np
import pytest

from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros_lab.replay import skill

MOTION = (0, 1, 2)


def actions(frames=60, seed=0):
    result = np.zeros((frames, 7))
    result[:, :3] = np.random.default_rng(seed).normal(size=(frames, 3)) * (0.01, 0.02, 0.005)
    return result


def scores(predicted, recorded):
    guesses = {"mean": np.broadcast_to(recorded.mean(axis=0), recorded.shape), "itself": recorded}
    return skill.scores(predicted, recorded, guesses, MOTION, np.arange(len(recorded)) // 20)


def test_perfect_is_one_the_guess_itself_is_zero_and_worse_is_below():
    recorded = actions()
    assert scores(recorded, recorded)[0]["mean"] == 1
    mean = np.broadcast_to(recorded.mean(axis=0), recorded.shape)
    assert scores(mean, recorded)[0]["mean"] == pytest.approx(0)
    assert scores(-recorded, recorded)[0]["mean"] < -1
    assert np.isnan(scores(recorded, recorded)[0]["itself"])  # a guess without error leaves nothing to be ahead of


def test_rotation_and_gripper_do_not_count_and_joints_all_do():
    recorded = actions()
    predicted = recorded.copy()
    predicted[:, 3:] += 1.0
    assert scores(predicted, recorded)[0]["mean"] == 1
    assert skill.columns_of(PolicySpec()) == [0, 1, 2]
    joints = PolicySpec(action=parse_components("arm.joint_delta + arm.gripper", action=True), dimension=8)
    assert skill.columns_of(joints) == list(range(7))


def test_unknown_numbers_are_left_out_and_intervals_hold_the_score():
    recorded = actions()
    recorded[3] = np.nan
    predicted = np.nan_to_num(recorded) + np.random.default_rng(1).normal(size=recorded.shape) * 0.005
    guess = {"zero": np.zeros_like(recorded)}
    found, ends = skill.scores(predicted, recorded, guess, MOTION, np.arange(60) // 20)
    assert ends["zero"][0] <= found["zero"] <= ends["zero"][1] < 1


def test_turns_are_where_a_direction_changes_or_motion_begins():
    motion = np.zeros((9, 3))
    motion[1:4] = (1, 0, 0)  # sets off at 1
    motion[4:6] = (0, 1, 0)  # turns at 4
    motion[6] = (0.2, 1, 0)  # by 11 degrees: no turn
    motion[7:] = (-1, 0, 0)  # turns at 7
    episodes = np.zeros(9, np.int64)
    assert skill.turns(motion, episodes).tolist() == [1, 4, 7]
    episodes[4:] = 1
    assert skill.turns(motion, episodes).tolist() == [1, 7]
    motion[3] = np.nan
    assert skill.turns(motion, np.zeros(9, np.int64)).tolist() == [1, 7]
    assert skill.turns(np.zeros((1, 3)), np.zeros(1, np.int64)).tolist() == []


def test_repeating_the_past_has_no_cosine_at_turns():
    recorded = np.zeros((40, 7))
    recorded[:, :3] = np.repeat(np.eye(3)[[0, 1, 2, 0]], 10, axis=0)
    held = np.concatenate((recorded[:1], recorded[:-1]))
    found = skill.at_turns(recorded, recorded, {"hold_last": held}, np.zeros(40, np.int64), [MOTION])
    assert found["count"] == 3
    assert found["direction_cosine"] == pytest.approx(1)
    assert found["baselines"]["hold_last"] == pytest.approx(0)
