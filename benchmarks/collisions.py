"""Random commands at full speed next to a table and two boxes, with MuJoCo as the judge of what collides.

    python benchmarks/collisions.py --robot ur5 --commands 200000 --seed 0 --json ur5.json

The descriptions are those of ``example-robot-data`` (extra ``robots``). MuJoCo has its own kinematics and its own
convex pieces of the same meshes (by CoACD: ``pip install coacd``), and the same excluded pairs. The arm executes
each command that is sent, and stops with ``collision.deceleration`` after a refused one.
"""

import argparse
import hashlib
import json
import math
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib.metadata import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from vla_ros.collision.geometry import find_mesh
from vla_ros.config import Config, build
from vla_ros.config.collision import Obstacle
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.collision import CollisionCheck
from vla_ros.control.command import Command, lifetime
from vla_ros.control.reasons import Refused
from vla_ros.control.robot import RobotController, make_kinematics
from vla_ros.kinematics.rotations import euler_xyz_matrix
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
FREE = 0.02  # m beyond the stop distance


def description(name: str) -> str:
    found = [file for file in files("example-robot-data") or [] if str(file).endswith(f"robots/{name}")]
    return str(found[0].locate())


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
    if robot == "panda":  # links 5 and 7 are 2 cm apart in most postures
        values["collision.srdf"] = description("panda_description/srdf/panda.srdf")
    if robot == "two_arms":
        values |= {"robot.arms": ["left", "right"]}
        for arm, side in (("left", 1), ("right", -1)):
            values |= {
                f"{arm}.command": f"/{arm}",
                f"{arm}.joint_states": f"/{arm}/joints",
                f"{arm}.mount": [0, 0.35 * side, 0, 0, 0, 0],
            }
        values["collision.obstacles"] = [*obstacles[:1], "post = cylinder 0.05 0.6 at 0.5 0 0.25"]
    return build(values)


class Judge:
    """MuJoCo's model of the same robots, with its own convex pieces; of the check only the pairs left out."""

    def __init__(self, config: Config, check: CollisionCheck, margin: float) -> None:
        spec = mujoco.MjSpec()
        spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_FILTERPARENT
        spec.compiler.degree = False
        self._spec, self._margin, self._meshes = spec, margin, dict[str, list[str]]()
        self.joints: list[str] = []
        several = len(config.arms) > 1
        for arm in config.arms:
            prefix = f"{arm.name}/" if several else ""
            mount = arm.mount or (0.0,) * 6
            self._robot(Path(arm.robot.urdf), prefix, np.array(mount[:3]), euler_xyz_matrix(np.array(mount[3:])))
        for obstacle in config.collision.parsed_obstacles:
            self._obstacle(obstacle)
        for first, second in check.world.unchecked:  # type: ignore[union-attr]
            if spec.body(first) is not None and spec.body(second) is not None:
                spec.add_exclude(bodyname1=first, bodyname2=second)
        self.model = spec.compile()
        self.data = mujoco.MjData(self.model)
        order = {
            self.model.joint(index).name: int(self.model.jnt_qposadr[index]) for index in range(self.model.njnt)
        }
        self._columns = np.array([order[name] for name in check.world.tree.names])  # type: ignore[union-attr]

    def _robot(self, urdf: Path, prefix: str, place: np.ndarray, turn: np.ndarray) -> None:
        root = ElementTree.parse(urdf).getroot()
        joints = {joint.find("child").get("link"): joint for joint in root.findall("joint")}
        links = {link.get("name"): link for link in root.findall("link")}
        below: dict[str, list[str]] = {}
        for child, joint in joints.items():
            below.setdefault(joint.find("parent").get("link"), []).append(child)

        def add(parent: Any, name: str, place: np.ndarray, turn: np.ndarray) -> None:
            body = parent.add_body(
                name="root" if name == "world" else prefix + name, pos=place, quat=quaternion(turn)
            )
            joint = joints.get(name)
            if joint is not None and joint.get("type") in ("revolute", "continuous", "prismatic"):
                kind = (
                    mujoco.mjtJoint.mjJNT_SLIDE if joint.get("type") == "prismatic" else mujoco.mjtJoint.mjJNT_HINGE
                )
                axis = numbers(joint.find("axis"), "xyz", "1 0 0")
                body.add_joint(name=prefix + joint.get("name"), type=kind, axis=axis)
                body.mass, body.inertia, body.explicitinertial = 1.0, [1.0] * 3, True
            for collision in links[name].findall("collision"):
                self._geom(body, collision, urdf, name)
            for child in below.get(name, []):
                add(body, child, *origin(joints[child]))

        add(self._spec.worldbody, next(name for name in links if name not in joints), place, turn)

    def _geom(self, body: Any, collision: Any, urdf: Path, link: str) -> None:
        place, turn = origin(collision)
        shape = collision.find("geometry")[0]
        common = {"pos": place, "quat": quaternion(turn), "margin": self._margin}
        if shape.tag == "box":
            body.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, size=numbers(shape, "size") / 2, **common)
        elif shape.tag == "cylinder":
            size = [float(shape.get("radius")), float(shape.get("length")) / 2, 0]
            body.add_geom(type=mujoco.mjtGeom.mjGEOM_CYLINDER, size=size, **common)
        elif shape.tag == "sphere":
            body.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, size=[float(shape.get("radius")), 0, 0], **common)
        else:
            for mesh in self._decomposed(
                find_mesh(shape.get("filename"), urdf, link), numbers(shape, "scale", "1 1 1")
            ):
                body.add_geom(type=mujoco.mjtGeom.mjGEOM_MESH, meshname=mesh, **common)

    def _decomposed(self, path: Path, scale: np.ndarray) -> list[str]:
        """Return the names of the convex pieces of a mesh, kept in a folder beside the temporary files."""
        key = hashlib.sha256(path.read_bytes() + scale.tobytes()).hexdigest()[:16]
        if key not in self._meshes:
            folder = Path(tempfile.gettempdir()) / "vla_ros_decompositions"
            folder.mkdir(exist_ok=True)
            stored = folder / f"{key}.npz"
            if not stored.exists():
                np.savez(stored, *decompose(path, scale))
            with np.load(stored) as pieces:
                self._meshes[key] = [f"{key}_{name}" for name in pieces.files]
                for name in pieces.files:
                    self._spec.add_mesh(name=f"{key}_{name}", uservert=pieces[name].ravel())
        return self._meshes[key]

    def _obstacle(self, obstacle: Obstacle) -> None:
        body = self._spec.worldbody.add_body(name=obstacle.name, pos=obstacle.position)
        if obstacle.kind == "box":
            body.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, size=np.array(obstacle.size) / 2, margin=self._margin)
        else:
            size = [obstacle.size[0], obstacle.size[1] / 2, 0]
            body.add_geom(type=mujoco.mjtGeom.mjGEOM_CYLINDER, size=size, margin=self._margin)

    def distance(self, q: np.ndarray) -> float:
        """Return the smallest distance at positions ``q`` of the tree, or the margin."""
        self.data.qpos[self._columns] = q
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_comPos(self.model, self.data)
        mujoco.mj_collision(self.model, self.data)
        return float(self.data.contact.dist.min(initial=self._margin))

    def along(self, path: np.ndarray, reach: np.ndarray, step: float) -> float:
        return min(self.distance(q) for q in between(path, reach, step))


def decompose(path: Path, scale: np.ndarray) -> list[np.ndarray]:
    import coacd
    import coal

    mesh = coal.MeshLoader().load(str(path), scale)  # reads the file only
    triangles = np.array([[t[0], t[1], t[2]] for t in map(mesh.tri_indices, range(mesh.num_tris))])
    coacd.set_log_level("error")
    parts = coacd.run_coacd(
        coacd.Mesh(np.asarray(mesh.vertices()), triangles), threshold=0.05, max_convex_hull=16,
        preprocess_resolution=40, resolution=1000, mcts_iterations=60, mcts_nodes=12, seed=0,
    )  # fmt: skip
    return [np.asarray(vertices) for vertices, _ in parts]


def numbers(element: Any, attribute: str, default: str = "0 0 0") -> np.ndarray:
    text = default if element is None else element.get(attribute, default)
    return np.array([float(each) for each in text.split()])


def origin(element: Any) -> tuple[np.ndarray, np.ndarray]:
    found = element.find("origin")
    return numbers(found, "xyz"), euler_xyz_matrix(numbers(found, "rpy"))


def quaternion(turn: np.ndarray) -> np.ndarray:
    found = np.empty(4)
    mujoco.mju_mat2Quat(found, turn.ravel())
    return found


def between(path: np.ndarray, reach: np.ndarray, step: float) -> Iterator[np.ndarray]:
    """Yield positions along a path, between which nothing moves further than about ``step``."""
    yield path[0]
    for start, end in pairwise(path):
        count = math.ceil(float(np.abs(end - start) @ reach) / step)
        for index in range(1, count + 1):
            yield start + (end - start) * (index / count)


class Arms:
    """Arms that execute commands exactly, and stop with a deceleration of each joint."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config, self.rng = config, np.random.default_rng(seed)
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

    def place(self, judge: Judge, clear: float) -> None:
        while True:
            q = self.rng.uniform(np.maximum(self.tree.low, -math.pi), np.minimum(self.tree.high, math.pi))
            moved = np.isin(np.arange(len(q)), [column for own in self.columns.values() for column in own])
            self.q = self.tree.follow(np.where(moved, q, np.clip(0.0, self.tree.low, self.tree.high)))
            if judge.distance(self.q) >= clear:
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
        path = [self.q.copy()]
        for _ in range(10 if self.twist else 1):
            for command in commands:
                columns, chain = self.columns[command.arm], self.kinematics[command.arm]
                part = seconds / (10 if self.twist else 1)
                if command.twist is not None:
                    jacobian = chain.jacobian(self.q[columns])
                    speed = jacobian.T @ np.linalg.solve(
                        jacobian @ jacobian.T + 1e-4 * np.eye(6), np.concatenate(command.twist)
                    )
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
        deceleration, path, start, speed = (
            self.config.collision.deceleration,
            [self.q.copy()],
            self.q.copy(),
            self.speed,
        )
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


def measure(robot: str, output: str, commands: int, seed: int) -> dict[str, Any]:
    config = options(robot, output)
    arms = Arms(config, seed)
    stop = config.collision.stop_distance
    judge = Judge(config, arms.check, stop + FREE)
    expires, rng = lifetime(config), arms.rng
    wall, cpu, penetrated, deepest = [], [], 0, 0.0
    free = free_held = held = led = 0
    action, left = arms.action(), 0
    limit, path_of, seen = arms.check.limit, arms.check.path, []

    def timed(*arguments: Any) -> float:
        begin, used = time.perf_counter(), time.thread_time()
        try:
            return limit(*arguments)
        finally:
            wall.append(time.perf_counter() - begin)
            cpu.append(time.thread_time() - used)

    def watched(*arguments: Any) -> Any:
        seen.append(path_of(*arguments))
        return seen[-1]

    arms.check.limit, arms.check.path = timed, watched  # type: ignore[method-assign, assignment]

    def judged(path: np.ndarray) -> None:
        nonlocal penetrated, deepest
        depth = -judge.along(path, arms.reach, 0.01)
        penetrated += depth > 1e-3
        deepest = max(deepest, depth)

    for number in range(commands):
        if number % 200 == 0:
            arms.place(judge, stop + 0.005)
        if not left:
            action, left = arms.action(), int(rng.integers(4, 17))
        left -= 1
        seen.clear()
        try:
            sent = arms.controller.command(action, arms.joints(), 1, 1 / RATE)
            arms.controller.executed()
        except Refused:
            sent = ()
        is_free = bool(seen) and judge.along(seen[0][0], arms.reach, 0.02) >= stop + FREE - 1e-6
        free += is_free
        if sent:
            lost = arms.config.arms[0].output != "joint_state" and rng.random() < 0.05
            judged(arms.executed(sent, expires if lost else 1 / RATE))
            if lost:
                judged(arms.stopped())
            continue
        free_held += is_free
        held += 1
        judged(arms.stopped())
        arms.controller.hold(arms.joints())
        left = 0
        try:  # the way that it came
            sent = arms.controller.command(-action * 0.2, arms.joints(), 1, 1 / RATE)
            arms.controller.executed()
            led += 1
            judged(arms.executed(sent, 1 / RATE))
        except Refused:
            pass
    return {
        "robot": robot, "output": output, "commands": commands, "seed": seed, "penetrations": penetrated,
        "largest_mm": round(1e3 * max(deepest, 0.0), 3), "held_share": free_held / max(free, 1), "free": free,
        "held": held, "escaped_share": led / max(held, 1), "p50_ms": 1e3 * float(np.percentile(wall, 50)),
        "p99_ms": 1e3 * float(np.percentile(wall, 99)), "cpu_p50_ms": 1e3 * float(np.percentile(cpu, 50)),
        "cpu_p99_ms": 1e3 * float(np.percentile(cpu, 99)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robot", choices=(*ROBOTS, "two_arms"), default="ur5")
    parser.add_argument("--output", choices=tuple(OUTPUTS), default="position")
    parser.add_argument("--commands", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.robot, arguments.output, arguments.commands, arguments.seed)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
