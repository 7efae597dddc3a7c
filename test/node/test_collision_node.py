"""The running node next to obstacles."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla_ros.graph.origin import Origin
from vla_ros.kinematics.solver import Kinematics
from vla_ros.node.scene import SceneTopic

CHECK = ("collision.check:=true", "collision.deceleration:=20.0")


@pytest.mark.causes("collision_scene")
def test_an_obstacle_in_the_way_holds_and_is_named(robot, inside) -> None:
    """The policy moves along x, deeper into a wall that the hand touches."""
    tip = Kinematics.from_urdf("demo").forward(np.array(robot.positions)).position
    inside(*CHECK, f"collision.obstacles:=['wall = box 0.2 2 2 at {tip[0] + 0.09} 0 1']")
    robot.until(lambda: robot.says("collision_scene"), robot.send_frame)
    assert "wall" in robot.status["holds"]["collision_scene"]
    robot.until(lambda: robot.status["counters"]["collision_scene"] and len(robot.sent) > 60, robot.send_frame)
    assert all(np.allclose(command.position[:7], robot.positions) for command in robot.commands), "at most a hold"


@pytest.mark.causes("collision_self")
def test_parts_of_the_arm_that_come_too_near_hold_and_are_named(robot, inside) -> None:
    inside(*CHECK, "collision.hold_distance:=0.3", "collision.slow_distance:=0.4")
    robot.until(lambda: robot.says("collision_self"), robot.send_frame)
    assert "link_" in robot.status["holds"]["collision_self"]


@pytest.mark.causes("scene_stale")
def test_a_required_scene_that_does_not_arrive_holds(robot, inside) -> None:
    inside(*CHECK, "collision.scene:=/obstacles", "collision.scene_required:=true")
    robot.until(lambda: robot.says("scene_stale"), robot.send_frame)


def markers_of(robot: Any, *added: tuple[int, float, float], action: int = 0, frame: str = "") -> Any:
    """A message with cubes of 0.2 x 2 x 2 m: type, x, and size along x of each."""
    array = robot.graph.message("visualization_msgs/msg/MarkerArray")()
    for number, (kind, x, size) in enumerate(added):
        marker = robot.graph.message("visualization_msgs/msg/Marker")()
        marker.id, marker.type, marker.action, marker.header.frame_id = number, kind, action, frame
        marker.pose.position.x, marker.pose.position.z, marker.pose.orientation.w = x, 1.0, 1.0
        marker.scale.x, marker.scale.y, marker.scale.z = size, 2.0, 2.0
        array.markers = [*array.markers, marker]
    return array


def test_a_scene_holds_while_its_obstacle_is_in_the_way_and_shows_what_is_checked(robot, inside) -> None:
    tip = Kinematics.from_urdf("demo").forward(np.array(robot.positions)).position
    make, qos = robot.graph.message, robot.graph.qos
    array = make("visualization_msgs/msg/MarkerArray")
    scene = robot.node.create_publisher(array, "/obstacles", qos("state_publisher"))
    shown: list[object] = []
    robot.node.create_subscription(array, "/vla_policy/collision", robot.hears(shown), qos("diagnostics"))
    node = inside(
        *CHECK, "collision.scene:=/obstacles", "collision.scene_required:=true", "collision.scene_timeout:=3.0"
    )
    wall = markers_of(robot, (1, tip[0] + 0.09, 0.2))

    def with_scene(message):  # type: ignore[no-untyped-def]
        def send() -> None:
            scene.publish(message)
            robot.send_frame()

        return send

    robot.until(lambda: robot.says("collision_scene"), with_scene(wall))
    assert "scene:0" in robot.status["holds"]["collision_scene"]
    robot.until(lambda: shown, with_scene(wall))
    assert any(marker.color.r > 0.85 for message in shown for marker in message.markers[1:]), "the nearest are red"
    robot.until(lambda: "scene:0" in robot.status["collision"].get("bodies", ()), with_scene(wall))
    assert robot.status["collision"]["checked"]
    assert "scene:0" in robot.diagnostics["collision"]["message"]
    check = node._pipeline.controller.collision
    wrongs = [(1, np.nan, 0.2), (1, 0.0, -1.0), (9, 0.0, 1.0), (10, 0.0, 1.0)]
    for wrong in [*(markers_of(robot, each) for each in wrongs), markers_of(robot, (1, 0.0, 1.0), action=7)]:
        scene.publish(wrong)
    robot.until(lambda: node._loop.alive and len(check.scene) == 1, with_scene(wall))
    count = len(robot.commands)
    robot.until(lambda: len(robot.commands) > count + 2, with_scene(markers_of(robot, (1, 0.0, 1.0), action=3)))
    assert check.scene == ()


def test_a_scene_that_a_busy_node_reads_late_counts_from_when_it_was_published(robot, inside) -> None:
    """The newest message waits for 0.4 s, as when the receiving thread does not run; its publisher is known."""
    node = inside(*CHECK, "collision.scene:=/obstacles", "collision.scene_required:=true")
    check, array = node._pipeline.controller.collision, markers_of(robot, (1, 2.0, 0.2))
    context = node._context
    scene = SceneTopic(context, SimpleNamespace(subscribe_from=lambda *_: None, timer=lambda *_: None), check)
    for _ in range(3):
        scene.take(array, Origin(b"camera", time.time_ns()))
    assert check.steady() - check._scene_at < 0.2
    sent = time.time_ns()
    time.sleep(0.4)
    scene.take(array, Origin(b"camera", sent))
    assert 0.3 < check.steady() - check._scene_at < 2.0
    scene.take(array)
    assert check.steady() - check._scene_at < 0.2, "a middleware without timestamps"


def test_the_status_says_that_nothing_is_checked(robot, inside) -> None:
    inside()
    robot.until(lambda: "collision" in robot.diagnostics, robot.send_frame)
    assert robot.status["collision"] == {"checked": False, "why_not": "collision.check is false"}
    assert robot.diagnostics["collision"]["message"] == "not checked: collision.check is false"
