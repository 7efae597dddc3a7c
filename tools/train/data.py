"""Records demonstrations of the expert in disturbed episodes, labelled for every object of the scene.

A shard depends only on the recipe and the shard's number. The number of processes therefore does not matter, and
an interrupted run can be resumed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tools.train import shards
from tools.train.labels import PATCH, counterfactual_actions, counterfactual_chunks, kinds_of, patch_of
from tools.train.recipe import DataRecipe, as_json, claim
from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros.contract.spec import ImageFeature
from vla_ros.errors import VlaRosError
from vla_ros.execution.source import ActionSource
from vla_ros.policies.base import Session
from vla_ros.types import ActionChunk, FloatArray, Observation, UInt8Array
from vla_ros.vision.points import patch_positions
from vla_ros_lab.eval.port import NodePort
from vla_ros_lab.eval.runner import EpisodeOptions, EpisodeRunner
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.expert import ExpertPolicy
from vla_ros_lab.sim.scene import Scene
from vla_ros_lab.sim.table import IMAGE_TOPIC, POINTS_TOPIC, TableEnvironment, TableOptions
from vla_ros_lab.sim.tasks import SLOTS, make_task
from vla_ros_lab.sim.world import TableTop, WorldOptions

MANIFEST = "dataset.json"
POINTS = "points"
POINTS_OPTIONS = (
    f"camera.topics:=[{IMAGE_TOPIC}, {POINTS_TOPIC}]", f"camera.keys:=[image, {POINTS}]",
)  # fmt: skip
"""Options of a node that takes the table's points."""

_MEMORY = 0.7  # correlation of the disturbance from one step to the next
_PUSH_M = (0.01, 0.03)  # m per step

Progress = Callable[[int, int], None]
"""Called after each shard with the number of episodes and frames so far."""


def size_options(side: int) -> tuple[str, ...]:
    """Return the options of a node whose images have this width and height."""
    return f"camera.width:={side}", f"camera.height:={side}"


def shard_paths(folder: Path) -> list[Path]:
    """Return the finished shards of ``folder``, in order."""
    return sorted(folder.glob("shard-*.npz"))


def generate(
    folder: Path, recipe: DataRecipe, processes: int = 0, progress: Progress = lambda episodes, frames: None
) -> None:
    """Record the missing shards of ``folder`` in parallel ``processes`` (0: one per core).

    Raises:
        ConfigError: The folder was recorded with another recipe.
        MissingDependencyError: MuJoCo or OpenGL is missing.
    """
    claim(folder / MANIFEST, as_json(recipe))
    count = -(-recipe.episodes // recipe.shard_episodes)
    paths = [folder / f"shard-{number:05d}.npz" for number in range(count)]
    missing = [(number, path) for number, path in enumerate(paths) if not path.exists()]
    finished = [shards.read(path).results for path in paths if path.exists()]
    episodes = sum(len(results) for results in finished)
    frames = sum(int(results[:, 2].sum()) for results in finished)
    progress(episodes, frames)
    for results in _work(recipe, missing, processes or os.cpu_count() or 1):
        episodes += len(results)
        frames += int(results[:, 2].sum())
        progress(episodes, frames)


def _work(recipe: DataRecipe, missing: list[tuple[int, Path]], processes: int) -> Iterator[np.ndarray]:
    processes = min(processes, len(missing))
    if processes <= 1:
        recorder = Recorder(recipe)
        try:
            for number, path in missing:
                yield recorder.shard(number, path)
        finally:
            recorder.close()
        return
    with multiprocessing.get_context("spawn").Pool(processes, _begin_worker, (recipe,)) as pool:
        yield from pool.imap_unordered(_make_shard, missing)


_worker: list[Recorder] = []


def _begin_worker(recipe: DataRecipe) -> None:
    _worker.append(Recorder(recipe))


def _make_shard(job: tuple[int, Path]) -> np.ndarray:
    return _worker[0].shard(*job)


class Disturbance:
    """Noise for the executed actions of an episode, so that the data contain recoveries.

    Labels are the expert's undisturbed actions (DART; Laskey et al., 2017), so a learner's small errors lead to
    states that are in the data.
    """

    def __init__(self, recipe: DataRecipe, seed: int) -> None:
        self._recipe = recipe
        self._random = np.random.default_rng([seed, 0xD157])
        self.sd = float(self._random.choice(recipe.noise_m))
        """Standard deviation of this episode, metres."""
        self._drift = self._random.normal(size=3) * self.sd
        self._push = np.zeros(3)
        self._pushed_steps = 0
        self._flipped_steps = 0

    def __call__(self, step: int, action: FloatArray) -> FloatArray:
        """Return the action [7] to execute instead of the undisturbed ``action``."""
        if not self.sd:  # some episodes are undisturbed
            return action
        rng = self._random
        self._drift = _MEMORY * self._drift + (1 - _MEMORY**2) ** 0.5 * self.sd * rng.normal(size=3)
        if not self._pushed_steps and rng.random() < self._recipe.burst_chance:
            way = rng.normal(size=3) * (1.0, 1.0, 0.6)
            self._push = way / np.linalg.norm(way) * rng.uniform(*_PUSH_M)
            self._pushed_steps = int(rng.integers(1, 4))
        if not self._flipped_steps and rng.random() < self._recipe.flip_chance:
            self._flipped_steps = int(rng.integers(1, 4))
        executed = action.copy()
        executed[:3] += self._drift
        if self._pushed_steps:
            self._pushed_steps -= 1
            executed[:3] += self._push
        if self._flipped_steps:
            self._flipped_steps -= 1
            executed[6] = 1.0 - executed[6]
        return executed


class Demonstrator(ActionSource):
    """The expert, whose actions are disturbed before they are executed; notes frames and labels of an episode.

    Attributes:
        frames: Images so far.
        rows: The label of each image, as fields of :class:`~.shards.Labels`.
    """

    def __init__(self, expert: ExpertPolicy, world: TableTop, recipe: DataRecipe) -> None:
        self.spec = expert.spec
        if recipe.points:  # the expert takes every camera's image
            self.spec = replace(self.spec, images=(ImageFeature("image"),), points=(("image", POINTS),))
        self._expert, self._world, self._recipe = expert, world, recipe
        self.begin(0)

    def begin(self, seed: int) -> None:
        """Forget the last episode; ``seed`` determines the disturbances of the next one."""
        self.frames: list[UInt8Array] = []
        self.rows: list[dict[str, Any]] = []
        self._seed, self._step, self._disturbance = seed, 0, Disturbance(self._recipe, seed)
        self._rng = rng = np.random.default_rng([seed, 0x5717C4])
        self._switch_at = int(rng.integers(2, 16)) if rng.random() < self._recipe.switch_share else -1

    def infer(self, observation: Observation) -> ActionChunk:
        if self._step == self._switch_at:
            self._world.judge_by(_another(self._world.scene, self._recipe, self._rng))
        if self._step % self._recipe.every == 0:
            self._note(observation)
        asked = replace(observation, instruction=self._world.scene.instruction)
        chunk = self._expert.infer(Session(), asked)
        executed = self._disturbance(self._step, chunk.actions[0])
        self._step += 1
        return replace(chunk, actions=executed[np.newaxis])

    def _note(self, observation: Observation) -> None:
        world, scene = self._world, self._world.scene
        objects = world.object_positions()
        recipe, joints = self._recipe, observation.state["joints"]
        state = np.append(joints, np.mean(observation.state["fingers"]))
        if recipe.horizon > 1:
            places = np.full((SLOTS, 3), np.nan)
            places[: len(objects)] = list(objects.values())
            label = {"places": places}
        else:
            label = {"actions": counterfactual_actions(arm.forward(joints), state[7], objects, recipe.tasks)}
        patches = [patch_of(world.project(place), recipe.side) for place in objects.values()]
        self.rows.append(
            {
                "seeds": np.int64(self._seed),
                "steps": np.int16(self._step),
                "kinds": kinds_of(list(objects)),
                "patches": np.array(patches + [-1] * (len(kinds_of([])) - len(patches)), np.int16),
                "states": state.astype(np.float32),
                **label,
                "asked": np.array(
                    [recipe.tasks.index(scene.task.name), list(objects).index(scene.task.target)], np.int8
                ),
                "noise": np.float32(self._disturbance.sd),
                "positions": patch_positions(observation.points[POINTS], recipe.side, PATCH)
                if recipe.points
                else np.zeros((0, 3), np.float32),
            }
        )
        self.frames.append(observation.images["image"])


class Recorder:
    """Records episodes of the expert on one table-top, in lockstep with the node."""

    def __init__(self, recipe: DataRecipe) -> None:
        self._recipe = recipe
        options: tuple[str, ...] = ("policy.name:=expert", "control.schedule:=sync")
        options += (f"control.rate_hz:={recipe.rate_hz}", *size_options(recipe.side))
        options += POINTS_OPTIONS if recipe.points else ()
        config = load([config_file("demo")], options)
        size, objects = (recipe.side, recipe.side), recipe.objects
        world = WorldOptions(*size, recipe.tasks, rate_hz=recipe.rate_hz, objects=objects, shrink=recipe.shrink)
        self._world = TableTop(world)
        self._source = Demonstrator(ExpertPolicy(config), self._world, recipe)
        episodes = EpisodeOptions(recipe.max_steps)
        self._port = NodePort(config, self._source)
        table = TableEnvironment(self._world, TableOptions(points=recipe.points))
        self._runner = EpisodeRunner(table, self._port, episodes)

    def close(self) -> None:
        self._world.close()

    def shard(self, number: int, path: Path) -> np.ndarray:
        """Record shard ``number`` to ``path``; return the results of its episodes, int64 [episodes, 3]."""
        first = number * self._recipe.shard_episodes
        last = min(first + self._recipe.shard_episodes, self._recipe.episodes)
        frames: list[UInt8Array] = []
        rows: list[dict[str, Any]] = []
        results = []
        for episode in range(first, last):
            results.append(self.episode(self._recipe.seed + episode))
            frames += self._source.frames
            rows += self._source.rows
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        blob, offsets = shards.pack(frames)
        height, width, _ = frames[0].shape
        shard = shards.Shard(
            shards.Labels(**columns), blob, offsets, (height, width), np.array(results, dtype=np.int64)
        )
        shards.write(path, shard)
        return shard.results

    def episode(self, seed: int) -> tuple[int, int, int]:
        """Record an episode into the source's frames and rows; return (seed, success as 0 or 1, frames)."""
        recipe, source = self._recipe, self._source
        source.begin(seed)
        success = self._runner.run(seed).success
        if self._port.failed:
            raise VlaRosError(self._port.failed)
        if recipe.horizon > 1:
            states = np.stack([row["states"] for row in source.rows]).astype(np.float64)
            places = np.stack([row.pop("places") for row in source.rows])
            chunks = counterfactual_chunks(states, places, recipe.tasks, recipe.horizon, recipe.rate_hz)
            for row, actions in zip(source.rows, chunks, strict=True):
                row["actions"] = actions
        return seed, int(bool(success)), len(source.frames)


def _another(scene: Scene, recipe: DataRecipe, rng: np.random.Generator) -> Scene:
    """Return the same scene with another target and perhaps another task."""
    others = [thing.name for thing in scene.objects if thing.name != scene.task.target]
    target = others[int(rng.integers(len(others)))]
    return replace(scene, task=make_task(recipe.tasks[int(rng.integers(len(recipe.tasks)))], target))
