"""Records demonstrations of the expert, in the Python that has LIBERO: ``python -m tools.libero.record FOLDER``.

Each process has one task. ``--every 1`` records every step, as a data set for ``vla-ros finetune`` needs it
(``tools.libero dataset``). Episodes begin at the benchmark's initial states 20 to 49, in most of them with the
objects moved; 0 to 19 are kept for the evaluation. Disturbances are added to the executed action, never to the
recorded one. Imports nothing of this package. A frame is what the benchmark sends: both images turned by 180
degrees, and the state with its rotation vector not wrapped.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tools.libero.expert import BOWL, PLATE, TASKS, act
from tools.libero.scene import CAMERAS, FIRST_STATE, OBJECTS, PATCH, SIZE, Scene

_LONGEST, _AFTER = 130, 8  # steps of an episode, and steps recorded after success


class Disturbance:
    """Correlated noise, pushes and a gripper that does the opposite, all on the executed action."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._deviation = random.choice([0.0, 0.06, 0.12, 0.2])
        self._drift = np.zeros(6)
        self._push, self._flip = np.zeros(3), 0
        self._pushed = 0

    def apply(self, action: np.ndarray) -> np.ndarray:
        random, done = self._random, action.copy()
        scale = np.array([1.0] * 3 + [0.15] * 3) * self._deviation
        self._drift = 0.8 * self._drift + 0.6 * scale * random.normal(size=6)
        done[:6] += self._drift
        if self._deviation and not self._pushed and random.random() < 0.015:
            self._pushed, self._push = int(random.integers(2, 6)), random.uniform(-1, 1, 3)
        if self._pushed:
            self._pushed -= 1
            done[:3] = self._push
        if self._deviation and not self._flip and random.random() < 0.004:
            self._flip = int(random.integers(2, 5))
        if self._flip:
            self._flip -= 1
            done[6] = -done[6]
        return np.asarray(np.clip(done, -1.0, 1.0))


class Recorder:
    """One task's environment; every ``every``-th step of an episode is a frame."""

    def __init__(self, task: int, seed: int, every: int, spread: float = 1.0, points: bool = False) -> None:
        from robosuite.utils import camera_utils

        self._task, self._random, self._every = task, np.random.default_rng(seed), every
        self._spread, self._points = spread, points
        self._scene = scene = Scene(task, seed, points)
        self._matrix = camera_utils.get_camera_transform_matrix(scene.sim, CAMERAS[0], 2 * SIZE, 2 * SIZE)

    def episode(self) -> dict[str, Any]:
        """Run one episode; return its frames and labels."""
        random, scene = self._random, self._scene
        scene.begin(int(random.integers(FIRST_STATE, len(scene.states))))
        if random.random() < 0.7:
            scene.move(random, self._spread)
        every, phase = self._every, int(random.integers(self._every))
        obs = scene.settle(not phase)
        disturbance, found = Disturbance(random), _Episode()
        succeeded = 0
        for step in range(_LONGEST):
            action = act(obs)
            found.actions.append(action)
            if step % every == phase:
                found.take(step, obs, self._pixels(obs), self._positions(obs))
            scene.render((step + 1) % every == phase)  # the next observation
            obs, _, done, _ = scene.env.step(disturbance.apply(action))
            succeeded += bool(done) or succeeded > 0
            if succeeded > _AFTER:
                break
        return found.arrays(self._task, scene.instruction, succeeded > 0)

    def _pixels(self, obs: Mapping[str, Any]) -> np.ndarray:
        """Return where the objects are in the first image as sent, [objects, 2], x and y from 0 to 1."""
        places = np.array([[*obs[f"{name}_pos"], 1.0] for name in OBJECTS])
        seen = places @ self._matrix.T
        return np.asarray(1.0 - seen[:, :2] / seen[:, 2:3] / (2 * SIZE) * [1.0, -1.0] - [0.0, 1.0])

    def _positions(self, obs: Mapping[str, Any]) -> np.ndarray:
        """Return where the patches of the images are, [cameras, patches, 3]; [cameras, 0, 3] if not recorded."""
        if not self._points:
            return np.zeros((len(CAMERAS), 0, 3), np.float32)
        from vla_ros.vision.points import patch_positions

        return np.stack([patch_positions(self._scene.points(obs, camera), SIZE, PATCH) for camera in CAMERAS])


class _Episode:
    def __init__(self) -> None:
        self.actions: list[np.ndarray] = []
        self.steps: list[int] = []
        self.images: list[np.ndarray] = []
        self.states: list[np.ndarray] = []
        self.places: list[np.ndarray] = []
        self.pixels: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []

    def take(self, step: int, obs: Mapping[str, Any], pixels: np.ndarray, positions: np.ndarray) -> None:
        tip = obs["robot0_eef_pos"]
        vector = rotation_vector(obs["robot0_eef_quat"])
        self.steps.append(step)
        self.images.append(np.stack([halved(obs[f"{camera}_image"][::-1, ::-1]) for camera in CAMERAS]))
        self.states.append(np.concatenate([tip, vector, obs["robot0_gripper_qpos"]]))
        self.places.append(np.concatenate([obs[f"{name}_pos"] - tip for name in (BOWL, PLATE)]))
        self.pixels.append(pixels)
        self.positions.append(positions)

    def arrays(self, task: int, instruction: str, success: bool) -> dict[str, Any]:
        count = len(self.steps)
        return {
            "images": np.array(self.images, np.uint8),
            "states": np.array(self.states, np.float32),
            "places": np.array(self.places, np.float32),
            "pixels": np.array(self.pixels, np.float32),
            "positions": np.array(self.positions, np.float32),
            "steps": np.array(self.steps, np.int32),
            "actions": np.array(self.actions, np.float32),
            "lengths": np.array([len(self.actions)], np.int32),
            "frames": np.array([count], np.int32),
            "tasks": np.array([task], np.int32),
            "instructions": np.array([instruction]),
            "successes": np.array([success], bool),
        }


def halved(image: np.ndarray) -> np.ndarray:
    """Return the mean of each 2x2 pixels, which is what linear interpolation to half the size is."""
    parts = image.astype(np.uint16)
    total = parts[::2, ::2] + parts[1::2, ::2] + parts[::2, 1::2] + parts[1::2, 1::2]
    return ((total + 2) // 4).astype(np.uint8)


def rotation_vector(quaternion: np.ndarray) -> np.ndarray:
    """Return the published state's rotation vector of (x, y, z, w); it is not wrapped."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = math.sqrt(1.0 - w * w)
    return quaternion[:3] * (2 * math.acos(w) / sine) if sine > 1e-9 else np.zeros(3)


def _record(options: argparse.Namespace) -> None:
    """Record one task until the seconds have passed or the episodes are done."""
    folder, index, episodes = options.folder, options.index, options.episodes
    until = time.monotonic() + options.seconds
    how = options.every, options.spread, options.points
    recorder = Recorder(options.tasks[index % len(options.tasks)], options.seed + index, *how)
    kept: list[dict[str, Any]] = []
    shard = 0
    while time.monotonic() < until and shard * 8 + len(kept) < episodes:
        kept.append(recorder.episode())
        print(f"{index}: {kept[-1]['lengths'][0]} steps, {kept[-1]['successes'][0]}", flush=True)
        if len(kept) == 8:
            _write(folder / f"{index:03d}_{shard:04d}.npz", kept)
            kept, shard = [], shard + 1
    if kept:
        _write(folder / f"{index:03d}_{shard:04d}.npz", kept)


def _write(path: Path, episodes: list[dict[str, Any]]) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as stream:
        arrays: dict[str, Any] = {name: np.concatenate([each[name] for each in episodes]) for name in episodes[0]}
        np.savez(stream, **arrays)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at least one for each task")
    parser.add_argument("--seconds", type=float, default=1e9, help="of recording; episodes under way are finished")
    parser.add_argument("--episodes", type=int, default=10**9, help="of each process")
    parser.add_argument("--tasks", type=int, nargs="+", default=TASKS, metavar="T", help="numbers of the tasks")
    parser.add_argument("--every", type=int, default=2, metavar="N", help="steps of a frame (default 2)")
    text = "share of the usual distances by which objects are moved (default 1)"
    parser.add_argument("--spread", type=float, default=1.0, metavar="F", help=text)
    parser.add_argument("--points", action="store_true", help="record where the image patches are, too")
    parser.add_argument("--seed", type=int, default=1000, metavar="S", help="of the first process (default 1000)")
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.index is not None:
        _record(options)
        return
    common = [sys.executable, "-m", "tools.libero.record", *sys.argv[1:], "--index"]
    running = [subprocess.Popen([*common, str(index)]) for index in range(options.processes)]
    failed = sum(process.wait() != 0 for process in running)
    shards = list(options.folder.glob("*.npz"))
    print(f"{len(shards)} files; {failed} of {len(running)} processes failed")
    sys.exit(1 if not shards else 0)


if __name__ == "__main__":
    main()
