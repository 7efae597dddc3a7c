from pathlib import Path

import numpy as np
import pytest

from tools.train.controls import CONTROLS, chosen, draft_acceptance, markdown, summarize
from tools.train.recipe import LabelRecipe
from tools.train.rollouts import Meaning, Rollout, Simulation, parse_options
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.policies.openvla.processing import ActionBins, ActionStatistics
from vla_ros.sim import arm
from vla_ros.sim.expert import decide
from vla_ros.sim.tasks import parse_instruction
from vla_ros.types import IntArray, UInt8Array
from vla_ros.vision.processors import ResizeNaive

REACH = np.array([0.03, 0.03, 0.03, 0.05, 0.05, 0.05, 1.0])
STATISTICS = ActionStatistics("table", -REACH, REACH, np.array([True] * 6 + [False]))
BINS = ActionBins(704)


class PerfectNetwork:
    """Infers the expert's action for the instruction, in tokens, and records its inputs."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.inputs: list[tuple[UInt8Array, str]] = []

    def __call__(self, image: UInt8Array, instruction: str) -> IntArray:
        self.inputs.append((image, instruction))
        world = self.simulation._world
        task = parse_instruction(instruction)
        assert task is not None
        joints = world.joint_positions()
        action = decide(task, arm.forward(joints[:7]), float(joints[7:].mean()), world.object_positions())
        action[6] = LabelRecipe().closed_value + (1 - LabelRecipe().closed_value) * action[6]
        return BINS.encode(STATISTICS.normalize(action))


def play(name: str, *more: str) -> tuple[Rollout, PerfectNetwork]:
    arguments = parse_options(Path("nowhere"), (*chosen(name)[0].options, *more))
    spec = PolicySpec((ImageFeature("image", ResizeNaive()),))
    simulation = Simulation(arguments, Meaning(spec, BINS, STATISTICS))
    network = PerfectNetwork(simulation)
    try:
        return simulation.run(5, network), network
    finally:
        simulation.close()


def first_image(name: str) -> UInt8Array:
    return play(name, "--max-steps", "1")[1].inputs[0][0]


def test_a_perfect_network_succeeds_with_upright_images() -> None:
    rollout, network = play("plain")
    assert rollout.success
    assert rollout.tokens.shape == (rollout.steps, 7)
    image = network.inputs[0][0]
    assert image[:40].mean() > image[-40:, :, 2].mean()  # the sky is above the table
    assert image[0, 0, 2] > image[0, 0, 0]


def test_image_controls_change_the_images() -> None:
    upright = first_image("plain")
    np.testing.assert_array_equal(first_image("orientation"), upright[::-1, ::-1])
    assert not first_image("blank").any()
    assert first_image("dim").mean() == pytest.approx(0.6 * upright.mean(), rel=0.02)
    cropped = first_image("crop")
    assert cropped.shape == upright.shape
    assert (cropped != upright).any()


def test_a_perfect_network_fails_when_shuffled_and_follows_a_switch() -> None:
    shuffled, _ = play("shuffle")
    assert (shuffled.success, shuffled.reason) == (False, "wrong_object")
    switched, network = play("switch")
    assert switched.success
    instructions = [text for _, text in network.inputs]
    assert len(set(instructions)) == 2
    assert instructions[5] != instructions[6]
    assert len(set(instructions[:6])) == 1


def test_a_perfect_network_fails_under_the_gripper_control() -> None:
    assert not play("gripper")[0].success


def test_every_control_is_a_demo_command_line() -> None:
    for each in CONTROLS:
        parse_options(Path("checkpoint"), each.options)
    assert chosen("") == CONTROLS
    with pytest.raises(ValueError, match="plain"):
        chosen("plain,bunp")


def test_draft_acceptance_compares_strictly() -> None:
    first = np.array([[1, 2, 3, 4, 5, 6, 7]] * 2 + [[1, 2, 9, 4, 5, 6, 7]])
    assert draft_acceptance([first, first[:1]]) == {"tokens": round(13 / 14, 4), "leading": 4.5, "whole": 0.5}
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


def test_the_docs_list_all_controls() -> None:
    page = (Path(__file__).parents[3] / "docs" / "demo-policy.md").read_text(encoding="utf-8").replace('"', "")
    for each in CONTROLS:
        if each.options:
            assert f"| `{' '.join(each.options)}` |" in page, each.name
