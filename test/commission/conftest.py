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

PATIENCE, TRIES = 120.0, 2
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

LIMITS = {"joint_1": (-2.8, 2.8), "joint_2": (-1.9, 1.9), "joint_3": (-2.8, 2.8), "joint_4": (0.05, 2.6)}


def urdf() -> str:
    """An arm of four joints and a gripper of two fingers, which the package does not ship."""
    parts, parent = ['<robot name="four"><link name="base_link"/>'], "base_link"
    for index, (name, (low, high)) in enumerate(LIMITS.items()):
        parts.append(
            f'<link name="link_{index}"/><joint name="{name}" type="revolute"><parent link="{parent}"/>'
            f'<child link="link_{index}"/><origin xyz="0 0 0.2"/><axis xyz="0 {index % 2} {1 - index % 2}"/>'
            f'<limit lower="{low}" upper="{high}" velocity="2.0" effort="10"/></joint>'
        )
        parent = f"link_{index}"
    parts.append(
        f'<link name="tool"/><joint name="mount" type="fixed"><parent link="{parent}"/><child link="tool"/>'
        '<origin xyz="0 0 0.1"/></joint>'
    )
    fingers = [
        f'<link name="{side}_pad"/><joint name="finger_{side}" type="prismatic"><parent link="tool"/>'
        f'<child link="{side}_pad"/><axis xyz="0 1 0"/>'
        '<limit lower="0" upper="0.04" velocity="0.2" effort="10"/></joint>'
        for side in ("left", "right")
    ]
    return "".join([*parts, *fingers, "</robot>"])


class Commissioned:
    """What a run of the command said and wrote."""

    def __init__(self, folder: Path, status: int, said: str) -> None:
        self.status, self.said, self.folder = status, said, folder
        self.figures = json.loads(path.read_text()) if (path := folder / "found.json").exists() else {}

    @property
    def hampered(self) -> bool:
        """Whether this host was too busy to move an arm, or to hear it, in time."""
        gaps = [each["longest"] for each in self.figures.get("joint_states", {}).values()]
        return (
            "Again, because" in self.said or "the node held the arm" in self.said or max(gaps, default=0.0) > 0.12
        )

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
        act: Callable[[int, subprocess.Popen[Any], str], None] = lambda terminal, process, text: None,
    ) -> Commissioned:
        here = Path(__file__).parent
        driver = subprocess.Popen(
            [sys.executable, str(here / "arm.py"), json.dumps(faults)], stdout=subprocess.PIPE
        )
        processes.append(driver)
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"ready\n"
        for old in ("out.yaml", "page.html", "found.json"):
            (tmp_path / old).unlink(missing_ok=True)
        config, description = tmp_path / "robot.yaml", tmp_path / "four.urdf"
        description.write_text(urdf())
        output = "joint_velocity_state" if faults.get("velocity") else "joint_state"
        config.write_text(CONFIG.replace("OUTPUT", output).replace("URDF", str(description)))
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
            act(ours, process, said)
        else:
            process.kill()
        os.close(ours)
        status = process.wait(20)
        driver.send_signal(signal.SIGINT)
        assert driver.poll() is None, "the driver has died"
        driver.wait(20)
        return Commissioned(tmp_path, status, said)

    def quietly(faults: dict[str, Any], *, times: bool = False, **how: Any) -> Commissioned:
        """Run until this host was not too busy; where ``times`` matter, few processes may wait."""
        for _ in range(TRIES):
            if times and os.getloadavg()[0] > 4 * (os.cpu_count() or 1):
                continue
            done = run(faults, **how)
            if not done.hampered:
                return done
        pytest.skip(f"this host was too busy {TRIES} times: load {os.getloadavg()[0]:.0f}")

    yield quietly
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
