import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tools.train import data, shards
from tools.train.labels import KINDS, NOWHERE, counterfactual_actions, counterfactual_chunks, kinds_of, patch_of
from tools.train.recipe import DataRecipe
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.expert import Situation, decide, plan
from vla_ros_lab.sim.tasks import SLOTS, make_task
from vla_ros_lab.sim.world import TableTop, WorldOptions


def test_the_number_of_processes_does_not_change_the_files(
    demonstrations: Path, recipe: DataRecipe, tmp_path
) -> None:
    data.generate(tmp_path, recipe, processes=2)
    expected = data.shard_paths(demonstrations)
    assert [path.name for path in data.shard_paths(tmp_path)] == [path.name for path in expected]
    for mine, other in zip(data.shard_paths(tmp_path), expected, strict=True):
        assert mine.read_bytes() == other.read_bytes()


def test_an_interrupted_run_resumes_and_keeps_finished_shards(
    demonstrations: Path, recipe: DataRecipe, tmp_path
) -> None:
    first, last = data.shard_paths(demonstrations)
    kept = tmp_path / first.name
    kept.write_bytes(first.read_bytes())
    before = kept.stat().st_mtime_ns
    reported: list[tuple[int, int]] = []
    data.generate(tmp_path, recipe, processes=1, progress=lambda *done: reported.append(done))
    assert kept.stat().st_mtime_ns == before
    assert (tmp_path / last.name).read_bytes() == last.read_bytes()
    counts = [len(shards.read_labels(paths)) for paths in ([first], [first, last])]
    assert reported == [(2, counts[0]), (3, counts[1])]


def test_another_recipe_is_refused_in_the_same_folder(demonstrations: Path, recipe: DataRecipe) -> None:
    with pytest.raises(ConfigError, match="flip_chance"):
        data.generate(demonstrations, dataclasses.replace(recipe, flip_chance=0.5), processes=1)


def test_the_first_frame_shows_the_scene_of_the_seed(demonstrations: Path, recipe: DataRecipe) -> None:
    shard = shards.read(data.shard_paths(demonstrations)[0])
    with TableTop() as world:
        world.options = dataclasses.replace(world.options, tasks=recipe.tasks)
        world.reset(recipe.seed)
        np.testing.assert_array_equal(shard.frame(0), world.render())
        places = [patch_of(world.project(place)) for place in world.object_positions().values()]
    assert shard.labels.patches[0, : len(places)].tolist() == places
    assert all(place != NOWHERE for place in places)


def test_the_patch_of_an_object_has_its_colour(demonstrations: Path) -> None:
    shard = shards.read(data.shard_paths(demonstrations)[0])
    main = {"red": (0,), "green": (1,), "blue": (2,), "yellow": (0, 1)}
    for kind, patch in zip(shard.labels.kinds[0], shard.labels.patches[0], strict=True):
        if kind == NOWHERE:
            continue
        row, column = divmod(int(patch), 16)
        pixels = shard.frame(0)[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14].reshape(-1, 3).astype(int)
        strong = main[KINDS[kind].split("_")[0]]
        weak = [channel for channel in range(3) if channel not in strong]
        contrast = pixels[:, strong].min(axis=1) - pixels[:, weak].max(axis=1)
        assert contrast.max() > 60, KINDS[kind]


def test_labels_are_the_experts_action_for_each_object_and_task() -> None:
    joints = np.array([0.1, 0.5, 0.0, 1.7, 0.05, 0.9, 0.0])
    objects = {"red_cube": np.array([0.5, 0.1, 0.02]), "blue_ball": np.array([0.45, -0.1, 0.023])}
    tasks = ("pick", "push_right")
    actions = counterfactual_actions(arm.forward(joints), 0.04, objects, tasks)
    assert actions.shape == (2, SLOTS, 7)
    for row, task in enumerate(tasks):
        for slot, name in enumerate(objects):
            expected = decide(make_task(task, name), arm.forward(joints), 0.04, objects)
            np.testing.assert_allclose(actions[row, slot], expected, atol=1e-7)
    assert not actions[:, 2:].any()
    assert not np.allclose(actions[0, 0], actions[0, 1])


def test_chunks_are_the_experts_next_joint_positions_for_each_object(recipe: DataRecipe, tmp_path) -> None:
    """The chunk of the object that the arm follows brings it where the chunk says."""
    calm = dataclasses.replace(
        recipe,
        episodes=1,
        tasks=("pick",),
        rate_hz=20.0,
        horizon=16,
        noise_m=(0.0,),
        switch_share=0.0,
        max_steps=20,
    )
    data.generate(tmp_path, calm, processes=1)
    labels = shards.read(data.shard_paths(tmp_path)[0]).labels
    assert labels.actions.shape == (20, 1, SLOTS, 16, 8)
    followed = labels.actions[0, 0, labels.asked[0, 1]]
    with TableTop(WorldOptions(rate_hz=20.0)) as world:
        world.reset(recipe.seed)
        np.testing.assert_allclose(world.joint_positions()[:7], labels.states[0, :7], atol=1e-6)
        for action in followed:
            world.step(np.append(action[:7], np.full(2, action[7] * arm.FINGER_TRAVEL)))
        np.testing.assert_allclose(world.joint_positions()[:7], followed[-1, :7], atol=0.05)
    assert np.abs(followed[-1, :7] - labels.states[0, :7]).max() > 0.2
    present = labels.kinds[0] >= 0
    assert len(np.unique(labels.actions[0, 0, present].reshape(present.sum(), -1), axis=0)) == present.sum()
    assert not labels.actions[0, 0, ~present].any()


def test_all_objects_are_labelled_and_the_followed_one_is_named(demonstrations: Path) -> None:
    labels = shards.read_labels(data.shard_paths(demonstrations))
    present = labels.kinds >= 0
    assert present[:, :3].all()
    assert not labels.actions.transpose(0, 2, 1, 3)[~present].any()
    rows = np.arange(len(labels))
    assert (labels.kinds[rows, labels.asked[:, 1]] >= 0).all()
    assert labels.asked[:, 0].max() < 2


def test_kinds_and_patches() -> None:
    assert kinds_of(["red_cube", "yellow_ball"]).tolist() == [0, 11, NOWHERE, NOWHERE]
    pixels = np.array([(0.0, 13.9), (14.0, 223.9), (-0.1, 5.0), (5.0, 224.0)])
    assert [patch_of(pixel) for pixel in pixels] == [0, 31, NOWHERE, NOWHERE]


def test_noise_changes_the_executed_action_and_depends_on_the_seed(recipe: DataRecipe) -> None:
    clean = np.array([0.01, 0.0, -0.01, 0.0, 0.0, 0.0, 1.0])
    wild = dataclasses.replace(recipe, noise_m=(0.006,), burst_chance=0.3, flip_chance=0.3)
    first, second = data.Disturbance(wild, 7), data.Disturbance(wild, 7)
    runs = [np.array([noise(step, clean) for step in range(200)]) for noise in (first, second)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert clean[0] == 0.01  # the label stays clean
    assert 0.002 < np.abs(runs[0][:, 0] - clean[0]).mean() < 0.03
    assert set(runs[0][:, 6]) == {0.0, 1.0}
    np.testing.assert_array_equal(runs[0][:, 3:6], 0.0)
    calm = data.Disturbance(dataclasses.replace(recipe, noise_m=(0.0,)), 7)
    np.testing.assert_array_equal(calm(0, clean), clean)


def test_the_error_for_a_damaged_shard_says_what_to_do(demonstrations: Path, tmp_path) -> None:
    path = tmp_path / "shard-00000.npz"
    whole = data.shard_paths(demonstrations)[0].read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(VlaRosError, match=r"tools\.train data"):
        shards.read(path)


def test_chunk_labels_are_the_experts_plan_for_each_object_and_task() -> None:
    rng = np.random.default_rng(0)
    states, places = np.empty((20, 8)), np.full((20, SLOTS, 3), np.nan)
    for row in range(len(states)):  # near the first object, hand open or holding
        places[row, :2] = [[0.5, 0.1, 0.02], [0.45, -0.1, 0.023]] + rng.normal(size=(2, 3)) * 0.02
        tool = places[row, 0] + (0, 0, rng.uniform(0, 0.1)) + rng.normal(size=3) * 0.005
        states[row] = [*arm.solve(tool, arm.TOOL_DOWN, arm.HOME, 60), rng.choice([0.04, 0.02])]
    tasks = ("pick", "push_right")
    chunks = counterfactual_chunks(states, places, tasks, 6, 20.0)
    assert not chunks[:, :, 2:].any()
    assert chunks[:, 0, 0, :, 7].min() == 0 < chunks[:, 0, 0, :, 7].max()
    for row, state in enumerate(states):
        for column, task in enumerate(tasks):
            now = Situation(state[:7], state[7], places[row, 1])
            expected = plan(make_task(task, ""), now, "joint_position", 6, 20.0)
            np.testing.assert_allclose(chunks[row, column, 1], expected, atol=1e-6)
