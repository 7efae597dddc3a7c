"""State vectors through the options of robots and presets, compared with published functions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.conventions.golden import Array, entry
from test.conventions.robots import GANTRY_JOINTS, gantry, gantry_joints
from vla_ros.config import Config, build, load
from vla_ros.config.files import config_file
from vla_ros.contract.binding import make_arms
from vla_ros.contract.components import parse_components
from vla_ros.contract.features import complete_spec
from vla_ros.contract.spec import PolicySpec, StateFeature
from vla_ros.contract.state import Measured, StateReader, bind_state
from vla_ros.errors import ConfigError
from vla_ros.kinematics.rotations import read_rotation
from vla_ros.types import JointState
from vla_ros_models.pi.processing import aloha_state

DOWN = "[rotation_vector near 3.141592653589793 0 0]"
OPEN = PolicySpec((), action=(), dimension=0, horizon=4, takes_any_state=True)  # as a policy on a server


class Gantry:
    """Reads a state of a gantry whose tip is anywhere."""

    def __init__(self, folder: Path, parts: str, turn: Array | None = None) -> None:
        self._config = build({"robot.urdf": str(gantry(folder, turn)), "robot.gripper_joint_names": ["a", "b"]})
        self._parts = parts

    def read(self, position: Array, matrix: Array, fingers: Array | tuple[float, float] = (0.0, 0.0)) -> Array:
        """Return the first state of an episode."""
        reader = bind_state(StateFeature("s", parse_components(self._parts)), make_arms(self._config), {})
        joints = np.concatenate((gantry_joints(position, matrix), fingers))
        return reader.read(Measured(JointState((*GANTRY_JOINTS, "a", "b"), joints, 1)), 1, 0.0)

    def rotations(self, matrices: Array) -> Array:
        """Return the state of each rotation."""
        return np.stack([self.read(np.zeros(3), matrix) for matrix in matrices])


def matrices_of(numbers: Array, form: str) -> Array:
    return np.stack([read_rotation(one, form) for one in numbers])


def close(ours: Array, published: Array, form: str, atol: float, where: Array | None = None) -> None:
    """Compare the numbers ``where`` they must agree, and the rotations everywhere."""
    np.testing.assert_allclose(matrices_of(ours, form), matrices_of(published, form), atol=max(atol, 2e-6))
    chosen = slice(None) if where is None else where
    np.testing.assert_allclose(ours[chosen], published[chosen], atol=atol)


@pytest.mark.parametrize(
    "name", ["openpi_libero", "oft_libero", "openvla_libero", "robosuite", "vla_eval_robosuite", "lerobot_libero"]
)
def test_rotation_vectors_near_the_lowered_tool_are_not_wrapped(name: str, tmp_path: Path) -> None:
    """Quaternions whose x is negative lie nearer to the other vector of their rotation."""
    known = entry(f"quat_axisangle.{name}")
    exact = known["quat"][np.abs(np.linalg.norm(known["quat"], axis=1) - 1) < 1e-9]
    published = known["out"][np.abs(np.linalg.norm(known["quat"], axis=1) - 1) < 1e-9]
    ours = Gantry(tmp_path, f"arm.tip_rotation{DOWN}").rotations(matrices_of(exact, "quaternion_xyzw"))
    same = (exact[:, 0] > 1e-3) & (np.abs(exact[:, 3]) < 1 - 1e-6)
    assert same.sum() > 20
    np.testing.assert_allclose(ours[same], published[same], atol=1e-5 if published.dtype == np.float32 else 1e-6)
    known_well = np.abs(exact[:, 3]) < 1 - 1e-6
    np.testing.assert_allclose(
        matrices_of(ours, "rotation_vector")[known_well],
        matrices_of(published, "rotation_vector")[known_well],
        atol=1e-5,
    )


def test_wrapped_rotation_vectors_are_those_of_the_antipodal_form(tmp_path: Path) -> None:
    known = entry("quat_axisangle.vla_eval_antipodal")
    quat = known["quat"]
    where = (np.abs(np.linalg.norm(quat, axis=1) - 1) < 1e-9) & (np.abs(quat[:, 3]) > 1e-3)
    ours = Gantry(tmp_path, "arm.tip_rotation[rotation_vector wrapped]").rotations(
        matrices_of(quat[where], "quaternion_xyzw")
    )
    np.testing.assert_allclose(ours, known["out"][where], atol=1e-5)


def test_quaternions(tmp_path: Path) -> None:
    known = entry("quat.robosuite_mat2quat")
    ours = Gantry(tmp_path, "arm.tip_rotation[quaternion_xyzw wrapped]").rotations(known["matrix"])
    sign = np.sign((ours * known["quat"]).sum(axis=1))
    np.testing.assert_allclose(ours, known["quat"] * sign[:, None], atol=1e-5)
    for row, quat in zip(known["matrix"], known["quat"], strict=True):  # the sign of any reference can be had
        near = " ".join(f"{number:.12f}" for number in quat)
        one = Gantry(tmp_path, f"arm.tip_rotation[quaternion_xyzw near {near}]").rotations(row[None])
        np.testing.assert_allclose(one[0], quat, atol=1e-5)
    known = entry("quat.vla_eval_wxyz")
    unit = np.abs(np.linalg.norm(known["wxyz"], axis=1) - 1) < 1e-9
    np.testing.assert_allclose(
        matrices_of(known["wxyz"][unit], "quaternion_wxyz"), known["matrix"][unit], atol=1e-6
    )
    ours = Gantry(tmp_path, "arm.tip_rotation[quaternion_wxyz]").rotations(known["matrix"][unit])
    back = np.roll(known["back"][unit], 1, axis=1)
    np.testing.assert_allclose(np.abs((ours * back).sum(axis=1)), 1, atol=1e-9)


@pytest.mark.parametrize("name", ["droid", "bridge", "vla_eval"])
def test_euler_angles(name: str, tmp_path: Path) -> None:
    known = entry(f"euler.{name}")
    np.testing.assert_allclose(matrices_of(known["euler"], "euler_xyz"), known["matrix"], atol=1e-6)
    ours = Gantry(tmp_path, "arm.tip_rotation[euler_xyz wrapped]").rotations(known["matrix_in"])
    published = known["from_matrix"]
    regular = np.hypot(known["matrix_in"][:, 0, 0], known["matrix_in"][:, 1, 0]) > 1e-3
    turned = np.abs(np.abs(published) - np.pi).min(axis=1) < 1e-6  # pi and -pi are the same angle
    close(ours, published, "euler_xyz", 1e-6, regular & ~turned)


def test_six_numbers_of_a_rotation(tmp_path: Path) -> None:
    known = entry("rot6d.groot_rows")
    made = Gantry(tmp_path, "arm.tip_position + arm.tip_rotation[rot6d]")
    ours = [made.read(pose[:3, 3], pose[:3, :3]) for pose in known["pose"]]
    np.testing.assert_allclose(ours, known["xyz_rot6d"], atol=1e-9)
    np.testing.assert_allclose(matrices_of(known["rot6d"], "rot6d"), known["matrix"], atol=1e-6)
    known, forms = entry("rot6d.vla_eval"), {"interleaved": "rot6d_interleaved", "contiguous": "rot6d_columns"}
    for published, form in forms.items():
        ours = Gantry(tmp_path, f"arm.tip_rotation[{form}]").rotations(known["matrix"])
        np.testing.assert_allclose(ours, known[published], atol=1e-9)
    known = entry("rot6d.vla_eval_inverse")
    for published, form in forms.items():
        found = matrices_of(known["rot6d"], form)
        np.testing.assert_allclose(found, known[f"matrix_{published}"], atol=1e-6)


def test_groots_turned_tip_of_droid(tmp_path: Path) -> None:
    """Preset ``gr00t_droid``, whose tip frame has the axes R @ correction."""
    known = entry("eef_9d.groot_droid")
    config = build({"preset": "gr00t_droid"})
    parts = config.features.state[0].partition(" = ")[2]
    made = Gantry(tmp_path, parts, known["correction"])
    for pose, published in zip(known["cartesian"], known["eef_9d"], strict=True):
        ours = made.read(pose[:3], read_rotation(pose[3:], "euler_xyz"))
        np.testing.assert_allclose(ours, published, atol=1e-9)


def test_bridges_state(tmp_path: Path) -> None:
    """The tip frame has the axes R @ default_rotation^T; the last option as in preset ``bridge``'s comment."""
    known, padded = entry("state.bridge"), entry("state.openvla_bridge")
    parts = "arm.tip_position + arm.tip_rotation[euler_xyz wrapped] + unused[1] + arm.gripper"
    made = Gantry(tmp_path, parts, known["default_rotation"].T)
    for pose, gripper, state in zip(known["pose"], known["gripper"], known["state"], strict=True):
        ours = made.read(pose[:3, 3], pose[:3, :3], (0.04 * gripper[0], 0.04 * gripper[0]))
        np.testing.assert_allclose(ours[[0, 1, 2, 6, 7]], [*state[:3], 0, state[6]], atol=1e-9)
        regular = abs(abs(state[4]) - np.pi / 2) > 1e-3 and (np.abs(np.abs(state[3:6]) - np.pi) > 1e-6).all()
        close(ours[None, 3:6], state[None, 3:6], "euler_xyz", 1e-6, None if regular else np.array([False]))
    np.testing.assert_array_equal(np.insert(padded["state"], 6, 0, axis=1), padded["proprio"])


def test_lerobots_libero_state(tmp_path: Path) -> None:
    known = entry("libero_observation.lerobot")
    made = Gantry(tmp_path, f"arm.tip_position + arm.tip_rotation{DOWN} + arm.fingers[m, -m]")
    for position, quat, fingers, state in zip(
        known["position"], known["quat"], known["gripper"], known["state"], strict=True
    ):
        ours = made.read(position, read_rotation(quat, "quaternion_xyzw"), fingers)
        np.testing.assert_allclose(ours[[0, 1, 2, 6, 7]], state[[0, 1, 2, 6, 7]], atol=1e-5)
        where = None if quat[0] > 0 else np.array([False])
        close(ours[None, 3:6], state[None, 3:6], "rotation_vector", 1e-5, where)


def aloha(preset: bool = True) -> tuple[StateReader, Config]:
    config = load([config_file("aloha")], ["preset:=aloha"] if preset else [])
    features = complete_spec(OPEN, config).state
    return bind_state(features[0], make_arms(config), {}), config


def measured(names: tuple[str, ...], **arms: Array) -> Measured:
    return Measured(arms={name: JointState(names, values, 1) for name, values in arms.items()})


DRIVER = (*load([config_file("aloha")]).robot.joint_names, "gripper", "left_finger", "right_finger")


@pytest.mark.parametrize("name", ["openpi", "oft"])
def test_alohas_state_has_the_fingers_travel(name: str) -> None:
    known, (reader, _) = entry(f"aloha_robot.{name}"), aloha()
    for (left, right), published in zip(known["joint_states"], known["state"], strict=True):
        ours = reader.read(measured(DRIVER, left=left, right=right), 1, 0.0)
        np.testing.assert_allclose(ours, published, atol=1e-9)


@pytest.mark.parametrize("name", ["openpi", "oft"])
def test_alohas_scales_of_the_gripper(name: str) -> None:
    known, (reader, config) = entry(f"gripper.aloha_constants_{name}"), aloha()
    for travel, published in zip(known["position"], known["position_normalized"], strict=True):
        joints = np.array([*np.zeros(7), travel, -travel])
        found = reader.read(measured(DRIVER, left=joints, right=joints), 1, 0.0)
        np.testing.assert_allclose(found[[6, 13]], published, atol=1e-9)
    closed, opened = config.gripper.closed_position, config.gripper.open_position
    np.testing.assert_allclose((known["joint"] - closed) / (opened - closed), known["joint_normalized"], atol=1e-9)


def test_alohas_state_in_pis_units() -> None:
    known = entry("aloha_pi_units.openpi")
    np.testing.assert_allclose(aloha_state(known["state"]), known["state_pi"], atol=1e-9)
    known = entry("gripper.aloha_openpi_angular")
    states = np.zeros((len(known["value"]), 14))
    states[:, 6] = known["value"]
    np.testing.assert_allclose(aloha_state(states)[:, 6], known["to_angular"], atol=1e-9)


def opening(options: dict[str, Any], parts: str, positions: Array) -> Array:
    """Return the state of each position of the joint ``finger``."""
    arms = make_arms(build({"robot.gripper_joint_names": ["finger"], **options}))
    reader = bind_state(StateFeature("s", parse_components(parts)), arms, {})
    read = [reader.read(Measured(JointState(("finger",), np.array([at]), 1)), 1, 0.0)[0] for at in positions]
    return np.array(read)


def test_grippers_of_bridge_and_droid_are_not_clipped() -> None:
    known = entry("gripper.bridge")
    config = load([config_file("openvla_bridge")], ["robot.urdf:=demo", "robot.gripper_joint_names:=[finger]"])
    ends = {f"gripper.{end}": getattr(config.gripper, end) for end in ("open_position", "closed_position")}
    np.testing.assert_allclose(opening(ends, "arm.gripper", known["finger"]), known["normalized"], atol=1e-9)
    known, droid = entry("gripper.droid_robot"), build({"preset": "droid"})
    parts = droid.features.state[1].partition(" = ")[2]
    ends = {"gripper.open_position": float(known["max_width"]), "gripper.closed_position": 0.0}
    np.testing.assert_allclose(opening(ends, parts, known["width"]), known["position"], atol=1e-9)


@pytest.mark.parametrize("form", ["degrees", "m100_100"])
def test_so101(form: str, tmp_path: Path) -> None:
    """The URDF's limits are the calibrated range, and its zero is the middle of it."""
    known, names = entry(f"so101.{form}"), ("pan", "lift", "elbow", "flex", "roll")
    half = (known["range_max"] - known["range_min"]) * np.pi / 4095
    links = "".join(
        f'<link name="l{index + 1}"/><joint name="{name}" type="revolute"><parent link="l{index}"/>'
        f'<child link="l{index + 1}"/><axis xyz="0 0 1"/>'
        f'<limit lower="{-half[index]:.17g}" upper="{half[index]:.17g}" velocity="1" effort="1"/></joint>'
        for index, name in enumerate(names)
    )
    path = tmp_path / "so101.urdf"
    path.write_text(f'<robot name="r"><link name="l0"/>{links}</robot>', encoding="utf-8")
    options = {"gripper.open_position": float(half[5]), "gripper.closed_position": -float(half[5])}
    config = build({"robot.urdf": str(path), "robot.gripper_joint_names": ["jaw"], **options})
    chosen = build({"preset": "so101", "features.joint_form": {"degrees": "deg"}.get(form, "-100..100")})
    [feature] = complete_spec(PolicySpec(action=(), takes_any_state=True), chosen).state
    reader = bind_state(feature, make_arms(config), {})
    middle = (known["range_max"] + known["range_min"]) / 2
    for counts, state in zip(known["counts"], known["state"], strict=True):
        joints = (counts - middle) * 2 * np.pi / 4095
        ours = reader.read(Measured(JointState((*names, "jaw"), joints, 1)), 1, 0.0)
        np.testing.assert_allclose(ours, state, atol=1e-9)


@pytest.mark.parametrize(
    ("form", "largest", "doubt"),
    [
        ("deg", 110.4, ""),
        ("deg", 100.0, "is that of -100..100, as LeRobot recorded up to 0.4.3"),
        ("deg", 1.92, "is less than a turn in radians"),
        ("deg", 2048.0, "cannot be degrees"),
        ("-100..100", 100.0, ""),
        ("-100..100", 110.4, "is beyond the range"),
    ],
)
def test_statistics_that_cannot_be_in_the_chosen_form_are_doubted(form: str, largest: float, doubt: str) -> None:
    names = [f"joint_{index}" for index in range(1, 6)]
    config = build(
        {
            "robot.urdf": "demo",
            "robot.tip_frame": "link_5",
            "robot.joint_names": names,
            "robot.gripper_joint_names": ["jaw"],
        }
    )
    chosen = build({"preset": "so101", "features.joint_form": form})
    [feature] = complete_spec(PolicySpec(action=(), takes_any_state=True), chosen).state
    learned = replace(feature, largest=(1.0, largest, 1.0, 1.0, 1.0, 1000.0))
    found = [*bind_state(learned, make_arms(config), {}).unit_warnings()]
    assert len(found) == bool(doubt)
    assert all(one.endswith(f"largest number, {largest:.5g}, {doubt}") for one in found)
    assert not [*bind_state(feature, make_arms(config), {}).unit_warnings()]


def test_a_gauge_is_received_and_must_be_valid() -> None:
    _, config = aloha()
    assert [arm.measured_fingers for arm in config.arms] == [("gripper", "left_finger")] * 2
    for wrong in ("left_finger", "left_finger = 0..0", "= 0..1"):
        with pytest.raises(ConfigError, match=r"gripper.measured_by: found .*expected JOINT = CLOSED..OPEN"):
            build({"robot.gripper_joint_names": ["finger"], "gripper.measured_by": wrong})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("arm.tip_rotation[rotation_vector near 1 2]", "near 2 numbers, expected 3"),
        ("arm.tip_rotation[rot6d near 1 0 0 0 1 0]", "is unique"),
        ("arm.tip_rotation[rot6d wrapped]", "is unique"),
        ("arm.joint_position[rad wrapped]", "is no rotation"),
        ("arm.joint_position[rad clipped]", "only a range"),
        ("arm.fingers[m, -x]", r"expected one of m, m, -m"),
        ("arm.tip_rotation[rotation_vector close 1 2 3]", "expected one of rotation_vector"),
    ],
)
def test_what_a_form_cannot_be_is_refused(part: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_components(part)


@pytest.mark.parametrize(
    "part",
    [
        "arm.tip_rotation[rotation_vector near 3.141592653589793 0 -0.5]",
        "arm.tip_rotation[euler_xyz wrapped]",
        "arm.joint_position[-100..100 clipped]",
        "arm.fingers[m, -m]",
    ],
)
def test_a_part_is_read_back_from_its_text(part: str) -> None:
    assert [str(one) for one in parse_components(part)] == [part]
    assert parse_components(str(parse_components(part)[0])) == parse_components(part)
