"""Replay and the live node give identical actions and commands for the same frames.

`demo_jpeg` was recorded from the live policy node over DDS (see test/data/bags/README.md); the slow test records
such a bag anew.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from vla_ros.cli.main import main
from vla_ros.config import load
from vla_ros_lab.replay import series, truth
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.play import ReplayOptions
from vla_ros_lab.replay.topics import JOINTS, select_topics
from vla_ros_lab.sim.expert import ExpertPolicy

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "config" / "demo.yaml"


def commands_equal(path, outcome, config, tolerance):
    """Compare the commands of a replay with those that the live node sent; the number of compared ones."""
    with Bag(path) as bag:
        selection = select_topics(bag.topics, config, {"truth": "/arm/joint_command"})
        assert selection.truth_type == JOINTS
        recorded = series.read_recording(bag, selection).truth.main
    found = outcome.samples
    rows, rule = truth.pair(found.times, found.stamps, recorded, 200_000_000)
    assert rule == "stamp"
    known = np.flatnonzero(rows >= 0)
    assert recorded.names == tuple(found.commands)
    commands = np.stack(list(found.commands.values()), axis=1)
    assert np.abs(commands[known] - recorded.values[rows[known]]).max() <= tolerance
    return len(known)


def replayed(play, path, speed=0.0):
    # It was recorded faster than in real time: a step of the fingers at once.
    config = load([DEMO], ["control.rate_hz:=0.0", "gripper.max_speed:=10.0"] if speed else [])
    outcome = play(path, ExpertPolicy(config), ReplayOptions(speed=speed), config=config)
    assert outcome.samples.problem == ""
    return outcome, config


@pytest.mark.parametrize("speed", [0.0, 0.1])
def test_a_recorded_live_run_is_answered_identically(play, speed):
    path = ROOT / "test" / "data" / "bags" / "demo_jpeg"
    outcome, config = replayed(play, path, speed)
    found = outcome.samples
    compared = np.isfinite(found.recorded).all(axis=1)
    assert compared.sum() == 40
    # Another processor may round differently.
    assert np.abs(found.predicted[compared] - found.recorded[compared]).max() < 1e-9
    assert commands_equal(path, outcome, config, 1e-6) == 41


def test_recorded_joint_commands_come_back_as_actions(tmp_path):
    path = ROOT / "test" / "data" / "bags" / "demo_jpeg"
    arguments = ["--config", DEMO, "-p", "policy.name:=expert"]
    arguments += ["--topics", "truth=/arm/joint_command"]
    assert main(["replay", *map(str, (path, *arguments, "--json", tmp_path / "a.json"))]) == 0
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["truth"]["rule"] == ["stamp"]
    assert content["direction_cosine"] > 0.99
    assert content["gripper_f1"] == 1
    # A busy machine adds that it is too slow.
    assert content["verdict"]["headline"].startswith("The policy does what was recorded")


@pytest.mark.skipif(not (find_spec("rclpy") or find_spec("cyclonedds")), reason="neither ROS 2 nor the extra 'dds'")
def test_a_live_run_over_the_graph_is_answered_identically(play, tmp_path):
    """Records two episodes of the demo, with the policy node in a process of its own."""
    # Without a domain the demo looks for one where nobody is: another run's commands must not get into the bag.
    environment = {name: value for name, value in os.environ.items() if name != "ROS_DOMAIN_ID"}
    path = tmp_path / "live"
    words = f"demo --episodes 2 --seed 900 --policy expert --lockstep --record {path}".split()
    command = [sys.executable, "-m", "vla_ros.cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if "EGL" in done.stderr:
        pytest.skip(f"the simulation cannot render here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    outcome, config = replayed(play, path)
    found = outcome.samples
    compared = np.isfinite(found.recorded).all(axis=1)
    assert compared.sum() >= 20
    assert np.array_equal(found.predicted[compared], found.recorded[compared])
    # The live command began at the last one, the replayed one at the position that the arm measured there.
    assert commands_equal(path, outcome, config, 1e-12) >= 20
