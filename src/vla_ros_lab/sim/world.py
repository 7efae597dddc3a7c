"""The simulated table-top: one or two arms and a few objects in MuJoCo, with cameras and joint sensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.errors import MissingDependencyError, install
from vla_ros.types import Float32Array, FloatArray, JointState, UInt8Array
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.depth import misplaced, sensed, turn_camera, unproject
from vla_ros_lab.sim.render import Renderer
from vla_ros_lab.sim.scene import Judge, Scene, draw
from vla_ros_lab.sim.tasks import COLOURS, KINDS, SHAPES, SLOTS

TIMESTEP = 0.002
"""Physics time step of ``assets/table_top.xml``, seconds."""

_JOINTS, _OF_AN_ARM = len(arm.JOINT_NAMES), len(arm.JOINT_NAMES) + len(arm.FINGER_NAMES)
_TICK = 0.02 * 1.001  # s: joint states at 50 Hz or a little more
_SETTLING = 50  # physics steps at the start of an episode
_TWO_ARMS_FOVY = 62.0  # degrees; shows the objects of both arms


@dataclass(frozen=True)
class WorldOptions:
    """Options of the table-top."""

    width: int = 224  # image width in pixels
    height: int = 224  # image height in pixels
    tasks: tuple[str, ...] = ("pick",)  # tasks to draw from (:data:`~vla_ros_lab.sim.tasks.TASK_NAMES`)
    camera_gain: float = 1.0  # factor on pixel values
    camera_turn: float = 0.0  # degrees by which the front camera is moved counter-clockwise around what it looks at
    bump: float = 0.0  # largest distance by which the tool is bumped, metres; 0: no bumps
    bump_chance: float = 0.15  # probability of a bump at each step
    arms: int = 1  # 1 or 2
    rate_hz: float = 10.0  # control steps a second
    objects: int = 0  # number of objects with one arm, including the target; 0 draws three or four
    shrink: float = 0.0  # metres by which the region from which objects are drawn is smaller on each side
    displace: float = 0.0  # metres by which targets are outside that region
    depth_sensor: bool = False  # points with the noise and the holes of a stereo camera, else exact
    # Metres and degrees by which the camera's pose, with which points are computed, is wrong.
    extrinsics: tuple[float, float] = (0.0, 0.0)


class TableTop:
    """A MuJoCo world; the same seed and commands give the same images and poses. Use it from one thread.

    Joint vectors hold the nine joints of each arm in turn (seven in radians, then two fingers in metres).
    Positions are in the table's frame, which is the base frame of a single arm.

    Attributes:
        mounts: The arms.
        joint_names: All joints, in the order of the vectors.
        substeps: Physics steps of one control step.
        ticks: Parts of a control step, each about 0.02 s; joint states are published once per tick.

    Raises:
        MissingDependencyError: MuJoCo is not installed.
    """

    def __init__(self, options: WorldOptions | None = None) -> None:
        try:
            import mujoco
        except ImportError as error:
            found = f"the simulation: MuJoCo does not import ({error})"
            raise MissingDependencyError(f"{found}; install it with: {install('sim')}") from error
        self.options = options or WorldOptions()
        self._mujoco = mujoco
        self.substeps = round(1 / (self.options.rate_hz * TIMESTEP))
        parts = range(math.ceil(self.substeps * TIMESTEP / _TICK), self.substeps + 1)
        self.ticks = next(count for count in parts if self.substeps % count == 0)
        self._ramp_steps = round(0.8 * self.substeps)
        self.mounts = arm.ONE_ARM if self.options.arms == 1 else arm.TWO_ARMS
        self.joint_names = tuple(name for mount in self.mounts for name in mount.joint_names)
        self._model: Any = _model(mujoco, self.mounts)
        if self.options.camera_turn:
            turn_camera(mujoco, self._model.camera("front"), math.radians(self.options.camera_turn))
        self._data: Any = mujoco.MjData(self._model)
        joints = [self._model.joint(name) for name in self.joint_names]
        self._places = np.concatenate([joint.qposadr for joint in joints])
        self._speeds = np.concatenate([joint.dofadr for joint in joints])
        self._range = np.array([joint.range for joint in joints]).T
        self._is_finger = np.arange(len(joints)) % _OF_AN_ARM >= _JOINTS
        self._tools = [self._model.site(f"{mount.prefix}tool").id for mount in self.mounts]
        self._bodies = [self._model.body(f"object_{slot}").id for slot in range(SLOTS)]
        self._renderer: Renderer | None = None
        self.reset(0)

    @property
    def wrist_cameras(self) -> tuple[str, ...]:
        return tuple(f"{mount.prefix}wrist" for mount in self.mounts)

    # --- episodes ---

    def reset(self, seed: int) -> Scene:
        """Start the episode of ``seed``: objects placed, hand open at the start pose, everything at rest."""
        options = self.options
        self.scene = draw(seed, options.tasks, self.mounts, options.objects, options.shrink, options.displace)
        self.judge = Judge(self.scene)
        self._random = np.random.default_rng([seed, 0xB0B])
        self._sensing, self._seed = np.random.default_rng([seed, 0xDE97]), seed
        self._mujoco.mj_resetData(self._model, self._data)
        for slot in range(SLOTS):
            self._place(slot)
        fingers = np.full(_OF_AN_ARM - _JOINTS, arm.FINGER_TRAVEL)
        self._goal = np.concatenate([part for start in self.scene.starts for part in (arm.inverse(start), fingers)])
        self._from, self._ramp = self._goal.copy(), np.full(len(self._goal), self._ramp_steps)
        self._velocity = np.zeros(len(self._goal))  # added to the targets until the next command
        self._data.qpos[self._places] = self._goal
        self._data.ctrl[:] = self._goal
        for _ in range(_SETTLING):
            self._mujoco.mj_step(self._model, self._data)
        return self.scene

    def judge_by(self, scene: Scene) -> None:
        """Judge the rest of the episode by the task of ``scene``, which has the same objects."""
        self.scene = scene
        self.judge = Judge(scene)

    def _place(self, slot: int) -> None:
        """Place the object of a slot, or park an empty slot; only one shape is visible and collides."""
        thing = self.scene.objects[slot] if slot < len(self.scene.objects) else None
        for shape in SHAPES:
            geom = self._model.geom(f"{shape}_{slot}")
            shown = thing is not None and shape == thing.shape
            # A parked slot lies on the floor behind the camera as an invisible cylinder.
            solid = shown or (thing is None and shape == "cylinder")
            geom.contype[:] = 2 if solid else 0
            geom.conaffinity[:] = 3 if solid else 0
            geom.rgba[:] = (*(COLOURS[thing.colour] if thing else (0.0, 0.0, 0.0)), 1.0 if shown else 0.0)
        joint = f"object_{slot}"
        turn = thing.yaw / 2 if thing else 0.0
        position = thing.position if thing else self._model.body(joint).pos
        self._data.joint(joint).qpos[:] = (*position, math.cos(turn), 0.0, 0.0, math.sin(turn))

    # --- physics ---

    def command(self, positions: FloatArray) -> None:
        """Set the position targets of all joints, in the order of :attr:`joint_names`."""
        self.command_named(self.joint_names, positions)

    def command_named(self, names: Sequence[str], positions: Sequence[float] | FloatArray) -> None:
        """Set the position targets of the named joints; the others keep theirs.

        The arm's targets move to the positions linearly within 0.8 control steps, the fingers' at once. Raises
        ValueError if a name is unknown, the lengths differ or a position is not finite.
        """
        self._begin(self._rows(names, positions), np.array(positions, dtype=np.float64))

    def command_velocities(self, names: Sequence[str], velocities: Sequence[float]) -> None:
        """Move the named joints at these velocities (rad/s, m/s) until they are commanded again."""
        rows = self._rows(names, velocities)
        self._begin(rows, self._current_target()[rows])
        self._velocity[rows] = velocities

    def _begin(self, rows: list[int], goal: FloatArray) -> None:
        self._from[rows] = self._current_target()[rows]
        self._goal[rows], self._velocity[rows], self._ramp[rows] = goal, 0.0, 0

    def _rows(self, names: Sequence[str], values: Sequence[float] | FloatArray) -> list[int]:
        if len(names) != len(values) or not np.all(np.isfinite(values)):
            raise ValueError(f"found {list(values)} for {len(names)} joints, expected a finite number for each")
        unknown = [name for name in names if name not in self.joint_names]
        if unknown:
            raise ValueError(f"found joint {unknown[0]!r}, expected one of {', '.join(self.joint_names)}")
        return [self.joint_names.index(name) for name in names]

    def advance(self, substeps: int) -> None:
        """Advance by ``substeps`` of 2 ms."""
        for _ in range(substeps):
            if self._velocity.any():
                moved = np.clip(self._goal + TIMESTEP * self._velocity, *self._range)
                self._from, self._goal = self._from + (moved - self._goal), moved
            self._ramp = np.minimum(self._ramp + 1, self._ramp_steps)
            self._data.ctrl[:] = self._current_target()
            self._mujoco.mj_step(self._model, self._data)

    def _current_target(self) -> FloatArray:
        share = self._ramp / self._ramp_steps
        target: FloatArray = self._from + share * (self._goal - self._from)
        target[self._is_finger] = self._goal[self._is_finger]
        return target

    def step(self, positions: FloatArray | None = None) -> bool:
        """Advance by a control step; return True once the episode is decided."""
        if positions is not None:
            self.command(positions)
        self.advance(self.substeps)
        return self.watch()

    def watch(self) -> bool:
        """Bump the arm at random (``options.bump``) and update the judge; call once per control step."""
        if self.options.bump and self._random.random() < self.options.bump_chance:
            self._bump()
        return self.judge.update(self.object_positions())

    def _bump(self) -> None:
        """Displace the tool by up to ``options.bump`` metres, as if a person bumped into the arm."""
        shift = self._random.normal(size=3) * (1.0, 1.0, 0.5)
        shift *= self.options.bump * self._random.uniform(0.4, 1.0) / np.linalg.norm(shift)
        bumped = 0 if len(self.mounts) == 1 else int(self._random.integers(len(self.mounts)))
        rows = slice(_OF_AN_ARM * bumped, _OF_AN_ARM * bumped + _JOINTS)
        base = self.mounts[bumped].position
        place = np.maximum(self.tool_position(bumped) - base + shift, (0.3, -0.35, 0.03))
        goal = self._goal.copy()
        try:
            goal[rows] = arm.inverse(place, start=self.joint_positions()[rows])
        except ValueError:  # out of reach: no bump
            return
        self.command(goal)
        self.advance(self.substeps)

    # --- sensors ---

    def joint_positions(self) -> FloatArray:
        """Return the measured positions of all joints, float64 [9 * arms]."""
        return np.array(self._data.qpos[self._places], dtype=np.float64)

    def joint_velocities(self) -> FloatArray:
        """Return the measured velocities of all joints, float64 [9 * arms], radians and metres per second."""
        return np.array(self._data.qvel[self._speeds], dtype=np.float64)

    def joint_states(self, stamp: int) -> list[JointState]:
        """Return the joint state of each arm."""
        arms = [part.reshape(len(self.mounts), -1) for part in (self.joint_positions(), self.joint_velocities())]
        return [JointState(one.joint_names, q, stamp, v) for one, q, v in zip(self.mounts, *arms, strict=True)]

    def tool_position(self, index: int = 0) -> FloatArray:
        """Return the position of an arm's ``tool``, float64 [3], metres."""
        return np.array(self._data.site_xpos[self._tools[index]], dtype=np.float64)

    def tool_rotation(self, index: int = 0) -> FloatArray:
        """Return the rotation of an arm's ``tool``, float64 [3, 3]."""
        return np.array(self._data.site_xmat[self._tools[index]], dtype=np.float64).reshape(3, 3)

    def object_positions(self) -> dict[str, FloatArray]:
        """Return the centre of each object of the scene, float64 [3], metres."""
        places = [np.array(self._data.xpos[body], dtype=np.float64) for body in self._bodies]
        return {thing.name: place for thing, place in zip(self.scene.objects, places, strict=False)}

    def object_state(self, stamp: int) -> JointState:
        """Return the content of ``/sim/objects``: ``red_cube/x``, ``red_cube/y``, ... of all kinds, metres.

        Objects that are not in the scene are a metre below the table.
        """
        places = self.object_positions()
        absent = np.array([0.0, 0.0, -1.0])
        names = tuple(f"{name}/{axis}" for name in KINDS for axis in "xyz")
        return JointState(names, np.concatenate([places.get(name, absent) for name in KINDS]), stamp)

    def render(self, camera: str = "front") -> UInt8Array:
        """Return the upright image of ``front`` or ``wrist`` (two arms: ``left_wrist``), uint8 [H, W, 3] RGB."""
        return self._render(camera, None)

    def _render(self, camera: str, depth: Float32Array | None) -> UInt8Array:
        if self._renderer is None:
            self._renderer = Renderer(self._model, self.options.width, self.options.height)
        image = self._renderer.render(self._data, camera, depth)
        if self.options.camera_gain != 1.0:
            image = np.clip(image * self.options.camera_gain, 0, 255).astype(np.uint8)
        return image

    def render_points(self, camera: str = "front") -> tuple[UInt8Array, Float32Array]:
        """Return the upright image and its points, float32 [H, W, 3], metres in the table's frame; NaN: unknown."""
        depth = np.empty((self.options.height, self.options.width), np.float32)
        image, seen = self._render(camera, depth), self._data.camera(camera)
        fovy, metres = float(self._model.camera(camera).fovy[0]), depth.astype(np.float64)
        if self.options.depth_sensor:
            metres = sensed(metres, fovy, self._sensing)
        pose = seen.xpos, seen.xmat.reshape(3, 3)
        pose = misplaced(*pose, *self.options.extrinsics, np.random.default_rng([self._seed, 0xCA1]))
        return image, unproject(metres, fovy, *pose)

    def project(self, point: FloatArray, camera: str = "front") -> FloatArray:
        """Project a point [3], metres, to (row, column) of the upright image, float64 [2]."""
        seen = self._data.camera(camera)
        right, up, backward = seen.xmat.reshape(3, 3).T @ (np.asarray(point) - seen.xpos)
        focal = self.options.height / (2 * math.tan(math.radians(float(self._model.camera(camera).fovy[0])) / 2))
        row = self.options.height / 2 + focal * up / backward
        column = self.options.width / 2 - focal * right / backward
        return np.array([row, column])

    def close(self) -> None:
        """Free the renderer; may be called twice."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def __enter__(self) -> TableTop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _model(mujoco: Any, mounts: Sequence[arm.Mount]) -> Any:
    """Return the MuJoCo model of the table with these arms."""
    path = str(arm.ASSETS / "table_top.xml")
    if mounts is arm.ONE_ARM:
        return mujoco.MjModel.from_xml_path(path)
    table = mujoco.MjSpec.from_file(path)
    table.delete(table.body("base_link"))
    for mount in mounts:
        robot = mujoco.MjSpec.from_file(path)
        table.worldbody.add_frame(pos=mount.position).attach_body(robot.body("base_link"), mount.prefix, "")
    table.camera("front").fovy = _TWO_ARMS_FOVY
    return table.compile()
