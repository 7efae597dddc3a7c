import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vla_ros.graph.launcher import wait_for_end

LAUNCHER = """
import os, subprocess, sys
from vla_ros.graph.launcher import launched
child = subprocess.Popen(sys.argv[1:], env={**os.environ, **launched()})
print("child", child.pid, flush=True)
child.wait()
"""
NODE = Path(__file__).with_name("scripted_node.py")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_armed_node_holds_and_ends_with_its_launcher(robot, start, number: signal.Signals) -> None:
    words = ("-p", "control.armed:=true", "-p", "policy.instruction:=go on")
    launcher = start(*words, script=(sys.executable, "-c", LAUNCHER, sys.executable, str(NODE)))
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    found = re.search(r"child (\d+)", launcher.log.read_text())
    launcher.signal(number)
    died = robot.now()
    deadline = time.monotonic() + 15
    while not wait_for_end(int(found[1]), 0.0):
        assert time.monotonic() < deadline, "the node lives on"
        robot.send_frame()
        time.sleep(1 / 30)
    robot.until(lambda: np.allclose(robot.command_positions(), robot.positions, atol=1e-9))
    late = [robot.command_stamp(index) for index in range(len(robot.commands))]
    assert all(stamp < died + 1_000_000_000 for stamp in late)
    holds = [each for each in robot.commands if np.allclose(each.position[:7], robot.positions, atol=1e-9)]
    assert len(holds) == 1
    assert "is gone: ending" in launcher.log.read_text()
    assert "ended: the arm holds" in launcher.log.read_text()
