"""Every preset binds to a robot of its kind, and contradicting options are refused with the preset's name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.conventions.free_arm import revolute, urdf
from vla_ros import config as package
from vla_ros.config import Config, build, flatten, load, read_file
from vla_ros.contract.binding import Binding, bind, make_arms
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.inputs import Snapshot
from vla_ros.errors import ConfigError
from vla_ros.execution.source import PolicySource
from vla_ros.node.inference import first_step
from vla_ros.node.pipeline import build_pipeline
from vla_ros.policies import Policy, Session
from vla_ros.policies.base import create
from vla_ros.types import ActionChunk, FloatArray, JointState, Observation
from vla_ros.vision.messages import encode_image

PRESETS = sorted(path.stem for path in (Path(str(package.__file__)).parent / "presets").glob("*.yaml"))
OPEN = PolicySpec((), action=(), dimension=0, horizon=4, takes_any_state=True)  # as a policy on a server
STAMP = 1_700_000_000_000_000_000


@pytest.fixture
def robot(tmp_path: Path) -> Any:
    """Options of a robot with so many joints in each arm."""

    def make(joints: int) -> dict[str, Any]:
        path = urdf(tmp_path, revolute(joints), velocity=3.0, reach=2.0)
        return {"robot.urdf": path, "robot.tip_frame": "hand", "robot.gripper_joint_names": ["finger"]}

    return make


MOTION = {"control.delta_form": "motion"}
CHOICES: dict[str, dict[str, str]] = {
    "libero": MOTION,
    "gr00t_libero": MOTION,
    "so101": {"features.joint_form": "deg"},
}
DROID = {"topics.gripper": "/gripper"}
DEMO = {"robot.urdf": "demo", "robot.gripper_joint_names": ["finger_left", "finger_right"]}
JOINTS = {"aloha": 6, "so101": 5}
DIMENSIONS = {"libero": 7, "bridge": 7, "droid": 8, "aloha": 14, "so101": 6, "gr00t_droid": 8, "gr00t_libero": 7}
IMAGES = {"libero": 2, "bridge": 1, "droid": 2, "aloha": 3, "so101": 2, "gr00t_droid": 2, "gr00t_libero": 2}


def options(preset: str, robot: Any, **more: Any) -> Config:
    own = robot(JOINTS[preset]) if preset in JOINTS else DEMO | (DROID if preset == "droid" else {})
    if preset == "aloha":
        own["gripper.measured_by"] = ""  # this robot has one finger joint
    own |= CHOICES.get(preset, {})
    return build({"preset": preset, **own, "policy.name": "hold", "policy.instruction": "go", **more})


def bound(config: Config) -> Binding:
    return bind(OPEN, config, make_arms(config))


def test_all_presets_are_documented() -> None:
    assert set(PRESETS) == set(DIMENSIONS)
    page = (Path(__file__).parents[2] / "docs" / "features.md").read_text()
    assert [name for name in PRESETS if f"`{name}`" not in page] == []


class Scripted(Policy):
    """Answers the same each time."""

    def __init__(self, spec: PolicySpec, action: FloatArray) -> None:
        self.spec, self._action = spec, action

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        return ActionChunk(np.tile(self._action, (self.spec.horizon, 1)), observation.stamp)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_policy_runs_with_the_features_of_a_preset(preset: str, robot: Any) -> None:
    config = options(preset, robot)
    binding = bound(config)
    assert binding.spec.dimension == DIMENSIONS[preset]
    q = {"aloha": [0.02] * 6, "so101": [0.02] * 5}.get(preset, [0.02, 0.02, 0.02, 1.0, 0.02, 0.02, 0.02])
    still = {
        "aloha": [*q, 0.5] * 2,
        "so101": [*np.degrees(q), 50.0],
        "gr00t_droid": [*q, 0.5],
    }
    measured = {
        name: JointState((*arm.joints, *arm.fingers), np.array(q + [0.02] * len(arm.fingers)), STAMP)
        for name, arm in make_arms(config).items()
    }
    source = PolicySource(Scripted(OPEN, np.array(still.get(preset, [0.0] * DIMENSIONS[preset]))))
    source.load()
    pipeline = build_pipeline(config, source.spec)
    frame = encode_image(np.zeros((48, 64, 3), np.uint8), STAMP, "camera")
    inputs = Snapshot(instruction="go", arms=measured)
    period = 1 / binding.config.control.rate_hz
    step = first_step(source, pipeline, [frame] * IMAGES[preset], inputs, period)
    found = step.observation
    assert found is not None
    assert len(found.images) == IMAGES[preset]
    for image in binding.spec.images:
        if image.size and image.key in found.images:
            assert found.images[image.key].shape[-3:-1] == image.size
    assert {feature.key: feature.size for feature in binding.spec.state} == {
        key: vector.shape[-1] for key, vector in found.state.items()
    }
    assert step.refused is None
    assert [command.arm for command in step.commands] == list(measured)
    assert not pipeline.controller.counters, "nothing asked for more than a limit"


@pytest.mark.parametrize("preset", PRESETS)
def test_files_and_assignments_override_a_preset(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"/**: {{ros__parameters: {{preset: {preset}, control: {{rate_hz: 3.0}}}}}}")
    found = load([path], ["control.execute_steps:=2"])
    assert (found.control.rate_hz, found.control.execute_steps) == (3.0, 2)
    assert found.features == build({"preset": preset}).features
    again = build(flatten(found))
    assert flatten(again) == flatten(found)


@pytest.mark.parametrize(
    ("preset", "values", "message"),
    [
        ("libero", {"control.rotation": "euler_xyz"}, "control.rotation: found euler_xyz"),
        (
            "libero",
            {"gripper.open_value": 1.0, "gripper.closed_value": 0.0},
            "found 0 and 1, but the policy returns",
        ),
        ("libero", {"robot.gripper_joint_names": []}, "arm.fingers"),
        ("so101", {"robot.urdf": "demo", "robot.tip_frame": ""}, "the policy expects 6"),
        ("gr00t_droid", {"camera.keys": ["exterior", "hand"]}, "'video.wrist_image_left' from 'wrist'"),
    ],
)
def test_an_override_that_contradicts_a_preset_is_refused(
    preset: str, values: dict[str, Any], message: str, robot: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"{message}.*\(preset: {preset}\)"):
        bound(options(preset, robot, **values))


def test_the_worked_example_of_the_documentation_binds(robot: Any, tmp_path: Path) -> None:
    pytest.importorskip("msgpack", reason="the library msgpack is not installed (extra 'remote')")
    page = (Path(__file__).parents[2] / "docs" / "features.md").read_text()
    path = tmp_path / "example.yaml"
    path.write_text(page.split("```yaml\n")[1].split("```")[0])
    own = {**robot(6), "robot.base_frame": "base"}
    config = build({**read_file(path), **own})
    binding = build_pipeline(config, create(config).describe()).binding
    table = binding.table()
    assert table.count("\n") == 9
    assert "/force_torque_sensor_broadcaster/wrench at -10, 0" in table
    assert binding.spec.dimension == 8
