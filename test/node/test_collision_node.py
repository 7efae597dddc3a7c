"""The running node next to obstacles."""

import numpy as np
import pytest

from vla_ros.kinematics.solver import Kinematics

CHECK = ("collision.check:=true", "collision.deceleration:=20.0")


@pytest.mark.causes("collision_scene")
def test_an_obstacle_in_the_way_holds_and_is_named(robot, inside) -> None:
    """The policy moves along x, deeper into a wall that the hand touches."""
    tip = Kinematics.from_urdf("demo").forward(np.array(robot.positions)).position
    inside(*CHECK, f"collision.obstacles:=['wall = box 0.2 2 2 at {tip[0] + 0.09} 0 1']")
    robot.until(lambda: robot.says("collision_scene"), robot.send_frame)
    assert "wall" in robot.status["holds"]["collision_scene"]
    robot.until(lambda: robot.commands)
    assert all(np.allclose(command.position[:7], robot.positions) for command in robot.commands)


@pytest.mark.causes("collision_self")
def test_parts_of_the_arm_that_come_too_near_hold_and_are_named(robot, inside) -> None:
    inside(*CHECK, "collision.stop_distance:=0.3", "collision.slow_distance:=0.4")
    robot.until(lambda: robot.says("collision_self"), robot.send_frame)
    assert "link_" in robot.status["holds"]["collision_self"]


@pytest.mark.causes("scene_stale")
def test_a_required_scene_that_does_not_arrive_holds(robot, inside) -> None:
    inside(*CHECK, "collision.scene:=/obstacles", "collision.scene_required:=true")
    robot.until(lambda: robot.says("scene_stale"), robot.send_frame)
