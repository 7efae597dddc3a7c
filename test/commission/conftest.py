"""Arms with faults: here on a simulated clock, or in a process of their own with a person at a terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))  # test modules are imported by path: arm would not be found

from arm import TICK, Arm, Faults

from tools import forks
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.command import Command
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import JointState
from vla_ros_lab.commission import result, rigs
from vla_ros_lab.commission.motion import commissioning_options
from vla_ros_lab.commission.session import Commissioning
from vla_ros_lab.eval.command import free_domain
from vla_ros_lab.sim.arm import HOME
from vla_ros_lab.sim.environment import Environment, Measurements

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


def configure(folder: Path, faults: dict[str, Any]) -> Path:
    """Write the URDF and the configuration of an arm with faults."""
    description, config = folder / "four.urdf", folder / "robot.yaml"
    description.write_text(urdf())
    output = "joint_velocity_state" if faults.get("velocity") else "joint_state"
    output = "twist_stamped" if faults.get("twist") else output
    text = CONFIG.replace("OUTPUT", output).replace("URDF", str(description))
    if output != "joint_state":  # carries no fingers
        text = text.replace("gripper: {", "gripper: {mode: none, ")
        text = text.replace("gripper_joint_names: [finger_left, finger_right]", "")
    if faults.get("twist"):
        text = text.replace(str(description), "demo")
    config.write_text(text)
    return config


class SimulatedArm(Environment):
    """An arm with faults; what its driver publishes between two steps of it is left out."""

    step_seconds, ticks, instruction = 2 * TICK, 1, "commission"

    def __init__(self, clock: SimulatedClock, faults: dict[str, Any]) -> None:
        seven = {"joints": [f"joint_{number}" for number in range(1, 8)], "home": HOME.tolist()}
        self._tip = Kinematics.from_urdf("demo", seven["joints"], "base_link", "tool")
        faults = seven | faults if faults.get("twist") else faults
        self._clock, self._arm, self._rng = clock, Arm(Faults(**faults)), np.random.default_rng(0)
        self._names = (*self._arm.faults.joints, "finger_left", "finger_right")

    def reset(self, seed: int) -> None: ...

    def observe(self, cameras: Collection[str], stamp: int) -> Measurements:
        places = np.concatenate([self._arm.measured(self._rng), self._arm.fingers])
        behind = round(1e9 * self._arm.faults.clock)
        return Measurements([JointState(self._names, places, stamp - behind)])

    def apply(self, command: Command) -> None:
        arm, now = self._arm, self._clock.steady()
        at = dict(zip(command.names, command.positions.tolist(), strict=True)) | dict(command.velocities or {})
        if command.twist is not None:
            joints = np.linalg.pinv(self._tip.jacobian(arm.at)) @ np.concatenate(command.twist)
            at = dict(zip(arm.faults.joints, joints.tolist(), strict=True))
        arm.hear(now, np.array([at[name] for name in arm.faults.joints]), np.full(2, at.get("finger_left", 0.04)))

    def step(self) -> None:
        for before in (TICK, 0.0):
            self._arm.move(self._clock.steady() - before)


class Asked(Commissioning):
    """Asks a function instead of a person."""

    answer: Callable[[str], bool]

    def _ask(self, question: str) -> Generator[None, None, bool]:
        yield
        return self.answer(question)


class Simulated:
    """An arm that was commissioned on a simulated clock."""

    def __init__(self, folder: Path, faults: dict[str, Any], answer: Callable[[str], bool]) -> None:
        self.config, clock = configure(folder, faults), SimulatedClock(1_000_000_000)
        given, ours = commissioning_options([self.config], [])
        self.session = Asked(ours, clock, None, 0.2, 0.15)
        self.session.answer = answer
        rigs.simulated(self.session, ours, SimulatedArm(clock, faults), clock, lambda: None)
        self.figures = result.figures_of(self.session, given)
        self.options, self.page = folder / "measured.yaml", result.to_html(self.figures, self.session, "four")
        self.options.write_text(result.options_file(self.figures, "four"))

    @property
    def found(self) -> str:
        return "\n".join([self.figures["surprise"], *result.findings_of(self.figures)])


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., Simulated]:
    return lambda faults, answer=lambda question: True: Simulated(tmp_path, faults, answer)


class Commissioned:
    """What a run of the command said and wrote."""

    def __init__(self, folder: Path, status: int, said: str) -> None:
        self.status, self.said, self.folder = status, said, folder
        self.figures = json.loads(path.read_text()) if (path := folder / "found.json").exists() else {}

    @property
    def hampered(self) -> bool:
        """Whether this host was too busy to move an arm, or to hear it, in time."""
        gaps = [each["longest"] for each in self.figures.get("joint_states", {}).values()]
        return "the node held the arm" in self.said or max(gaps, default=0.0) > 0.15

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
    processes: list[Any] = []

    def run(
        faults: dict[str, Any],
        answer: Callable[[str], str] = yes,
        words: tuple[str, ...] = (),
        act: Callable[[int, subprocess.Popen[Any], str], None] = lambda terminal, process, text: None,
    ) -> Commissioned:
        here = Path(__file__).parent
        driver = forks.Fork(forks.script, [str(here / "arm.py"), json.dumps(faults)], None, 2)
        processes.append(driver)
        assert driver.stdout is not None
        assert driver.stdin is not None
        driver.stdin.close()
        assert driver.stdout.readline() == "ready\n"
        for old in ("out.yaml", "page.html", "found.json"):
            (tmp_path / old).unlink(missing_ok=True)
        config = configure(tmp_path, faults)
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
