"""~/run_policy, called by `ros2 action` and cancelled by Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")
pytest.importorskip("rosetta_interfaces", reason="rosetta_interfaces is not installed")

pytestmark = [
    pytest.mark.ros,
    pytest.mark.skipif(not shutil.which("ros2"), reason="ros2 is not installed"),
]

SCRIPTED = Path(__file__).parents[1] / "node" / "scripted_node.py"
GOAL = ("/vla_policy/run_policy", "rosetta_interfaces/action/RunPolicy", "{prompt: 'go on'}", "--feedback")


@pytest.fixture(params=["rclpy", "dds"])
def node(request: pytest.FixtureRequest, robot: Any, program: Callable[..., Any]) -> Any:
    """An armed node without an instruction."""
    if request.param == "dds" and os.environ.get("RMW_IMPLEMENTATION") != "rmw_cyclonedds_cpp":
        pytest.skip("services of the embedded participant are those of rmw_cyclonedds_cpp")
    quick = [option for option in robot.quick if not option.startswith("policy.instruction")]
    options = (*quick, "control.armed:=true", f"node.backend:={request.param}")
    started = program(sys.executable, str(SCRIPTED), *(word for option in options for word in ("-p", option)))
    robot.drive()
    started.wait_for("is ready")
    return started


def test_a_goal_of_the_command_line_runs_and_succeeds(robot: Any, node: Any, program: Callable[..., Any]) -> None:
    from std_msgs.msg import Bool

    success = robot.node.create_publisher(Bool, "/vla_policy/success", 10)
    goal = program("ros2", "action", "send_goal", *GOAL)
    goal.wait_for("status: executing")
    robot.wait(lambda: robot.commands and robot.is_motion(robot.commands[-1][1]), "motion")
    success.publish(Bool(data=True))
    goal.wait_for("Goal finished with status: SUCCEEDED")
    assert "success: true" in goal.output
    assert "message: topics.success said so" in goal.output


def test_ctrl_c_cancels_the_goal_and_the_arm_holds(robot: Any, node: Any, program: Callable[..., Any]) -> None:
    goal = program("ros2", "action", "send_goal", *GOAL)
    goal.wait_for("status: executing")
    robot.wait(lambda: robot.commands and robot.is_motion(robot.commands[-1][1]), "motion")
    goal.process.send_signal(signal.SIGINT)
    node.wait_for("run_policy ended: canceled")
    node.wait_for("armed -> holding (no_instruction")
    robot.wait(lambda: not robot.is_motion(robot.commands[-1][1]), "the hold")


def test_ten_goals_in_the_simulation_end_as_they_should(program: Callable[..., Any], tmp_path: Path) -> None:
    """One after the other on the table-top: seven succeed, one each is cancelled, takes too long and is stopped."""
    pytest.importorskip("mujoco", reason="the simulation needs mujoco (extra 'sim')")
    from vla_ros.config import load
    from vla_ros.config.files import config_file
    from vla_ros.graph import open_graph
    from vla_ros.sim.arguments import LOCKSTEP
    from vla_ros.sim.node import SimNode
    from vla_ros.sim.world import TableTop, WorldOptions

    words = ("policy.name:=expert", "policy.instruction:=''", "timeouts.run:=25.0", *LOCKSTEP)
    config = load([config_file("demo")], words)
    given = [word for each in words for word in ("-p", each)]
    node = program(sys.executable, "-m", "vla_ros.cli", "run", "--config", "demo", *given)
    options = WorldOptions(width=64, height=64, rate_hz=config.control.rate_hz)
    with TableTop(options) as world, open_graph("auto") as graph:
        sim = SimNode(graph, config.arms)
        tells = graph.create_node("person")
        make, command = graph.message("std_msgs/msg/Bool"), graph.qos("command")
        success, stop = (
            tells.create_publisher(make, f"/vla_policy/{what}", command) for what in ("success", "stop")
        )
        sim.wait_for_policy(60, lambda: node.process.poll() is None)

        def answered() -> dict[str, Any]:
            found: dict[str, Any] = {}

            def is_answered() -> bool:
                found.update(sim.take_commands())
                return bool(found)

            sim.spin(is_answered, 0.1)
            return found

        def goal(number: int, prompt: str = "", act: Callable[[Any], None] | None = None) -> str:
            """What the command line says of a goal, during which the simulation runs."""
            scene, steps, decided = world.reset(number), 0, False
            text = f"{{prompt: '{prompt or scene.instruction}'}}"
            called = program("ros2", "action", "send_goal", *GOAL[:2], text, "--feedback")
            deadline = time.monotonic() + 120
            while called.process.poll() is None and time.monotonic() < deadline:
                stamp = sim.next_stamp()
                sim.publish_state(world, stamp)
                sim.publish_image(world.render(), stamp)
                commands = answered()
                for each in commands.values():
                    world.command_named(each.names, each.positions)
                if commands:
                    decided, steps = world.step() or decided, steps + 1
                if decided:
                    success.publish(make(data=True))
                if act is not None and steps == 10:
                    act(called)
                    act = None
            return str(called.output)

        for number in range(10):
            if number == 3:
                said = goal(number, act=lambda called: called.process.send_signal(signal.SIGINT))
                node.wait_for("run_policy ended: canceled")
            elif number == 5:
                said = goal(number, "pick up the purple moon")
                assert "message: not done within 25 s (timeouts.run)" in said
                assert "status: ABORTED" in said
            elif number == 7:
                said = goal(number, act=lambda _: stop.publish(make(data=True)))
                assert "stopped by operator_stop" in said
                assert "status: ABORTED" in said
                node.process.send_signal(signal.SIGHUP)
                node.wait_for("no longer stopped")
                node.process.send_signal(signal.SIGUSR1)
                sim.spin(lambda: not sim.policy.stopped, 10)
            else:
                said = goal(number)
                assert "success: true" in said, said + node.output
                assert "status: SUCCEEDED" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_that_ends_during_a_goal_gives_its_result(
    robot: Any, node: Any, program: Callable[..., Any], number: signal.Signals
) -> None:
    goal = program("ros2", "action", "send_goal", *GOAL)
    goal.wait_for("status: executing")
    robot.wait(lambda: robot.commands and robot.is_motion(robot.commands[-1][1]), "motion")
    assert node.end(number) == 0
    goal.wait_for("Goal finished with status: ABORTED")
    assert "message: the node was shut down" in goal.output
