import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tools.train import data, shards
from tools.train.batches import shifted, shifted_patches
from tools.train.flow_export import export
from tools.train.flow_fit import TOKENIZER, Run, relative, states_of
from tools.train.flow_network import ACTION_SIZE, FlowTrainee, architecture_of
from tools.train.flow_words import FORM, VOCABULARY
from tools.train.labels import KINDS
from tools.train.loop import STATISTICS
from tools.train.recipe import DataRecipe, FitOptions, FitRecipe, FlowNetworkRecipe
from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros.errors import ConfigError
from vla_ros.types import Observation
from vla_ros.vision.points import camera_positions
from vla_ros_lab.sim.world import TableTop, WorldOptions
from vla_ros_lab.training.state import restore_state
from vla_ros_models.engine.flow import prefill_flow, run_step, suffix_rows
from vla_ros_models.engine.flow_engine import FlowRequest
from vla_ros_models.engine.guidance import predict_velocity
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.stream import KVCache
from vla_ros_models.normalization import LEROBOT_EPS, make_normalization
from vla_ros_models.pi.checkpoint import read_checkpoint
from vla_ros_models.pi.inference import load_model, load_network, make_engine
from vla_ros_models.pi.network import make_flow
from vla_ros_models.pi.policy import PiPolicy
from vla_ros_models.pi.processing import load_tokenizer, prompt_tokens

SMALL = FlowNetworkRecipe(
    vision_width=32,
    vision_blocks=2,
    vision_heads=2,
    prefix_width=48,
    prefix_hidden=64,
    expert_width=32,
    expert_hidden=48,
    depth=3,
    heads=2,
    head_dim=16,
)
HORIZON = 6


@pytest.fixture(scope="module")
def trainee() -> FlowTrainee:
    torch.manual_seed(0)
    made = FlowTrainee(architecture_of(SMALL, vocabulary=40, horizon=HORIZON))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
    return made.eval()


@pytest.mark.parametrize("given", [0, 2])
def test_velocities_in_training_are_those_of_the_engine(trainee: FlowTrainee, given: int) -> None:
    """In every flow step, with prompts of different lengths and with actions that are given."""
    random = torch.Generator().manual_seed(1)
    images = torch.randint(256, (1, 224, 224, 3), dtype=torch.uint8, generator=random)
    prompts = torch.randint(3, 40, (2, 9), generator=random)
    lengths = torch.tensor([9, 6])
    model, ops = make_flow(trainee.network, steps=4, summed=False), Ops()
    actions = torch.randn(2, HORIZON, model.action_dim, generator=random)
    is_given = (torch.arange(HORIZON) < given).expand(2, -1)
    with torch.no_grad():
        patches = model.encode(images).expand(2, -1, -1)
        cache = KVCache.in_blocks(model.prefix, 2, patches.shape[1] + 9 + HORIZON)
        prefill_flow(model, ops, cache, patches, prompts, lengths.int())
        start = (patches.shape[1] + lengths).int()
        for step, rows in enumerate(suffix_rows(model, ops, cache, start, is_given.int())):
            stream = run_step(model, ops, cache, actions, torch.zeros(2, HORIZON), rows, step)
            velocity = predict_velocity(ops.norm(model.expert, stream, rows), model.action_out, HORIZON)
            times = torch.where(is_given, 0.0, model.times[step])
            found = trainee(images, prompts, lengths, actions, times)
            torch.testing.assert_close(found.velocity, velocity, atol=2e-4, rtol=1e-3)
    assert found.places.shape == (2, 256)
    assert found.kinds.shape == (1, 256, 13)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("flow")
    recipe = DataRecipe(episodes=2, shard_episodes=2, max_steps=4, rate_hz=20.0, horizon=HORIZON)
    data.generate(folder / "data", recipe, processes=1)
    fit = FitRecipe(steps=12, batch=2, prompts=2, warmup=2, learning_rate=3e-3)
    made = Run(folder / "run", folder / "data", SMALL, fit, FitOptions(device="cpu"))
    made.train(made.load())
    return made


def test_training_lowers_the_loss_and_resumes(run: Run) -> None:
    step, losses = restore_state(run.folder, {})
    assert step == len(losses) == 12
    assert np.mean(losses[-3:]) < 0.8 * losses[0]
    again = Run(run.folder, run._dataset, SMALL, run.recipe, run.options)
    assert again.done
    frames = run.load()
    assert again.evaluate(frames) == run.evaluate(frames)


def test_prompts_carry_the_state_as_the_policy_writes_it(run: Run) -> None:
    frames = run.load()
    encode = load_tokenizer(run.folder / TOKENIZER, len(VOCABULARY)).encode
    statistics = json.loads((run.folder / STATISTICS).read_text())["observation.state"]
    normal = make_normalization("quantile", statistics, "state", LEROBOT_EPS)
    labels = shards.read_labels(data.shard_paths(run._dataset))
    rows = torch.arange(len(labels))
    ids, lengths = frames.prompts.fill(rows * 0 + KINDS.index("blue_ball"), frames.bins)
    for row, state in enumerate(states_of(labels)):
        expected = prompt_tokens(encode, "pick up the blue ball", FORM, normal.normalize(state.astype(np.float32)))
        np.testing.assert_array_equal(ids[row, : lengths[row]].numpy(), expected)
    assert "<unk>" not in {VOCABULARY[index] for index in ids.unique().tolist()}


def test_the_exported_checkpoint_is_the_trained_network(run: Run, tmp_path) -> None:
    """LeRobot's layout, read by the policy: sizes, statistics, prompt, and the weights to float16."""
    size = export(run.folder, tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.architecture == run.trainee.architecture
    assert (checkpoint.trained_delay, checkpoint.processing.delta) == (SMALL.max_delay, (True,) * 7 + (False,))
    assert checkpoint.processing.prompt.length == FORM.length
    model = load_model(checkpoint)
    parameters = dict(run.trainee.network.named_parameters())
    assert size < 3 * sum(parameter.numel() for parameter in parameters.values())
    for name, loaded in load_network(checkpoint).named_parameters():
        torch.testing.assert_close(loaded, parameters[name].detach(), atol=1e-3, rtol=1e-3)
    assert model.engine.model.horizon == HORIZON


def test_the_policy_answers_with_the_exported_checkpoint(run: Run, tmp_path) -> None:
    """Chunks of joint positions near the state, since actions are relative to it."""
    export(run.folder, tmp_path)
    chosen = ["policy.name:=pi", f"policy.checkpoint:={tmp_path}", "policy.device:=cpu", "policy.self_test:=false"]
    policy = PiPolicy(load([config_file("demo")], chosen))
    policy.load()
    labels = shards.read_labels(data.shard_paths(run._dataset))
    image = shards.read(data.shard_paths(run._dataset)[0]).frame(0)
    state = states_of(labels)[0]
    asked = Observation({"image": image}, "pick up the red cube", 1, {"state": state})
    actions = policy.infer(policy.start_session(), asked).actions
    assert actions.shape == (HORIZON, 8)
    reach = np.abs(relative(labels)[..., :7]).max()
    assert np.abs(actions[:, :7] - state[:7]).max() < 10 * reach


def test_the_default_network_fits_into_15_mb() -> None:
    network = FlowTrainee(architecture_of(FlowNetworkRecipe(), len(VOCABULARY), horizon=16)).network
    assert 2 * sum(parameter.numel() for parameter in network.parameters()) < 15e6


def test_single_actions_are_refused(demonstrations: Path, tmp_path) -> None:
    with pytest.raises(ConfigError, match="--horizon 16"):
        Run(tmp_path, demonstrations, SMALL, FitRecipe(), FitOptions())


@pytest.fixture(scope="module")
def geometric(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("geometric")
    recipe = DataRecipe(
        episodes=1, shard_episodes=1, max_steps=3, rate_hz=20.0, horizon=HORIZON, points=True, shrink=0.06
    )
    data.generate(folder / "data", recipe, processes=1)
    fit = FitRecipe(steps=2, batch=2, prompts=2, warmup=1, learning_rate=3e-3, shift=2)
    made = Run(folder / "run", folder / "data", replace(SMALL, geometry=True), fit, FitOptions(device="cpu"))
    made.train(made.load())
    return made


def test_positions_are_recorded_as_the_policy_computes_them(geometric: Run) -> None:
    """The table is in the recorded positions, at its height, and the policy's own scene has the same ones."""
    labels = shards.read_labels(data.shard_paths(geometric._dataset))
    assert labels.positions.shape == (len(labels), 256, 3)
    with TableTop(WorldOptions(rate_hz=20.0, shrink=0.06)) as world:
        world.reset(int(labels.seeds[0]))
        points = world.render_points()[1]
    expected = camera_positions({"points": points}, (("image", "points"),), ["image"], 224, 256)[0]
    still = np.abs(labels.positions[0] - expected).max(axis=1) < 1e-3  # all but the arm, which has begun to move
    assert still.mean() > 0.7
    assert np.isnan(expected).mean() < 0.1


def test_shifted_images_keep_their_positions_and_objects(geometric: Run) -> None:
    """Every patch of a shifted image has the pixels, the position and the object of the patch that it was."""
    frames = geometric.load()
    moves = torch.tensor([[2, -1], [0, 3]])
    images = shifted(frames.images[:2], moves * 14)
    boards = shifted(frames.positions[:2].unflatten(1, (16, 16)), moves, torch.nan)
    patches = shifted_patches(frames.patches[:2], moves, 16)
    for frame, (down, right) in enumerate(moves.tolist()):
        board = frames.positions[frame].unflatten(0, (16, 16))
        for row in range(16):
            for column in range(16):
                was = row - down, column - right
                if not all(0 <= one < 16 for one in was):
                    assert boards[frame, row, column].isnan().all()
                    continue
                torch.testing.assert_close(boards[frame, row, column], board[was], equal_nan=True)
                now, before = (
                    one[frame, 14 * at[0] : 14 * at[0] + 14, 14 * at[1] : 14 * at[1] + 14]
                    for one, at in ((images, (row, column)), (frames.images, was))
                )
                assert torch.equal(now, before)
        for slot, patch in enumerate(frames.patches[frame].tolist()):
            at = divmod(patch, 16)
            inside = patch >= 0 and 0 <= at[0] + down < 16 and 0 <= at[1] + right < 16
            assert patches[frame, slot] == (16 * (at[0] + down) + at[1] + right if inside else -1)


def test_tokens_in_training_are_those_of_the_engine(geometric: Run) -> None:
    trainee, frames = deepcopy(geometric.trainee).eval(), geometric.load()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainee.parameters():
            parameter.normal_(std=0.2, generator=random)
        images, positions = frames.images[:1], frames.positions[:1].clone()
        positions[:, :9] = torch.nan
        prompts, times = torch.randint(3, 40, (2, 9), generator=random), torch.full((2, HORIZON), 1.0)
        actions = torch.randn(2, HORIZON, ACTION_SIZE, generator=random)
        found = trainee(images, prompts, None, actions, times, positions).velocity
        other = trainee(images, prompts, None, actions, times, -positions).velocity
        engine = make_engine(trainee.network, geometric_processing(geometric), 1)
        pixels, where = images[0].numpy() / np.float32(255), positions.numpy()
        asked = [
            FlowRequest([pixels], row.numpy(), lambda: np.zeros(ACTION_SIZE), noise.numpy(), positions=where)
            for row, noise in zip(prompts, actions, strict=True)
        ]
        answers = torch.stack([torch.from_numpy(one.actions) for one in engine.answer(asked)])
    velocity = actions - answers  # one step from time 1 to 0
    torch.testing.assert_close(velocity, found, atol=2e-4, rtol=1e-3)
    assert (found - other).abs().max() > 1e-2


def geometric_processing(run: Run) -> Any:
    return SimpleNamespace(prompt=FORM, summed_times=False, antialias=False)


def test_a_checkpoint_with_tokens_states_its_points(geometric: Run, tmp_path: Path) -> None:
    export(geometric.folder, tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.architecture == geometric.trainee.architecture
    assert checkpoint.spec.points == (("image", data.POINTS),)
    parameters = dict(geometric.trainee.network.named_parameters())
    for name, loaded in load_network(checkpoint).named_parameters():
        torch.testing.assert_close(loaded, parameters[name].detach(), atol=1e-3, rtol=1e-3)


def test_tokens_need_demonstrations_with_points(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no points, which --geometry needs; record them with --points"):
        Run(tmp_path, run._dataset, replace(SMALL, geometry=True), run.recipe, run.options)
