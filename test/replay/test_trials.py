import numpy as np
import pytest

from vla_ros.config import build
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.policies import Policy
from vla_ros.types import ActionChunk
from vla_ros.vision.processors import LiberoResize
from vla_ros_lab.replay import evaluate, trials
from vla_ros_lab.replay.play import ReplayOptions
from vla_ros_lab.replay.result import make_result

PERIOD = 100_000_000


class SpotPolicy(Policy):
    """Goes where a red spot lies in the image; blue ones say nothing to it."""

    def __init__(self, scale=1.0):
        self.spec = PolicySpec()
        self.scale = scale

    def infer(self, session, observation):
        image = observation.images["image"].astype(float)
        weight = np.clip(image[..., 0] - image[..., 2] - 50, 0, None)
        if weight.sum() == 0:
            action = np.array([0.02, 0, 0, 0, 0, 0, 1.0])
        else:
            rows, columns = np.indices(weight.shape)
            centre = np.array([(columns * weight).sum(), (rows * weight).sum()]) / weight.sum()
            motion = (centre - 111.5) / 111.5 * 0.05
            action = np.array([*motion, 0, 0, 0, 0, 1.0])
        normalized = action / 0.05
        action[:6] *= self.scale
        return ActionChunk(action[None], observation.stamp, normalized[None])

    def other_statistics(self, normalized):
        return {"half": 0.025 * normalized, "right": 0.05 * normalized, "twice": 0.1 * normalized}


@pytest.fixture
def spot_bag(make, write_bag):
    """``spot_bag(alter)`` gives a bag of spots; ``alter`` turns each upright image into the camera's."""

    def write(alter, steps=40):
        rng = np.random.default_rng(0)
        messages = [(make.start, "/vla_policy/instruction", make.text("go to the spot"))]
        for step in range(steps):
            stamp = make.start + step * PERIOD
            place = rng.integers(20, 204, 2)
            pixels = np.zeros((224, 224, 3), np.uint8)
            pixels[place[1] - 12 : place[1] + 12, place[0] - 12 : place[0] + 12, 0] = 255
            action = [*((place - 112) / 111.5 * 0.05), 0, 0, 0, 0, float(step % 20 < 10)]
            messages += [
                (stamp + 1_000_000, "/camera/image_raw", make.image(stamp, alter(pixels))),
                (stamp + 21_000_000, "/vla_policy/action", make.array(action)),
            ]
        return write_bag("spots", messages)

    return write


def explained(path, policy=None, **options):
    config = build(options)
    chosen, options = policy or SpotPolicy(), ReplayOptions(instruction="go")
    outcome = evaluate.play(evaluate.BagJob(path, config, options), lambda: chosen)
    return trials.explain(make_result([outcome], config, options), lambda: chosen)


@pytest.mark.parametrize(
    ("alter", "name"),
    [
        (lambda image: image[::-1, ::-1], "camera.orientation rotate_180"),
        (lambda image: image[:, ::-1], "camera.orientation flip_horizontal"),
        (lambda image: image[..., ::-1], "red and blue swapped"),
    ],
)
def test_the_cause_is_the_first_reason(spot_bag, alter, name):
    found = explained(spot_bag(alter))
    assert found.verdict.level == "bad"
    assert found.verdict.reasons[0].startswith(f"actions agree far better with {name} (cosine 1.00")
    assert [trial["name"] for trial in found.figures["trials"] if trial["better"]] == [name]
    assert found.figures["verdict"]["reasons"][0] == found.verdict.reasons[0]


def test_a_short_recording_says_that_nothing_was_tried(spot_bag):
    found = explained(spot_bag(lambda image: image[::-1, ::-1], steps=10))
    compared = found.figures["frames"]["compared"]
    assert 0 < compared < trials.FRAMES
    assert found.verdict.reasons[-1].startswith(f"only {compared} frames were compared, so that no other option")
    assert found.figures["verdict"]["reasons"] == list(found.verdict.reasons)
    assert "trials" not in found.figures


def test_the_advice_can_be_typed(spot_bag):
    path = spot_bag(lambda image: image[::-1, ::-1])
    found = explained(path)
    assert found.verdict.reasons[0].endswith("try -p 'camera.orientation:=[rotate_180]'")
    again = explained(path, **{"camera.orientation": ["rotate_180"]})
    assert again.figures["direction_cosine"] > 0.99
    assert "trials" not in again.figures


def test_statistics_of_another_dataset_are_named(spot_bag):
    found = explained(spot_bag(lambda image: image), SpotPolicy(scale=3.0))
    assert found.verdict.reasons[0].startswith("actions agree far better with policy.unnorm_key right ")
    assert any("times as large" in reason for reason in found.verdict.reasons)


def test_no_cause_is_named_if_no_change_helps(spot_bag):
    """Answers that have nothing to do with what was recorded: everything was tried, and that is what is said."""
    rng = np.random.default_rng(5)

    class Random(SpotPolicy):
        def infer(self, session, observation):
            observation.images["image"]
            action = np.array([*rng.normal(0, 0.02, 3), 0, 0, 0, 1.0])
            return ActionChunk(action[None], observation.stamp, (action / 0.05)[None])

    found = explained(spot_bag(lambda image: image), Random())
    assert found.verdict.level == "bad"
    assert found.verdict.reasons[-1].endswith("none agrees far better")
    assert not any(trial["better"] for trial in found.figures["trials"])


def test_nothing_is_tried_for_a_good_policy(spot_bag):
    found = explained(spot_bag(lambda image: image))
    assert "trials" not in found.figures
    assert found.figures["skill"]["mean_action"] > 0.99


def test_frames_on_which_both_are_right_do_not_speak_against_a_change():
    """Going straight down looks alike both ways round: only some frames tell."""
    guess, right = np.ones(16), np.zeros(16)
    before = np.where(np.arange(16) < 10, 0.0, 4.0)
    assert trials.is_far_better(before, right + 1e-4, guess)
    assert not trials.is_far_better(before, np.where(np.arange(16) < 6, 4.0, 0.0), guess)
    assert not trials.is_far_better(before, 0.45 * before, guess)  # better, but not good


@pytest.mark.parametrize("crop_area", [0.9, 1.0])
def test_the_crop_of_an_image_is_known_whatever_the_camera_is_called(crop_area):
    image = ImageFeature("observation/image", LiberoResize(crop_area=crop_area), camera="front")
    config = build({"camera.keys": ["front"]})
    names = [change.name for change in trials.changes(config, PolicySpec((image,)))]
    assert names[-1] == f"camera.crop_area {0.9 if crop_area == 1.0 else 1.0}"
    assert sum(name.startswith("camera.orientation") for name in names) == 5
