"""A task of LIBERO with the objects moved or displaced, the camera moved, and points; in LIBERO's own Python.

What turns depth into points is shared with the simulated table and imported when it is needed: that Python then
needs this repository's ``src`` and OpenCV.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.libero.expert import BOWL, PLATE

SUITE = "libero_spatial"
OBJECTS = (BOWL, "akita_black_bowl_2", PLATE, "glazed_rim_porcelain_ramekin_1", "cookies_1")
SIZE, PATCH = 128, 16  # pixels of a policy's image, the mean of 2x2 rendered ones, and of its patches
CAMERAS = ("agentview", "robot0_eye_in_hand")
POINTS = ("points", "wrist_points")  # their points
WAIT = 10  # steps at rest before an episode, as in the benchmark
FIRST_STATE = 20  # of the demonstrations; those before are for evaluations
IDLE = np.array([0.0] * 6 + [-1.0])
_SPAN = {BOWL: 0.06, PLATE: 0.05}  # metres by which demonstrations move an object
_OTHERS = 0.025
_CLEARANCE = 0.105  # metres between the centres of two objects
_FAR = 0.17  # metres; the arm cannot hold the tool upright beyond
_CABINET = -0.09  # metres; the hand hits the cabinet beyond
_TABLE = 0.9  # metres, height of the table's top
_TRIES = 500


@dataclass(frozen=True)
class Changes:
    """How an evaluation differs from the demonstrations; the defaults change nothing."""

    displace: float = 0.0  # metres by which the bowl is outside the region where demonstrations had it
    spread: float = 1.0  # of these demonstrations (``--spread``)
    camera_turn: float = 0.0  # degrees by which the first camera is moved counter-clockwise around what it looks at
    depth_sensor: bool = False  # points with the noise and the holes of a stereo camera, else exact
    # Metres and degrees by which the pose of each camera, with which points are computed, is wrong.
    extrinsics: tuple[float, float] = (0.0, 0.0)


class Scene:
    """The environment of one task; it renders when it is asked to.

    Attributes:
        env: LIBERO's environment.
        sim: Its simulation.
        instruction: The task's instruction.
        states: The benchmark's initial states.
    """

    def __init__(self, task: int, seed: int, points: bool = False, changes: Changes | None = None) -> None:
        import torch

        torch.load = functools.partial(torch.load, weights_only=False)  # initial states are pickles of LIBERO's own
        from libero.libero import benchmark
        from libero.libero.envs import OffScreenRenderEnv

        suite = benchmark.get_benchmark_dict()[SUITE]()
        self._changes, self._sensors = changes or Changes(), ("image", "depth") if points else ("image",)
        self.instruction, self.states = suite.get_task(task).language, suite.get_task_init_states(task)
        self.env = OffScreenRenderEnv(
            bddl_file_name=suite.get_task_bddl_file_path(task),
            camera_heights=2 * SIZE,
            camera_widths=2 * SIZE,
            camera_depths=points,
            hard_reset=False,
        )
        self.env.seed(seed)
        self.sim = self.env.sim
        for camera in CAMERAS if points else ():
            self._note_pose(camera)
        if self._changes.camera_turn:
            import mujoco

            from vla_ros_lab.sim.depth import turn_camera

            camera = self.sim.model._model.camera(CAMERAS[0])
            turn_camera(mujoco, camera, math.radians(self._changes.camera_turn), _TABLE)

    def _note_pose(self, camera: str) -> None:
        """Add a camera's pose when the image is rendered to the observation."""
        from robosuite.utils.observables import Observable, sensor

        data, index = self.sim.data, self.sim.model.camera_name2id(camera)

        def pose(cache: object) -> Any:
            return np.concatenate([data.cam_xpos[index], data.cam_xmat[index]])

        self.env.env.add_observable(Observable(f"{camera}_pose", sensor(modality="pose")(pose)))

    def begin(self, state: int) -> Any:
        """Begin an episode at an initial state, which :meth:`settle` completes; return the observation."""
        self.env.reset()
        self.render(False)
        self._state, self._sensing = state, np.random.default_rng([state, 0xDE97])
        obs = self.env.set_init_state(self.states[state])
        if self._changes.displace:
            self._displace(np.random.default_rng([state, 0xD15B]))
        return obs

    def settle(self, wanted: bool = True) -> Any:
        """Wait until everything is at rest; return the observation, with images if they are ``wanted``."""
        for turn in range(WAIT):
            self.render(wanted and turn == WAIT - 1)
            obs, *_ = self.env.step(IDLE)
        return obs

    def render(self, wanted: bool) -> None:
        """Render at the next steps, or no more."""
        observables = self.env.env._observables
        for name in (f"{camera}_{sensor}" for camera in CAMERAS for sensor in self._sensors):
            if observables[name].is_enabled() != wanted:
                observables[name].set_enabled(wanted)
                for phase in ("_sampled", "_time_since_last_sample"):  # at the time of the state, near a step's end
                    setattr(observables[name], phase, getattr(observables["robot0_eef_pos"], phase))

    def points(self, obs: Mapping[str, Any], camera: str) -> Any:
        """Return where the surface in each second pixel is, float32 [SIZE, SIZE, 3], aligned to the image as sent.

        In metres in the frame of the robot's base, NaN where unknown.
        """
        from robosuite.utils.camera_utils import get_real_depth_map

        from vla_ros_lab.sim.depth import misplaced, sensed, unproject

        changes, data, model = self._changes, self.sim.data, self.sim.model
        index = model.camera_name2id(camera)
        depth = get_real_depth_map(self.sim, obs[f"{camera}_depth"][::-1, :, 0])
        fovy = model.cam_fovy[index]
        if changes.depth_sensor:
            depth = sensed(depth, fovy, self._sensing)
        wrong, pose = np.random.default_rng([self._state, 0xCA1, index]), obs[f"{camera}_pose"]
        position, rotation = misplaced(pose[:3], pose[3:].reshape(3, 3), *changes.extrinsics, wrong)
        base = model.body_name2id("robot0_base")
        turn = data.body_xmat[base].reshape(3, 3).T
        points = unproject(depth, fovy, turn @ (position - data.body_xpos[base]), turn @ rotation)
        return points[::2, ::-2]  # images are sent turned by half a turn, from a renderer that begins at the bottom

    def move(self, random: np.random.Generator, spread: float) -> None:
        """Move the objects of the table apart, the bowl and the plate furthest."""
        start = self._places()
        for _ in range(50):
            moved = {
                name: place + random.uniform(-1, 1, 2) * spread * _SPAN.get(name, _OTHERS)
                for name, place in start.items()
            }
            if _free(moved):
                self._put(moved)
                return

    def region(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and the highest x and y at which demonstrations have the bowl, metres."""
        first = 1 + self.sim.model.get_joint_qpos_addr(f"{BOWL}_joint0")[0]  # behind the time
        seen, span = self.states[FIRST_STATE:, first : first + 2], self._changes.spread * _SPAN[BOWL]
        low, high = seen.min(axis=0) - span, seen.max(axis=0) + span
        return np.maximum(low, [-np.inf, _CABINET]), np.minimum(high, [_FAR, np.inf])

    def _displace(self, random: np.random.Generator) -> None:
        """Put the bowl outside its region, on any side where it is free and the arm reaches it."""
        start, far = self._places(), self._changes.displace
        low, high = self.region()
        for _ in range(_TRIES):
            place, axis = random.uniform(low, high), random.integers(2)
            place[axis] = random.choice([low[axis] - far, high[axis] + far])
            if all(_free({name: other, BOWL: place}) for name, other in start.items() if name != BOWL):
                self._put({BOWL: place})
                if not self._touched():
                    return
        raise RuntimeError(f"{self.instruction}: the bowl has no place {far} m outside its region")

    def _touched(self) -> bool:
        """Return whether the bowl touches anything."""
        model, data = self.sim.model, self.sim.data
        pairs = [(one.geom1, one.geom2) for one in data.contact[: data.ncon]]
        names = [[model.body_id2name(model.geom_bodyid[geom]) for geom in pair] for pair in pairs]
        return any(
            any(name.startswith(BOWL) for name in pair) and not any("table" in name for name in pair)
            for pair in names
        )

    def _places(self) -> dict[str, np.ndarray]:
        return {name: np.array(self.sim.data.get_joint_qpos(f"{name}_joint0")[:2]) for name in OBJECTS}

    def _put(self, places: Mapping[str, np.ndarray]) -> None:
        for name, place in places.items():
            pose = np.array(self.sim.data.get_joint_qpos(f"{name}_joint0"))
            pose[:2] = place
            self.sim.data.set_joint_qpos(f"{name}_joint0", pose)
        self.sim.forward()


def _free(places: Mapping[str, np.ndarray]) -> bool:
    """Return whether objects are apart from each other, and the bowl is where the hand reaches it."""
    spots = list(places.values())
    apart = [float(np.linalg.norm(one - other)) for index, one in enumerate(spots) for other in spots[:index]]
    return bool(min(apart) > _CLEARANCE and places[BOWL][1] > _CABINET and places[BOWL][0] < _FAR)
