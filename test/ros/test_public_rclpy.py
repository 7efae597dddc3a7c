"""Where rcl's structs cannot be used, rclpy's public interface takes over, and the node says what is lost."""

import time
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.qos import QoSProfile

from vla_ros.graph.rclpy_frames import BLOCK

pytestmark = pytest.mark.ros


@pytest.fixture(params=["blocked", "another distribution"])
def without_structs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why the structs are not used, as the node says."""
    if request.param == "blocked":
        monkeypatch.setenv(BLOCK, "1")
        return f"{BLOCK} is set"
    monkeypatch.setenv("ROS_DISTRO", "zealous")
    return "the structs of rcl in zealous were not tried"


def test_the_node_moves_the_arm_and_names_the_checks_that_are_lost(robot, policy, without_structs: str) -> None:
    told: list[Any] = []
    robot.node.create_subscription(DiagnosticArray, "/diagnostics", told.append, QoSProfile(depth=10))
    node = policy()
    robot.drive()
    node.wait_for("is ready")  # for 10 s, the killed node of the test before has a service of that name
    robot.wait(lambda: robot.enable()[0], "arming")
    robot.wait(lambda: any(robot.is_motion(command) for _, command in robot.commands), "a command")
    node.wait_for(f"checks are lost: {without_structs}")
    part = robot.wait(lambda: graph_part(told), "a diagnostic of the graph")
    assert part.level == b"\x01"
    assert "camera_contested" in part.message


def graph_part(told: list[Any]) -> Any:
    return next((each for array in told for each in array.status if each.name == "vla_policy: graph"), None)


def test_a_message_has_the_time_at_which_it_was_published(robot, without_structs: str) -> None:
    from sensor_msgs.msg import Image

    from vla_ros.graph import open_graph

    heard: list[Any] = []

    def keep(cdr: Any, origin: Any) -> None:
        heard.append((bytes(cdr), origin, time.time_ns()))

    with open_graph("rclpy") as graph:
        assert without_structs in graph.lost_checks
        raw = graph.subscribe_raw(
            graph.create_node("listener"), Image, "/camera/image_raw", keep, graph.qos("camera")
        )
        robot.drive()
        end = time.monotonic() + 20
        graph.spin(lambda: len(heard) >= 3 or time.monotonic() > end)
        raw.destroy()
    assert len(heard) >= 3
    for cdr, origin, arrived in heard:
        assert len(cdr) > 48 * 64 * 3
        assert origin.publisher == b""
        assert 0 <= arrived - origin.published < 5_000_000_000
