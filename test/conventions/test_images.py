"""Images as presets and policies prepare them, compared with published pipelines to the bit."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.conventions.golden import Array, entry, expected_image
from test.conventions.robots import GANTRY_JOINTS, gantry, gantry_joints
from vla_ros.config import Config, build
from vla_ros.contract.binding import bind, make_arms
from vla_ros.contract.features import complete_spec
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.inputs import Snapshot
from vla_ros.kinematics.rotations import read_rotation
from vla_ros.node.observer import Observer
from vla_ros.types import JointState, Observation
from vla_ros.vision.messages import encode_image
from vla_ros.vision.preprocess import Preprocessor, process

OPEN = PolicySpec((), action=(), dimension=0, horizon=4, takes_any_state=True)  # as a policy on a server
BEGIN = 1_700_000_000_000_000_000
DATA = Path(__file__).parents[1] / "data"


def prepared(config: Config, spec: PolicySpec, image: Array, camera: int = 0) -> Array:
    """Return the image that the policy gets of a camera's frame."""
    preprocessor = Preprocessor(config.camera, complete_spec(spec, config))
    return process(preprocessor(encode_image(np.asarray(image), BEGIN, "camera"), camera))


def check(name: str, image: Array, key: str = "out") -> None:
    ours, published = expected_image(entry(name), key, image)
    np.testing.assert_array_equal(ours, published)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("image.resize_224_wide", "droid"),
        ("image.resize_224_tall", "droid"),
        ("image.resize_224_shrink", "droid"),
        ("image.resize_180x320", "gr00t_droid"),
        ("image.resize_180x320_same_ratio", "gr00t_droid"),
    ],
)
def test_presets_resize_with_bars(name: str, preset: str) -> None:
    check(name, prepared(build({"preset": preset}), OPEN, entry(name)["image"]))


def test_openpis_aloha_takes_channels_first() -> None:
    name, options = "image.openpi_aloha", {"preset": "aloha"}
    image = prepared(build(options), OPEN, entry(name)["image"])
    check(name, np.moveaxis(image, -1, 0))


@dataclass
class OpenVLA:
    """Tiny checkpoints of OpenVLA with the statistics of named data sets."""

    folder: Path

    def policy(self, dataset: str, **options: Any) -> tuple[Config, PolicySpec]:
        """Load a checkpoint trained on ``dataset``; return options and spec."""
        from tools.checkpoints.tiny import STATISTICS, tiny_architecture, write_tiny
        from vla_ros.policies.base import create

        small = tiny_architecture(vocabulary=768, empty_token=500)
        write_tiny(self.folder, architecture=small, statistics={dataset: STATISTICS["tiny"]})
        policy = {"policy.name": "openvla", "policy.checkpoint": str(self.folder), "policy.device": "cpu"}
        config = build({**policy, **options})
        made = create(config)
        made.load()
        spec = made.spec
        made.close()
        size = (224, 224)
        processors = [replace(image.processor, size=size) for image in spec.images]  # type: ignore[type-var, misc]
        return config, replace(
            spec,
            images=tuple(replace(a, processor=b) for a, b in zip(spec.images, processors, strict=True)),
        )


@pytest.fixture
def openvla(tmp_path: Path) -> OpenVLA:
    pytest.importorskip("torch")
    return OpenVLA(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "libero", "camera.crop_area": [1.0, 0.0]},
        {"camera.orientation": ["rotate_180"], "camera.crop_area": [1.0]},
    ],
)
def test_openvlas_libero_checkpoints(openvla: OpenVLA, options: dict[str, Any]) -> None:
    """Without the crop, which ``image.oft_crop`` has."""
    config, spec = openvla.policy("libero_spatial_no_noops", **options)
    check("image.openvla_libero", prepared(config, spec, entry("image.openvla_libero")["image"]))


def test_the_crop_of_openvlas_libero_checkpoints(openvla: OpenVLA) -> None:
    _, spec = openvla.policy("libero_spatial_no_noops")
    assert spec.images[0].processor is not None
    assert spec.images[0].processor.crop_area == 0.9  # type: ignore[attr-defined]
    _, spec = openvla.policy("kitchen", preset="libero")  # named by its owner
    assert spec.images[0].processor.crop_area == 0.9  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["image.bridge_60", "image.bridge_240"])
def test_openvlas_bridge_checkpoints(openvla: OpenVLA, name: str) -> None:
    config, spec = openvla.policy("bridge_orig")
    check(name, prepared(config, spec, entry(name)["image"]))


def oft(variant: str, preset: str, **options: Any) -> tuple[Config, PolicySpec]:
    """Return options and spec of an OFT checkpoint at 224x224, without the crop unless ``options`` say so."""
    pytest.importorskip("torch")
    from vla_ros.policies.base import create

    policy = {"policy.name": "oft", "policy.checkpoint": str(DATA / "oft" / variant), "preset": preset}
    config = build({**policy, "policy.crop_area": 1.0, **options})
    spec = create(config).describe()
    small = (224, 224)
    images = [replace(one, processor=replace(one.processor, size=small)) for one in spec.images]  # type: ignore
    return config, replace(spec, images=tuple(images))


def test_ofts_images() -> None:
    config, spec = oft("libero_l1", "libero")
    for camera in range(2):
        known = entry("image.oft_libero")
        check("image.oft_libero", prepared(config, spec, known["image"], camera))
    turned = entry("image.oft_224")["image"][::-1, ::-1]
    check("image.oft_224", prepared(config, spec, turned))
    config, spec = oft("libero_l1", "libero", **{"policy.crop_area": 0.9})
    check("image.oft_crop", prepared(config, spec, entry("image.oft_crop")["image"][::-1, ::-1]))


def test_ofts_aloha_images_are_first_resized_to_256() -> None:
    """The intermediate image is seen through a processor of 256x256, which neither encodes nor resizes it again."""
    config, spec = oft("aloha_film", "aloha")
    small = replace(spec.images[0].processor, size=(256, 256))  # type: ignore[type-var]
    spec = replace(spec, images=tuple(replace(one, processor=small) for one in spec.images))
    name = "image.oft_aloha_256"
    check(name, prepared(config, spec, entry(name)["image"]))


class Robot:
    """A robot whose observations a preset prepares, frame after frame at the preset's rate."""

    def __init__(self, **options: Any) -> None:
        config = build(options)
        binding = bind(OPEN, config, make_arms(config))
        self._config, self._observer = binding.config, Observer(binding)
        self._step = 0

    def observe(self, *images: Array, joints: JointState | None = None, encoding: str = "rgb8") -> Observation:
        """Return the observation of the next step; ``joints`` need no stamp."""
        stamp = BEGIN + round(self._step * 1e9 / self._config.control.rate_hz)
        self._step += 1
        frames = [encode_image(np.asarray(image), stamp, "camera", encoding) for image in images]
        joints = None if joints is None else replace(joints, stamp=stamp)
        inputs = Snapshot(joints, instruction="go")
        for index, frame in enumerate(frames):
            self._observer.remember(index, stamp, frame, inputs)
        return self._observer.observe(frames, inputs)


def test_openpis_libero_client(tmp_path: Path) -> None:
    known, fingers = entry("client.openpi_libero"), ["a", "b"]
    state = {"robot.urdf": str(gantry(tmp_path)), "robot.gripper_joint_names": fingers}
    for step, (state_of, published) in enumerate(zip(known["states_of_step"], known["states"], strict=True)):
        index = int(state_of) % len(known["positions"])
        quat = known["quat"][index]
        pose = gantry_joints(known["positions"][index], read_rotation(quat, "quaternion_xyzw"))
        joints = JointState((*GANTRY_JOINTS, *fingers), np.concatenate((pose, known["gripper"][index])), 1)
        found = Robot(preset="libero", **state).observe(known["agent_in"], known["wrist_in"], joints=joints)
        if step == 0:
            for key, image in (("agent", "observation/image"), ("wrist", "observation/wrist_image")):
                ours, stored = expected_image(known, key, found.images[image])
                np.testing.assert_array_equal(ours, stored)
        check_libero_state(found.state["observation/state"], published, quat)


def test_ofts_libero_client(tmp_path: Path) -> None:
    """The resize is left out in the published numbers."""
    known, fingers = entry("client.oft_libero"), ["a", "b"]
    state = {"robot.urdf": str(gantry(tmp_path)), "robot.gripper_joint_names": fingers}
    images = [f"observation/{name} = {camera}" for name, camera in (("image", "agent"), ("wrist_image", "wrist"))]
    for number, published in enumerate(known["states"]):
        index = (10 + 8 * number) % len(known["positions"])
        quat, render = known["quat"][index], known["renders"][index]
        pose = gantry_joints(known["positions"][index], read_rotation(quat, "quaternion_xyzw"))
        joints = JointState((*GANTRY_JOINTS, *fingers), np.concatenate((pose, known["gripper"][index])), 1)
        robot = Robot(preset="libero", **state, **{"features.images": images})
        found = robot.observe(render, render, joints=joints)
        np.testing.assert_array_equal(found.images["observation/image"], known["request_agent"][number])
        check_libero_state(found.state["observation/state"], published, quat)


def check_libero_state(ours: Array, published: Array, quat: Array) -> None:
    """Compare a state; a quaternion whose x is negative lies nearer to the other vector of its rotation."""
    np.testing.assert_allclose(ours[[0, 1, 2, 6, 7]], published[[0, 1, 2, 6, 7]], atol=1e-9)
    if quat[0] > 0:
        np.testing.assert_allclose(ours, published, atol=1e-6)
    rotations = [read_rotation(one[3:6], "rotation_vector") for one in (ours, published)]
    np.testing.assert_allclose(*rotations, atol=1e-6)


SEVEN = [f"joint{number}" for number in range(1, 8)]


def test_openpis_droid_client() -> None:
    known = entry("client.openpi_droid")
    options = {"robot.joint_names": SEVEN, "robot.gripper_joint_names": ["width"], "topics.gripper": "/gripper"}
    ends = {"gripper.open_position": 0.085, "gripper.closed_position": 0.0}
    for number, step in enumerate((0, 8, 16)):
        joints = np.array([*known["joints"][step], 0.085 * (1 - known["gripper"][step])])
        robot = Robot(preset="droid", **options, **ends)
        measured = JointState((*SEVEN, "width"), joints, 1)
        found = robot.observe(known["exterior"], known["wrist"], joints=measured, encoding="bgra8")
        for key, image in (("exterior_image_1_left", "exterior"), ("wrist_image_left", "wrist")):
            ours, stored = expected_image(known, f"request_{image}", found.images[f"observation/{key}"])
            np.testing.assert_array_equal(ours, stored)
        np.testing.assert_allclose(found.state["observation/joint_position"], known["request_joints"][number])
        gripper = found.state["observation/gripper_position"]
        np.testing.assert_allclose(gripper, known["request_gripper"][number], atol=1e-9)


def test_groots_droid_client(tmp_path: Path) -> None:
    known, fingers = entry("client.gr00t_droid"), ["width"]
    urdf = gantry(tmp_path, entry("eef_9d.groot_droid")["correction"])
    features = build({"preset": "gr00t_droid"}).features.state
    robot = Robot(
        preset="gr00t_droid",
        **{"robot.urdf": str(urdf), "robot.gripper_joint_names": fingers, "features.state": features[:2]},
        **{"gripper.open_position": 1.0, "gripper.closed_position": 0.0, "topics.gripper": "/gripper"},
    )
    pictures, steps = known["pictures"], len(known["cartesian"])
    for step, (cartesian, gripper) in enumerate(zip(known["cartesian"], known["gripper"], strict=True)):
        pose = gantry_joints(cartesian[:3], read_rotation(cartesian[3:], "euler_xyz"))
        joints = JointState((*GANTRY_JOINTS, *fingers), np.array([*pose, 1 - gripper]), 1)
        wrist = pictures[(step + 7) % 40 % steps]
        found = robot.observe(pictures[step], wrist, joints=joints, encoding="bgra8")
        if step not in known["request_at_step"]:
            continue
        number = known["request_at_step"].tolist().index(step)
        images = found.images["video.exterior_image_1_left"]
        np.testing.assert_array_equal(images[:, ::9, ::8], known["request_exterior_probe"][number])
        if (step + 7) % 40 < steps:  # of the others, the entry has no image
            now = found.images["video.wrist_image_left"][-1]
            np.testing.assert_array_equal(now[::9, ::8], known["request_wrist_probe"][number, -1])
        np.testing.assert_allclose(found.state["state.eef_9d"], known["request_eef_9d"][number], atol=1e-5)
        ours = found.state["state.gripper_position"]
        np.testing.assert_allclose(ours, known["request_gripper"][number], atol=1e-5)


@pytest.mark.parametrize("robot", ["droid", "libero"])
def test_openpis_slots_of_images(robot: str) -> None:
    """Openpi's third slot is black and masked, and does not reach the model here; states are joined in order."""
    pytest.importorskip("torch")
    from vla_ros_models.pi.processing import ROBOTS

    known, ours = entry(f"policy_inputs.openpi_{robot}_pi0"), ROBOTS[robot]
    slots = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    assert ours.images == tuple(slot for slot, used in zip(slots, known["mask"], strict=True) if used)
    np.testing.assert_array_equal(known["images"][0], known["first"])
    assert sum(size for _, size in ours.state_keys) == len(known["state"])


def test_the_index_names_the_source_of_every_entry() -> None:
    index = json.loads((DATA / "conventions/index.json").read_text(encoding="utf-8"))
    assert all(set(row) == {"repository", "commit", "file", "function"} for row in index.values())
