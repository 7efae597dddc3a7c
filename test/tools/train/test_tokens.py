from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tools.train import data, shards
from tools.train.labels import KINDS
from tools.train.network import EMPTY_TOKEN, VOCABULARY, architecture_of, token_ids
from tools.train.recipe import DATASET, FOREIGN_DATASET, LabelRecipe, NetworkRecipe
from tools.train.tokens import Prompts, encode_actions, followed, shape_actions, statistics_json, statistics_of
from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros.control.gripper import Gripper
from vla_ros.execution.source import PolicySource
from vla_ros.policies import Session
from vla_ros.types import ActionChunk, Observation
from vla_ros_lab.eval.port import NodePort
from vla_ros_lab.eval.runner import EpisodeOptions, EpisodeRunner
from vla_ros_lab.sim.expert import CLOSED, OPEN, ExpertPolicy
from vla_ros_lab.sim.table import TableEnvironment
from vla_ros_lab.sim.world import TableTop, WorldOptions
from vla_ros_models.openvla.processing import ActionBins
from vla_ros_models.openvla.prompt import load_prompt_encoder

BINS = ActionBins(VOCABULARY, 256)


def test_word_and_action_tokens_are_disjoint() -> None:
    ids = token_ids()
    assert ids["▁"] == EMPTY_TOKEN
    assert max(ids.values()) < VOCABULARY - 255
    assert len(set(ids.values())) == len(ids)


def test_tokens_decode_to_the_labels(demonstrations: Path) -> None:
    found = shards.read_labels(data.shard_paths(demonstrations))
    actions = shape_actions(found.actions, LabelRecipe())
    statistics = statistics_of(statistics_json(found, actions))
    tokens = encode_actions(actions, statistics, BINS)
    assert tokens.min() >= VOCABULARY - 255
    assert tokens.max() < VOCABULARY
    decoded = statistics.unnormalize(BINS.decode(tokens))
    clipped = np.clip(actions, statistics.low, statistics.high)
    half_bin = (statistics.high - statistics.low) / 255 / 2
    half_bin[6] = 1 / 255
    assert (np.abs(decoded - clipped) <= half_bin + 1e-9).all()


def test_standing_still_is_exactly_zero(demonstrations: Path) -> None:
    found = shards.read_labels(data.shard_paths(demonstrations))
    statistics = statistics_of(statistics_json(found, shape_actions(found.actions, LabelRecipe())))
    still = np.zeros(7)
    np.testing.assert_array_equal(
        statistics.unnormalize(BINS.decode(encode_actions(still, statistics, BINS)))[:6], 0.0
    )


def test_statistics_are_of_the_followed_actions_and_of_another_robot(demonstrations: Path) -> None:
    found = shards.read_labels(data.shard_paths(demonstrations))
    actions = shape_actions(found.actions, LabelRecipe())
    entry = statistics_json(found, actions)
    own, foreign = statistics_of(entry, DATASET), statistics_of(entry, FOREIGN_DATASET)
    assert own.high[:3].max() <= 0.0301
    assert len(followed(found, actions)) == entry[DATASET]["num_transitions"] == len(found)
    still = foreign.unnormalize(np.zeros(7))
    np.testing.assert_allclose(still[[0, 3]], [-0.0231, 0.1187], atol=1e-4)  # m, rad: it drifts and turns


def test_only_the_gripper_of_a_label_differs() -> None:
    actions = np.array([[0.03, 0.0, 0.004, 0.01, 0.0, 0.0, 0.0]], np.float32)
    shaped = shape_actions(actions, LabelRecipe())
    np.testing.assert_array_equal(shaped[0, :6], actions[0, :6])
    assert (shaped[0, 6], actions[0, 6]) == (LabelRecipe().closed_value, 0.0)  # the demonstrations are not changed


def test_prompts_are_the_policys(tmp_path) -> None:
    architecture = architecture_of(NetworkRecipe())
    prompts = Prompts(tmp_path, architecture, ("pick", "push_left"))
    encoder = load_prompt_encoder(tmp_path, architecture)
    for row, instruction in (
        (KINDS.index("blue_ball"), "Pick up the BLUE ball"),
        (len(KINDS) + KINDS.index("red_cube"), "push the red cube to the left"),
    ):
        length = int(prompts.lengths[row])
        assert prompts.ids[row, :length].tolist() == encoder.encode(instruction).tolist()
        assert not prompts.ids[row, length:].any()
    assert prompts.lengths[0] < prompts.lengths[-1]  # pushes are longer, so picks are padded


@pytest.mark.parametrize("mode", ["binary", "continuous"])
def test_the_closing_value_grasps_only_with_the_threshold(mode: str) -> None:
    """Taken literally, it leaves the hand wider open than any object."""
    options = ("policy.name:=expert", "control.schedule:=sync", f"gripper.mode:={mode}")
    config = load([config_file("demo")], options)
    closing = LabelRecipe().closed_value

    class Pressed(ExpertPolicy):
        def infer(self, session: Session, observation: Observation) -> ActionChunk:
            chunk = super().infer(session, observation)
            actions = chunk.actions.copy()
            actions[:, 6] = closing + (OPEN - closing) * actions[:, 6]
            return replace(chunk, actions=actions)

    source = PolicySource(Pressed(config)).start()
    with TableTop(WorldOptions(width=16, height=16)) as world:
        runner = EpisodeRunner(TableEnvironment(world), NodePort(config, source), EpisodeOptions(40))
        won = [runner.run(seed).success for seed in (0, 1, 2)]
    assert won == [mode == "binary"] * 3
    gripper = Gripper(config.gripper)
    assert gripper.opening(closing) == (CLOSED if mode == "binary" else pytest.approx(closing))
