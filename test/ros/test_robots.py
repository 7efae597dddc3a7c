import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")
pytest.importorskip("controller_manager_msgs", reason="ros2_control is not installed")

import yaml

from tools.robots.descriptions import ROBOTS, homes, urdf, with_mock_hardware
from tools.robots.path import follow
from vla_ros.config import Config, load
from vla_ros.config.files import config_file

pytestmark = pytest.mark.ros

AMPLITUDE, SECONDS = 0.06, 1.2
RATE = 100  # Hz, of the controller manager
TRAJECTORY = "joint_trajectory_controller/JointTrajectoryController"
POSITION = "position_controllers/JointGroupPositionController"
VELOCITY = "velocity_controllers/JointGroupVelocityController"
GRIPPER = "position_controllers/GripperActionController"
PARALLEL = "parallel_gripper_action_controller/GripperActionController"
PACKAGES = {GRIPPER: "gripper_controllers", PARALLEL: "parallel_gripper_controller"}


@dataclass(frozen=True)
class Case:
    """A robot's controllers.

    Attributes:
        name: Of the configuration.
        controllers: Name to type and joints.
        options: What differs from the configuration: what ros2_control does not have.
        prefixes: Of the joints of each arm.
        listed: There is a configuration of that name.
        near: How far from the path the joints may be, in amplitudes.
    """

    name: str
    controllers: Mapping[str, tuple[str, Sequence[str]]]
    options: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)
    interface: str = "position"
    listed: bool = True
    near: float = 0.3
    id: str = field(default="", compare=False)


def of(name: str) -> tuple[str, ...]:
    return ROBOTS[name].joints


def hand(name: str) -> tuple[str, ...]:
    return ROBOTS[name].fingers[:1]


TWO = ("left_", "right_")
UR_GRIPPER = {"robotiq_gripper_controller": (GRIPPER, hand("ur5e"))}
CASES = (
    Case("ur5e", {"scaled_joint_trajectory_controller": (TRAJECTORY, of("ur5e")), **UR_GRIPPER}),
    Case(
        "ur5e",
        {"forward_position_controller": (POSITION, of("ur5e")), **UR_GRIPPER},
        (
            "topics.command:=/forward_position_controller/commands",
            "control.output:=float64_multi_array",
            "control.rate_hz:=20.0",
        ),
        id="ur5e-forward-position",
    ),
    Case(
        "ur5e",
        {"forward_velocity_controller": (VELOCITY, of("ur5e")), **UR_GRIPPER},
        (
            "topics.command:=/forward_velocity_controller/commands",
            "control.output:=joint_velocity",
            "control.rate_hz:=20.0",
        ),
        interface="velocity",
        near=0.9,  # a velocity loop overshoots by what a measurement is late
        id="ur5e-forward-velocity",
    ),
    Case(
        "fr3",
        {"fr3_arm_controller": (TRAJECTORY, of("fr3")), "fr3_hand": (PARALLEL, hand("fr3"))},
        ("topics.gripper:=/fr3_hand/gripper_cmd", "gripper.output:=parallel_gripper_command"),
    ),
    Case(
        "xarm7",
        {"xarm7_traj_controller": (TRAJECTORY, of("xarm7")), "xarm_gripper": (GRIPPER, hand("xarm7"))},
        ("topics.gripper:=/xarm_gripper/gripper_cmd",),
    ),
    Case(
        "so101",
        {"forward_position_controller": (POSITION, of("so101") + hand("so101"))},
        ("gripper.max_speed:=20.0",),
    ),
    Case(
        "aloha",
        {
            f"{side}{what}": (POSITION, tuple(side + joint for joint in joints))
            for side in TWO
            for what, joints in (("arm", of("aloha")), ("hand", hand("aloha")))
        },
        (
            "control.output:=float64_multi_array",
            "gripper.output:=float64_multi_array",
            "gripper.max_speed:=20.0",
            *(
                f"{side}.{option}"
                for side in ("left", "right")
                for option in (
                    f"joint_names:=[{', '.join(f'{side}_{joint}' for joint in of('aloha'))}]",
                    f"gripper_joint_names:=[{side}_gripper]",
                    "joint_states:=/joint_states",
                    f"command:=/{side}_arm/commands",
                    f"gripper:=/{side}_hand/commands",
                )
            ),
        ),
        TWO,
    ),
)
EMBEDDED = "node.backend:=dds"
CASES += tuple(
    replace(case, options=(*case.options, EMBEDDED), id=f"{case.name}-embedded")
    for case in CASES
    if case.name in ("ur5e", "fr3") and not case.id
)


def prefix(package: str) -> Path | None:
    from ament_index_python.packages import PackageNotFoundError, get_package_prefix

    try:
        return Path(get_package_prefix(package))
    except PackageNotFoundError:
        return None


def controllers(case: Case) -> str:
    """The controller manager's parameters."""
    manager = {name: {"type": kind} for name, (kind, _) in case.controllers.items()}
    manager["joint_state_broadcaster"] = {"type": "joint_state_broadcaster/JointStateBroadcaster"}
    text: dict[str, Any] = {"controller_manager": {"ros__parameters": {"update_rate": RATE, **manager}}}
    for name, (kind, joints) in case.controllers.items():
        own: dict[str, Any] = {"joints": list(joints)}
        if kind == TRAJECTORY:
            own |= {"command_interfaces": ["position"], "state_interfaces": ["position", "velocity"]}
        elif kind in PACKAGES:
            own = {"joint": joints[0], "allow_stalling": True}
        text[name] = {"ros__parameters": own}
    return yaml.safe_dump(text)


class Rig:
    """Controllers on mock hardware, cameras, and what the joints did."""

    def __init__(self, case: Case, folder: Path, robot: Any, program: Callable[..., Any]) -> None:
        from sensor_msgs.msg import Image, JointState
        from std_msgs.msg import Bool, String

        self.case, self.robot, self.program = case, robot, program
        arms = [urdf(case.name, prefix=each) for each in case.prefixes]
        self.file = folder / "robot.urdf"
        self.file.write_text(arms[0])
        whole = joined(arms)
        (folder / "mock.urdf").write_text(
            with_mock_hardware(whole, homes(case.name, case.prefixes), case.interface)
        )
        (folder / "controllers.yaml").write_text(controllers(case))
        publisher = prefix("robot_state_publisher")
        manager = prefix("controller_manager")
        assert publisher is not None
        assert manager is not None
        description = program(
            str(publisher / "lib/robot_state_publisher/robot_state_publisher"), str(folder / "mock.urdf")
        )
        params = str(folder / "controllers.yaml")
        self.manager = program(
            str(manager / "lib/controller_manager/ros2_control_node"), "--ros-args", "--params-file", params
        )
        spawner = program(
            str(manager / "lib/controller_manager/spawner"),
            "joint_state_broadcaster",
            *case.controllers,
            "-p",
            params,
        )
        self.states: list[tuple[float, dict[str, float]]] = []

        def on_state(message: Any) -> None:
            known = self.states[-1][1] if self.states else {}
            self.states.append(
                (time.monotonic(), {**known, **dict(zip(message.name, message.position, strict=True))})
            )

        robot.node.create_subscription(JointState, "/joint_states", on_state, 50)
        description.wait_for("Robot initialized")
        self.manager.wait_for("Received robot description")
        robot.wait(lambda: spawner.process.poll() is not None, "the controllers", 90)
        assert spawner.process.returncode == 0, spawner.output + self.manager.output
        self.config: Config = load([config_file(case.name)] if case.listed else [], case.options)
        self._cameras = [robot.node.create_publisher(Image, topic, 1) for topic in self.config.camera.topics]
        self._stop = robot.node.create_publisher(Bool, "/vla_policy/stop", 1)
        self._bool, self._string = Bool, String

    def drive(self) -> None:
        from vla_ros.vision.messages import encode_image

        def send() -> None:
            for camera in self._cameras:
                image = np.random.default_rng().integers(90, 160, (48, 64, 3), dtype=np.uint8)
                camera.publish(bytes(encode_image(image, self.robot.node.get_clock().now().nanoseconds, "camera")))

        self.robot.node.create_timer(0.05, send)

    def start(self, *options: str) -> Any:
        words = (
            f"robot.urdf:={self.file if len(self.case.prefixes) == 1 else ''}",
            f"robot.tip_frame:={ROBOTS[self.case.name].tip}",
            "control.armed:=true",
            f"policy.amplitude:={AMPLITUDE}",
            f"policy.seconds:={SECONDS}",
            *self.case.options,
        )
        given = [word for option in (*words, *options) for word in ("-p", option)]
        return self.program(sys.executable, "-m", "vla_ros.cli", "run", "--config", self.case.name, *given)

    def stop(self) -> None:
        self._stop.publish(self._bool(data=True))


def joined(arms: Sequence[str]) -> str:
    """One URDF with all arms beside each other."""
    import xml.etree.ElementTree as ET

    if len(arms) == 1:
        return arms[0]
    root = ET.Element("robot", name="robot")
    ET.SubElement(root, "link", name="world")
    for text in arms:
        arm = ET.fromstring(text)
        base = arm.find("link")
        assert base is not None
        root.extend(list(arm))
        joint = ET.SubElement(root, "joint", name=f"{base.get('name')}_mount", type="fixed")
        ET.SubElement(joint, "parent", link="world")
        ET.SubElement(joint, "child", link=str(base.get("name")))
    return ET.tostring(root, "unicode")


@pytest.fixture(params=CASES, ids=[case.id or case.name for case in CASES])
def rig(request: pytest.FixtureRequest, tmp_path: Path, robot: Any, program: Callable[..., Any]) -> Rig:
    case: Case = request.param
    if EMBEDDED in case.options and os.environ.get("RMW_IMPLEMENTATION") != "rmw_cyclonedds_cpp":
        pytest.skip("actions of the embedded participant are those of rmw_cyclonedds_cpp")
    needed = {"controller_manager", "robot_state_publisher", "joint_state_broadcaster"}
    needed |= {PACKAGES[kind] for kind, _ in case.controllers.values() if kind in PACKAGES}
    missing = sorted(package for package in needed if prefix(package) is None)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return Rig(case, tmp_path, robot, program)


def known(rig: Rig, names: Sequence[str]) -> list[tuple[float, dict[str, float]]]:
    """When and where the joints were, from the first state that has them all."""
    return [each for each in list(rig.states) if set(names) <= each[1].keys()]


def test_the_joints_follow_the_path_the_gripper_moves_and_a_stop_holds(rig: Rig) -> None:
    case, robot = rig.case, ROBOTS[rig.case.name]
    joints = {each: [each + joint for joint in robot.joints] for each in case.prefixes}
    every = [name for names in joints.values() for name in names]
    rig.robot.wait(lambda: rig.states and set(every) <= rig.states[-1][1].keys(), "joint states")
    node = rig.start("policy.instruction:=one joint after the other")
    rig.drive()
    for each, names in joints.items():
        follow(
            lambda names=names: [(at, [state[name] for name in names]) for at, state in known(rig, every)],
            lambda ready: rig.robot.wait(ready, "the next round of the path", 90),
            AMPLITUDE,
            SECONDS,
            case.near,
        )
        fingers = [state[each + robot.fingers[0]] for _, state in known(rig, every)]
        gripper = rig.config.gripper
        ends = sorted((gripper.closed_position, gripper.open_position))
        assert [min(fingers), max(fingers)] == pytest.approx(ends, abs=0.02)
    assert "gripper_failed" not in node.output
    rig.stop()
    node.wait_for("operator_stop")
    time.sleep(0.5)  # a trajectory that was under way
    held, count = dict(rig.states[-1][1]), len(rig.states)
    rig.robot.wait(lambda: len(rig.states) > count + RATE // 2, "further joint states")
    still = [abs(rig.states[-1][1][name] - held[name]) for name in (*every, *homes(case.name, case.prefixes))]
    assert max(still) < 1e-3


PAGE = Path(__file__).parents[2] / "docs" / "robots" / "new-robot.md"


def test_the_page_for_a_robot_that_is_not_in_the_list(tmp_path, robot, program, monkeypatch) -> None:
    """Its steps as they stand there, with an arm that no configuration describes."""
    joints = of("kinova_j2")
    rig = Rig(Case("kinova_j2", {"arm_controller": (TRAJECTORY, joints)}, listed=False), tmp_path, robot, program)
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()

    def step(begin: str) -> str:
        """A command of the page, without its comment."""
        found = next(line for line in page.splitlines() if line.startswith(begin))
        return re.sub(r"  +#.*", "", found)

    def run(command: str) -> str:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "my_robot.yaml").write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    until, urdf = time.monotonic() + 40, step("ros2 param get")
    while subprocess.run(urdf, shell=True, capture_output=True, timeout=60, check=False).returncode:
        assert time.monotonic() < until, "ros2's daemon, which this starts, has not discovered the node"
    assert f"/arm_controller/joint_trajectory: {', '.join(joints)}" in run(
        step("vla-ros run --config my_robot.yaml --dry")
    )
    node = program("bash", "-c", "exec " + step("vla-ros run --config my_robot.yaml -p policy.instruction"))
    rig.drive()
    node.wait_for("is ready")
    first = dict(rig.states[-1][1])
    assert "success=True" in run(step("ros2 service call /vla_policy/enable"))

    def moved(joint: str) -> bool:
        return abs(rig.states[-1][1][joint] - first[joint]) > 0.03

    for joint in joints[:2]:
        rig.robot.wait(lambda joint=joint: moved(joint), f"motion of {joint}", 40)
    program("bash", "-c", "exec " + step("ros2 topic pub /arm_controller/joint_trajectory"))
    node.wait_for("armed -> stopped (command_contested")
    time.sleep(0.5)  # a trajectory that was under way
    held, count = dict(rig.states[-1][1]), len(rig.states)
    rig.robot.wait(lambda: len(rig.states) > count + RATE // 2, "further joint states")
    assert max(abs(rig.states[-1][1][joint] - held[joint]) for joint in joints) < 1e-3
