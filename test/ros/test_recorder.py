"""`ros2 bag` under a launch that is ended: it closes its bag and leaves.

Regression pinned: a recorder of `replay.launch.py` that went on for ever after SIGKILL to `ros2 launch`.
"""

import re
import shutil
import signal
import sys

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from vla_ros.graph.launcher import wait_for_end

pytestmark = pytest.mark.ros

RECORDER = """
import sys
from launch import LaunchDescription, LaunchService
from launch.actions import ExecuteProcess
from vla_ros.launching.ending import ends_with_launch, interrupted_with_launch
process = ExecuteProcess(cmd=interrupted_with_launch("ros2", "bag", *sys.argv[1:]), output="screen")
service = LaunchService(argv=[])
service.include_launch_description(LaunchDescription([ends_with_launch(process)]))
sys.exit(service.run())
"""


@pytest.mark.usefixtures("ros2_bag")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not installed")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_recorder_ends_with_its_launch(program, tmp_path, number: signal.Signals) -> None:
    """As `replay.launch.py` starts it."""
    launch = program(sys.executable, "-c", RECORDER, "record", "-o", str(tmp_path / "bag"), "-e", "^/rosout$")
    launch.wait_for("Recording...", 60)
    found = re.search(r"process started with pid \[(\d+)\]", launch.output)
    assert found is not None
    launch.process.send_signal(number)
    assert wait_for_end(int(found[1]), 10.0), "the recorder lives on"
    assert (tmp_path / "bag" / "metadata.yaml").exists(), "the bag was not closed"
