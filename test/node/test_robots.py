import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tools.forks import Fork, vla_ros
from tools.robots.descriptions import ROBOTS, homes, urdf
from tools.robots.drivers import Drivers
from tools.robots.path import follow
from vla_ros.config import Config, load
from vla_ros.config.files import config_file

AMPLITUDE, SECONDS = 0.06, 1.2
NEAR, NEAR_BY_VELOCITY = 0.3, 0.8  # amplitudes; a velocity loop overshoots by what a measurement is late
FAST = (f"policy.amplitude:={AMPLITUDE}", f"policy.seconds:={SECONDS}", "control.rate_hz:=0.0")


class Run:
    """The node with a configuration, beside its drivers."""

    def __init__(self, folder: Path, name: str, options: tuple[str, ...]) -> None:
        (folder / "robot.urdf").write_text(urdf(name, own=True))
        robot = ROBOTS[name]
        own = ("node.backend:=dds", f"robot.urdf:={folder / 'robot.urdf'}", f"robot.tip_frame:={robot.tip}")
        words = ("control.armed:=true", "policy.instruction:=wiggle", *FAST, *own, *options)
        self.config: Config = load([config_file(name)], words)
        self.drivers = Drivers(self.config, {arm.name: homes(name) for arm in self.config.arms})
        self.log = folder / "log"
        given = [word for each in words for word in ("-p", each)]
        self.node = Fork(vla_ros, ["run", "--config", name, *given], self.log)

    def until(self, ready: Callable[[], object], seconds: float = 100.0) -> None:
        """Wait for ``ready()``."""
        deadline = time.monotonic() + seconds
        while not ready():
            assert self.node.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def close(self) -> None:
        self.node.send_signal(signal.SIGTERM)
        try:
            self.node.wait(15)
        finally:
            self.node.kill()
            self.drivers.close()


CASES = [
    *((name, ()) for name in ("ur5e", "fr3", "xarm7")),
    *((name, ("gripper.max_speed:=20.0",)) for name in ("so101", "aloha")),
    (
        "ur5e",
        (
            "control.output:=joint_velocity",
            "topics.command:=/forward_velocity_controller/commands",
            "control.rate_hz:=20.0",
        ),
    ),
    ("ur5e", ("gripper.output:=parallel_gripper_command",)),
]


AT_ONCE = 3
"""Cases that run at once: an arm that wiggles through its joints takes ten seconds."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Run]]:
    """Return a case that runs, each in a domain of its own, and start the next ones."""
    started: dict[int, Run] = {}
    with pytest.MonkeyPatch.context() as environment, ExitStack() as ends:
        tag = f"<Tag>vla_ros_robots_{os.getpid()}</Tag>"
        uri = f"<CycloneDDS><Domain><Discovery>{tag}</Discovery></Domain></CycloneDDS>"
        environment.setenv("CYCLONEDDS_URI", uri)
        environment.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")

        def run(case: int) -> Run:
            for number in range(case, min(case + AT_ONCE, len(CASES))):
                if number not in started:
                    name, options = CASES[number]
                    environment.setenv("ROS_DOMAIN_ID", str(1 + (os.getpid() + number) % 100))
                    started[number] = Run(tmp_path_factory.mktemp(name), name, options)
                    ends.callback(started[number].close)
            return started[case]

        yield run


@pytest.mark.parametrize("case", range(len(CASES)), ids=[" ".join([name, *options]) for name, options in CASES])
def test_every_joint_follows_the_path_and_a_stop_holds(runs: Callable[[int], Run], case: int) -> None:
    running, (name, options) = runs(case), CASES[case]
    log, robot = running.drivers.log, ROBOTS[name]
    near = NEAR_BY_VELOCITY if options and "velocity" in options[0] else NEAR
    arms = [arm.name for arm in running.config.arms]
    running.until(lambda: log.states)
    for arm in arms:
        keys = [f"{arm}/{joint}" for joint in robot.joints]
        follow(
            lambda keys=keys: [(at, [state[key] for key in keys]) for at, state in list(log.states)],
            running.until,
            AMPLITUDE,
            SECONDS,
            near,
        )
    gripper = running.config.gripper
    ends = sorted((gripper.closed_position, gripper.open_position))

    def reached(arm: str) -> bool:
        fingers = [state[f"{arm}/{robot.fingers[0]}"] for _, state in list(log.states)]
        return [min(fingers), max(fingers)] == pytest.approx(ends, abs=0.02)

    for arm in arms:
        running.until(lambda arm=arm: reached(arm))
    running.drivers.stop()
    running.until(lambda: "operator_stop" in running.log.read_text())
    commanded = len(log.commands)
    time.sleep(0.2)
    stopped = dict(log.states[-1][1])
    goals = len(log.goals)
    time.sleep(0.5)
    assert len(log.commands) <= commanded + len(arms) * 2
    assert len(log.goals) == goals
    still = {key: abs(log.states[-1][1][key] - value) for key, value in stopped.items()}
    assert max(value for key, value in still.items() if key.split("/")[1] in robot.joints) < 0.005
    running.close()  # leaves the processor to the others
