"""The recipe for LIBERO, without LIBERO: the expert, and that the exported policy is the trained network."""

import zlib
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from test.tools.train.test_flow import SMALL
from tools.libero import fit
from tools.libero.expert import RIM, act
from tools.libero.fit import HORIZON, IMAGES, INSTRUCTIONS, NETWORK, Run, export, network_of
from tools.libero.record import halved, rotation_vector
from tools.libero.scene import PATCH, POINTS, SIZE
from tools.libero.score import NODE, cells
from tools.train.recipe import FitOptions, FitRecipe
from vla_ros.config import load
from vla_ros.types import Observation
from vla_ros.vision.processors import resize_with_pad_linear
from vla_ros_models.pi.checkpoint import read_checkpoint
from vla_ros_models.pi.policy import PiPolicy
from vla_ros_models.pi.processing import load_tokenizer

DOWN = np.array([1.0, 0.0, 0.0, 0.0])


def situation(
    tip: np.ndarray, bowl: np.ndarray, width: float, quaternion: np.ndarray = DOWN
) -> dict[str, np.ndarray]:
    return {
        "robot0_eef_pos": tip,
        "robot0_eef_quat": quaternion,
        "robot0_gripper_qpos": np.array([width / 2, -width / 2]),
        "akita_black_bowl_1_pos": bowl,
        "plate_1_pos": np.array([0.05, 0.2, 0.9]),
    }


def test_the_expert_approaches_closes_lifts_carries_and_lets_go() -> None:
    bowl = np.array([-0.07, 0.0, 0.9])
    rim = bowl + RIM * [1.0, -1.0, 1.0]
    far = act(situation(np.array([-0.2, 0.1, 1.1]), bowl, 0.08))
    assert far[0] > 0 > far[1]
    assert far[6] == -1.0
    at_rim = act(situation(rim, bowl, 0.08))
    np.testing.assert_allclose(at_rim[:6], 0.0, atol=1e-9)
    assert at_rim[6] == 1.0
    held = act(situation(rim, bowl, 0.01))
    assert held[2] > 0.3
    assert held[6] == 1.0
    above = np.array([0.0, 0.0, 0.1])
    carried = act(situation(rim + above, bowl + above, 0.01))
    assert carried[0] > 0.5 < carried[1]
    there = np.array([0.05, 0.2, 0.905])
    left = act(situation(there + RIM, there, 0.01))
    assert (left[6], left[2] > 0.5) == (-1.0, True)


def test_the_expert_turns_the_tool_down_again() -> None:
    """By the sign of robosuite's goal: the rotation from the pose to the goal, in the world."""
    half = 0.1 / 2  # turned by 0.1 rad about the world's x: (x, y, z, w) of the product with the lowered tool
    tilted = np.array([np.cos(half), 0.0, 0.0, -np.sin(half)])
    action = act(situation(np.zeros(3), np.ones(3), 0.08, tilted))
    np.testing.assert_allclose(action[3:6] * 0.5 / 0.5, [-0.1, 0.0, 0.0], atol=1e-9)


def test_half_the_size_is_what_the_policy_resizes_to() -> None:
    image = np.random.default_rng(0).integers(0, 256, (2 * SIZE, 2 * SIZE, 3), np.uint8)
    wanted = np.asarray(resize_with_pad_linear(image, (SIZE, SIZE))) * 255
    np.testing.assert_allclose(halved(image), wanted, atol=0.51)


def test_the_rotation_vector_is_not_wrapped() -> None:
    vector = rotation_vector(np.array([np.sin(1.7), 0.0, 0.0, np.cos(1.7)]))
    np.testing.assert_allclose(vector, [3.4, 0.0, 0.0])


def write_demonstrations(folder: Path) -> None:
    random = np.random.default_rng(1)
    folder.mkdir()
    small = random.integers(0, 256, (6, 2, 8, 8, 3), np.uint8)
    np.savez(
        folder / "000_0000.npz",
        images=small.repeat(SIZE // 8, axis=2).repeat(SIZE // 8, axis=3),
        states=random.normal(size=(6, 8)).astype(np.float32),
        places=random.normal(size=(6, 6)).astype(np.float32),
        pixels=random.uniform(size=(6, 5, 2)).astype(np.float32),
        positions=random.normal(size=(6, 2, (SIZE // PATCH) ** 2, 3)).astype(np.float32),
        steps=np.array([1, 3, 5, 2, 4, 6], np.int32),
        actions=random.uniform(-1, 1, (16, 7)).astype(np.float32),
        lengths=np.array([7, 9], np.int32),
        frames=np.array([3, 3], np.int32),
        tasks=np.array([2, 8], np.int32),
        successes=np.array([True, False]),
    )


def test_the_held_out_episodes_are_the_same_in_every_process(tmp_path: Path) -> None:
    """A run that is resumed must not train on what it held out before."""
    write_demonstrations(tmp_path / "data")
    with np.load(tmp_path / "data" / "000_0000.npz") as arrays:
        numbers = fit._shard(arrays)["episodes"]
        first = zlib.crc32(arrays["actions"].tobytes())
    assert numbers.tolist() == [first] * 3 + [first + 1] * 3


@pytest.mark.parametrize("geometry", [False, True])
def test_the_exported_policy_answers_as_the_trained_network(tmp_path: Path, geometry: bool) -> None:
    """Two cameras, the state in the prompt, statistics and the order of all of them, in one comparison."""
    write_demonstrations(tmp_path / "data")
    recipe = FitRecipe(steps=8, batch=2, samples=2, warmup=2, learning_rate=2e-3)
    run = Run(
        tmp_path / "run", tmp_path / "data", recipe, FitOptions(device="cpu"), replace(SMALL, geometry=geometry)
    )
    frames = run.load()
    before = run.evaluate(frames)["total"]
    run.train(frames)
    assert run.evaluate(frames)["total"] < before
    export(run.folder, tmp_path / "checkpoint")

    options = [NODE[index] for index in range(len(NODE)) if NODE[index - 1] == "-p"]
    chosen = ["policy.name:=pi", f"policy.checkpoint:={tmp_path / 'checkpoint'}", "policy.device:=cpu"]
    keys = ("agent", "wrist", *POINTS)
    chosen += [f"camera.keys:=[{', '.join(keys)}]", f"camera.topics:=[{', '.join(f'/{key}' for key in keys)}]"]
    policy = PiPolicy(load([], [*options, *chosen, "robot.base_frame:=base", "policy.self_test:=false"]))
    policy.load()
    assert policy.spec.execute_steps == 8
    with np.load(tmp_path / "data" / "000_0000.npz") as arrays:
        image, state = arrays["images"][1].repeat(2, axis=1).repeat(2, axis=2), arrays["states"][1]
    noise = np.random.default_rng(2).normal(size=(HORIZON, 8)).astype(np.float32)
    named = {name.removeprefix("observation.images."): each for name, each in zip(IMAGES, image, strict=True)}
    positions = frames.positions[1:2] if geometry else None
    placed = dict(zip(POINTS, frames.positions[1].unflatten(1, (SIZE // PATCH, -1)).numpy(), strict=True))
    points = {key: one.repeat(PATCH, axis=0).repeat(PATCH, axis=1) for key, one in placed.items()}
    state_of = {"state": state.astype(np.float64)}
    asked = Observation(named, INSTRUCTIONS[2], 1, state_of, noise=noise, points=points if geometry else {})
    answered = policy.infer(policy.start_session(), asked).normalized
    assert answered is not None

    bins = frames.states[1:2].floor().long().clamp(-1, 255)
    words, lengths = frames.prompts.fill(frames.asked[1:2], bins)
    run.trainee.eval()
    with torch.no_grad():
        prefix = run.trainee.encode(frames.images[1:2], words[:, : int(lengths)], lengths, positions)
        wanted = run.trainee.sample(prefix, torch.from_numpy(noise)[None], 5)[0, :, :7]
    np.testing.assert_allclose(answered, wanted.numpy(), atol=0.02)  # float16 weights


def test_the_table_has_every_schedule_latency_and_control() -> None:
    names = [name for name, _ in cells()]
    assert len(names) == len(set(names)) == 1 + 12 + 4


def test_the_weights_in_the_repository_are_the_recipes() -> None:
    found = read_checkpoint(Path(__file__).parents[3] / "checkpoints" / "libero")
    assert found.architecture == network_of(NETWORK)
    assert found.image_keys == tuple(name.removeprefix("observation.images.") for name in IMAGES)
    assert (found.execute_steps, found.trained_delay) == (8, NETWORK.max_delay)
    assert sum(prod(stored.shape) for stored in found.stored.values()) < 12e6
    encode = load_tokenizer(found.folder / "tokenizer.json", found.architecture.vocabulary).encode
    unknown = encode("<unk>")
    assert not {token for text in INSTRUCTIONS.values() for token in encode(text)} & set(unknown)
