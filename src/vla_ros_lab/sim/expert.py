"""A scripted expert for the demo; its actions can also train a model.

The expert drives one arm, or two arms with one object each, with any of the :data:`ACTIONS`. It is stateless: an
action depends only on the joints, the object positions and the instruction, so every state that a learner visits
can be labelled for any object (DAgger; Ross et al., 2011).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vla_ros.config import Config, PolicyConfig
from vla_ros.config.options import option
from vla_ros.contract.components import Component, parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import ConfigError
from vla_ros.kinematics.rotations import rotation_vector, rotation_vector_matrix, write_rotation
from vla_ros.policies.base import Policy, Session
from vla_ros.types import ActionChunk, FloatArray, Observation
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.tasks import KINDS, SIDES, Task, parse_instruction

ACTIONS: dict[str, tuple[str, ...]] = {
    "eef_delta": ("tip_delta", "gripper"),
    "joint_position": ("joint_position", "gripper"),
    "joint_velocity": ("joint_velocity", "gripper"),
    "eef_pose": ("tip_position", "tip_rotation[rot6d]", "gripper"),
}
"""The expert's kinds of action, with the parts of each arm's action."""

OBJECTS_TOPIC = "objects"
"""Name of the state topic with the object positions."""
RATE_HZ = 10.0

GAIN = 0.6
"""Share of the remaining distance covered in a tenth of a second."""
MAX_STEP = 0.03
"""Largest translation in a tenth of a second, metres."""
MAX_TURN = 0.05
"""Largest rotation in a tenth of a second about each axis, radians."""

HOVER = 0.09
"""Height of the tool above an object's centre while it travels, metres."""
LIFT_TO = 0.20
"""Height above the table to which a held object is lifted, metres."""
OPEN, CLOSED = 1.0, 0.0

_GRASP_RADIUS = 0.012
_GRASP_HEIGHT = 0.012
_HELD = 0.85 * arm.FINGER_TRAVEL  # m; also above a cube held by its corners and a fallen cylinder held lengthwise
_FUNNEL = (0.010, 0.035)
_PUSH_START = 0.070
_PUSH_HEIGHT = 0.026
_PUSH_PACE = 0.025  # m in a tenth of a second
_LOW = 0.05
_FINGER_SPEED = 0.5  # m/s
_GRASPED = 0.021  # m, opening of a finger that touches an object
_CONTACT = 0.034  # m between tool and object when closed fingers push it
_ITERATIONS = 2  # of inverse kinematics, for a step of a few centimetres


def decide(
    task: Task, pose: FloatArray, fingers: float, objects: Mapping[str, FloatArray], rate_hz: float = RATE_HZ
) -> FloatArray:
    """Return the expert's action in a state, in the convention of OpenVLA's Bridge checkpoints.

    ``pose`` is the pose of ``tool`` in the base frame, float64 [4, 4], metres; ``fingers`` is the measured opening
    of one finger, metres; ``objects`` maps names to centres [3], metres. Returns float64 [7]: dx, dy, dz (metres)
    and droll, dpitch, dyaw (radians, fixed axes) in the base frame, and the gripper (1 open, 0 closed).
    """
    place, share = objects[task.target], RATE_HZ / rate_hz
    gain = 1 - (1 - GAIN) ** share
    if task.verb == "pick":
        way, gripper = _pick(pose[:3, 3], place, fingers)
    else:
        way, gripper = _push(pose[:3, 3], place, SIDES[task.side], _PUSH_PACE * share / gain)
    step = gain * way
    length, longest = float(np.linalg.norm(step)), MAX_STEP * share
    if length > longest:
        step *= longest / length
    # TOOL_DOWN R^T turns the hand back to straight down; a small rotation vector is (roll, pitch, yaw).
    turn = gain * rotation_vector(arm.TOOL_DOWN @ pose[:3, :3].T)
    turn = np.clip(turn, -MAX_TURN * share, MAX_TURN * share)
    return np.concatenate([step, turn, [gripper]])


def _funnel(error: float) -> float:
    """Return the safe height above the goal at a horizontal ``error``, metres: 0 near the axis, then rising."""
    near, far = _FUNNEL
    return HOVER * float(np.clip((error - near) / (far - near), 0.0, 1.0))


def _approach(tool: FloatArray, goal: FloatArray) -> FloatArray:
    """Return the displacement to ``goal`` from above, not sideways while the tool is low and off the axis."""
    way = goal - tool
    error = float(np.hypot(way[0], way[1]))
    height = tool[2] - goal[2]
    way[2] += _funnel(error)
    if error > _FUNNEL[1] and height < _LOW:
        way[:2] = 0.0
    return way


def _pick(tool: FloatArray, place: FloatArray, fingers: float) -> tuple[FloatArray, float]:
    way = place - tool
    error = float(np.hypot(way[0], way[1]))
    if error < _GRASP_RADIUS and abs(way[2]) < _GRASP_HEIGHT:
        held = fingers < _HELD
        return (np.array([0.0, 0.0, LIFT_TO - place[2]]) if held else np.zeros(3)), CLOSED
    way = _approach(tool, place)
    if fingers < 0.75 * arm.FINGER_TRAVEL and tool[2] - place[2] < _LOW:
        way[2] = max(way[2], 0.0)  # open the hand before lowering it over the object
    return way, OPEN


def _push(tool: FloatArray, place: FloatArray, side: float, speed: float) -> tuple[FloatArray, float]:
    ahead = side * (tool[1] - place[1])  # negative behind the object
    across = place[0] - tool[0]
    if ahead < -0.02 and ahead > -_PUSH_START - 0.03 and abs(across) < 0.015 and tool[2] < 0.045:
        return np.array([across, side * speed, _PUSH_HEIGHT - tool[2]]), CLOSED
    goal = np.array([place[0], place[1] - side * _PUSH_START, _PUSH_HEIGHT])
    return _approach(tool, goal), CLOSED


class Situation(NamedTuple):
    """Joints and fingers of an arm, and the object to move, in the arm's base frame."""

    joints: FloatArray  # float64 [7], radians
    fingers: float  # opening of one finger, metres
    target: FloatArray | None  # centre [3], metres; None without a task


def predict(now: Situation, motion: FloatArray, pose: FloatArray, goal: FloatArray, seconds: float) -> Situation:
    """Predict the situation after an action [7] of :func:`decide` at ``pose`` [4, 4], for later steps of a chunk.

    The prediction is that the arm reaches the joint positions ``goal`` [7] and a held or pushed object follows.
    """
    wanted = motion[6] * arm.FINGER_TRAVEL
    reach = _FINGER_SPEED * seconds
    fingers = float(np.clip(wanted, now.fingers - reach, now.fingers + reach))
    target = now.target
    if target is not None:
        way = target - pose[:3, 3]
        if np.hypot(way[0], way[1]) < _GRASP_RADIUS and abs(way[2]) < _GRASP_HEIGHT:
            fingers = max(fingers, _GRASPED)
            if max(fingers, now.fingers) < _HELD:
                target = target + motion[:3]
        elif motion[6] == CLOSED and np.all(np.abs(way) < _CONTACT):  # the closed fingers push it
            tool = pose[1, 3] + motion[1]
            beside = math.copysign(max(abs(target[1] - tool), _CONTACT), way[1])
            target = np.array([target[0], tool + beside, target[2]])
    return Situation(goal, fingers, target)


def plan(
    task: Task | None, now: Situation, actions: str = "eef_delta", horizon: int = 1, rate_hz: float = RATE_HZ
) -> FloatArray:
    """Return an arm's next ``horizon`` actions, float64 [horizon, D]; ``actions`` is a key of :data:`ACTIONS`.

    Without a task, the arm keeps still. Actions after the first are computed from predicted situations.
    """
    rows: list[FloatArray] = []
    for left in reversed(range(horizon)):
        pose, goal = arm.forward(now.joints), now.joints
        if task is None or now.target is None:
            motion = np.array([0.0] * 6 + [OPEN if now.fingers > arm.FINGER_TRAVEL / 2 else CLOSED])
        else:
            motion = decide(task, pose, now.fingers, {task.target: now.target}, rate_hz)
            if left or actions.startswith("joint"):
                goal = arm.solve(*_moved(pose, motion), now.joints, _ITERATIONS)
        if actions == "eef_delta":
            rows.append(motion[:6])
        elif actions == "eef_pose":
            position, rotation = _moved(pose, motion)
            rows += [position, write_rotation(rotation, "rot6d")]
        else:
            rows.append(goal if actions == "joint_position" else (goal - now.joints) * rate_hz)
        rows.append(motion[6:])
        if left:
            now = predict(now, motion, pose, goal, 1 / rate_hz)
    return np.concatenate(rows).reshape(horizon, -1)


@dataclass(frozen=True)
class ExpertOptions(PolicyConfig):
    """Options of the scripted expert."""

    actions: str = option("eef_delta", "Kind of actions that move the arms", choices=tuple(ACTIONS))
    horizon: int = option(1, "Steps in a chunk, at control.rate_hz", low=1, high=100)


class ExpertPolicy(Policy):
    """The expert as a policy for one or two arms; it uses joints and object positions, but no images.

    Arms keep still if the instruction is unknown, is for another number of arms, or names an absent object.
    """

    Options = ExpertOptions

    def __init__(self, config: Config) -> None:
        names = [one.name for one in config.arms]
        self._mounts = next((mounts for mounts in (arm.ONE_ARM, arm.TWO_ARMS) if _names(mounts) == names), ())
        if not self._mounts:
            expected = f"{_names(arm.ONE_ARM)} or {_names(arm.TWO_ARMS)}, the arms of the simulation"
            raise ConfigError(f"robot.arms: found {names}, expected {expected}")
        options = config.policy if isinstance(config.policy, ExpertOptions) else ExpertOptions()
        self._actions = options.actions
        self._rate_hz = max(config.control.rate_hz, 0.0) or RATE_HZ

        def of_arms(*quantities: str, **more: bool) -> tuple[Component, ...]:
            return parse_components(" + ".join(f"{name}.{each}" for name in names for each in quantities), **more)

        action = of_arms(*ACTIONS[self._actions], action=True)
        self.spec = PolicySpec(
            tuple(map(ImageFeature, config.camera.keys)),
            (
                StateFeature("joints", of_arms("joint_position")),
                StateFeature("fingers", of_arms("fingers")),
                StateFeature("objects", parse_components(f"topic.{OBJECTS_TOPIC}[{3 * len(KINDS)}]")),
            ),
            action,
            dimension=sum(part.size(len(arm.JOINT_NAMES)) for part in action),
            horizon=options.horizon,
            rate_hz=self._rate_hz,
        )

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        begin = time.perf_counter()
        joints = observation.state["joints"].reshape(len(self._mounts), -1)
        fingers = observation.state["fingers"].reshape(len(self._mounts), -1).mean(axis=1)
        objects = positions_of(observation.state["objects"])
        task = parse_instruction(observation.instruction)
        targets: tuple[str | None, ...] = task.targets if task else ()
        if len(targets) != len(self._mounts) or not {*targets} <= objects.keys():
            targets = (None,) * len(self._mounts)
        columns = []
        for index, (mount, target) in enumerate(zip(self._mounts, targets, strict=True)):
            place = objects[target] - mount.position if target else None
            own = replace(task, targets=(target,)) if task and target else None
            now = Situation(joints[index], float(fingers[index]), place)
            columns.append(plan(own, now, self._actions, self.spec.horizon, self._rate_hz))
        elapsed = (time.perf_counter() - begin) * 1e3
        return ActionChunk(np.concatenate(columns, axis=1), observation.stamp, stages_ms={"expert": elapsed})


def _names(mounts: tuple[arm.Mount, ...]) -> list[str]:
    return [mount.name for mount in mounts]


def _moved(pose: FloatArray, motion: FloatArray) -> tuple[FloatArray, FloatArray]:
    return pose[:3, 3] + motion[:3], rotation_vector_matrix(motion[3:6]) @ pose[:3, :3]


def positions_of(numbers: FloatArray) -> dict[str, FloatArray]:
    """Return each object's centre [3] in metres by name, from the numbers of :data:`OBJECTS_TOPIC`."""
    places = zip(KINDS, numbers.reshape(-1, 3), strict=True)
    return {name: place for name, place in places if place[2] > -0.5}
