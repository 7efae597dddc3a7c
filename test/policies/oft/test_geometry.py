"""Geometric tokens of OpenVLA-OFT: where they are added, what they leave unchanged, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.models.subject import random_weights
from test.policies.pi.test_geometry import points_like
from test.training.runs import CPU, OPTIONS, ArmSamples, opened, policy_of, run
from tools.checkpoints.tiny import tiny_architecture
from vla_ros.config import CameraConfig, Config, build
from vla_ros.contract.binding import bind, make_arms
from vla_ros.control.inputs import Snapshot
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.node.observer import Observer
from vla_ros.types import JointState, Observation, RawImage
from vla_ros.vision.messages import encode_image, encode_points
from vla_ros.vision.points import camera_positions, patch_positions
from vla_ros.vision.preprocess import process
from vla_ros_lab.training.export import export
from vla_ros_models.convert import convert
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.shapes import GeometryShape
from vla_ros_models.oft.inference import ChunkRequest, make_chunk_engine
from vla_ros_models.oft.network import Layout, OFTModel
from vla_ros_models.oft.policy import OFTPolicy
from vla_ros_models.oft.processing import OFTResize
from vla_ros_models.openvla import OpenVLAOptions
from vla_ros_models.openvla.loading import fill_quantized
from vla_ros_models.openvla.policy import OpenVLAPolicy
from vla_ros_models.weights import empty

from .conftest import DATA, cases, make_policy, observe

POINTS = {"libero_l1": {"0": "p0", "1": "p1"}, "aloha_film": {"2": "p2", "0": "p0"}}
POINTS |= {"libero_diffusion": {"1": "p1"}, "discrete": {"0": "p0"}}


@pytest.mark.parametrize("size", [(224, 224), (256, 256), (480, 640), (300, 200)])
@pytest.mark.parametrize(("area", "side"), [(0.9, 0), (0.9, 256), (1.0, 0), (0.5, 0)])
def test_points_go_where_the_image_processor_puts_their_pixels(size, area, side):
    """Two grey images show their own rows and columns as levels, which the processed ones have in their patches."""
    ramps = np.stack(np.meshgrid(*(np.linspace(10, 240, count) for count in size), indexing="ij"), axis=-1)
    points = np.dstack([ramps, np.zeros(size)]).astype(np.float32)
    found = patch_positions(points, 224, 14, area)
    for axis in (0, 1):
        image = np.repeat(ramps[:, :, axis, None].round(), 3, axis=2).astype(np.uint8)
        shown = OFTResize((224, 224), area, side)(image)[:, :, 0].astype(np.float32)
        patches = shown.reshape(16, 14, 16, 14).transpose(0, 2, 1, 3).reshape(256, 196)
        step = 230 / 16 * np.sqrt(area)  # levels from one patch to the next
        error = (found[:, axis] - np.median(patches, axis=1)) / step
        assert np.abs(error).max() < 0.3
        assert abs(error.mean()) < 0.1  # levels are rounded down


def learn(folder, seed=2):
    """Replace the new tensors by random ones."""
    file, random = folder / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name, one in tensors.items():
        if name.startswith("geometry."):
            one.copy_(torch.randn(one.shape, generator=random) * 0.3)
    save_file(tensors, file)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """``folders(variant)`` gives a checkpoint with new tokens, and one whose tokens have learnt something."""
    base, made = tmp_path_factory.mktemp("geometry"), {}
    discrete = shutil.copytree(DATA / "libero_l1", base / "discrete")
    next(discrete.glob("action_head*")).unlink()

    def make(variant):
        if variant not in made:
            new, learnt = base / f"{variant}-new", base / f"{variant}-learnt"
            plain = discrete if variant == "discrete" else DATA / variant
            convert(plain, new, points=POINTS[variant])
            shutil.copytree(new, learnt)
            learn(learnt)
            made[variant] = new, learnt, plain
        return made[variant]

    return make


def opened_policy(variant, folder):
    policy = make_policy(settings_of(variant), folder, self_test=False, denoising_steps=2)
    policy.load()
    return policy


def settings_of(variant):
    return "libero_l1" if variant == "discrete" else variant


def seen(policy, variant, seed=0, **given):
    variant = settings_of(variant)
    one = observe(policy, variant, cases(variant)[0])
    points = {key: points_like((256, 256), seed + number) for number, (_, key) in enumerate(policy.spec.points)}
    return Observation(
        one.images, one.instruction, 7, one.state, noise=one.noise, points=given.get("points", points)
    )


def numbers(policy, observation):
    chunk = policy.infer(policy.start_session(), observation)
    return np.array(chunk.info.get("logit_margins", chunk.normalized), np.float64)


@pytest.mark.parametrize("variant", POINTS)
def test_new_tokens_change_no_bit_of_a_chunk(folders, variant):
    new, plain = (opened_policy(variant, folders(variant)[index]) for index in (0, 2))
    expected = numbers(plain, seen(plain, variant))
    for seed in (0, 9):
        np.testing.assert_array_equal(numbers(new, seen(new, variant, seed)), expected)
    keys = new.spec.image_keys
    assert set(new.spec.points) == {(keys[int(image)], key) for image, key in POINTS[variant].items()}
    assert not plain.spec.points
    assert plain.loaded.model.geometry is None
    assert plain.describe().points == ()
    assert new.describe() == new.spec


@pytest.mark.parametrize("variant", POINTS)
def test_the_chunk_depends_on_the_points_of_each_image(folders, variant):
    policy = opened_policy(variant, folders(variant)[1])
    first = numbers(policy, seen(policy, variant))
    np.testing.assert_array_equal(first, numbers(policy, seen(policy, variant)))
    for _, key in policy.spec.points:
        points = {**seen(policy, variant).points, key: np.full((256, 256, 3), np.nan, np.float32)}
        assert np.abs(first - numbers(policy, seen(policy, variant, points=points))).max() > 1e-4, key
    with pytest.raises(ConfigError, match=r"points 'p\d' of 'camera_\d': found None, expected float32"):
        numbers(policy, seen(policy, variant, points={}))


@pytest.mark.parametrize("variant", ["libero_l1", "aloha_film"])
def test_each_patch_gets_the_token_of_its_own_place(folders, variant):
    """The rows that enter the decoder, against the network of the positions computed here."""
    policy = opened_policy(variant, folders(variant)[1])
    observation = seen(policy, variant)
    model, engine, keys = policy.loaded.model, policy.loaded.engine, list(policy.spec.image_keys)
    rows = {}
    for known in (True, False):
        points = observation.points if known else {
            key: np.full_like(one, np.nan) for key, one in observation.points.items()
        }  # fmt: skip
        numbers(policy, seen(policy, variant, points=points))
        [stages] = [engine._of(1).take(one) for one in [len(policy.loaded.prompt.encode(observation.instruction))]]
        rows[known] = stages.patches[0].clone()
    with torch.inference_mode():
        for image, key in policy.spec.points:
            first = keys.index(image) * 256
            where = torch.from_numpy(patch_positions(observation.points[key], 224, 14, 0.9))
            added = torch.stack([model.geometry(one) for one in where]) - model.geometry.unknown
            difference = rows[True][first : first + 256] - rows[False][first : first + 256]
            torch.testing.assert_close(difference, added, atol=1e-4, rtol=1e-4)
        for number, image in enumerate(keys):
            if image not in dict(policy.spec.points):
                one = slice(number * 256, number * 256 + 256)
                assert torch.equal(rows[True][one], rows[False][one])


def test_padded_batches_of_the_engine_are_the_reference_chunks(folders):
    policy = opened_policy("libero_l1", folders("libero_l1")[1])
    asked = []
    for seed in range(2):
        observation = seen(policy, "libero_l1", seed)
        asked.append(policy._request(policy.start_session(), observation, observation.images))
    expected = [policy.loaded.engine.answer(one).normalized for one in asked]
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    engine = make_chunk_engine(policy.loaded.model, ops=Ops())
    for one, wanted in zip(engine.answer_all(asked), expected, strict=True):
        np.testing.assert_allclose(one.normalized, wanted, atol=1e-4)


def test_the_tokens_stay_float32(folders):
    policy = make_policy("libero_l1", folders("libero_l1")[1], dtype="bfloat16", self_test=False)
    policy.load()
    assert policy.loaded.model.projector.fc1.weight.dtype == torch.bfloat16
    assert {one.dtype for one in policy.loaded.model.geometry.parameters()} == {torch.float32}
    one, other = (numbers(policy, seen(policy, "libero_l1", seed)) for seed in (0, 5))
    assert np.abs(one - other).max() > 1e-4


def test_quantised_weights_have_the_same_tokens():
    layout, cpu = Layout(2, 8, 7, 8, "l1", False, GeometryShape(hidden=16)), torch.device("cpu")
    model = empty(lambda: OFTModel(tiny_architecture(llm_width=128, llm_layers=2), layout))
    decoder = fill_quantized(model, random_weights(model, cpu, torch.bfloat16), cpu, torch.bfloat16, "int8")
    assert {one.dtype for one in model.geometry.parameters()} == {torch.float32}
    random = np.random.default_rng(0)
    images = list(random.integers(0, 256, (2, 224, 224, 3), np.uint8))
    places = random.random((2, 256, 3), np.float32)
    asked = [ChunkRequest(images, np.array([1, 5, 6, 500]), np.zeros(8), None, one) for one in (places, 2 * places)]
    engine = make_chunk_engine(model, decoder, Ops(), quantization="int8")
    one, other = (engine.answer(each).normalized for each in asked)
    assert np.isfinite(one).all()
    assert np.abs(one - other).max() > 1e-3


def test_cameras_with_points_are_no_images(folders):
    """A node's messages of two cameras and their points, in any order, become the request."""
    keys = ("p1", "camera_0", "p0", "camera_1")
    values = {
        "policy.name": "oft", "policy.checkpoint": str(folders("libero_l1")[1]), "policy.device": "cpu",
        "policy.self_test": False, "policy.chunk": 8, "camera.keys": list(keys),
        "camera.topics": [f"/{key}/image" for key in keys], "robot.urdf": "demo", "robot.base_frame": "base_link",
        "robot.gripper_joint_names": ["finger_left", "finger_right"], "control.delta_form": "motion",
        "features.state": ["state = arm.tip_position + arm.tip_rotation[rotation_vector] + arm.fingers"],
    }  # fmt: skip
    config = build(values)
    policy = OFTPolicy(config)
    policy.load()
    assert policy.spec.image_keys == ("camera_0", "camera_1")
    binding = bind(policy.spec, config, make_arms(config))
    points = {key: points_like((256, 256), seed) for seed, key in enumerate(("p0", "p1"))}
    random = np.random.default_rng(4)
    images = {key: random.integers(0, 256, (256, 256, 3), np.uint8) for key in ("camera_0", "camera_1")}
    messages = [
        encode_points(points[key], 5, "base_link") if key in points else encode_image(images[key], 5, key)
        for key in keys
    ]
    names = (*(f"joint_{joint}" for joint in range(1, 8)), "finger_left", "finger_right")
    joints = Snapshot(JointState(names, np.zeros(9), 5), instruction="pick up the cube")
    seen = Observer(binding).observe(messages, joints)
    asked = policy._request(policy.start_session(), seen, policy._images(seen))
    for number, key in enumerate(points):
        np.testing.assert_array_equal(asked.positions[number], patch_positions(points[key], 224, 14, 0.9))
    shown = [policy.spec.images[0].processor(images[key]) for key in images]
    np.testing.assert_array_equal(
        [process(one) if isinstance(one, RawImage) else one for one in asked.images], shown
    )
    assert policy.trainable(CPU).inputs.keys == ("camera_0", "camera_1")


def changed(folder, target, change):
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: config["geometry"].update(points={}), "geometry: points: found {}"),
        (lambda config: config["geometry"].update(points={"2": "p"}), "found points of 2, .*policy: 0, 1"),
        (lambda config: config["geometry"].update(points={"wrist": "p"}), "found points of wrist, expected images"),
        (lambda config: config["geometry"].update(colour=3), "found colour: 3"),
        (lambda config: config["geometry"].update(hidden=8), r"geometry.fc1.weight"),
        (lambda config: config.pop("geometry"), r"unexpected.*geometry.fc1"),
    ],
)  # fmt: skip
def test_an_entry_that_does_not_fit_is_refused(folders, tmp_path, change, words):
    folder = changed(folders("libero_l1")[0], tmp_path / "a", change)
    with pytest.raises(CheckpointError, match=words):
        make_policy("libero_l1", folder).load()


def test_a_key_without_tensors_and_openvla_with_a_key_are_refused(folders, tmp_path):
    key = {"geometry": {"points": {"0": "p"}}}
    folder = changed(DATA / "libero_l1", tmp_path / "a", lambda config: config.update(key))
    with pytest.raises(CheckpointError, match=r"missing.*geometry\.fc1"):
        make_policy("libero_l1", folder).load()
    options = OpenVLAOptions(checkpoint=str(folders("discrete")[0]), device="cpu")
    with pytest.raises(CheckpointError, match="found geometry: "):
        OpenVLAPolicy(Config(policy=options, camera=CameraConfig(keys=("image",)))).load()


@pytest.mark.parametrize(
    ("again", "points", "words"),
    [
        (True, {"0": "p"}, "has geometric tokens already"),
        (False, {"3": "p"}, "found 3, expected an image of the policy: 0, 1, 2"),
        (False, {"wrist": "p"}, "found wrist, expected an image of the policy: 0, 1, 2"),
    ],
)
def test_tokens_are_added_once_and_to_known_images(folders, tmp_path, again, points, words):
    folder = folders("libero_l1")[0] if again else DATA / "libero_l1"
    with pytest.raises(ConfigError, match=words):
        convert(folder, tmp_path / "b", points=points)
    assert not (tmp_path / "b").exists()


def test_tokens_in_a_file_of_their_own_are_those_of_the_shards(folders, tmp_path):
    """As the published layout has an action head and projectors, with the prefix of distributed training."""
    folder = changed(DATA / "libero_l1", tmp_path / "a", lambda config: config.update(
        json.loads((folders("libero_l1")[1] / "config.json").read_text())
    ))  # fmt: skip
    tensors = load_file(folders("libero_l1")[1] / "model.safetensors")
    named = {name.replace("geometry.", "module."): one for name, one in tensors.items() if "geometry." in name}
    torch.save(named, folder / "geometry--150000_checkpoint.pt")
    one, other = opened_policy("libero_l1", folder), opened_policy("libero_l1", folders("libero_l1")[1])
    np.testing.assert_array_equal(numbers(one, seen(one, "libero_l1")), numbers(other, seen(other, "libero_l1")))


@pytest.fixture
def trained_options(folders, monkeypatch):
    monkeypatch.setitem(OPTIONS, "oft", (folders("libero_l1")[0], OPTIONS["oft"][1]))
    return OPTIONS["oft"]


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_training_changes_the_tokens_and_they_are_exported(tmp_path, trained_options, adapter):
    folder, settings = trained_options
    adapted = opened("oft", adapter)
    geometry = {name: one for name, one in adapted.parameters.items() if ".geometry." in name}
    assert len(geometry) == 5
    assert not any("lora" in name for name in geometry), "new modules train in full, beside an adapter of the rest"
    before = {name: one.detach().clone() for name, one in geometry.items()}
    run(adapted, tmp_path / "run", 3)
    # The first step moves the zeros of the last layer, later ones what is in front of it, too.
    assert all(not torch.equal(before[name], one) for name, one in geometry.items())
    export(adapted, folder, tmp_path / "out", "float32")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, one in geometry.items():
        torch.testing.assert_close(written[adapted.trainable.names[name]], one.detach(), rtol=0, atol=0)
    policy = policy_of(tmp_path / "out", *settings)
    policy.load()
    sample = ArmSamples(policy.spec)[3]
    chunk = policy.infer(policy.start_session(), sample.observation)
    again = policy.trainable(CPU)
    prepared = dict(again.inputs.prepare(
        sample.observation, sample.actions, sample.is_pad, np.random.default_rng(0)
    ))  # fmt: skip
    expected = camera_positions(
        sample.observation.points, policy.spec.points, policy.spec.image_keys, 224, 256, 0.9
    )
    np.testing.assert_array_equal(prepared["positions"], expected)
    prepared["actions"] = chunk.normalized.astype(np.float32)
    with torch.no_grad():
        error = again.trainee(again.inputs.collate([prepared])).element
    assert float(error.max()) < 1e-4, "what trains is what infers"
    if adapter == "lora":
        merged = policy_of(tmp_path / "out" / "adapter", f"policy.base:={folder}", *settings)
        merged.load()
        other = merged.infer(merged.start_session(), sample.observation)
        np.testing.assert_allclose(other.normalized, chunk.normalized, atol=1e-4)


def test_every_new_tensor_has_a_gradient(folders, monkeypatch):
    monkeypatch.setitem(OPTIONS, "oft", (folders("libero_l1")[1], OPTIONS["oft"][1]))
    trainable = opened("oft", "full").trainable
    samples = ArmSamples(trainable.spec)
    prepared = [
        trainable.inputs.prepare(one.observation, one.actions, one.is_pad, np.random.default_rng(0))
        for one in (samples[0], samples[9])
    ]
    trainable.trainee(trainable.inputs.collate(prepared)).total.backward()
    geometry = {name: one for name, one in trainable.trainee.named_parameters() if ".geometry." in name}
    assert len(geometry) == 5
    parameter = geometry["network.geometry.fc2.bias"]
    assert all(one.grad.abs().max() > 0 for one in geometry.values())
    with torch.no_grad():  # against a difference of losses
        losses = []
        for step in (-1e-3, 1e-3):
            parameter[3] += step
            losses.append(float(trainable.trainee(trainable.inputs.collate(prepared)).total))
            parameter[3] -= step
    assert (losses[1] - losses[0]) / 2e-3 == pytest.approx(float(parameter.grad[3]), rel=0.05, abs=1e-5)
