"""The simulated table-top as a benchmark of vla-eval, which runs it in a process of its own."""

from pathlib import Path
from typing import Any

import numpy as np
from vla_eval.benchmarks.base import StepBenchmark, StepResult

from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros.contract.spec import PolicySpec
from vla_ros.node.pipeline import build_pipeline
from vla_ros_lab.sim.table import IMAGE_TOPIC, TableEnvironment
from vla_ros_lab.sim.world import TableTop, WorldOptions


class TableBenchmark(StepBenchmark):
    """Picks cubes; ``log`` is a file for observations and actions, ``joints`` for a policy of joint positions."""

    def __init__(self, seed: int = 0, log: str = "", joints: bool = False, send_state: bool = False) -> None:
        super().__init__()
        self._first, self._log, self._size, self._send_state = seed, log, 8 if joints else 7, send_state
        self._rows: list[tuple[Any, ...]] = []
        config = load([config_file(name) for name in (("demo", "demo_pi") if joints else ("demo",))])
        self._world = TableTop(WorldOptions(rate_hz=config.control.rate_hz))
        self._table = TableEnvironment(self._world)
        spec = PolicySpec(action=(), dimension=8) if joints else PolicySpec()
        self._controller = build_pipeline(config, spec).controller

    def get_tasks(self) -> list[dict[str, Any]]:
        return [{"name": "pick"}]

    def get_metadata(self) -> dict[str, Any]:
        return {"max_steps": 160}

    def get_action_spec(self) -> dict[str, Any]:
        return {}

    get_observation_spec = get_action_spec

    def reset(self, task: dict[str, Any]) -> Any:
        self._table.reset(self._first + task["episode_idx"])
        self._controller.reset()
        return self._image()

    def _image(self) -> Any:
        """The camera is mounted upside down; a benchmark of vla-eval sends upright images."""
        return np.ascontiguousarray(self._table.observe([IMAGE_TOPIC], 1).images[IMAGE_TOPIC][::-1, ::-1])

    def make_obs(self, raw_obs: Any, task: dict[str, Any]) -> dict[str, Any]:
        positions = np.array(self._table.observe((), 1).joints[0].positions)
        state = np.append(positions[:7], np.clip(positions[7] / 0.04, 0, 1))
        self._seen = raw_obs, self._table.instruction, state, task["episode_idx"]
        observation = {"images": {"front": raw_obs}, "task_description": self._table.instruction}
        return observation | ({"states": state} if self._send_state else {})

    def step(self, action: dict[str, Any]) -> StepResult:
        row = np.asarray(action["actions"])
        assert row.shape == (self._size,)
        self._rows.append((*self._seen, row))
        [joints] = self._table.observe((), 1).joints
        [command] = self._controller.command(row, joints, 1, self._table.step_seconds)
        self._controller.sent()
        self._table.apply(command)
        for _ in range(self._table.ticks):
            self._table.step()
        return StepResult(self._image(), 0.0, self._table.done, {})

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        return {"success": self._table.success}

    def cleanup(self) -> None:
        columns = map(np.array, zip(*self._rows, strict=True))
        names = ("images", "instructions", "states", "episodes", "actions")
        np.savez(Path(self._log), **dict(zip(names, columns, strict=True)))
        self._world.close()
