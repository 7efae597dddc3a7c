"""A scripted expert for the demo, from which a model can learn.

It is stateless: the action depends on joints, object positions and instruction alone, so that any state a learner
visits can be labelled for any object (DAgger; Ross et al., 2011).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.parts import parse_parts
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.policies.base import Policy, Session
from vla_ros.sim import arm
from vla_ros.sim.tasks import KINDS, SIDES, Task, parse
from vla_ros.types import ActionChunk, FloatArray, JointState, Observation

FEED = "objects"
"""Feed of the object positions."""
STATE = (
    StateFeature("joints", parse_parts("arm.joint_position")),
    StateFeature("fingers", parse_parts("arm.fingers")),
    StateFeature("objects", parse_parts(f"feed.{FEED}[{3 * len(KINDS)}]")),
)
"""What the expert measures."""

GAIN = 0.6
"""Share of the remaining distance covered in one step."""
MAX_STEP = 0.03
"""Largest translation of one step, metres (10 steps a second)."""
MAX_TURN = 0.05
"""Largest rotation of one step about each axis, radians."""

HOVER = 0.09
"""Height of the tool above an object's centre while it travels, metres."""
LIFT_TO = 0.20
"""Height above the table to which a held object is lifted, metres."""
OPEN, CLOSED = 1.0, 0.0

_GRASP_RADIUS = 0.012
_GRASP_HEIGHT = 0.012
_HELD = 0.85 * arm.FINGER_TRAVEL  # also around a cube's corners and along a cylinder that fell over
_FUNNEL = (0.010, 0.035)
_PUSH_START = 0.070
_PUSH_HEIGHT = 0.026
_PUSH_PACE = 0.025
_LOW = 0.05


def decide(task: Task, pose: FloatArray, fingers: float, objects: Mapping[str, FloatArray]) -> FloatArray:
    """The expert's action in a state.

    Args:
        task: The task; its target must be among ``objects``.
        pose: Pose of ``tool`` in the base frame, float64 [4, 4], metres.
        fingers: Measured opening of one finger, metres.
        objects: Name to centre [3], metres in the base frame.

    Returns:
        Float64 [7]: dx, dy, dz (metres), droll, dpitch, dyaw (radians, fixed axes), both in the base frame, and
        the gripper (1 open, 0 closed), in the convention of OpenVLA's Bridge checkpoints.
    """
    place = objects[task.target]
    if task.verb == "pick":
        way, gripper = _pick(pose[:3, 3], place, fingers)
    else:
        way, gripper = _push(pose[:3, 3], place, SIDES[task.side])
    step = GAIN * way
    length = float(np.linalg.norm(step))
    if length > MAX_STEP:
        step *= MAX_STEP / length
    # TOOL_DOWN R^T turns the hand back to straight down; a small rotation vector is (roll, pitch, yaw).
    turn = np.clip(GAIN * arm.rotation_vector(arm.TOOL_DOWN @ pose[:3, :3].T), -MAX_TURN, MAX_TURN)
    return np.concatenate([step, turn, [gripper]])


def _funnel(error: float) -> float:
    """Safe height above the goal at a horizontal ``error``, metres: 0 near the axis, then rising."""
    near, far = _FUNNEL
    return HOVER * float(np.clip((error - near) / (far - near), 0.0, 1.0))


def _approach(tool: FloatArray, goal: FloatArray) -> FloatArray:
    """Vector to ``goal`` from above: never sideways while low and off the axis."""
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


def _push(tool: FloatArray, place: FloatArray, side: float) -> tuple[FloatArray, float]:
    ahead = side * (tool[1] - place[1])  # negative behind the object
    across = place[0] - tool[0]
    if ahead < -0.02 and ahead > -_PUSH_START - 0.03 and abs(across) < 0.015 and tool[2] < 0.045:
        return np.array([across, side * _PUSH_PACE / GAIN, _PUSH_HEIGHT - tool[2]]), CLOSED
    goal = np.array([place[0], place[1] - side * _PUSH_START, _PUSH_HEIGHT])
    return _approach(tool, goal), CLOSED


class ExpertPolicy(Policy):
    """The expert as a policy that uses joints and object positions, but no images.

    It keeps still if the instruction is unknown or names an object that is absent.
    """

    def __init__(self, config: Config) -> None:
        self.spec = PolicySpec(tuple(map(ImageFeature, config.camera.keys)), STATE, rate_hz=10.0)

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        """Infer the action for one observation."""
        begin = time.perf_counter()
        joints, fingers = observation.state["joints"], float(np.mean(observation.state["fingers"]))
        objects = positions_of(observation.state["objects"])
        task = parse(observation.instruction)
        if task is None or task.target not in objects:
            action = np.array([0.0] * 6 + [OPEN if fingers > arm.FINGER_TRAVEL / 2 else CLOSED])
        else:
            action = decide(task, arm.forward(joints), fingers, objects)
        elapsed = (time.perf_counter() - begin) * 1e3
        return ActionChunk(actions=action[None], stamp=observation.stamp, stages_ms={"expert": elapsed})


def positions_of(numbers: FloatArray) -> dict[str, FloatArray]:
    """Name to centre [3] in metres of the objects in the scene, from the feed's numbers."""
    places = zip(KINDS, numbers.reshape(-1, 3), strict=True)
    return {name: place for name, place in places if place[2] > -0.5}


def state_of(joints: JointState, objects: JointState) -> dict[str, FloatArray]:
    """The expert's state vectors from what the simulation publishes."""
    return {
        "joints": joints.select(arm.JOINT_NAMES),
        "fingers": joints.select(arm.FINGER_NAMES),
        "objects": objects.positions,
    }
