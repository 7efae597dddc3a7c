"""A hand reaches into an open bin and out of it; MuJoCo, which knows five boxes, judges what touches."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hollow import WALL, bin_of
from tiny_robot import box, write_stl

from vla_ros.config import Config, build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.collision import CollisionCheck
from vla_ros.control.reasons import Refused
from vla_ros.control.robot import RobotController
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import JointState

pytest.importorskip("mujoco", reason="MuJoCo is not installed")

from tools.collision_judge import Judge

ARM = Kinematics.from_urdf("demo")
FINGERS = ("finger_left", "finger_right")
DOWN = np.array([0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0])  # the hand points down
HAND, LENGTH = np.array([0.094, 0.124]), 0.15  # m, its width and depth; and of the bin
FLOOR, BELOW = 0.05, 0.013  # m; the fingers reach this far beyond the tip


def walls(spare: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sizes and middles of a bin's floor and walls, ``spare`` m from the hand on each side."""
    x, y = HAND + 2 * spare
    found = [(np.array([x + 2 * WALL, y + 2 * WALL, WALL]), np.array([0.0, 0.0, -WALL / 2]))]
    for side in (-1, 1):
        found.append((np.array([WALL, y + 2 * WALL, LENGTH]), np.array([side * (x + WALL) / 2, 0.0, LENGTH / 2])))
        found.append((np.array([x, WALL, LENGTH]), np.array([0.0, side * (y + WALL) / 2, LENGTH / 2])))
    return found


def configure(obstacles: list[str]) -> Config:
    collision: dict[str, Any] = {"check": True, "deceleration": 20.0, "obstacles": obstacles}
    values = {"robot.urdf": "demo", "robot.gripper_joint_names": list(FINGERS), "topics.gripper": "/gripper"}
    return build(
        {**values, "control.rate_hz": 10.0, **{f"collision.{key}": value for key, value in collision.items()}}
    )


@pytest.mark.parametrize(("form", "spare"), [*product(("closed", "boxes"), (0.03, 0.015))])
def test_a_hand_is_not_held_in_a_bin_and_touches_nothing(tmp_path: Path, form: str, spare: float) -> None:
    """With 3 cm to spare it is never held; with half of that, and sideways steps, it may be."""
    around, start = walls(spare), ARM.forward(DOWN).position
    place = np.array([start[0], 0.0, FLOOR])
    triangles = (
        bin_of(np.array([*(HAND + 2 * spare), LENGTH]))
        if form == "closed"
        else np.concatenate([box(middle - size / 2, middle + size / 2) for size, middle in around])
    )
    write_stl(tmp_path / "bin.stl", triangles)
    config = configure([f"bin = mesh {tmp_path / 'bin.stl'} at {place[0]} {place[1]} {place[2]}"])
    check = CollisionCheck(config, {"arm": ARM})
    text = "{} {} {}".format
    solid = [f"wall_{k} = box {text(*size)} at {text(*(place + at))}" for k, (size, at) in enumerate(around)]
    judge = Judge(configure(solid), check, 0.0)
    spec = PolicySpec(action=parse_components("arm.tip_delta + arm.gripper", action=True), dimension=7)
    controller = RobotController(config, spec, {"arm": ARM}, check)
    assert check.world is not None
    rng, q, deeper, held, reached = np.random.default_rng(0), DOWN.copy(), True, 0, 0

    def whole(positions: np.ndarray) -> np.ndarray:
        return np.array([*positions, 0.04, 0.04])

    for _ in range(120):
        tip = ARM.forward(q).position
        goal = FLOOR + BELOW + (0.0305 if deeper else LENGTH + 0.03)
        if abs(goal - tip[2]) < 0.003:
            deeper, reached = not deeper, reached + deeper
        aside = 0.0 if spare > 0.02 else rng.normal(0, 0.01, 2)
        step = np.array([0, 0, np.clip(goal - tip[2], -0.03, 0.03), 0, 0, 0, 1.0])
        step[:2] = place[:2] - tip[:2] + aside
        try:
            [command] = controller.command(
                step, {"arm": JointState((*ARM.joint_names, *FINGERS), whole(q), 1)}, 1, 0.1
            )
        except Refused:
            held += 1
            deeper = not deeper
            controller.reset()
            continue
        controller.sent()
        way = np.array([whole(q), whole(command.positions[:7])])
        assert min(judge.along(way, check.world.reach, 0.01)) >= -1e-4
        q = command.positions[:7].copy()
    if spare > 0.02:
        assert (held, reached > 2) == (0, True), (held, reached)
