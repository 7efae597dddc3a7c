"""Labels to tokens: what the policy decodes is what the expert meant, in the gripper convention of the data."""

from pathlib import Path

import numpy as np
import pytest

from tools.train import data, shards
from tools.train.episode import make_controller, run_episode
from tools.train.labels import KINDS
from tools.train.network import EMPTY_TOKEN, VOCABULARY, architecture_of, token_ids
from tools.train.recipe import DATASET, FOREIGN_DATASET, LabelRecipe, NetworkRecipe
from tools.train.tokens import Prompts, encode_actions, followed, shape_actions, statistics_json, statistics_of
from vla_ros.control.gripper import Gripper
from vla_ros.policies.openvla.actions import ActionBins
from vla_ros.policies.openvla.prompt import load_prompt_encoder
from vla_ros.sim.expert import CLOSED, OPEN
from vla_ros.sim.world import TableTop

BINS = ActionBins(VOCABULARY, 256)


def test_words_and_actions_share_no_token() -> None:
    ids = token_ids()
    assert ids["▁"] == EMPTY_TOKEN
    assert max(ids.values()) < VOCABULARY - 255
    assert len(set(ids.values())) == len(ids)


def test_tokens_decode_to_the_labels(demonstrations: Path, labels: LabelRecipe) -> None:
    found = shards.read_labels(data.shard_paths(demonstrations))
    actions = shape_actions(found.actions, labels)
    statistics = statistics_of(statistics_json(found, actions))
    tokens = encode_actions(actions, statistics, BINS)
    assert tokens.min() >= VOCABULARY - 255
    assert tokens.max() < VOCABULARY
    decoded = statistics.unnormalize(BINS.decode(tokens))
    clipped = np.clip(actions, statistics.low, statistics.high)
    half_bin = (statistics.high - statistics.low) / 255 / 2
    half_bin[6] = 1 / 255
    assert (np.abs(decoded - clipped) <= half_bin + 1e-9).all()


def test_standing_still_is_exactly_zero(demonstrations: Path, labels: LabelRecipe) -> None:
    found = shards.read_labels(data.shard_paths(demonstrations))
    statistics = statistics_of(statistics_json(found, shape_actions(found.actions, labels)))
    still = np.zeros(7)
    np.testing.assert_array_equal(
        statistics.unnormalize(BINS.decode(encode_actions(still, statistics, BINS)))[:6], 0.0
    )


def test_the_statistics_are_of_what_was_followed_and_the_foreign_ones_of_another_robot(
    demonstrations: Path, labels: LabelRecipe
) -> None:
    found = shards.read_labels(data.shard_paths(demonstrations))
    actions = shape_actions(found.actions, labels)
    entry = statistics_json(found, actions)
    own, foreign = statistics_of(entry, DATASET), statistics_of(entry, FOREIGN_DATASET)
    assert own.high[:3].max() <= 0.0301
    assert len(followed(found, actions)) == entry[DATASET]["num_transitions"] == len(found)
    still = foreign.unnormalize(np.zeros(7))
    np.testing.assert_allclose(still[[0, 3]], [-0.0231, 0.1187], atol=1e-4)  # m, rad: it drifts and turns


def test_caps_and_grids_shape_the_translation_only() -> None:
    actions = np.array([[0.03, 0.0, 0.004, 0.01, 0.0, 0.0, 0.0]], np.float32)
    shaped = shape_actions(actions, LabelRecipe(step_cap=0.015, step_grid=0.005))
    np.testing.assert_allclose(shaped[0, :3], [0.015, 0.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(shaped[0, 3:], [0.01, 0, 0, LabelRecipe().closed_value], atol=1e-7)
    assert actions[0, 0] == np.float32(0.03)  # the demonstrations are not changed


def test_prompts_are_what_the_policy_writes(tmp_path: Path) -> None:
    architecture = architecture_of(NetworkRecipe())
    prompts = Prompts(tmp_path, architecture, ("pick", "push_left"))
    encoder = load_prompt_encoder(tmp_path, architecture)
    for row, words in (
        (KINDS.index("blue_ball"), "Pick up the BLUE ball"),
        (len(KINDS) + KINDS.index("red_cube"), "push the red cube to the left"),
    ):
        length = int(prompts.lengths[row])
        assert prompts.ids[row, :length].tolist() == encoder.encode(words).tolist()
        assert not prompts.ids[row, length:].any()
    assert prompts.lengths[0] < prompts.lengths[-1]  # pushes have more words, so picks are padded


@pytest.mark.parametrize("mode", ["binary", "continuous"])
def test_the_closing_value_grasps_only_behind_the_threshold(mode: str) -> None:
    """A hand that obeys the number literally stays wider open than any object: the control must hurt."""
    from dataclasses import replace

    from vla_ros.config import load
    from vla_ros.config.files import config_file
    from vla_ros.sim.expert import ExpertPolicy

    config = load([config_file("demo")], [f"gripper.mode:={mode}"])
    expert = ExpertPolicy(config)
    closing = LabelRecipe().closed_value

    def answer(observation):  # type: ignore[no-untyped-def]
        chunk = expert.infer(expert.start_session(), observation)
        actions = chunk.actions.copy()
        actions[:, 6] = closing + (OPEN - closing) * actions[:, 6]
        return replace(chunk, actions=actions)

    with TableTop() as world:
        controller = make_controller(expert.spec, config)
        won = [
            run_episode(world, answer, controller, seed, render=False, max_steps=40).success for seed in (0, 1, 2)
        ]
    assert won == [mode == "binary"] * 3
    gripper = Gripper(config.gripper)
    assert gripper.opening(closing) == (CLOSED if mode == "binary" else pytest.approx(closing))
