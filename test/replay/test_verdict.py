import numpy as np
import pytest

from vla_ros.config import Config, GripperConfig
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros_lab.replay import figures, verdict
from vla_ros_lab.replay.play import ReplayOptions
from vla_ros_lab.replay.samples import Samples

SPEC = PolicySpec()


def recorded_actions():
    """200 frames of a wandering arm that closes its gripper halfway."""
    rng = np.random.default_rng(0)
    actions = np.zeros((200, 7))
    actions[:, :3] = np.cumsum(rng.normal(0, 0.003, (200, 3)), axis=0) * 0.2
    actions[:, 3:6] = rng.normal(0, 0.01, (200, 3))
    actions[:, 6] = np.arange(200) < 100
    return actions


def judged(predicted, recorded, spec=SPEC, **changes):
    """The verdict on 100 ms steps of 20 ms each; ``changes`` are options and fields of the samples."""
    frames, config = len(predicted), changes.pop("config", Config())
    times = 1_790_000_000_000_000_000 + np.arange(frames) * 100_000_000
    fields = {
        "times": times,
        "stamps": times,
        "episodes": np.arange(frames) // 50,
        "normalized": np.zeros(predicted.shape),
        "openings": np.full((frames, len(spec.grippers)), np.nan),
        "commands": {},
        "stages_ms": {"total": np.full(frames, 20.0)},
        "age_ms": np.full(frames, np.nan),
    }
    samples = Samples(
        bag="bag",
        predicted=predicted,
        recorded=recorded,
        instructions=("do it",) * 4,
        received=frames,
        rule="after",
        topics={"truth": "/action"},
        **{**fields, **changes},
    )
    found = figures.summarize([samples], spec, config, ReplayOptions())
    rows = samples.compared
    return verdict.judge(found, predicted[rows], recorded[rows], spec)


def noisy(actions, share=0.2, seed=1):
    noise = np.random.default_rng(seed).normal(size=actions.shape) * actions.std(axis=0) * share
    noise[:, 6] = 0
    return actions + noise


RECORDED = recorded_actions()
FAST = np.zeros((200, 7))
FAST[:100, 1] = 1.0
"""Normalised actions with one number at the end of its range in half of the frames."""


def changed(columns, change):
    """The recorded actions with a little noise and some of their numbers changed."""
    predicted = noisy(RECORDED, 0.05)
    predicted[:, columns] = change(predicted[:, columns])
    return predicted


def jitter(motion):
    return motion + np.random.default_rng(1).normal(size=motion.shape) * RECORDED[:, :3].std(axis=0) * 1.5


MOTION, GRIPPER = slice(0, 3), slice(6, 7)


@pytest.mark.parametrize(
    ("predicted", "level", "reasons"),
    [
        pytest.param(noisy(RECORDED), "good", ["directions agree"], id="a little noise"),
        pytest.param(changed(MOTION, jitter), "warn", ["no better", "agree only partly"], id="much noise"),
        *(
            pytest.param(
                changed(MOTION, lambda motion, axes=axes: motion[:, axes] * (-1, -1, 1)),
                "bad",
                ["camera.orientation", "would agree with axes"],
                id=f"turned {axes}",
            )
            for axes in ((1, 0, 2), (0, 1, 2))
        ),
        pytest.param(
            np.roll(RECORDED, 61, axis=0) * 2, "bad", ["worse than the mean-action baseline"], id="another robot"
        ),
        *(
            pytest.param(
                changed(slice(0, 6), lambda motion, scale=scale: motion * scale),
                "bad",
                ["times as large as recorded ones: check policy.unnorm_key"],
                id=f"{scale} times as large",
            )
            for scale in (10, 0.1)
        ),
        pytest.param(
            np.tile(RECORDED.mean(axis=0), (200, 1)), "bad", ["same action for every frame"], id="sees nothing"
        ),
        pytest.param(changed(GRIPPER, lambda number: 1 - number), "bad", ["does the opposite"], id="inverted"),
        pytest.param(changed(GRIPPER, lambda number: 0 * number + 1), "bad", ["never closes"], id="always open"),
    ],
)
def test_each_failure_is_named(predicted, level, reasons):
    found = judged(predicted, RECORDED)
    assert found.level == level
    for words in reasons:
        assert any(words in reason for reason in found.reasons), words


def test_right_but_late_is_the_headline():
    late = judged(noisy(RECORDED), RECORDED, stages_ms={"total": np.full(200, 900.0)})
    assert late.level == "warn"
    assert any("took longer than the period" in reason for reason in late.reasons)
    assert late.headline == "The policy does what was recorded, but this machine is too slow for it."


def test_the_end_of_a_range_counts_only_where_it_is_wrong():
    clipped = noisy(RECORDED)
    clipped[:100, 1] += 3 * RECORDED[:, 1].std()
    wrong = judged(clipped, RECORDED, normalized=FAST)
    assert any("dy is at the end of its range in 50 %" in reason for reason in wrong.reasons)
    right = judged(noisy(RECORDED, 0.05), RECORDED, normalized=FAST)
    assert right.level == "good"
    assert not any("end of its range" in reason for reason in right.reasons)


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
    predicted = noisy(RECORDED)
    predicted[:, 6] = np.where(RECORDED[:, 6] > 0.5, 1.0, 0.7)
    analog = Config(gripper=GripperConfig(mode="binary", threshold=0.85))
    found = judged(predicted, RECORDED, config=analog)
    assert found.level == "good"
    low = judged(predicted, RECORDED)
    assert low.level == "bad"
    assert any("never closes" in reason and "[0.7, 1]" in reason for reason in low.reasons)


def test_measured_fingers_reveal_a_swapped_convention():
    """Actions and answers agree perfectly, and both mean the opposite of what the hand did."""
    openings = np.where(RECORDED[:, 6] > 0.5, 0.0, 1.0)  # wide where the number says closed
    found = judged(noisy(RECORDED), RECORDED, openings=openings[:, None])
    assert found.level == "bad"
    assert any("contradict the measured fingers" in reason for reason in found.reasons)
    assert judged(noisy(RECORDED), RECORDED, openings=1 - openings[:, None]).level == "good"


def test_three_times_too_large_is_named_though_directions_agree():
    predicted = noisy(RECORDED, 0.05)
    predicted[:, :3] *= 3
    found = judged(predicted, RECORDED)
    assert found.level == "bad"
    assert any(reason.startswith("directions agree, but predicted motions are 3") for reason in found.reasons)
    assert not any("camera.orientation" in reason for reason in found.reasons)


def test_nothing_to_compare_is_reported():
    found = judged(RECORDED, np.full_like(RECORDED, np.nan), problem="the bag has no actions")
    assert found.level == "warn"
    assert "nothing to compare" in found.headline
    assert "the bag has no actions" in found.reasons


@pytest.mark.parametrize(
    ("offset", "words"), [(-3_000_000_000, "3 s behind"), (90_000_000_000, "90 s ahead of"), (-50_000_000, "")]
)
def test_clocks_that_disagree_are_named(offset, words):
    stamps = 1_790_000_000_000_000_000 + np.arange(200) * 100_000_000 + offset
    found = judged(noisy(RECORDED), RECORDED, stamps=stamps)
    assert found.level == ("warn" if words else "good")
    assert any(f"stamps are {words}" in reason for reason in found.reasons) == bool(words)
    unstamped = judged(noisy(RECORDED), RECORDED, stamps=np.zeros(200, np.int64))
    assert any("no stamp" in reason for reason in unstamped.reasons)


def test_every_arm_and_gripper_is_judged():
    parts = "left.tip_delta + left.gripper + right.tip_delta + right.gripper"
    spec = PolicySpec(action=parse_components(parts, action=True), dimension=14)
    recorded = np.concatenate([RECORDED, RECORDED[::-1]], axis=1)
    assert judged(noisy(recorded), recorded, spec).level == "good"
    wrong = noisy(recorded)
    wrong[:, 7:10] *= -1
    assert "hardly agree" in " ".join(judged(wrong, recorded, spec).reasons)
    wrong = noisy(recorded)
    wrong[:, [6, 13]] = 1 - recorded[:, [6, 13]]
    assert "does the opposite" in " ".join(judged(wrong, recorded, spec).reasons)
    wrong = noisy(recorded)
    wrong[:, 13] = 1.0
    found = judged(wrong, recorded, spec)
    assert (found.level, "gripper agrees only partly" in " ".join(found.reasons)) == ("warn", True)
    names = figures.dimension_names(spec, ())
    assert (names[0], names[6], names[7], names[13]) == ("left dx", "left gripper", "right dx", "right gripper")
