from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

pytestmark = pytest.mark.ros


@pytest.mark.usefixtures("ros2_bag")
def test_a_recorded_bag_drives_the_node(robot, policy, program, recorded_bag: Path) -> None:
    policy("use_sim_time:=true").wait_for("is ready")
    play = program("ros2", "bag", "play", str(recorded_bag), "--clock", "100", "--delay", "3", "--rate", "0.5")
    assert play.process.wait(60) == 0, play.output
    # On a busy machine newer frames overtake older ones, which is what KEEP_LAST(1) is for.
    robot.wait(lambda: len(robot.actions) >= 20, "the actions of 40 frames")
