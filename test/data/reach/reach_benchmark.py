"""A benchmark of vla-eval: move a hand in a plane to a goal and close the gripper there; it can misbehave."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.specs import GRIPPER_CLOSE_POS, IMAGE_RGB, LANGUAGE, POSITION_DELTA, ROTATION_AA, DimSpec


class Reach(StepBenchmark):
    """Numbers of an action are tenths of the table, clipped to [-1, 1], as robosuite does.

    ``wrong`` is ``WHAT@TASK/EPISODE/STEP``: raise, die, hang or size (of the image). With ``points``, it also sends
    where on the table each pixel is.
    """

    def __init__(
        self, seed: int = 0, send_state: bool = False, wrong: str = "", side: int = 32, points: bool = False
    ) -> None:
        super().__init__()
        self.points = points
        self.seed, self.send_state, self.wrong, self.side = seed, send_state, wrong, side

    def get_tasks(self) -> list[dict[str, Any]]:
        return [{"name": f"go {way}", "suite": "reach", "way": way} for way in ("left", "right")]

    def get_metadata(self) -> dict[str, Any]:
        return {"max_steps": 30, "max_episodes_per_task": 5}

    def reset(self, task: dict[str, Any]) -> Any:
        self.task, self.steps = task, 0
        random = np.random.default_rng((self.seed, task["episode_idx"], len(task["way"])))
        self.at = random.uniform(-0.1, 0.1, 2)
        self.goal = np.array([-0.6 if task["way"] == "left" else 0.6, random.uniform(-0.5, 0.5)])
        self._misbehave()
        return None

    def _misbehave(self) -> str:
        what, _, when = self.wrong.partition("@")
        if when != f"{self.task['way']}/{self.task['episode_idx']}/{self.steps}":
            return ""
        if what == "raise":
            raise RuntimeError("the simulator broke")
        if what == "die":
            print("out of memory")
            os._exit(7)
        if what == "hang":
            time.sleep(600)
        return what

    def step(self, action: dict[str, Any]) -> StepResult:
        numbers = np.asarray(action["actions"])
        assert len(numbers) == 7, f"found {len(numbers)} numbers, expected 7"
        with open(os.environ.get("REACH_LOG", os.devnull), "a") as log:  # noqa: PTH123
            print(*(float(number).hex() for number in numbers), file=log)
        self.steps += 1
        self.at = self.at + 0.1 * np.clip(numbers[:2], -1, 1)
        self._misbehave()
        near = bool(np.abs(self.at - self.goal).max() < 0.05)
        return StepResult(None, float(near), near and bool(numbers[6] > 0), {})

    def make_obs(self, raw_obs: Any, task: dict[str, Any]) -> dict[str, Any]:
        side = self.side + (self._misbehave() == "size")
        image = np.zeros((side, side, 3), np.uint8)
        for place, colour in ((self.goal, 1), (self.at, 0)):
            row, column = np.clip((place + 1) / 2 * (side - 1), 0, side - 1).round().astype(int)
            image[row, column, colour] = 255
        found: dict[str, Any] = {"images": {"top": image}, "task_description": task["name"]}
        if self.points:
            line = np.linspace(-1, 1, side, dtype=np.float32)
            places = np.meshgrid(line, line, indexing="ij")
            found["images"]["where"] = np.stack([*places, np.zeros_like(places[0])], axis=-1)
        return {**found, "states": np.concatenate([self.at, self.goal])} if self.send_state else found

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        return {"success": step_result.done}

    def get_action_spec(self) -> dict[str, DimSpec]:
        return {"position": POSITION_DELTA, "rotation": ROTATION_AA, "gripper": GRIPPER_CLOSE_POS}

    def get_observation_spec(self) -> dict[str, DimSpec]:
        return {"top": IMAGE_RGB, "language": LANGUAGE}
