"""Episodes by the fast way: controls reach simulation and policy, and figures are counted right."""

from pathlib import Path

import numpy as np
import pytest

from tools.train.controls import CONTROLS, chosen
from tools.train.figures import draft_acceptance, markdown, summarize
from tools.train.recipe import LabelRecipe
from tools.train.rollouts import Meaning, Rollout, Simulation, read_words
from vla_ros.policies.openvla.actions import ActionBins, ActionStatistics
from vla_ros.sim.expert import decide
from vla_ros.sim.tasks import parse
from vla_ros.types import ActionSpec, IntArray, UInt8Array
from vla_ros.vision.processors import ResizeNaive

REACH = np.array([0.03, 0.03, 0.03, 0.05, 0.05, 0.05, 1.0])
STATISTICS = ActionStatistics("table", -REACH, REACH, np.array([True] * 6 + [False]))
BINS = ActionBins(704)


class Seer:
    """Answers as a perfect network would: the expert's action for the words, in tokens. Notes what it was shown."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.shown: list[tuple[UInt8Array, str]] = []

    def __call__(self, picture: UInt8Array, words: str) -> IntArray:
        self.shown.append((picture, words))
        world = self.simulation._world
        task = parse(words)
        assert task is not None
        joints = world.joint_positions()
        action = decide(task, joints[:7], float(joints[7:].mean()), world.object_positions())
        action[6] = LabelRecipe().closed_value + (1 - LabelRecipe().closed_value) * action[6]
        return BINS.encode(STATISTICS.normalize(action))


def play(words: tuple[str, ...], seed: int = 5) -> tuple[Rollout, Seer]:
    arguments = read_words(Path("nowhere"), words)
    simulation = Simulation(arguments, Meaning(ActionSpec(processors={"image": ResizeNaive()}), BINS, STATISTICS))
    seer = Seer(simulation)
    try:
        return simulation.run(seed, seer), seer
    finally:
        simulation.close()


def control(name: str) -> tuple[str, ...]:
    return chosen(name)[0].words


def test_a_perfect_network_succeeds_and_sees_upright_pictures() -> None:
    rollout, seer = play(control("plain"))
    assert rollout.success
    assert rollout.tokens.shape == (rollout.steps, 7)
    picture = seer.shown[0][0]
    assert picture[:40].mean() > picture[-40:, :, 2].mean()  # the sky is above the table
    assert picture[0, 0, 2] > picture[0, 0, 0]


def test_each_control_changes_what_it_says() -> None:
    upright = play(control("plain"))[1].shown[0][0]
    turned = play((*control("orientation"), "--max-steps", "1"))[1].shown[0][0]
    np.testing.assert_array_equal(turned, upright[::-1, ::-1])
    assert not play((*control("blank"), "--max-steps", "1"))[1].shown[0][0].any()
    dim = play((*control("dim"), "--max-steps", "1"))[1].shown[0][0]
    assert dim.mean() == pytest.approx(0.6 * upright.mean(), rel=0.02)
    cropped = play((*control("crop"), "--max-steps", "1"))[1].shown[0][0]
    assert cropped.shape == upright.shape
    assert (cropped != upright).any()


def test_a_network_that_listens_fails_when_shuffled_and_follows_a_switch() -> None:
    shuffled, _ = play(control("shuffle"))
    assert (shuffled.success, shuffled.reason) == (False, "wrong_object")
    switched, seer = play(control("switch"))
    assert switched.success
    words = [text for _, text in seer.shown]
    assert len(set(words)) == 2
    assert words[5] != words[6]
    assert len(set(words[:6])) == 1


def test_the_gripper_control_lets_even_a_perfect_network_fail() -> None:
    rollout, _ = play(control("gripper"))
    assert not rollout.success


def test_every_control_is_a_demo_command_line() -> None:
    for each in CONTROLS:
        read_words(Path("checkpoint"), each.words)
    assert chosen("") == CONTROLS
    with pytest.raises(ValueError, match="plain"):
        chosen("plain,bunp")


def test_draft_acceptance_is_counted_strictly() -> None:
    first = np.array([[1, 2, 3, 4, 5, 6, 7]] * 2 + [[1, 2, 9, 4, 5, 6, 7]])
    assert draft_acceptance([first, first[:1]]) == {
        "tokens": round(13 / 14, 4),
        "leading": 4.5,
        "whole": 0.5,
    }
    assert draft_acceptance([first[:1]]) == {}


def test_figures_of_a_control() -> None:
    tokens = np.ones((3, 7), np.int64)
    rollouts = [
        Rollout(7, True, "success", 10, tokens),
        Rollout(8, False, "wrong_object", 20, tokens),
        Rollout(9, True, "success", 13, tokens),
        Rollout(10, True, "success", 13, tokens),
    ]
    figures = summarize(chosen("bump")[0], rollouts)
    assert figures["success_rate"] == 0.75
    assert figures["wrong_object_rate"] == 0.25
    assert figures["steps"] == 12.0
    assert figures["failed_seeds"] == [8]
    assert not figures["met"]
    assert "| 75.0% | 25.0% | 12.0 | >= 90% MISSED | 100%, 7.0, 100% |" in markdown([figures])


def test_the_page_lists_the_controls_as_they_are() -> None:
    page = (Path(__file__).parents[3] / "docs" / "demo-policy.md").read_text(encoding="utf-8").replace('"', "")
    for each in CONTROLS:
        if each.words:
            assert f"| `{' '.join(each.words)}` |" in page, each.name
