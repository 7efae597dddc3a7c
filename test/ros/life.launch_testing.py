"""policy.launch.py through the life of the node, under launch_testing.

    launch_test test/ros/life.launch_testing.py

pytest runs it from ``test_launch.py``, because the pytest plug-in of Jazzy's launch_testing does not load in
pytest 9.
"""

from __future__ import annotations

import sys
import unittest
from pathlib import Path

import launch_testing
import launch_testing.asserts
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare
from lifecycle_msgs.msg import Transition

from launch import LaunchDescription

sys.path.append(str(Path(__file__).parent))

from conftest import Robot

ARGUMENTS = {
    "policy": "hold",
    "instruction": "hold still",
    "autostart": "false",
    "set": "camera.width:=64; camera.height:=48; robot.urdf:=demo; control.rate_hz:=0.0",
}


def generate_test_description() -> LaunchDescription:
    """The launch file as a user includes it."""
    file = PathJoinSubstitution([FindPackageShare("vla_ros"), "launch", "policy.launch.py"])
    policy = IncludeLaunchDescription(PythonLaunchDescriptionSource(file), launch_arguments=list(ARGUMENTS.items()))
    return LaunchDescription([policy, launch_testing.actions.ReadyToTest()])


class Life(unittest.TestCase):
    """While the launch is up."""

    def setUp(self) -> None:
        self.robot = Robot()
        self.addCleanup(self.robot.close)
        self.robot.drive()

    def test_states_frames_and_commands(self, proc_output: launch_testing.IoHandler) -> None:
        """Lifecycle through its states; frames in, actions and commands out."""
        robot = self.robot
        assert robot.state() == "unconfigured"
        assert robot.change(Transition.TRANSITION_CONFIGURE)
        proc_output.assertWaitFor("policy 'hold' is ready", timeout=30)
        assert robot.change(Transition.TRANSITION_ACTIVATE)
        robot.wait(lambda: len(robot.actions) >= 3, "actions")
        assert robot.commands == [], "activation arms nothing"
        assert robot.enable()[0]
        robot.wait(lambda: len(robot.commands) >= 3, "commands")
        assert robot.change(Transition.TRANSITION_DEACTIVATE)
        assert robot.change(Transition.TRANSITION_CLEANUP)
        assert robot.change(Transition.TRANSITION_CONFIGURE)
        assert robot.change(Transition.TRANSITION_ACTIVATE)
        assert robot.state() == "active"
        told = len(robot.commands)
        shown = len(robot.actions)
        robot.wait(lambda: len(robot.actions) >= shown + 3, "actions of the second life")
        assert len(robot.commands) <= told + 1, "the second life begins disarmed"


@launch_testing.post_shutdown_test()
class End(unittest.TestCase):
    """After the launch has ended the node with SIGINT."""

    def test_ended_in_order(
        self, proc_info: launch_testing.ProcInfoHandler, proc_output: launch_testing.IoHandler
    ) -> None:
        """Exit status 0, and the last word."""
        launch_testing.asserts.assertExitCodes(proc_info)
        text = "".join(event.text.decode(errors="replace") for event in proc_output)
        assert "ended by SIGINT: the arm holds" in text
        assert "Traceback" not in text
