"""Judges by MuJoCo whether bodies touched, at every joint state that the robot sent."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tools.collision_judge import Judge
from tools.faults.judge import GRACE, Violation
from tools.faults.records import Record
from vla_ros.config import Config
from vla_ros.control.collision import CollisionCheck
from vla_ros.control.robot import make_kinematics

_DEEP = 1e-3  # m
_STEP = 0.1  # s; the robot ends a step within this time


def contacts(config: Config, records: Sequence[Record]) -> Iterator[Violation]:
    """Yield where bodies are more than 1 mm inside each other, and more than just after the obstacles appeared.

    Args:
        config: The node's options; with ``collision.held``, the gripper is closed all the time.
        records: The records of all arms.
    """
    check = CollisionCheck(config, make_kinematics(config))
    assert check.world is not None
    judge, names = Judge(config, check, 0.0), check.world.tree.names
    at, known, allowed, appeared = np.zeros(len(names)), set[str](), _DEEP, -math.inf
    arms = {arm.name for arm in config.arms}
    noticed = config.collision.scene_timeout + GRACE + _STEP  # the node may know a scene that is so old
    for record in sorted(records, key=lambda each: each.time):
        if record.kind == "scene":
            collision = replace(config.collision, obstacles=tuple(json.loads(record.text)))
            judge = Judge(replace(config, collision=collision), check, 0.0)
            allowed, appeared = _DEEP, record.time
        if record.kind != "joints" or record.positions is None:
            continue
        arm = record.arm or config.arms[0].name
        own = check.world.joints[arm]
        for name, position in zip(record.names, record.positions, strict=True):
            at[own[name]] = position
        known.add(arm)
        depth = -judge.distance(at) if known == arms else 0.0
        if record.time < appeared + noticed:
            allowed = max(allowed, depth + _DEEP)
        if depth > allowed:
            yield Violation("contact", record.time, f"{1e3 * depth:.1f} mm deep, allowed {1e3 * allowed:.1f}")
