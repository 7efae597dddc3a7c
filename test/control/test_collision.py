"""Commands of the demo's arm next to obstacles: held, slowed, led out; and the scene."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from demo_arm import ARM, DT, HOME, STAMP, configure, spec_of, state

from vla_ros.collision.geometry import Body
from vla_ros.collision.world import obstacle_body
from vla_ros.config import build
from vla_ros.config.collision import read_obstacle
from vla_ros.control.collision import CollisionCheck
from vla_ros.control.command import Command
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.robot import RobotController
from vla_ros.errors import ConfigError
from vla_ros.kinematics.rotations import Pose, rotation_vector_matrix
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray, JointState

TABLE = "table = box 2 2 0.2 at 0 0 -0.1 support"
DOWN = np.array([0.0, 0.0, -0.04, 0.0, 0.0, 0.0, 1.0])
UP = np.array([0.0, 0.0, 0.02, 0.0, 0.0, 0.0, 1.0])


class Robot:
    """The demo's arm, which follows its commands at once."""

    def __init__(
        self, output: str = "joint_state", action: str = "arm.tip_delta + arm.gripper", **collision: Any
    ) -> None:
        options = {"check": True, "deceleration": 20.0, "obstacles": [TABLE]} | collision
        control = {"output": output, "rate_hz": 10.0, "delta_from": "commanded"}
        self.config = configure(collision=options, topics={"gripper": "/gripper"}, control=control)
        self.now = 100.0
        self.check = CollisionCheck(self.config, {"arm": ARM})
        self.check.steady = lambda: self.now
        spec = spec_of(action, 7 if "tip" in action else 8)
        self.controller = RobotController(self.config, spec, {"arm": ARM}, self.check)
        self.q, self.fingers = HOME.copy(), 0.04

    def step(self, action: np.ndarray) -> np.ndarray:
        """Execute an action; return the positions [7] that were commanded."""
        joints = {"arm": state(self.q, self.fingers)}
        [command] = self.controller.command(action, joints, STAMP, DT)
        self.controller.sent()
        if len(command.names) > 7 or not command.moves_on:
            self.fingers = float(command.positions[7])
        self.q = command.positions[:7].copy()
        return self.q

    @property
    def height(self) -> float:
        """Distance of the finger tips from the table."""
        tip = ARM.forward(self.q)
        return float(tip.position[2] + 0.013 * tip.rotation[2, 2])


def test_twists_of_an_arm_of_five_joints_are_refused() -> None:
    arm = Kinematics.from_urdf("demo", [f"joint_{number}" for number in range(1, 6)])
    config = Robot("twist_stamped").config
    with pytest.raises(ConfigError, match="5 joints cannot follow every twist"):
        CollisionCheck(config, {"arm": arm})


def repeat(robot: Robot, action: np.ndarray, steps: int = 60) -> None:
    """Execute an action until it is refused."""
    for _ in range(steps):
        robot.step(action)


def lower(robot: Robot) -> Refused:
    """Move the hand down until that is refused."""
    with pytest.raises(Refused) as refused:
        repeat(robot, DOWN)
    return refused.value


@pytest.mark.parametrize("output", ["joint_state", "joint_velocity", "twist_stamped"])
def test_the_arm_is_held_above_the_table_and_can_be_led_up_at_once(output: str) -> None:
    robot = Robot(output)
    refused = lower(robot)
    assert refused.reason is Reason.COLLISION_SCENE
    assert "table" in refused.detail
    nearest = robot.check.checker.nearest(robot.check._q)
    assert nearest.distance > 0.001
    before = robot.height
    robot.step(UP)
    assert robot.height > before


def test_the_arm_slows_down_before_it_is_held() -> None:
    """The hand approaches a wall with 1 cm a step; its joints stop within a few millimetres."""
    tip, forward = ARM.forward(HOME).position, np.array([0.01, 0, 0, 0, 0, 0, 1.0])
    robot, places = Robot(obstacles=[f"wall = box 0.2 2 2 at {tip[0] + 0.26} 0 1"]), [tip[0]]

    def approach() -> None:
        for _ in range(60):
            places.append(ARM.forward(robot.step(forward)).position[0])  # noqa: PERF401

    with pytest.raises(Refused, match="wall"):
        approach()
    steps = np.diff(places)
    assert steps[-1] < 0.5 * steps.max()


def test_a_slowed_command_hardly_leaves_the_workspace_box_whose_border_its_way_bends_across() -> None:
    """The first joint turns from one point of a side of the box to another one, a centimetre outside in between."""
    start, turn = HOME.copy(), np.array([0.2, 0, 0, 0, 0, 0, 0, 1.0])
    start[0] = -0.1
    beyond = float(ARM.forward(start).position[0]) + 1e-4
    for share in (0.3, 0.5, 0.8):
        robot = Robot(action="arm.joint_delta + arm.gripper", obstacles=[])
        limits = replace(
            robot.config.arms[0].limits, workspace_low=(-1.0, -1.0, -1.0), workspace_high=(beyond, 1.0, 1.0)
        )
        limits = replace(
            limits, max_translation_step=1.0, max_rotation_step=1.0, max_joint_step=1.0, velocity_scale=1.0
        )
        [arm] = robot.controller.arms
        arm._envelope = replace(arm._envelope, tip=limits)
        arm.command(turn, state(start, 0.04), STAMP, DT)
        shortened = arm.shortened(share)
        assert shortened is not None
        tip = ARM.forward(shortened.positions[:7]).position
        assert 0 < tip[0] - beyond < 1.01e-3
        assert shortened.positions[0] > start[0] + 1e-3


def test_a_slowed_command_is_where_the_next_one_starts() -> None:
    robot = Robot()
    lower(robot)
    for arm in robot.controller.arms:
        np.testing.assert_allclose(arm.next_start(state(robot.q, 0.04))[0], robot.q)


class Sagging(Robot):
    """It rests below its commands, where its driver lets it: up to 0.05 rad in the joints that carry the arm."""

    sag = np.array([0.0, 0.05, 0.0, 0.03, 0.0, 0.05, 0.0])

    def step(self, action: np.ndarray) -> np.ndarray:
        self.q = super().step(action) + self.sag
        return self.q


def test_an_arm_that_sags_is_held_above_the_table_where_it_is_and_can_be_led_up() -> None:
    """Its commands are 5 cm above it: from where it is, their way leads up."""
    robot = Sagging()
    refused = lower(robot)
    assert refused.reason is Reason.COLLISION_SCENE
    assert robot.check.checker.nearest(robot.check._q).distance > 0.001
    before = robot.height
    for _ in range(5):
        robot.step(UP)
    assert robot.height > before + 0.02


def test_an_arm_that_sags_slows_down_before_it_is_held() -> None:
    robot = Sagging(obstacles=[TABLE.removesuffix(" support")])
    heights = [robot.height]

    def approach() -> None:
        for _ in range(80):
            robot.step(DOWN * (1, 1, 0.25, 1, 1, 1, 1))
            heights.append(robot.height)

    with pytest.raises(Refused, match="table"):
        approach()
    steps = -np.diff(heights[1:])
    assert steps[-1] < 0.7 * steps.max()


def test_an_arm_that_is_late_is_kept_from_what_is_between_its_last_command_and_the_next_one() -> None:
    """It will pass both, and the way from where it is now passes a post by."""
    here, last, goal = HOME.copy(), HOME.copy(), HOME.copy()
    last[0], goal[0] = 0.4, 0.5
    goal[3] += 0.5  # draws the hand back
    middle = ARM.forward(0.9 * last + 0.1 * goal).position
    robot = Robot(obstacles=[f"post = sphere 0.01 at {middle[0]} {middle[1]} {middle[2]}"])
    joints = {"arm": state(here, 0.0)}

    def command(origin: np.ndarray) -> Command:
        velocity = (goal - origin) / DT
        return Command(ARM.joint_names, goal, STAMP, velocity=velocity, duration=DT)

    robot.check.limit([command(here)], joints)
    with pytest.raises(Refused, match="post"):
        robot.check.limit([command(last)], joints)


def test_the_arm_does_not_fold_into_itself() -> None:
    robot = Robot(action="arm.joint_delta + arm.gripper", obstacles=[])
    fold = np.array([0.0, 0.0, 0.0, 0.15, 0.0, 0.15, 0.0, 1.0])
    with pytest.raises(Refused) as refused:
        repeat(robot, fold)
    assert refused.value.reason is Reason.COLLISION_SELF
    assert robot.check.checker.nearest(robot.check._q).distance > 0.005


def test_without_the_check_the_same_motion_is_sent() -> None:
    robot = Robot(check=False)
    for _ in range(30):
        robot.step(DOWN)
    assert robot.height < 0.0
    assert robot.check.describe() == "collision: NOT CHECKED (collision.check is false)"


def test_the_description_names_bodies_pairs_obstacles_and_what_is_not_covered() -> None:
    text = Robot(scene="/obstacles", scene_required=True).check.describe()
    for part in (
        "pairs checked",
        "link_4",
        "table (support)",
        "/obstacles (required)",
        "2 mm from a support: left_finger",
    ):
        assert part in text
    assert "not covered: links without geometry: tool" in text


def test_the_description_says_what_a_servo_of_a_redundant_arm_must_not_do() -> None:
    said = "not covered: motions of arm that do not move its tip"
    assert said in Robot("twist_stamped").check.describe()
    assert said not in Robot("joint_velocity").check.describe()


def test_the_stopping_distance_counts() -> None:
    """The slower an arm stops, the earlier it is held."""
    heights = []
    for deceleration in (2.0, 20.0):
        robot = Robot(deceleration=deceleration)
        lower(robot)
        heights.append(robot.height)
    assert heights[0] > heights[1] + 0.001


@pytest.mark.parametrize(
    ("damping", "rate", "most"),
    [(0.0, 1000, 0.05), (1e-3, 100, 0.01), (2e-3, 100, 0.01), (1e-2, 100, 0.05), (2e-2, 500, 0.05)],
)
def test_a_twist_is_checked_along_the_way_that_any_servo_takes_near_singularities(
    damping: float, rate: int, most: float
) -> None:
    """Servos with other dampings and rates, which keep velocity limits as MoveIt Servo does, and then brake.

    At 100 Hz, a servo brakes from a speed that may be 10 ms old. It is off by at most ``most``, rad.
    """
    robot, rng = Robot("twist_stamped"), np.random.default_rng(0)
    for _ in range(60):
        q = np.clip(HOME + rng.uniform(-0.6, 0.6, 7), ARM.position_low, ARM.position_high)
        linear, angular = rng.normal(size=(2, 3))
        linear, angular = linear / np.linalg.norm(linear), 2.0 * angular / np.linalg.norm(angular)
        twist, here = np.concatenate((linear, angular)), ARM.forward(q)
        target = Pose(here.position + DT * linear, rotation_vector_matrix(DT * angular) @ here.rotation)
        end = ARM.solve(q, target)
        command = Command(
            ARM.joint_names, end, STAMP, velocity=(end - q) / DT, duration=DT, twist=(linear, angular)
        )
        ways, _ = robot.check.ways([command], {"arm": state(q, 0.04)})
        for _ in range(2):  # periods until the twist expires
            for _ in range(round(rate * DT)):
                jacobian = ARM.jacobian(q)
                speed = jacobian.T @ np.linalg.pinv(jacobian @ jacobian.T + damping**2 * np.eye(6)) @ twist
                speed /= max(1.0, (np.abs(speed) / ARM.velocity_limits).max())
                q = np.clip(q + speed / rate, ARM.position_low, ARM.position_high)
            rest = np.clip(q + speed * np.abs(speed) / (2 * 20.0), ARM.position_low, ARM.position_high)
            assert max(min(off(way, x) for way in ways) for x in (q, rest)) < most


def off(path: FloatArray, q: FloatArray) -> float:
    """Return how far joints ``q`` [N] are from a path [W, J], rad."""
    start, step = path[:-1, : len(q)], np.diff(path[:, : len(q)], axis=0)
    share = np.einsum("wj,wj->w", q - start, step) / np.maximum(np.einsum("wj,wj->w", step, step), 1e-12)
    nearest = start + np.clip(share, 0, 1)[:, None] * step
    return float(np.abs(nearest - q).max(axis=1).min())


def ball(robot: Robot, x: float) -> Body:
    assert robot.check.world is not None
    obstacle = read_obstacle(f"ball = sphere 0.1 at {x} 0 0.4")
    assert obstacle is not None
    return obstacle_body(robot.check.world, obstacle)


def test_an_obstacle_of_the_scene_that_appears_in_the_path_holds_until_it_leaves() -> None:
    robot = Robot(scene="/obstacles", obstacles=[])
    tip = ARM.forward(robot.q).position
    forward = np.array([0.04, 0, 0, 0, 0, 0, 1.0])
    robot.step(forward)
    robot.check.set_scene([ball(robot, tip[0] + 0.25)])
    with pytest.raises(Refused, match="ball") as refused:
        repeat(robot, forward, 10)
    assert refused.value.reason is Reason.COLLISION_SCENE
    robot.check.set_scene([])
    robot.step(forward)


def test_a_required_scene_that_is_missing_or_stale_holds() -> None:
    robot = Robot(scene="/obstacles", scene_required=True)
    with pytest.raises(Refused, match="none has arrived") as refused:
        robot.step(UP)
    assert refused.value.reason is Reason.SCENE_STALE
    robot.check.set_scene([])
    robot.step(UP)
    robot.now += 1.5
    with pytest.raises(Refused, match=r"1\.5 s old"):
        robot.step(UP)


def test_a_held_object_is_kept_from_the_table_while_the_gripper_is_closed() -> None:
    heights = []
    for held in ("", "box 0.04 0.04 0.2"):
        robot = Robot(held=held)
        robot.fingers = 0.0
        with pytest.raises(Refused) as refused:
            repeat(robot, DOWN * (1, 1, 1, 1, 1, 1, 0))
        heights.append(robot.height)
    assert "held" in refused.value.detail
    assert heights[1] > heights[0] + 0.05


def test_two_arms_do_not_meet() -> None:
    values: dict[str, Any] = {
        "robot.arms": ["left", "right"], "robot.urdf": "demo_two_arms", "collision.check": True,
        "collision.deceleration": 20.0, "control.rate_hz": 10.0,
    }  # fmt: skip
    chains = {}
    for name in ("left", "right"):
        joints = [f"{name}_joint_{number}" for number in range(1, 8)]
        values |= {
            f"{name}.command": f"/{name}",
            f"{name}.joint_names": joints,
            f"{name}.tip_frame": f"{name}_tool",
        }
        chains[name] = Kinematics.from_urdf("demo_two_arms", joints, "", f"{name}_tool")
    config = build(values)
    check = CollisionCheck(config, chains)
    parts = spec_of("left.joint_delta + right.joint_delta", 14), chains
    robot = RobotController(config, *parts, check)
    q = dict.fromkeys(chains, np.array([0, 1.2, 0, 0.3, 0, 0.3, 0.0]))
    towards = np.array([-0.1, 0, 0, 0, 0, 0, 0, 0.1, 0, 0, 0, 0, 0, 0])

    def approach() -> None:
        for _ in range(40):
            joints = {name: JointState(chains[name].joint_names, q[name], 1) for name in q}
            for command in robot.command(towards, joints, STAMP, DT):
                q[command.arm] = command.positions[:7]
            robot.sent()

    alone = RobotController(
        replace(config, control=replace(config.control, arms_hold_alone=True)),
        *parts,
        CollisionCheck(config, chains),
    )
    with pytest.raises(Refused, match=r"right: no joint state yet, so it cannot be kept clear of"):
        alone.command(towards, {"left": JointState(chains["left"].joint_names, q["left"], 1)}, STAMP, DT)
    with pytest.raises(Refused, match=r"left_.*right_|right_.*left_") as refused:
        approach()
    assert refused.value.reason is Reason.COLLISION_SELF
    assert check.checker.nearest(check._q).distance > 0.005
