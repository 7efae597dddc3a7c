"""`ros2 bag play` of a recorded bag drives the node: frames of last year are answered by its clock."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

pytestmark = pytest.mark.ros


@pytest.mark.skipif(shutil.which("ros2") is None, reason="the ros2 command is not installed")
def test_a_recorded_bag_drives_the_node(
    robot: Any, policy: Callable[..., Any], program: Callable[..., Any], recorded_bag: Path
) -> None:
    policy("use_sim_time:=true").wait_for("is ready")
    play = program("ros2", "bag", "play", str(recorded_bag), "--clock", "100", "--delay", "3", "--rate", "0.5")
    assert play.process.wait(60) == 0, play.output
    # On a busy machine newer frames overtake older ones, which is what KEEP_LAST(1) is for.
    robot.wait(lambda: len(robot.actions) >= 20, "the actions of 40 frames")
