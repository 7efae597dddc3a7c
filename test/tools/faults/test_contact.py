"""The judge of contacts sees an arm in a wall, and one that goes deeper into it."""

import json

import numpy as np
import pytest

pytest.importorskip("mujoco", reason="the library mujoco is not installed (extra 'sim')")

from tools.faults.contact import contacts
from tools.faults.driver import ARM, FINGERS, HOME
from tools.faults.records import Record
from tools.faults.rows import find
from tools.faults.setups import OPTIONS
from vla_ros.config import Config, load

pytest.importorskip("mujoco")


def config_of(row: str) -> Config:
    return load((), [f"{name}:={value}" for name, value in {**OPTIONS, **find(row).options}.items()])


def joints(time: float, turned: float, arm: str = "") -> Record:
    positions = np.array(HOME)
    positions[0] += turned
    return Record("joints", time, names=(*ARM, *FINGERS), positions=tuple(positions), arm=arm)


def test_an_arm_that_moves_into_a_wall_is_seen_and_one_that_the_wall_appeared_in_may_stay() -> None:
    config, wall = config_of("obstacle appears"), json.dumps(["wall = box 0.3 0.1 0.3 at 0.5 0.2 0.2"])
    beside, within = [joints(0.1 * number, 0.0) for number in range(9)], [joints(1.0, 0.4), joints(1.1, 0.5)]
    scene = Record("scene", 0.05, text=wall)
    assert not [*contacts(config, [*beside, *within])], "without the wall"
    assert [each.time for each in contacts(config, [*beside, scene, *within])] == [1.0, 1.1]
    late = Record("scene", 1.0, text=wall)
    found = [*contacts(config, [*beside, joints(0.99, 0.4), late, joints(1.01, 0.4), joints(1.5, 0.4), within[0]])]
    assert not found, "where the wall appeared"


def test_two_arms_that_meet_are_seen() -> None:
    config = config_of("two arms meeting")
    apart = [joints(0.0, 0.0), joints(0.0, 0.0, "right")]
    assert not [*contacts(config, apart)]
    assert [*contacts(config, [*apart, joints(0.1, -0.4), joints(0.1, 0.4, "right")])]
