"""Features in the words of vla-eval: what a policy says of its actions and inputs, and what benchmarks execute.

vla-eval 0.8.0 describes actions and observations by named parts, each a map of ``name``, ``dims``, ``format`` and
``range`` (its ``DimSpec``). :data:`BENCHMARKS` has the actions that its benchmarks' code executes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_ros.config import Config, GripperConfig
from vla_ros.contract.components import UNUSED, WRAPPED, Component, parse_components
from vla_ros.contract.gripper import GripperValues, gripper_ends
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.types import FloatArray

ROTATIONS = {
    "axis_angle": "rotation_vector",
    "euler_xyz": "euler_xyz",
    "quaternion_xyzw": "quaternion_xyzw",
    "rot6d_interleaved": "rot6d_interleaved",
}
"""vla-eval's format of a rotation to the form in :data:`~vla_ros.contract.components.ROTATION_SIZES`."""
GRIPPERS = {
    "binary_close_positive": (1.0, -1.0),
    "binary_close_negative": (-1.0, 1.0),
    "binary_close_01": (1.0, 0.0),
    "continuous_01": (0.0, 1.0),
}
"""vla-eval's format of a gripper to its values for closed and open."""
_FORMATS = {form: name for name, form in ROTATIONS.items()}
_JOINTS = {"joint_position": "joint_positions", "joint_delta": "joint_delta_pos"}
_STATES = {
    "tip_position tip_rotation[rotation_vector] fingers": "eef_pos3_axisangle3_gripper2",
    "tip_position tip_rotation[euler_xyz] fingers": "eef_pos3_euler3_gripper2",
    "tip_position tip_rotation[quaternion_xyzw] gripper": "eef_pos3_quat4_gripper1",
}
_RAW, _WRIST = "raw", ("wrist", "hand", "gripper")
_IMAGE, _TEXT = {"name": "image", "dims": 0, "format": "rgb_hwc_uint8"}, "language"
_SEEDED = {"openvla": 0, "oft": 0}  # policy.name to the seed of LIBERO's environment in its published evaluation


Executed = tuple[Component, ...]
"""The components of an action; the range of a gripper is [CLOSED..OPEN]."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of vla-eval."""

    images: tuple[str, ...]  # their names, in its order
    dimension: int  # numbers in an action
    actions: tuple[Executed, ...]  # that it executes; the first unless its parameters say otherwise


def _benchmark(images: str, dimension: int, *actions: str) -> Benchmark:
    return Benchmark(tuple(images.split()), dimension, tuple(parse_components(one, action=True) for one in actions))


_DELTA = "arm.tip_delta[rotation_vector] + arm.gripper"
_TURN = "arm.tip_delta[euler_xyz] + arm.gripper"
_POSE = "arm.tip_position + arm.tip_rotation[rotation_vector] + arm.gripper[1..-1]"  # with absolute_action
_PAIR = "left.joint_position + left.gripper[0..1] + right.joint_position + right.gripper[0..1]"

BENCHMARKS: Mapping[str, Benchmark] = {
    "libero": _benchmark("agentview wrist", 7, f"{_DELTA}[1..-1]", _POSE),
    **dict.fromkeys(
        ("libero_pro", "libero_plus", "libero_mem", "robocerebra"),
        _benchmark("agentview wrist", 7, f"{_DELTA}[1..-1]"),
    ),
    # Its controller takes rotation vectors, its gripper 1 for open, though its specification says otherwise.
    "simpler": _benchmark("primary", 7, f"{_DELTA}[0..1]", f"{_TURN}[0..1]"),
    "calvin": _benchmark("rgb_static rgb_gripper", 7, f"{_TURN}[-1..1]", _POSE),
    # Its code closes at 0.5 and above, though its specification says that -1 closes.
    "maniskill2": _benchmark("base_camera", 7, f"{_TURN}[1..0]"),
    "robocasa": _benchmark("robot0_agentview_left", 7, f"{_DELTA}[1..-1]", f"{_TURN}[1..-1]"),
    "vlabench": _benchmark("primary", 7, f"{_TURN}[-1..1]"),
    "rlbench": _benchmark("front wrist", 8, "arm.joint_velocity + arm.gripper[0..1]"),
    "molmospaces": _benchmark("exo_camera_1 wrist_camera", 8, "arm.joint_position + arm.gripper[255..0]"),
    "robotwin": _benchmark("head_camera left_camera right_camera", 14, _PAIR),
}
"""Package of a benchmark in ``vla_eval.benchmarks``, 0.8.0, to what its code does."""


def benchmark_of(name: str) -> tuple[str, Benchmark | None]:
    """Return the package and description of a benchmark named by its import string; None if it is not known."""
    parts = name.partition(":")[0].split(".")
    package = parts[2] if parts[:2] == ["vla_eval", "benchmarks"] and len(parts) > 2 else ""
    return package, BENCHMARKS.get(package)


def fitting(spec: PolicySpec, benchmark: Benchmark, name: str) -> Executed:
    """Return the action of a benchmark that the policy's actions are.

    A delta's form and a gripper's range may be open; grippers are converted. Raises ConfigError, which names both
    sides, if none fits.
    """
    for action in benchmark.actions:
        if benchmark.dimension == spec.dimension and (not spec.action or _alike(spec.action, action)):
            return action
    ours = " + ".join(map(str, spec.action)) or "of an unknown kind"
    theirs = " or ".join(" + ".join(map(str, action)) for action in benchmark.actions)
    raise ConfigError(
        f"the policy's actions do not fit the benchmark: they are {ours} ({spec.dimension} numbers), but {name} "
        f"executes {theirs} ({benchmark.dimension} numbers); run another policy, or say in features.action what "
        "its actions are"
    )


def _alike(ours: Sequence[Component], theirs: Sequence[Component]) -> bool:
    def same(one: Component, other: Component) -> bool:
        free = not one.form or one.quantity == "gripper"
        return one.quantity == other.quantity and (free or one.form == other.form)

    return len(ours) == len(theirs) and all(map(same, ours, theirs))


def pair_images(keys: Sequence[str], sent: Sequence[str]) -> dict[str, str]:
    """Pair a policy's images with a benchmark's: of one name, then those of a wrist, then the others in order."""
    pairs = {key: key for key in keys if key in sent}
    for wrist in (True, False):
        for key in [key for key in keys if key not in pairs and (not wrist or _of_wrist(key))]:
            free = (name for name in sent if name not in pairs.values())
            name = next((name for name in free if not wrist or _of_wrist(name)), None)
            if name is not None:
                pairs[key] = name
    return pairs


def _of_wrist(name: str) -> bool:
    return any(word in name.lower() for word in _WRIST)


class ActionConverter:
    """Converts the grippers of successive actions to the ranges of a benchmark's action ``executed``."""

    def __init__(self, spec: PolicySpec, executed: Executed, gripper: GripperConfig) -> None:
        pairs = zip(spec.columns(), executed, strict=True) if spec.action else ()
        self._grippers = [
            (GripperValues(gripper, part), columns.start, theirs.range)
            for (part, columns), theirs in pairs
            if part.quantity == "gripper" and theirs.range is not None
        ]

    def reset(self) -> None:
        """Begin an episode: forget the grippers' states."""
        for values, _, _ in self._grippers:
            values.reset()

    def __call__(self, action: FloatArray) -> FloatArray:
        """Return the action [D] that the benchmark executes next."""
        result = np.array(action)
        for values, column, ends in self._grippers:
            result[column] = values.convert(float(action[column]), ends)
        return result


def observation_params(
    spec: PolicySpec, package: str = "", family: str = "", executed: Executed = ()
) -> dict[str, Any]:
    """Return the parameters of a benchmark that send what the policy takes.

    ``package`` is the benchmark's in ``vla_eval.benchmarks``, "" if unknown, ``executed`` its action; ``family`` is
    ``policy.name``. LIBERO then sends the published state, whose rotation vector is not wrapped, unless the
    policy's is.
    """
    params: dict[str, Any] = {}
    if len(spec.images) > 1:
        params["send_wrist_image"] = True
    if spec.state:
        params["send_state"] = True
        vectors = [part for state in spec.state for part in state.components if part.form == "rotation_vector"]
        if package.startswith("libero") or (vectors and not package):
            params["quat_no_antipodal"] = not any(part.choice == WRAPPED for part in vectors)
    if package.startswith("libero") and family in _SEEDED:
        params["env_seed"] = _SEEDED[family]
    if any(part.quantity == "tip_position" for part in executed):
        params["absolute_action"] = True
    return params


def action_spec(spec: PolicySpec, config: Config, executed: Executed = ()) -> dict[str, dict[str, Any]]:
    """Describe the actions that a benchmark gets, as vla-eval's action specification.

    ``executed`` is the benchmark's action, which decides what the policy leaves open; () if it is unknown.
    """
    found: dict[str, dict[str, Any]] = {}
    parts = executed or spec.action
    if not parts:
        return {"actions": _part("actions", spec.dimension, _RAW)}
    several = len({part.arm for part in parts if part.arm}) > 1
    for part, columns in replace(spec, action=parts).columns():
        described = []
        if part.quantity == "tip_delta":
            form = part.form or config.control.rotation
            described = [_part("position", 3, "delta_xyz"), _part("rotation", 3, _FORMATS[form])]
        elif part.quantity == "tip_position":
            described = [_part("position", 3, "absolute_xyz")]
        elif part.quantity == "tip_rotation":
            described = [_part("rotation", part.size(0), _FORMATS.get(part.form, part.form))]
        elif part.quantity == "gripper":
            ends = gripper_ends(part, config.gripper)
            name = next((name for name, known in GRIPPERS.items() if known == ends), _RAW)
            described = [_part("gripper", 1, name) | {"range": sorted(ends)}]
        elif part.quantity != UNUSED:
            described = [_part("joints", columns.stop - columns.start, _JOINTS.get(part.quantity, part.quantity))]
        found |= {(f"{part.arm}_" if several else "") + one["name"]: one for one in described}
    return found


def observation_spec(spec: PolicySpec, benchmark: Benchmark | None = None) -> dict[str, dict[str, Any]]:
    """Describe the policy's inputs as vla-eval's observation specification; images have the benchmark's names."""
    images: Sequence[str] = benchmark.images if benchmark else spec.image_keys
    found = {name: dict(_IMAGE) for name in images[: len(spec.images)]}
    if spec.uses_instruction:
        found[_TEXT] = _part(_TEXT, 0, _TEXT)
    if spec.state:
        parts = [part for state in spec.state for part in state.components]
        kind = " ".join(
            f"{part.quantity}[{part.form}]" if part.form in _FORMATS else part.quantity for part in parts
        )
        found["state"] = _part("state", sum(state.size for state in spec.state), _STATES.get(kind, _RAW))
    return found


def _part(name: str, dims: int, form: str) -> dict[str, Any]:
    return {"name": name, "dims": dims, "format": form}
