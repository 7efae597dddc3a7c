import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vla_eval", reason="the library vla-eval is not installed (extra 'dev')")

from vla_eval.specs import DimSpec, check_specs

from vla_ros.config import Config, GripperConfig, load
from vla_ros.contract.benchmark import (
    BENCHMARKS,
    GRIPPERS,
    ActionConverter,
    action_spec,
    benchmark_of,
    fitting,
    observation_params,
    observation_spec,
)
from vla_ros.contract.components import parse_components
from vla_ros.contract.features import complete_spec
from vla_ros.contract.gripper import GripperValues
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.control.environment_arm import EnvironmentArm
from vla_ros.errors import ConfigError

# Package: what its specification says otherwise than its code, or leaves open.
OTHERWISE = {
    "simpler": {"rotation: axis_angle vs euler_xyz", "gripper: continuous_01 vs binary_close_positive"},
    "maniskill2": {"gripper: binary_close_01 vs binary_close_negative"},
    "robocasa": {"rotation: axis_angle vs euler_xyz", "gripper: binary_close_positive vs raw"},
    "vlabench": {"gripper: binary_close_negative vs raw"},
    "rlbench": {"gripper: continuous_01 vs raw"},
    "molmospaces": {"joints: joint_positions vs joint_pos_abs", "gripper: raw vs continuous_01"},
    "robotwin": {"no overlapping keys", "benchmark expects it"},  # one part for both arms
}


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Undo what modules of benchmarks set when they are imported, such as PYOPENGL_PLATFORM."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def theirs(package: str) -> Any:
    """A benchmark of vla-eval, of which only the specifications are asked for."""
    module = importlib.import_module(f"vla_eval.benchmarks.{package}.benchmark")
    [kind] = [
        value
        for name, value in vars(module).items()
        if name.endswith("Benchmark") and value.__module__ == module.__name__
    ]
    found = kind.__new__(kind)
    found.absolute_action = found.send_wrist_image = found.send_state = False
    return found


@pytest.mark.parametrize("package", BENCHMARKS)
def test_the_benchmarks_own_classes_say_the_same(package: str) -> None:
    known = BENCHMARKS[package]
    spec = PolicySpec(action=known.actions[0], dimension=known.dimension)
    assert fitting(spec, known, package) == known.actions[0]
    said = {key: DimSpec.from_dict(value) for key, value in action_spec(spec, Config(), known.actions[0]).items()}
    own = theirs(package).get_action_spec()
    warnings = check_specs(said, own, {}, {})
    expected = OTHERWISE.get(package, set())
    assert all(any(part in warning for part in expected) for warning in warnings), warnings
    assert all(any(part in warning for warning in warnings) for part in expected), warnings
    if package != "robotwin":
        assert sum(part.dims for part in said.values()) == sum(part.dims for part in own.values())
    images = [
        name for name, part in theirs(package).get_observation_spec().items() if part.format.startswith("rgb")
    ]
    assert images[0] == known.images[0]


def test_a_benchmark_is_found_by_its_import_string() -> None:
    assert benchmark_of("vla_eval.benchmarks.calvin.benchmark:CALVINBenchmark") == ("calvin", BENCHMARKS["calvin"])
    assert benchmark_of("vla_eval.benchmarks.kinetix:KinetixBenchmark") == ("kinetix", None)
    assert benchmark_of("libero:Benchmark") == ("", None)


@pytest.mark.parametrize(
    ("action", "dimension", "package"),
    [
        ("arm.joint_position + arm.gripper", 8, "libero"),
        ("arm.tip_delta[euler_xyz] + arm.gripper", 7, "libero"),
        ("arm.tip_delta + arm.gripper", 7, "robotwin"),
        ("arm.joint_velocity[1] + arm.gripper", 8, "rlbench"),
        ("left.tip_delta + left.gripper + right.tip_delta + right.gripper", 14, "libero"),
    ],
)
def test_actions_that_do_not_fit_are_refused_with_both_sides(action: str, dimension: int, package: str) -> None:
    parts = parse_components(action, action=True)
    spec = PolicySpec(action=parts, dimension=dimension)
    with pytest.raises(ConfigError) as error:
        fitting(spec, BENCHMARKS[package], f"vla_eval.benchmarks.{package}:X")
    ours, executed = (" + ".join(map(str, each)) for each in (parts, BENCHMARKS[package].actions[0]))
    assert ours in str(error.value)
    assert executed in str(error.value)
    with pytest.raises(ConfigError, match="of an unknown kind"):
        fitting(replace(spec, action=(), dimension=9), BENCHMARKS[package], package)


def test_a_policy_with_poses_gets_liberos_absolute_actions() -> None:
    pose = parse_components("arm.tip_position + arm.tip_rotation[rotation_vector] + arm.gripper", action=True)
    spec = PolicySpec(action=pose)
    executed = fitting(spec, BENCHMARKS["libero"], "libero")
    assert observation_params(spec, "libero", "", executed)["absolute_action"] is True
    assert action_spec(spec, Config(), executed)["position"]["format"] == "absolute_xyz"


VALUES = np.array([-0.2, 0.0, 0.3, 0.5, 0.6, 1.0, 1.4])


@pytest.mark.parametrize("package", ["libero", "simpler", "calvin", "maniskill2"])
def test_grippers_are_converted_as_the_published_servers_do(package: str) -> None:
    spec = PolicySpec()  # OpenVLA's: 0 closed, 1 open
    executed = fitting(spec, BENCHMARKS[package], package)
    actions = np.column_stack([np.full((7, 6), 0.25), VALUES])
    keep = GripperConfig(at_threshold="keep")
    convert = ActionConverter(spec, executed, keep)
    found = np.array([convert(action) for action in actions])
    np.testing.assert_array_equal(found[:, :6], actions[:, :6])
    published = {
        "libero": -np.sign(2 * VALUES - 1),  # vla_eval.model_servers.openvla and .oft
        "simpler": VALUES,  # what its sticky and its binary gripper read: 1 opens
        "calvin": np.sign(2 * VALUES - 1),
        "maniskill2": np.array([1, 1, 1, 0.5, 0, 0, 0]),
    }
    np.testing.assert_array_equal(found[:, 6], published[package])


def converted(config: GripperConfig, ours: str, theirs: tuple[float, float]) -> list[float]:
    [part] = parse_components(f"arm.gripper{ours}", action=True)
    values = GripperValues(config, part)
    return [values.convert(float(value), theirs) for value in VALUES]


def test_equal_ends_change_nothing_and_a_continuous_gripper_is_scaled() -> None:
    binary, continuous = GripperConfig(), GripperConfig(mode="continuous")
    assert converted(binary, "[1..-1]", (1.0, -1.0)) == list(VALUES)
    assert converted(binary, "[0..1]", (1.0, -1.0))[3] == -1  # opens at 0.5
    np.testing.assert_allclose(converted(continuous, "[0..1]", (1.0, -1.0)), 1 - 2 * np.clip(VALUES, 0, 1))


def test_a_gripper_inside_its_band_stays_as_in_the_node() -> None:
    """The server's conversion and the node's arm of an environment are one, so they cannot differ."""
    values = np.concatenate([VALUES, VALUES[::-1], np.random.default_rng(0).uniform(-0.2, 1.2, 200)])
    spec = PolicySpec()
    executed = fitting(spec, BENCHMARKS["libero"], "libero")
    options = ["control.output:=environment", "gripper.hysteresis:=0.2"]
    ends = ["gripper.closed_position:=1.0", "gripper.open_position:=-1.0"]
    config = load((), [*options, *ends])
    convert = ActionConverter(spec, executed, config.gripper)
    arm = EnvironmentArm(config, spec.columns())
    sent = []
    for value in values:
        action = np.array([0.01, 0.0, 0.0, 0.0, 0.0, 0.0, value])
        command = arm.command(action, None, 0, 0.05).action
        assert command is not None
        np.testing.assert_array_equal(convert(action), command)
        sent.append(command[6])
    assert set(sent) == {-1.0, 1.0}
    changes = np.flatnonzero(np.diff(sent)) + 1
    assert len(changes) > 20
    assert np.abs(values[changes] - 0.5).min() >= 0.2  # never inside the band
    convert.reset()
    assert convert(np.array([0.0] * 6 + [0.55]))[6] == -1.0  # the first value of an episode has no band


def test_the_formats_of_grippers_are_theirs() -> None:
    from vla_eval import specs

    constants = {value.format: value.range for value in vars(specs).values() if isinstance(value, DimSpec)}
    assert {name: tuple(sorted(ends)) for name, ends in GRIPPERS.items()} == {
        name: constants[name] for name in GRIPPERS
    }


def test_liberos_preset_says_what_its_benchmark_says() -> None:
    """With openpi's images and state, the published state that is not wrapped."""
    config = load((), ["preset:=libero", "control.delta_form:=goal"])
    states = (StateFeature("observation/state", size=8),)
    images = (ImageFeature("observation/image"), ImageFeature("observation/wrist_image"))
    spec = complete_spec(PolicySpec(images, states, action=(), dimension=7), config)
    params = observation_params(spec, "libero", "pi")
    assert params == {"send_wrist_image": True, "send_state": True, "quat_no_antipodal": True}
    from vla_eval.benchmarks.libero.benchmark import LIBEROBenchmark

    benchmark = LIBEROBenchmark(**params)
    known = BENCHMARKS["libero"]
    said = action_spec(spec, config, fitting(spec, known, "libero")), observation_spec(spec, known)
    ours = [{key: DimSpec.from_dict(value) for key, value in each.items()} for each in said]
    sent = benchmark.get_observation_spec()
    assert check_specs(ours[0], benchmark.get_action_spec(), ours[1], sent) == []
    wrapped = parse_components("arm.tip_position + arm.tip_rotation[rotation_vector wrapped] + arm.fingers")
    spec = replace(spec, state=(replace(states[0], components=wrapped),))
    assert observation_params(spec, "libero")["quat_no_antipodal"] is False
    assert "quat_no_antipodal" not in observation_params(spec, "calvin")
