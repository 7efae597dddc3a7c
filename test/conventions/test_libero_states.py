"""The state of preset ``libero`` on LIBERO's own trajectories, beginning anywhere, and in exported episodes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.conventions.golden import Array, libero
from test.conventions.robots import GANTRY_JOINTS, gantry, gantry_joints, panda
from test.replay.conftest import make, store, write_bag  # noqa: F401
from vla_ros.config import Config, build
from vla_ros.contract.binding import Binding, bind, make_arms
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.contract.state import Measured, StateReader
from vla_ros.kinematics.rotations import nearest, read_rotation, rotation_angle, write_rotation
from vla_ros.types import JointState

FINGERS = ("finger1", "finger2")
PANDA_JOINTS = tuple(f"joint{number}" for number in range(1, 8))
KEY = "observation/state"
START = 1_790_002_000_000_000_000
DOWN = np.array([np.pi, 0.0, 0.0])
SUITES = sorted(libero())


def preset(urdf: Path, base: str, tip: str, **options: Any) -> Config:
    robot = {"robot.urdf": str(urdf), "robot.base_frame": base, "robot.tip_frame": tip}
    return build({"preset": "libero", **robot, "robot.gripper_joint_names": list(FINGERS), **options})


def bound(config: Config, middle: tuple[float, ...] = ()) -> Binding:
    images = (ImageFeature("observation/image"), ImageFeature("observation/wrist_image"))
    return bind(PolicySpec(images, (StateFeature(KEY, size=8, middle=middle),)), config, make_arms(config))


def read(made: StateReader, names: tuple[str, ...], positions: Array, fingers: Array | None = None) -> Array:
    fingers = np.zeros(2) if fingers is None else fingers
    joints = JointState((*names, *FINGERS), np.concatenate((positions, fingers)), 1)
    return made.read(Measured(joints), 1, 0.0)


@pytest.mark.parametrize("middle", [(), (0, 0, 0.9, 2.97, -0.22, -0.13, 0.03, -0.03)])
@pytest.mark.parametrize("suite", SUITES)
def test_a_rotation_equals_the_published_one_from_any_step_on(
    suite: str, middle: tuple[float, ...], tmp_path: Path
) -> None:
    """The second reference is like the mean of a LIBERO checkpoint's statistics."""
    known = libero()[suite]
    made = bound(preset(gantry(tmp_path), "l0", "tip"), middle).states[0]
    poses = [
        gantry_joints(position, read_rotation(quaternion, "quaternion_xyzw"))
        for position, quaternion in zip(known["eef_pos"], known["eef_quat_xyzw"], strict=True)
    ]
    for start in range(len(poses)):
        made.begin_task()
        end = len(poses) if start % 20 == 0 else start + 3
        for pose, state in zip(poses[start:end], known["state"][start:end], strict=True):
            np.testing.assert_allclose(read(made, GANTRY_JOINTS, pose)[:6], state[:6], atol=1e-6)


@pytest.mark.parametrize("suite", SUITES)
def test_the_state_of_a_panda_is_the_published_one(suite: str, tmp_path: Path) -> None:
    known = libero()[suite]
    config = preset(panda(tmp_path, known["base_pos"]), "world", "grip_site")
    made = bound(config).states[0]
    # robosuite samples joint positions one simulation step of 2 ms after the pose.
    joints = known["joint_positions"] - 0.002 * np.gradient(known["joint_positions"], 0.05, axis=0)
    for q, fingers, state in zip(joints, known["gripper_qpos"], known["state"], strict=True):
        found = read(made, PANDA_JOINTS, q, fingers)
        assert np.linalg.norm(found[:3] - state[:3]) < 1e-3
        ours, published = (read_rotation(one[3:6], "rotation_vector") for one in (found, state))
        assert rotation_angle(ours.T @ published) < 2e-3
        assert np.linalg.norm(found[3:6] - state[3:6]) < 1e-2  # the same of the vectors of this rotation
        np.testing.assert_allclose(found[6:], state[6:], atol=1e-9)


def test_fingers_have_the_signs_of_training_whatever_the_driver_publishes(tmp_path: Path) -> None:
    config = preset(panda(tmp_path, np.zeros(3)), "world", "grip_site")
    for signs in ((1, 1), (1, -1), (-1, -1)):
        made = bound(config).states[0]
        for opening in (0.0, 0.04, 0.02, 0.001, -0.0004):  # the last one: pressed beyond closed
            found = read(made, PANDA_JOINTS, np.zeros(7), np.array(signs) * opening)[6:]
            np.testing.assert_allclose(found, [opening, -opening], atol=1e-12)


def test_the_table_shows_frames_and_the_fingers_signs(tmp_path: Path) -> None:
    table = bound(preset(panda(tmp_path, np.zeros(3)), "world", "grip_site")).table()
    assert "grip_site in world" in table
    assert "finger1, -finger2" in table
    assert "grip_site (axes of right_hand" in table


@pytest.mark.parametrize("form", ["rotation_vector", "euler_xyz", "quaternion_xyzw", "quaternion_wxyz"])
@pytest.mark.parametrize("axis", np.eye(3).tolist())
def test_no_jump_in_a_sweep_of_the_lowered_tool(form: str, axis: list[float]) -> None:
    down = read_rotation(DOWN, "rotation_vector")
    last = write_rotation(down, form)
    jumps, random = [], np.random.default_rng(3)
    for step in range(2200):  # more than a turn
        noise = 1e-4 * random.standard_normal(3) if form != "euler_xyz" else np.zeros(3)
        turn = read_rotation(0.003 * step * np.array(axis), "rotation_vector")
        shaken = read_rotation(noise, "rotation_vector") if step < 600 else np.eye(3)
        matrix = turn @ shaken @ down
        numbers = nearest(write_rotation(matrix, form), form, last)
        assert np.abs(read_rotation(numbers, form) - matrix).max() < 1e-6
        jumps.append(float(np.abs(numbers - last).max()))
        last = numbers
    assert max(jumps) < 0.05


def test_a_new_episode_begins_near_the_reference_again(tmp_path: Path) -> None:
    made = bound(preset(gantry(tmp_path), "l0", "tip")).states[0]
    for angle in np.arange(np.pi, 3 * np.pi, 0.1):
        pose = gantry_joints(np.zeros(3), read_rotation(angle * DOWN / np.pi, "rotation_vector"))
        np.testing.assert_allclose(read(made, GANTRY_JOINTS, pose)[3:6], [angle, 0, 0], atol=1e-6)
    made.begin_task()
    np.testing.assert_allclose(read(made, GANTRY_JOINTS, pose)[3:6], [angle - 2 * np.pi, 0, 0], atol=1e-6)


def test_the_wrapped_form_is_selectable(tmp_path: Path) -> None:
    state = f"{KEY} = arm.tip_rotation[rotation_vector wrapped] + unused[5]"
    made = bound(preset(gantry(tmp_path), "l0", "tip", **{"features.state": [state]})).states[0]
    for angle in (3.0, 3.2, 3.0):
        pose = gantry_joints(np.zeros(3), read_rotation(np.array([angle, 0, 0]), "rotation_vector"))
        wrapped = angle if angle < np.pi else angle - 2 * np.pi
        np.testing.assert_allclose(read(made, GANTRY_JOINTS, pose)[:3], [wrapped, 0, 0], atol=1e-6)


@pytest.mark.parametrize("suite", ["libero_goal"])
def test_an_exported_state_is_the_published_one(
    suite: str,
    tmp_path: Path,
    make: Any,  # noqa: F811
    write_bag: Any,  # noqa: F811
) -> None:
    pytest.importorskip("av")
    parquet = pytest.importorskip("pyarrow.parquet")
    from vla_ros.cli.main import main

    known, names, messages = libero()[suite], [*PANDA_JOINTS, *FINGERS], []
    for step, (q, fingers) in enumerate(zip(known["joint_positions"], known["gripper_qpos"], strict=True)):
        at, positions = START + 50_000_000 * step, [*q.tolist(), *fingers.tolist()]
        messages.append((at, "/joint_states", make.joints(at, positions, names)))
        messages.append((at + 1, "/camera/image_raw", make.image(at, np.zeros((16, 32, 3), np.uint8))))
        messages.append((at + 2, "/arm/joint_command", make.joints(at, positions, names)))
    messages.append((START, "/vla_policy/instruction", make.text("push")))
    bag = write_bag("bag", sorted(messages, key=lambda message: message[0]))
    urdf = panda(tmp_path, known["base_pos"])
    rotation = "arm.tip_rotation[rotation_vector near 3.14159 0 0]"
    options = [f"robot.urdf:={urdf}", "robot.base_frame:=world", "robot.tip_frame:=grip_site"]
    options.append(f"robot.gripper_joint_names:=[{', '.join(FINGERS)}]")
    arguments = ["--output", str(tmp_path / "set"), "--clock", "frames", "--fps", "20"]
    arguments += ["--state", f"arm.tip_position + {rotation} + arm.fingers[m, -m]"]
    arguments += ["--action", f"arm.tip_position + {rotation} + arm.gripper"]
    assert main(["export", str(bag), *arguments, *(word for one in options for word in ("-p", one))]) == 0
    table = parquet.read_table(tmp_path / "set/data/chunk-000/file-000.parquet")
    states = np.array(table["observation.state"].to_pylist())
    assert len(states) > 150
    np.testing.assert_allclose(states, known["state"][: len(states)], atol=5e-3)
    actions = np.array(table["action"].to_pylist())
    np.testing.assert_allclose(actions[:, :6], states[:, :6], atol=1e-5)
