import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")
pytest.importorskip("rosetta_interfaces", reason="rosetta_interfaces is not installed")

pytestmark = [pytest.mark.ros, pytest.mark.skipif(not shutil.which("ros2"), reason="ros2 is not installed")]

SCRIPTED = Path(__file__).parents[1] / "node" / "scripted_node.py"
BY_NAME = "<Compatibility><IgnoreTypeInformation>1.16</IgnoreTypeInformation></Compatibility>"
GOAL = ("/vla_policy/run_policy", "rosetta_interfaces/action/RunPolicy", "{prompt: 'go on'}", "--feedback")


@pytest.fixture(params=["rclpy", "dds"])
def node(
    request: pytest.FixtureRequest, robot: Any, program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Any:
    if request.param == "dds" and os.environ.get("RMW_IMPLEMENTATION") != "rmw_cyclonedds_cpp":
        pytest.skip("services of the embedded participant are those of rmw_cyclonedds_cpp")
    if request.param == "dds" and os.environ.get("ROS_DISTRO") == "lyrical":  # whose clients compare types
        monkeypatch.setenv("CYCLONEDDS_URI", f"<CycloneDDS><Domain>{BY_NAME}</Domain></CycloneDDS>")
    quick = [option for option in robot.quick if not option.startswith("policy.instruction")]
    options = (*quick, "control.armed:=true", f"node.backend:={request.param}")
    started = program(sys.executable, str(SCRIPTED), *(word for option in options for word in ("-p", option)))
    robot.drive()
    started.wait_for("is ready")
    return started


def test_a_goal_of_the_command_line_runs_and_succeeds(robot, node, program) -> None:
    from std_msgs.msg import Bool

    success = robot.node.create_publisher(Bool, "/vla_policy/success", 10)
    goal = program("ros2", "action", "send_goal", *GOAL)
    goal.wait_for("status: executing")
    robot.wait(lambda: robot.commands and robot.is_motion(robot.commands[-1][1]), "motion")
    success.publish(Bool(data=True))
    goal.wait_for("Goal finished with status: SUCCEEDED")
    assert "success: true" in goal.output
    assert "message: true on ~/success" in goal.output


def test_ctrl_c_cancels_the_goal_and_the_arm_holds(robot, node, program) -> None:
    goal = program("ros2", "action", "send_goal", *GOAL)
    goal.wait_for("status: executing")
    robot.wait(lambda: robot.commands and robot.is_motion(robot.commands[-1][1]), "motion")
    goal.process.send_signal(signal.SIGINT)
    node.wait_for("run_policy ended: canceled")
    node.wait_for("armed -> holding (no_instruction")
    robot.wait(lambda: not robot.is_motion(robot.commands[-1][1]), "the hold")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_that_ends_during_a_goal_gives_its_result(robot, node, program, number: signal.Signals) -> None:
    goal = program("ros2", "action", "send_goal", *GOAL)
    goal.wait_for("status: executing")
    robot.wait(lambda: robot.commands and robot.is_motion(robot.commands[-1][1]), "motion")
    assert node.end(number) == 0
    goal.wait_for("Goal finished with status: ABORTED")
    assert "message: the node was shut down" in goal.output
