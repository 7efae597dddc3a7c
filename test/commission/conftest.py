"""An arm in a process of its own, and a person at a terminal who answers the command's questions."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # test modules are imported by path: arm would not be found

from vla_ros_lab.eval.command import free_domain

PATIENCE = 120.0
CONFIG = """
/**:
  ros__parameters:
    policy: {name: hold}
    robot:
      urdf: URDF
      base_frame: base_link
      tip_frame: tool
      gripper_joint_names: [finger_left, finger_right]
    control: {output: OUTPUT, rate_hz: 10.0}
    gripper: {open_position: 0.04, closed_position: 0.0}
    limits: {velocity_scale: 0.5}
    node: {backend: dds}
"""


class Commissioned:
    """What a run of the command said and wrote."""

    def __init__(self, folder: Path, status: int, said: str) -> None:
        self.status, self.said, self.folder = status, said, folder
        self.figures = json.loads(path.read_text()) if (path := folder / "found.json").exists() else {}

    @property
    def found(self) -> str:
        """All findings, and what ended everything."""
        lines = [f"{each['what']}: {each['found']}" for each in self.figures["findings"]]
        return "\n".join([self.figures["surprise"], *lines])

    def options(self, file: str = "out.yaml") -> Path:
        return self.folder / file


def yes(question: str) -> str:
    return "y"


@pytest.fixture
def commission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Commissioned]]:
    """Run the command against an arm with faults; ``answer`` gets its questions, ``act`` its output."""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(free_domain()))
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    processes: list[subprocess.Popen[Any]] = []

    def run(
        faults: dict[str, Any],
        answer: Callable[[str], str] = yes,
        words: tuple[str, ...] = (),
        act: Callable[[subprocess.Popen[Any], str], None] = lambda process, text: None,
        urdf: str = "demo",
    ) -> Commissioned:
        here = Path(__file__).parent
        driver = subprocess.Popen(
            [sys.executable, str(here / "arm.py"), json.dumps(faults)], stdout=subprocess.PIPE
        )
        processes.append(driver)
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"ready\n"
        config = tmp_path / "robot.yaml"
        output = "joint_velocity_state" if faults.get("velocity") else "joint_state"
        config.write_text(CONFIG.replace("OUTPUT", output).replace("URDF", urdf))
        if faults.get("velocity"):  # carries no fingers
            text = config.read_text().replace("gripper: {", "gripper: {mode: none, ")
            config.write_text(text.replace("gripper_joint_names: [finger_left, finger_right]", ""))
        files = [word for name, file in (("output", "out.yaml"), ("report", "page.html"), ("json", "found.json"))
                 for word in (f"--{name}", str(tmp_path / file))]  # fmt: skip
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "vla_ros.cli", "commission", "--config", str(config), *files, *words]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        processes.append(process)
        os.close(theirs)
        said, asked, deadline = "", 0, time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    said += os.read(ours, 4096).decode()
                except OSError:  # its end is closed: the process has ended
                    break
            questions = said.split("[y/n]")
            if len(questions) - 1 > asked:
                asked += 1
                os.write(ours, f"{answer(questions[asked - 1].splitlines()[-1])}\n".encode())
            act(process, said)
        else:
            process.kill()
        os.close(ours)
        status = process.wait(20)
        driver.send_signal(signal.SIGINT)
        assert driver.poll() is None, "the driver has died"
        driver.wait(20)
        return Commissioned(tmp_path, status, said)

    yield run
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
