"""Random commands at full speed next to a table and two boxes, with MuJoCo as the judge of what collides.

    python benchmarks/collisions.py --robot ur5 --commands 200000 --seed 0 --json ur5.json

The descriptions are those of ``example-robot-data`` (extra ``robots``). MuJoCo has its own kinematics and its own
convex pieces of the same meshes (by CoACD: ``pip install coacd``), and the same excluded pairs. The arm executes
each command that is sent; a twist as MoveIt Servo does: by a pseudo-inverse (damped, differently for each command),
all joints slower where one would exceed its velocity limit (``jointLimitVelocityScalingFactor`` of
``moveit_servo``). It stops with ``collision.deceleration`` after a refused command.
"""

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from tools.collision_judge import Judge
from vla_ros.config import Config, build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.collision import CollisionCheck
from vla_ros.control.command import Command, lifetime
from vla_ros.control.reasons import Refused
from vla_ros.control.robot import RobotController, make_kinematics
from vla_ros.errors import ConfigError, install
from vla_ros.types import JointState

RATE = 20.0
DECELERATION = {"so101": 20.0}
ROBOTS = {
    "ur5": ("ur_description/urdf/ur5_robot.urdf", "ee_link", 1.0),
    "panda": ("panda_description/urdf/panda.urdf", "panda_hand_tcp", 1.0),
    "xarm7": ("xarm_description/urdf/xarm7.urdf", "link_eef", 1.0),
    "so101": ("so_arm_description/urdf/so101.urdf", "gripper_frame_link", 0.45),
}
"""File in example-robot-data's ``robots``, tip, and the size of the surroundings."""
OUTPUTS = {"position": "joint_state", "velocity": "joint_velocity_state", "twist": "twist_stamped"}
FREE = 0.02  # m beyond the hold distance
ASKED = 4  # one of so many commands is asked whether it is free
DAMPING = (1e-3, 2e-2)  # of the servo: between these, another one for each command
ATTEMPTS = 8  # to leave after a refused command: the action reversed, then random ones, at a fifth of the speed
BLOCK = 1000  # commands of one process at a time, the same for any number of processes


def description(name: str) -> str:
    try:
        found = [file for file in files("example-robot-data") or [] if str(file).endswith(f"robots/{name}")]
        return str(found[0].locate())
    except (PackageNotFoundError, IndexError):
        raise SystemExit(f"no {name} in example-robot-data: {install('robots')} coacd") from None


def options(robot: str, output: str) -> Config:
    source, tip, size = ROBOTS["panda" if robot == "two_arms" else robot]
    boxes = {
        "table": (2, 2, 0.1, 0, 0, -0.065),
        "left_box": (0.2, 0.2, 0.3, 0.45, 0.35, 0.15),
        "right_box": (0.15, 0.3, 0.5, -0.45, -0.4, 0.25),
    }
    obstacles = [
        "{} = box {:g} {:g} {:g} at {:g} {:g} {:g}".format(name, *(size * each for each in numbers))
        for name, numbers in boxes.items()
    ]
    values: dict[str, Any] = {
        "robot.urdf": description(source), "robot.tip_frame": tip, "control.output": OUTPUTS[output],
        "control.rate_hz": RATE, "collision.check": True, "collision.deceleration": DECELERATION.get(robot, 10.0),
        "collision.obstacles": obstacles, "gripper.mode": "none",
    }  # fmt: skip
    if robot in ("panda", "two_arms"):  # links 5 and 7 are 2 cm apart in most postures
        values["collision.srdf"] = description("panda_description/srdf/panda.srdf")
    if robot == "two_arms":
        values["collision.srdf"] = srdf_of_both(Path(values["collision.srdf"]))
        values |= {"robot.arms": ["left", "right"]}
        for arm, side in (("left", 1), ("right", -1)):
            values |= {
                f"{arm}.command": f"/{arm}",
                f"{arm}.joint_states": f"/{arm}/joints",
                f"{arm}.mount": [0, 0.35 * side, 0, 0, 0, 0],
            }
        values["collision.obstacles"] = [*obstacles[:1], "post = cylinder 0.05 0.6 at 0.5 0 0.25"]
    return build(values)


def srdf_of_both(path: Path) -> str:
    """Write the pairs of an SRDF for the links of the arms ``left`` and ``right``; return the file's name."""
    root = ElementTree.parse(path).getroot()
    for each in root.findall("disable_collisions"):
        root.remove(each)
        for side in ("left/", "right/"):
            ElementTree.SubElement(root, each.tag, link1=side + each.get("link1"), link2=side + each.get("link2"))
    with tempfile.NamedTemporaryFile("wb", prefix="both_", suffix=".srdf", delete=False) as file:
        ElementTree.ElementTree(root).write(file)
    return file.name


class Arms:
    """Arms that execute commands exactly, and stop with a deceleration of each joint."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config, self.rng, self.servo = config, np.random.default_rng(seed), np.random.default_rng(seed)
        self.kinematics = make_kinematics(config)
        self.check = CollisionCheck(config, self.kinematics)
        self.twist = config.arms[0].output == "twist_stamped"
        part = "tip_delta[rotation_vector]" if self.twist else "joint_velocity[rad/s]"
        counts = [6 if self.twist else len(chain.joint_names) for chain in self.kinematics.values()]
        text = " + ".join(f"{name}.{part}" for name in self.kinematics)
        self.size = sum(counts)
        spec = PolicySpec(action=parse_components(text, action=True), dimension=self.size)
        self.controller = RobotController(config, spec, self.kinematics, self.check)
        world = self.check.world
        assert world is not None
        self.tree, self.reach = world.tree, world.reach
        own = [
            (name, [world.joints[name][joint] for joint in chain.joint_names])
            for name, chain in self.kinematics.items()
        ]
        self.columns = dict(own)
        self.q, self.speed = np.zeros(len(self.tree.names)), np.zeros(len(self.tree.names))
        self.limits = np.concatenate([chain.velocity_limits for chain in self.kinematics.values()])

    def random(self) -> np.ndarray:
        q = self.rng.uniform(np.maximum(self.tree.low, -math.pi), np.minimum(self.tree.high, math.pi))
        moved = np.isin(np.arange(len(q)), [column for own in self.columns.values() for column in own])
        return self.tree.follow(np.where(moved, q, np.clip(0.0, self.tree.low, self.tree.high)))

    def place(self, judge: Judge, clear: float) -> None:
        while True:
            self.q = self.random()
            if self.check.checker.nearest(self.q).distance >= clear and judge.distance(self.q) >= 0.0:
                break
        self.speed[:] = 0.0
        self.controller.reset()

    def action(self) -> np.ndarray:
        """Return a random direction at full speed: at least one joint (or the tip) as fast as it may be."""
        direction = self.rng.normal(size=self.size)
        if self.twist:
            limits = self.config.limits
            halves = direction.reshape(-1, 2, 3)
            halves /= np.linalg.norm(halves, axis=2, keepdims=True)
            return (halves * [[limits.max_translation_step], [limits.max_rotation_step]]).ravel()
        return direction * np.min(self.limits / np.abs(direction))

    def joints(self) -> dict[str, JointState]:
        return {
            name: JointState(chain.joint_names, self.q[self.columns[name]], 1)
            for name, chain in self.kinematics.items()
        }

    def executed(self, commands: tuple[Command, ...], seconds: float) -> np.ndarray:
        """Move for ``seconds``; return the path."""
        path, damping = [self.q.copy()], math.exp(self.servo.uniform(*np.log(DAMPING)))
        for _ in range(10 if self.twist else 1):
            for command in commands:
                columns, chain = self.columns[command.arm], self.kinematics[command.arm]
                part = seconds / (10 if self.twist else 1)
                if command.twist is not None:
                    twist = np.concatenate(command.twist)
                    [speed] = chain.resolve(self.q[columns][None], twist, np.array([damping]))
                elif command.velocities is not None:
                    speed = np.array([command.velocities[name] for name in chain.joint_names])
                else:
                    speed = (command.positions[: len(columns)] - self.q[columns]) / part
                self.speed[columns] = speed
                self.q[columns] = np.clip(self.q[columns] + part * speed, chain.position_low, chain.position_high)
            path.append(self.q.copy())
        return np.array(path)

    def stopped(self) -> np.ndarray:
        """Decelerate to rest; return the path."""
        deceleration, path = self.config.collision.deceleration, [self.q.copy()]
        start, speed = self.q.copy(), self.speed
        for time_ in np.linspace(0, np.abs(speed).max() / deceleration, 8)[1:]:
            passed = np.minimum(time_, np.abs(speed) / deceleration)
            self.q = np.clip(
                start + speed * passed - np.sign(speed) * deceleration * passed**2 / 2,
                self.tree.low,
                self.tree.high,
            )
            path.append(self.q.copy())
        self.speed = np.zeros_like(speed)
        return np.array(path)


@dataclass
class Counts:
    """What happened to some commands."""

    commands: int = 0
    penetrations: int = 0
    deepest: float = 0.0  # m
    deepest_at: tuple[int, int] = (0, 0)  # block and command
    free: int = 0
    share: float = 0.0  # sum over free commands: the part that was executed in the same time
    free_held: int = 0
    held: int = 0
    led: int = 0
    led_back: int = 0  # by the reversed action
    wall: list[float] = field(default_factory=list)  # s
    cpu: list[float] = field(default_factory=list)  # s

    def add(self, other: "Counts") -> None:
        if other.deepest > self.deepest:
            self.deepest, self.deepest_at = other.deepest, other.deepest_at
        for name in vars(self).keys() - {"deepest", "deepest_at"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def judges(config: Config, arms: Arms) -> tuple[Judge, Judge, Judge]:
    """Return who tells penetrations, and two who tell free motions.

    The second one knows no pairs that are never further apart; the third one does, and tells distances up to the
    hold distance.
    """
    far = config.collision.hold_distance + FREE
    rough = Judge(config, arms.check, far)
    near = list[set[tuple[str, str]]]()
    for _ in range(50):
        near.append(rough.near(arms.random()))
    roomy = Judge(config, arms.check, far, set.intersection(*near))
    return Judge(config, arms.check, 0.0), roomy, Judge(config, arms.check, config.collision.hold_distance)


def measure(arms: Arms, judge: Judge, roomy: Judge, tight: Judge, seed: int, block: int, commands: int) -> Counts:
    """Send a block of random commands, and judge what the arms do."""
    config, rng, counts = arms.config, np.random.default_rng([seed, block]), Counts()
    arms.rng, arms.servo = rng, np.random.default_rng([seed, block, 1])
    stop, expires = config.collision.hold_distance, lifetime(config)
    action, left = arms.action(), 0
    limit, ways_of, seen, shares = CollisionCheck.limit, CollisionCheck.ways, [], []

    def timed(*arguments: Any) -> float:
        begin, used = time.perf_counter(), time.thread_time()
        try:
            shares.append(limit(arms.check, *arguments))
            return shares[-1]
        finally:
            counts.wall.append(time.perf_counter() - begin)
            counts.cpu.append(time.thread_time() - used)

    def watched(*arguments: Any) -> Any:
        seen.append(ways_of(arms.check, *arguments))
        return seen[-1]

    arms.check.limit, arms.check.ways = timed, watched  # type: ignore[method-assign, assignment]

    def judged(path: np.ndarray) -> None:
        depth = -min(judge.along(path, arms.reach, 0.01))
        counts.penetrations += depth > 1e-3
        if depth > counts.deepest:
            counts.deepest, counts.deepest_at = depth, (block, counts.commands)

    for number in range(commands):
        if number % 200 == 0:
            arms.place(judge, stop)
        counts.commands += 1
        if not left:
            action, left = arms.action(), int(rng.integers(4, 17))
        left -= 1
        seen.clear()
        shares.clear()
        try:
            sent = arms.controller.command(action, arms.joints(), 1, 1 / RATE)
            arms.controller.sent()
        except Refused:
            sent = ()
        is_free = bool(seen) and number % ASKED == 0
        for who, least in ((roomy, stop + FREE), (tight, stop)):
            is_free = is_free and all(
                each >= least - 1e-6 for way in seen[0][0] for each in who.along(way, arms.reach, 0.02)
            )
        counts.free += is_free
        counts.share += sum(shares[:1]) * is_free
        if sent:
            lost = config.arms[0].output != "joint_state" and rng.random() < 0.05
            judged(arms.executed(sent, expires if lost else 1 / RATE))
            if lost:
                judged(arms.stopped())
            continue
        counts.free_held += is_free
        counts.held += 1
        judged(arms.stopped())
        arms.controller.hold(arms.joints())
        left = 0
        for attempt in range(ATTEMPTS):  # the way that it came, then others
            away = -action if not attempt else arms.action()
            try:
                sent = arms.controller.command(away * 0.2, arms.joints(), 1, 1 / RATE)
            except Refused:
                continue
            arms.controller.sent()
            counts.led += 1
            counts.led_back += not attempt
            judged(arms.executed(sent, 1 / RATE))
            break
    if not all(each.complete() for each in (judge, roomy, tight)):
        raise RuntimeError("MuJoCo has no memory for all contacts")
    return counts


_forked = list[Any]()  # what processes inherit: the arms, the judges, and when they begin no more


def _block(seed: int, block: int, commands: int) -> Counts:
    arms, *who, end = _forked
    return measure(arms, *who, seed, block, commands) if time.monotonic() < end else Counts()


def measure_all(
    robot: str, output: str, commands: int, seed: int, processes: int = 1, seconds: float = math.inf
) -> dict[str, Any]:
    """Send all commands, or those that ``processes`` have time for in about ``seconds``."""
    begin = time.monotonic()
    config = options(robot, output)
    arms = Arms(config, seed)
    _forked[:] = arms, *judges(config, arms), begin + seconds
    blocks = [
        (seed, number, min(BLOCK, commands - start)) for number, start in enumerate(range(0, commands, BLOCK))
    ]
    total = Counts()
    if processes == 1:
        for each in blocks:
            total.add(_block(*each))
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
            for found in pool.map(_block, *zip(*blocks, strict=True)):
                total.add(found)
    (p50, p99), (cpu_p50, cpu_p99) = (
        1e3 * np.percentile(times or [math.nan], (50, 99)) for times in (total.wall, total.cpu)
    )
    return {
        "robot": robot, "output": output, "commands": total.commands, "seed": seed, "processes": processes,
        "penetrations": total.penetrations, "largest_mm": round(1e3 * total.deepest, 3),
        "largest_at": total.deepest_at, "free": total.free, "held_share": total.free_held / max(total.free, 1),
        "free_speed": total.share / max(total.free, 1), "held": total.held,
        "escaped_share": total.led / max(total.held, 1),
        "back_share": total.led_back / max(total.held, 1), "p50_ms": p50, "p99_ms": p99,
        "cpu_p50_ms": cpu_p50, "cpu_p99_ms": cpu_p99, "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robot", choices=(*ROBOTS, "two_arms"), default="ur5")
    parser.add_argument("--output", choices=tuple(OUTPUTS), default="position")
    parser.add_argument("--commands", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="which share the commands")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no more commands afterwards")
    parser.add_argument("--json", type=Path)
    options_ = vars(parser.parse_args())
    path = options_.pop("json")
    try:
        text = json.dumps(measure_all(**options_), indent=2)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    print(text)
    if path:
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
