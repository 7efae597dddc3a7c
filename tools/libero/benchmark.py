"""LIBERO as a benchmark of vla-eval, with points and changed scenes: ``tools.libero.benchmark:Benchmark``.

In LIBERO's own Python. An episode depends on its task and initial state alone, not on those before it, so that two
policies meet the same scenes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vla_eval.benchmarks.libero.benchmark import LIBEROBenchmark

from tools.libero.scene import CAMERAS, POINTS, SUITE, Changes, Scene


class Benchmark(LIBEROBenchmark):  # type: ignore[misc]
    """Takes the fields of :class:`~tools.libero.scene.Changes`, too; ``points`` adds them to the images."""

    def __init__(self, points: bool = False, **given: Any) -> None:
        changes = {field.name: given.pop(field.name) for field in fields(Changes) if field.name in given}
        super().__init__(**{"suite": SUITE, **given})
        self._points, self._changes = points, Changes(**changes)
        self._task_id: int | None = None

    def reset(self, task: Mapping[str, Any]) -> Any:
        if self._task_id != task["task_id"]:
            self.cleanup()
            self._scene = Scene(task["task_id"], self.seed, self._points, self._changes)
            self._env, self._task_id = self._scene.env, task["task_id"]
        self._env.seed(1000 * self.seed + task["episode_idx"])  # draws where cabinet and stove stand
        self._scene.begin(task["episode_idx"])
        return self._scene.settle()

    def make_obs(self, raw_obs: Mapping[str, Any], task: Mapping[str, Any]) -> Any:
        found = super().make_obs(raw_obs, task)
        if self._points:
            found["images"] |= {
                name: self._scene.points(raw_obs, camera) for name, camera in zip(POINTS, CAMERAS, strict=True)
            }
        return found
