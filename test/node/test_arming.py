import signal

import pytest

pytestmark = pytest.mark.filterwarnings("error")


def test_a_request_to_arm_does_not_outlive_a_reset(robot, start) -> None:
    """Signals have no order: a process that is busy hears of a later SIGHUP before an earlier SIGUSR1."""
    node = start("-p", "control.armed:=true", "-p", "policy.instruction:=go on")
    robot.until(lambda: robot.commands, robot.send_frame)
    robot.stop()
    robot.until(lambda: "armed -> stopped" in node.log.read_text(), robot.send_frame)
    for number in (signal.SIGSTOP, signal.SIGUSR1, signal.SIGHUP, signal.SIGCONT):
        node.signal(number)
    robot.until(lambda: "stopped -> disarmed" in node.log.read_text(), robot.send_frame)
    robot.until(
        lambda: "not armed: the signal came together with another" in node.log.read_text(), robot.send_frame
    )
    assert "disarmed -> armed" not in node.log.read_text().partition("armed -> stopped")[2]
    moved = len(robot.commands)
    node.signal(signal.SIGUSR1)
    robot.until(lambda: len(robot.commands) > moved + 1, robot.send_frame)


def test_a_request_to_arm_during_loading_is_void(robot, start, monkeypatch) -> None:
    monkeypatch.setenv("SCRIPTED_LOAD_S", "2")
    node = start("-p", "policy.instruction:=go on")
    robot.until(lambda: "loading" in node.log.read_text(), robot.send_frame)
    node.signal(signal.SIGUSR1)
    robot.until(lambda: len(robot.actions) > 5, robot.send_frame)
    assert robot.commands == []
    assert "armed" not in node.log.read_text().replace("disarmed", "")
