"""Geometric tokens: what is added to a patch, that a checkpoint without them is unchanged, and what is refused."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from test.policies.pi.conftest import write_layout
from vla_ros.config import build, load
from vla_ros.config.files import config_file
from vla_ros.contract.binding import bind, make_arms
from vla_ros.control.inputs import Snapshot
from vla_ros.control.reasons import Refused
from vla_ros.errors import CheckpointError, ConfigError, ImageError
from vla_ros.node.observer import Observer
from vla_ros.types import JointState, Observation
from vla_ros.vision.messages import encode_image, encode_points
from vla_ros.vision.points import camera_positions, patch_positions
from vla_ros_models.convert import convert
from vla_ros_models.engine.shapes import GeometryShape
from vla_ros_models.geometry import GeometryTokens
from vla_ros_models.network_policy import Placement
from vla_ros_models.pi.policy import PiPolicy

SHAPE = GeometryShape(bands=3, longest=2.0, hidden=16)


def points_like(size, seed=0, unknown=0.3):
    random = np.random.default_rng(seed)
    points = random.uniform(-1, 1, (*size, 3)).astype(np.float32)
    points[random.random(size) < unknown] = np.nan
    return points


def test_positions_are_the_median_of_the_known_points():
    points = points_like((28, 28))
    points[:7, 7:14] = np.nan
    points[7:14, 7:14] = np.nan
    points[9, 9] = (1.0, 2.0, 3.0)
    found = patch_positions(points, 28, 7)
    assert found.dtype == np.float32
    for patch in range(16):
        row, column = 7 * (patch // 4), 7 * (patch % 4)
        block = points[row : row + 7, column : column + 7].reshape(-1, 3)
        known = block[~np.isnan(block[:, 0])]
        expected = [sorted(axis) for axis in known.T.astype(np.float64)]
        middle = [(axis[(len(axis) - 1) // 2] + axis[len(axis) // 2]) / 2 for axis in expected if axis]
        np.testing.assert_allclose(found[patch], middle or [np.nan] * 3, atol=1e-6)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[5], [1.0, 2.0, 3.0])


def test_points_are_fitted_as_the_image_is():
    """A wide image has bars above and below; each pixel of the square has the nearest point."""
    wide = np.stack([*np.meshgrid(np.arange(56.0), np.arange(28.0)), np.zeros((28, 56))], -1).astype(np.float32)
    found = patch_positions(wide, 28, 7).reshape(4, 4, 3)
    assert np.isnan(found[0]).all()
    assert np.isnan(found[3]).all()
    np.testing.assert_allclose(found[1:3, :, 0], [[7.0, 21.0, 35.0, 49.0]] * 2, atol=1.0)
    np.testing.assert_allclose(found[1:3, :, 1], [[7.0] * 4, [21.0] * 4], atol=1.0)


def test_tokens_are_a_network_of_waves_of_the_position():
    torch.manual_seed(1)
    module, positions = GeometryTokens(SHAPE, 6), points_like((5, 4), unknown=0.2)
    torch.nn.init.normal_(module.unknown)
    found = module(torch.from_numpy(positions)).detach().numpy()
    weights = {name: one.detach().numpy().astype(np.float64) for name, one in module.named_parameters()}
    erf = np.vectorize(math.erf)
    for where in np.ndindex(5, 4):
        at = positions[where].astype(np.float64)
        if np.isnan(at).any():
            np.testing.assert_array_equal(found[where], weights["unknown"].astype(np.float32))
            continue
        angles = [2 * np.pi * axis / wavelength for axis in at for wavelength in (2.0, 1.0, 0.5)]
        hidden = weights["fc1.weight"] @ [*at, *np.sin(angles), *np.cos(angles)] + weights["fc1.bias"]
        hidden *= 0.5 * (1 + erf(hidden / np.sqrt(2)))
        np.testing.assert_allclose(found[where], weights["fc2.weight"] @ hidden + weights["fc2.bias"], atol=1e-5)


POINTS = {"observation.images.image": "points"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny pi0.5, the same with new tokens, and the same with tokens that have learnt something."""
    base = tmp_path_factory.mktemp("geometry")
    plain = write_layout(base / "plain", "pi05", "lerobot")
    for name in ("new", "learnt"):
        convert(plain, base / name, points=POINTS)
    file = base / "learnt" / "model.safetensors"
    tensors, random = load_file(file), torch.Generator().manual_seed(2)
    for name, one in tensors.items():
        if "geometry" in name:
            one.copy_(torch.randn(one.shape, generator=random))
    save_file(tensors, file)
    return {name: base / name for name in ("plain", "new", "learnt")}


def make_policy(folder, **options):
    chosen = {"policy.name": "pi", "policy.checkpoint": str(folder), "policy.device": "cpu"}
    chosen |= {"policy.dtype": "float32"} | options
    return PiPolicy(load([config_file("demo")], [f"{name}:={value}" for name, value in chosen.items()]))


@pytest.fixture(scope="module")
def policies(folders):
    made = {name: make_policy(folder) for name, folder in folders.items()}
    for policy in made.values():
        policy.load()
    yield made
    for policy in made.values():
        policy.close()


def observe(policy, points):
    spec, random = policy.spec, np.random.default_rng(3)
    sizes = {one.key: one.processor.size for one in spec.images}
    images = {key: random.integers(0, 256, (*size, 3), np.uint8) for key, size in sizes.items()}
    state = {one.key: np.zeros(one.size) for one in spec.state}
    return Observation(images, "pick up the cube", 0, state, noise=np.ones(spec.noise), points=points)


def chunk(policy, points):
    return policy.infer(policy.start_session(), observe(policy, points)).normalized


def size_of(policy):
    return policy.spec.images[0].processor.size


def test_new_tokens_change_no_bit_of_a_chunk(policies):
    points = {"points": points_like(size_of(policies["new"]))}
    expected = chunk(policies["plain"], {})
    np.testing.assert_array_equal(chunk(policies["new"], points), expected)
    assert not policies["plain"].spec.points
    assert policies["plain"].loaded.engine.model.geometry is None


def test_the_chunk_depends_on_the_points(policies):
    policy = policies["learnt"]
    size = size_of(policy)
    one, other = (chunk(policy, {"points": points_like(size, seed)}) for seed in (0, 1))
    assert np.abs(one - other).max() > 1e-3
    np.testing.assert_array_equal(one, chunk(policy, {"points": points_like(size, 0)}))
    unknown = chunk(policy, {"points": np.full((*size, 3), np.nan, np.float32)})
    assert np.isfinite(unknown).all()
    assert np.abs(one - unknown).max() > 1e-3


@pytest.mark.parametrize("points", [{}, {"points": np.zeros((4, 4), np.float32)}])
def test_an_observation_without_points_is_refused(policies, points):
    with pytest.raises(ConfigError, match=r"points 'points' of .*expected float32 \[H, W, 3\] in metres"):
        chunk(policies["learnt"], points)


def config_of(policy, **values):
    keys = [*policy.spec.image_keys, "points"]
    usual = {
        "robot.urdf": "demo",
        "robot.base_frame": "base_link",
        "camera.keys": keys,
        "camera.topics": [f"/{key}/image" for key in keys],
        "features.state": ["state = arm.joint_position + arm.gripper"],
        "robot.gripper_joint_names": ["finger_left"],
        "features.action": ["arm.joint_position"],
    }
    return build(usual | values)


def test_a_robot_without_points_is_refused(policies):
    policy, arms = policies["learnt"], make_arms(config_of(policies["learnt"]))
    keys = list(policy.spec.image_keys)
    without = {"camera.keys": keys, "camera.topics": [f"/{key}/image" for key in keys]}
    for values, words in (
        (without, "camera.keys: the policy needs the points 'points' of 'image'.*32FC3"),
        ({"camera.transport": "compressed"}, "the points 'points' are raw"),
        ({"robot.base_frame": ""}, "robot.base_frame: not set, but the points 'points' have to be in it"),
    ):
        with pytest.raises(ConfigError, match=words):
            bind(policy.spec, config_of(policy, **values), arms)


def made_observer(policy):
    config = config_of(policy)
    binding = bind(policy.spec, config, make_arms(config))
    assert "points points[m] in base_link /points/image" in " ".join(binding.table().split())
    return Observer(binding)


def messages(policy, points, frame="base_link", **given):
    observation = observe(policy, {})
    frames = [encode_image(image, 5, "camera") for image in observation.images.values()]
    return [*frames, given.get("message", encode_points(points, 5, frame))]


def joints():
    names = (*(f"joint_{joint}" for joint in range(1, 8)), "finger_left")
    return Snapshot(JointState(names, np.zeros(8), 5), instruction="pick up the cube")


def test_training_and_node_see_the_same_positions(policies, folders):
    """A message of points, as the node reads it and prepares its request, and as a sample of the trainer."""
    policy = policies["learnt"]
    points = points_like(size_of(policy))
    observation = made_observer(policy).observe(messages(policy, points), joints())
    np.testing.assert_array_equal(observation.points["points"], points)
    asked = policy._request(policy.start_session(), observation, policy._images(observation))
    trainable = policy.trainable(Placement(torch.device("cpu"), "float32"))
    random, count = np.random.default_rng(0), policy.spec.horizon
    actions = np.zeros((count, policy.spec.dimension))
    sample = trainable.inputs.prepare(observation, actions, np.zeros(count, np.bool_), random)
    np.testing.assert_array_equal(sample["positions"], asked.positions)
    patch, side = trainable.tower.patch_size, trainable.tower.image_size
    np.testing.assert_array_equal(asked.positions[0], patch_positions(points, side, patch))
    batch = trainable.inputs.collate([sample, sample])
    assert batch.positions.shape == (2, *asked.positions.shape)
    trainable.trainee.requires_grad_(True)
    trainable.trainee(batch).total.backward()
    geometry = {name: one for name, one in trainable.trainee.named_parameters() if "geometry" in name}
    assert set(map(trainable.names.get, geometry)) == {f"geometry.{name}" for name in (
        "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "unknown"
    )}  # fmt: skip
    assert all(one.grad.abs().max() > 0 for one in geometry.values())


def test_messages_that_are_no_points_in_the_base_frame_are_refused(policies):
    policy = policies["learnt"]
    observer, points = made_observer(policy), points_like(size_of(policy))
    with pytest.raises(ImageError, match=r"/points/image: found points in 'camera', expected 'base_link'"):
        observer.observe(messages(policy, points, frame="camera"), joints())
    image = encode_image(np.zeros((4, 4, 3), np.uint8), 5, "base_link")
    with pytest.raises(ImageError, match=r"/points/image: .*found encoding 'rgb8', expected 32FC3"):
        observer.observe(messages(policy, points, message=image), joints())
    with pytest.raises(Refused, match="no frame yet on /points/image"):
        observer.observe([*messages(policy, points)[:-1], None], joints())


def test_an_image_without_points_is_unknown():
    points = {"points": points_like((28, 28))}
    found = camera_positions(points, (("front", "points"),), ["wrist", "front"], 28, 16)
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1], patch_positions(points["points"], 28, 7))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"points": {}}, "geometry: points: found {}"),
        ({"points": {"observation.images.side": "points"}}, "found points of observation.images.side"),
        ({"bands": 0}, "bands is 0"),
        ({"colour": 3}, "found colour: 3"),
        (None, "unexpected"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(folders, tmp_path, change, words):
    convert(folders["plain"], tmp_path / "a", points=POINTS)
    file = tmp_path / "a" / "config.json"
    config = json.loads(file.read_text())
    if change is None:
        del config["geometry"]
    else:
        config["geometry"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        make_policy(tmp_path / "a").load()


@pytest.mark.parametrize(
    ("name", "points", "words"),
    [
        ("new", POINTS, "has geometric tokens already"),
        ("plain", {"observation.images.side": "points"}, "found observation.images.side, expected an image of"),
    ],
)
def test_tokens_are_added_once_and_to_known_images(folders, tmp_path, name, points, words):
    with pytest.raises(ConfigError, match=words):
        convert(folders[name], tmp_path / "b", points=points)
