"""The verdict finds the silent failures, and says good only to what is good."""

import numpy as np
import pytest

from vla_ros.config import Config, GripperConfig
from vla_ros.replay import figures, verdict
from vla_ros.replay import frames as frames_of
from vla_ros.replay.samples import Samples
from vla_ros.types import ActionSpec

SPEC = ActionSpec()


def recorded_actions(frames=200, seed=0):
    """A wandering arm that closes its gripper halfway."""
    rng = np.random.default_rng(seed)
    actions = np.zeros((frames, 7))
    actions[:, :3] = np.cumsum(rng.normal(0, 0.003, (frames, 3)), axis=0) * 0.2
    actions[:, 3:6] = rng.normal(0, 0.01, (frames, 3))
    actions[:, 6] = np.arange(frames) < frames // 2
    return actions


def judged(predicted, recorded, **changes):
    frames, config = len(predicted), changes.pop("config", Config())
    stages = {"total": np.full(frames, 20.0)}
    samples = Samples(
        bag="bag",
        times=1_790_000_000_000_000_000 + np.arange(frames) * 100_000_000,
        stamps=changes.pop("stamps", 1_790_000_000_000_000_000 + np.arange(frames) * 100_000_000),
        episodes=np.arange(frames) // 50,
        predicted=predicted,
        recorded=recorded,
        normalized=changes.pop("normalized", np.zeros((frames, 7))),
        openings=changes.pop("openings", np.full(frames, np.nan)),
        commands=np.zeros((frames, 0)),
        command_names=(),
        stages_ms=changes.pop("stages_ms", stages),
        age_ms=np.full(frames, np.nan),
        instructions=("do it",) * 4,
        received=frames,
        rule="after",
        topics={"truth": "/action"},
        **changes,
    )
    found = figures.summarize([samples], SPEC, config, speed=0.0, every=1, tolerance_s=0.2)
    rows = frames_of.gather([samples]).compared
    return verdict.judge(found, predicted[rows], recorded[rows])


def noisy(actions, share=0.2, seed=1):
    noise = np.random.default_rng(seed).normal(size=actions.shape) * actions.std(axis=0) * share
    noise[:, 6] = 0
    return actions + noise


def test_a_little_noise_is_good():
    recorded = recorded_actions()
    found = judged(noisy(recorded), recorded)
    assert found.level == "good"
    assert any("directions agree" in reason for reason in found.reasons)


def test_more_noise_is_plausible_but_not_convincing():
    recorded = recorded_actions()
    predicted = recorded.copy()
    predicted[:, :3] += np.random.default_rng(1).normal(size=(200, 3)) * recorded[:, :3].std(axis=0) * 1.5
    found = judged(predicted, recorded)
    assert found.level == "warn"
    assert any("no better" in reason for reason in found.reasons)
    assert any("agree only partly" in reason for reason in found.reasons)


@pytest.mark.parametrize("axes", [(1, 0, 2), (0, 1, 2)])
def test_a_turned_image_is_bad_and_the_axes_are_named(axes):
    recorded = recorded_actions()
    predicted = noisy(recorded, 0.1)
    predicted[:, :3] = predicted[:, axes] * (-1, -1, 1)
    found = judged(predicted, recorded)
    assert found.level == "bad"
    assert any("camera.orientation" in reason for reason in found.reasons)
    assert any("would agree with axes" in reason for reason in found.reasons)


def test_actions_of_another_robot_are_worse_than_the_mean():
    recorded = recorded_actions()
    predicted = np.roll(recorded, 61, axis=0) * 2
    found = judged(predicted, recorded)
    assert found.level == "bad"
    assert any("worse than the mean-action baseline" in reason for reason in found.reasons)


@pytest.mark.parametrize(("scale", "word"), [(10, "unnorm_key"), (0.1, "unnorm_key")])
def test_a_wrong_scale(scale, word):
    recorded = recorded_actions()
    predicted = recorded.copy()
    predicted[:, :6] *= scale
    found = judged(predicted, recorded)
    assert found.level == "bad"
    assert any(word in reason and "times as large" in reason for reason in found.reasons)


def test_a_model_that_does_not_see():
    recorded = recorded_actions()
    found = judged(np.tile(recorded.mean(axis=0), (len(recorded), 1)), recorded)
    assert found.level == "bad"
    assert any("same action for every frame" in reason for reason in found.reasons)


def test_grippers():
    recorded = recorded_actions()
    inverted = noisy(recorded)
    inverted[:, 6] = 1 - inverted[:, 6]
    assert any("does the opposite" in reason for reason in judged(inverted, recorded).reasons)
    open_always = noisy(recorded)
    open_always[:, 6] = 1
    found = judged(open_always, recorded)
    assert found.level == "bad"
    assert any("never closes" in reason for reason in found.reasons)


def test_conduct_counts_too():
    recorded = recorded_actions()
    late = judged(noisy(recorded), recorded, stages_ms={"total": np.full(200, 900.0)})
    assert late.level == "warn"
    assert any("took longer than the period" in reason for reason in late.reasons)
    ends = np.zeros((200, 7))
    ends[:100, 1] = 1.0
    clipped = noisy(recorded)
    clipped[:100, 1] += 3 * recorded[:, 1].std()
    full = judged(clipped, recorded, normalized=ends)
    assert any("dy is at the end of its range in 50 %" in reason for reason in full.reasons)


def test_an_expert_at_full_speed_is_no_fault():
    recorded = recorded_actions()
    ends = np.zeros((200, 7))
    ends[:100, 1] = 1.0
    found = judged(noisy(recorded, 0.05), recorded, normalized=ends)
    assert found.level == "good"
    assert not any("end of its range" in reason for reason in found.reasons)


def test_right_but_late_is_said_in_the_headline():
    recorded = recorded_actions()
    late = judged(noisy(recorded), recorded, stages_ms={"total": np.full(200, 900.0)})
    assert late.headline == "The policy does what was recorded, but this machine is too slow for it."


def turning_actions(frames=400):
    """Straight runs of ten steps, each in another direction: smooth nearly everywhere."""
    rng = np.random.default_rng(3)
    runs = rng.normal(size=(frames // 10, 3))
    actions = np.zeros((frames, 7))
    actions[:, :3] = np.repeat(0.02 * runs / np.linalg.norm(runs, axis=1, keepdims=True), 10, axis=0)
    actions[:, 6] = np.arange(frames) % 100 < 50
    return actions


def test_a_policy_that_repeats_the_recorded_past_is_not_called_good():
    recorded = turning_actions()
    copied = recorded.copy()
    copied[1:, :6] = recorded[:-1, :6]
    found = judged(copied, recorded)
    assert found.level == "warn"
    assert any("where the recorded motion turns" in reason for reason in found.reasons)
    assert judged(noisy(recorded, 0.1), recorded).level == "good"


def test_a_gripper_number_counts_as_it_reaches_the_fingers():
    """0.7 closes where the threshold is 0.85: no error of 0.7."""
    recorded = recorded_actions()
    predicted = noisy(recorded)
    predicted[:, 6] = np.where(recorded[:, 6] > 0.5, 1.0, 0.7)
    analog = Config(gripper=GripperConfig(mode="binary", threshold=0.85))
    found = judged(predicted, recorded, config=analog)
    assert found.level == "good"
    low = judged(predicted, recorded)
    assert low.level == "bad"
    assert any("never closes" in reason and "[0.7, 1]" in reason for reason in low.reasons)


def test_fingers_tell_on_an_exchanged_convention():
    """Actions and answers agree perfectly, and both mean the opposite of what the hand did."""
    recorded = recorded_actions()
    openings = np.where(recorded[:, 6] > 0.5, 0.0, 1.0)  # wide where the number says closed
    found = judged(noisy(recorded), recorded, openings=openings)
    assert found.level == "bad"
    assert any("contradict the measured fingers" in reason for reason in found.reasons)
    assert judged(noisy(recorded), recorded, openings=1 - openings).level == "good"


def test_three_times_too_large_is_named_though_directions_agree():
    recorded = recorded_actions()
    predicted = noisy(recorded, 0.05)
    predicted[:, :3] *= 3
    found = judged(predicted, recorded)
    assert found.level == "bad"
    assert any(reason.startswith("directions agree, but predicted motions are 3") for reason in found.reasons)
    assert not any("camera.orientation" in reason for reason in found.reasons)


def test_nothing_to_compare_is_said():
    recorded = recorded_actions()
    found = judged(recorded, np.full_like(recorded, np.nan), problem="the bag has no actions")
    assert found.level == "warn"
    assert "nothing to compare" in found.headline
    assert "the bag has no actions" in found.reasons


@pytest.mark.parametrize(
    ("offset", "words"), [(-3_000_000_000, "3 s behind"), (90_000_000_000, "90 s ahead of"), (-50_000_000, "")]
)
def test_clocks_that_disagree_are_named(offset, words):
    recorded = recorded_actions()
    stamps = 1_790_000_000_000_000_000 + np.arange(200) * 100_000_000 + offset
    found = judged(noisy(recorded), recorded, stamps=stamps)
    assert found.level == ("warn" if words else "good")
    assert any(f"stamps are {words}" in reason for reason in found.reasons) == bool(words)
    unstamped = judged(noisy(recorded), recorded, stamps=np.zeros(200, np.int64))
    assert any("no stamp" in reason for reason in unstamped.reasons)
