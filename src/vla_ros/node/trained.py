"""Describes how a policy's actions will be executed, compared with its training."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vla_ros.config import ArmConfig, ControlConfig
from vla_ros.config.control import ENVIRONMENT, VELOCITY_OUTPUTS
from vla_ros.contract.action import velocity_scale
from vla_ros.contract.binding import Binding
from vla_ros.contract.components import Component
from vla_ros.contract.gripper import gripper_ends
from vla_ros.contract.state import Arm
from vla_ros.control.robosuite_osc import AT_REST, respond
from vla_ros.control.schedule import ensemble_decay
from vla_ros.kinematics.rotations import Pose, rotation_vector, rotation_vector_matrix

_SETTLED = 40  # steps after which a constant goal gives a constant motion


def description(binding: Binding, arms: Mapping[str, Arm], schedule: str) -> str:
    """Return rate and executed steps, units and frames of the actions, and limits that shorten them, as text."""
    lines = [_pace(binding, schedule), *_units(binding, arms)]
    shortened = list(shortening(binding, arms))
    if shortened:
        lines += ["limits that shorten what was trained (raise them only after a risk assessment):"]
        lines += [f"  {line}" for line in shortened]
    return "\n".join(lines)


def _pace(binding: Binding, schedule: str) -> str:
    control, spec = binding.config.control, binding.spec
    trained = "rate of training unknown" if spec.rate_hz is None else f"trained at {spec.rate_hz:g} Hz"
    rate = f"{control.rate_hz:g} Hz" if control.rate_hz else "one step per frame"
    usual = 1 if schedule == "ensemble" else spec.execute_steps
    steps = min(control.execute_steps or usual or spec.horizon, spec.horizon)
    chunk = f"{steps} of {spec.horizon} steps of a chunk executed" if spec.horizon > 1 else "1 step per inference"
    if schedule == "ensemble":
        schedule = f"ensemble (weights exp(-{ensemble_decay(control, spec):g} i), i = 0 for the oldest chunk)"
    elif spec.ensemble_decay is not None:
        schedule += (
            f", though the checkpoint averages chunks (control.schedule ensemble, m {spec.ensemble_decay:g})"
        )
    return f"rate: {rate} ({trained}), {chunk}, schedule {schedule}"


def _units(binding: Binding, arms: Mapping[str, Arm]) -> Iterator[str]:
    control = binding.config.control
    for part, _ in binding.columns:
        if part.arm in arms:
            yield f"{part}: {'; '.join(_unit(part, arms[part.arm], control))}"


def _unit(part: Component, arm: Arm, control: ControlConfig) -> Iterator[str]:
    gripper, kinematics = arm.config.gripper, arm.kinematics
    ends = gripper.closed_position, gripper.open_position
    same = part.quantity != "gripper" or gripper_ends(part, gripper) == ends
    if arm.config.output == ENVIRONMENT and same:
        yield "passed on in the environment's units"
        yield from _clipped(control) if part.quantity in ("tip_delta", "joint_velocity") else ()
    elif part.quantity == "tip_delta":
        scales = f"{control.translation_scale:g} m and {control.rotation_scale:g} rad"
        yield f"1 is {scales} ({part.form or control.rotation})"
        yield from _clipped(control)
        robot = arm.config.robot
        base = kinematics.base_frame if kinematics else robot.base_frame
        tip = kinematics.tip_frame if kinematics else robot.tip_frame
        yield f"moves {tip or 'the tip'} along the axes of {base if control.delta_frame == 'base' else tip}"
        meaning = {
            "goal": ", as a goal of robosuite's controller",
            "motion": ", moved as robosuite's controller does",
        }
        yield _added("pose", arm, control, meaning.get(control.delta_form, ""))
    elif part.quantity.startswith("tip_"):
        yield f"absolute, of {kinematics.tip_frame} in {kinematics.base_frame}" if kinematics else "absolute"
    elif part.quantity == "joint_velocity" and part.form == "1":
        if control.joint_velocity_scale:
            yield f"1 is {control.joint_velocity_scale:g} rad/s for every joint"
        else:
            yield "1 is the velocity limit of each joint"
        yield from _clipped(control)
        if arm.config.output not in VELOCITY_OUTPUTS:
            yield _added("positions", arm, control)
    elif part.quantity == "gripper":
        ends = part.range or (gripper.closed_value, gripper.open_value)
        closed, opened = (gripper.closed_position, gripper.open_position) if part.form == "m" else ends
        yield f"{opened:g} opens to {gripper.open_position:g}, {closed:g} closes to {gripper.closed_position:g}"
        if gripper.mode == "binary":
            yield f"binary, opens above {gripper.threshold:g} of the opening, at exactly it: {gripper.at_threshold}"
        else:
            yield gripper.mode
    else:
        yield f"in {part.form or 'rad'}" + (" of each joint's range" if part.range else "")
        if part.quantity == "joint_delta":
            yield _added("positions", arm, control)


def _added(what: str, arm: Arm, control: ControlConfig, meaning: str = "") -> str:
    """Return to what a delta is added, and what that means for an arm that sags."""
    if arm.config.output in VELOCITY_OUTPUTS:
        return f"added to the measured {what}{meaning}"
    sinks = ", so an arm that sags sinks by its sag at each step (control.delta_from: commanded does not)"
    return f"added to the {control.delta_from} {what}{meaning}{sinks if control.delta_from == 'measured' else ''}"


def _clipped(control: ControlConfig) -> Iterator[str]:
    if control.clip != "none":
        how = "each number clipped" if control.clip == "each" else "shortened together"
        yield f"{how} to {' and '.join(f'{value:g}' for value in control.clip_at)} before scaling"


def shortening(binding: Binding, arms: Mapping[str, Arm]) -> Iterator[str]:
    """Yield each limit that shortens motions which occur in the training data, and by how much."""
    config = binding.config
    for name, arm in arms.items():
        if arm.config.output == ENVIRONMENT:  # its actions are not in metres
            continue
        parts = [part for part, _ in binding.columns if part.arm == name]
        label = f"{name}: " if len(arms) > 1 else ""
        for line in (*_tip(parts, arm.config, binding), *_joints(parts, arm, config.control)):
            yield label + line


def _tip(parts: Sequence[Component], arm: ArmConfig, binding: Binding) -> Iterator[str]:
    control, stated = binding.config.control, binding.config.features.tip_step
    steps = np.array(stated)
    if any(part.quantity == "tip_delta" for part in parts) and not stated and control.clip != "none":
        steps = _largest(control)
    limits = (
        ("max_translation_step", arm.limits.max_translation_step, "m"),
        ("max_rotation_step", arm.limits.max_rotation_step, "rad"),
    )
    for (name, limit, unit), step in zip(limits, steps.tolist(), strict=False):
        if limit < step * (1 - 1e-9):
            yield (
                f"limits.{name} {limit:g} {unit}: steps of up to {step:.3g} {unit} were trained, the longest are "
                f"shortened to {100 * limit / step:.0f} %"
            )


def _largest(control: ControlConfig) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the largest translation and rotation [2] that clipped deltas make in a step."""
    ends = np.array([control.clip_at[0], control.clip_at[-1]])
    steps = ends * (control.translation_scale, control.rotation_scale)
    axes = np.sqrt(3.0) if control.clip == "each" else 1.0
    if control.delta_form != "motion":
        return np.asarray(axes * steps)
    state, moved = AT_REST, np.zeros(2)
    here = Pose(np.zeros(3), np.eye(3))
    goal = Pose(np.array([steps[0], 0, 0]), rotation_vector_matrix(np.array([0, 0, steps[1]])))
    for _ in range(_SETTLED):
        end, state = respond(here, goal, state, turning=True)
        moved = np.array([end.position[0], rotation_vector(end.rotation)[2]])
    return np.asarray(axes * moved)


def _joints(parts: Sequence[Component], arm: Arm, control: ControlConfig) -> Iterator[str]:
    shares = [part for part in parts if part.quantity == "joint_velocity" and part.form == "1"]
    if not shares or arm.kinematics is None:
        return
    limits, options = arm.kinematics.velocity_limits, arm.config.limits
    trained = velocity_scale(control, limits) * (control.clip_at[0] if control.clip != "none" else 1.0)
    allowed = limits * options.velocity_scale if options.velocity_scale else np.zeros(len(limits))
    slow: dict[str, list[str]] = {}
    for name, limit, speed in zip(arm.joints, allowed, trained, strict=True):
        if limit < speed * (1 - 1e-9):
            slow.setdefault(f"{limit:.4g}", []).append(name)
    for limit, names in slow.items():
        scale = "" if options.velocity_scale == 1 else f" times limits.velocity_scale {options.velocity_scale:g}"
        share = 100 * float(limit) / trained.max()
        yield (
            f"velocity limit{scale} {limit} rad/s of {', '.join(names)}: {trained.max():.3g} rad/s were trained, "
            f"slowed to {share:.0f} %"
        )
    step = trained.max() / control.rate_hz if control.rate_hz else 0.0
    if options.max_joint_step < step * (1 - 1e-9):
        share = 100 * options.max_joint_step / step
        found = f"limits.max_joint_step {options.max_joint_step:g} rad"
        yield f"{found}: steps of {step:.3g} rad were trained, shortened to {share:.0f} %"
