import re
import signal
import sys
import time
from pathlib import Path

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
    assert node.log.read_text().count("not armed: the signal came before the node was ready, and is void") == 1
    assert "-> armed" not in node.log.read_text()


def test_no_signal_ends_a_node_that_starts_and_a_disarm_meanwhile_counts(robot, start, monkeypatch) -> None:
    """``vla-ros run`` imports for seconds; SIGUSR1, SIGUSR2 and SIGHUP would end a process without a handler."""
    command = (str(Path(sys.executable).with_name("vla-ros")), "run")
    words = ("-p", "policy.name:=wiggle", "-p", "policy.instruction:=go on", "-p", "control.armed:=true")
    node = start(*words, script=command)
    status = Path(f"/proc/{node.process.pid}/status")  # until Python itself has started, a signal ends it

    def handles() -> bool:
        masks = re.findall(r"Sig(?:Blk|Ign|Cgt):\s(\w+)", status.read_text())
        return any(int(mask, 16) >> signal.SIGUSR1 - 1 & 1 for mask in masks)

    assert wait_until(handles)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        node.signal(number)
        time.sleep(0.1)
    robot.until(lambda: "by signal: kill" in node.log.read_text(), robot.send_frame, 60.0)
    robot.until(lambda: robot.status.get("state") == "disarmed", robot.send_frame)
    robot.until(lambda: len(robot.actions) > 5, robot.send_frame)
    assert robot.commands == []
    assert node.log.read_text().count("is void") == 1


def test_a_second_interrupt_does_not_skip_the_last_hold(robot, start, tmp_path) -> None:
    node = start("-p", "control.armed:=true", "-p", "policy.instruction:=go on", "-p", "record.what:=all",
                 "-p", f"record.folder:={tmp_path}")  # fmt: skip
    robot.until(lambda: len(robot.commands) > 10, robot.send_frame)
    robot.until(lambda: list(tmp_path.glob("*/*.mcap")), robot.send_frame)
    for _ in range(20):  # an impatient person
        node.signal(signal.SIGINT)
        time.sleep(0.02)
    assert node.process.wait(30) == 0
    assert "the arm holds" in node.log.read_text()
    assert robot.command_stamp() not in robot.sent, "the last command is no hold"
    assert list(tmp_path.glob("*/metadata.yaml"))


def wait_until(ready, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(ready())
