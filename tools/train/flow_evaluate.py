"""Success of a chunk policy in lockstep simulations without a ROS graph: a policy in each process."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np

from vla_ros.config import load
from vla_ros.policies.pi.policy import PiPolicy
from vla_ros.sim import arm
from vla_ros.sim.scene import shuffled_instruction
from vla_ros.sim.world import TableTop, WorldOptions
from vla_ros.types import Observation

RATE_HZ = 20.0
MAX_STEPS = 160
CONTROLS = ("plain", "shuffle", "turned", "blank")
_MOST = 0.3  # rad of a joint in a step, as config/demo.yaml limits it


def evaluate(
    pool: Pool, checkpoint: Path, seeds: Sequence[int], control: str, execute: int, flow_steps: int
) -> dict[str, object]:
    """Run the episodes of ``seeds``, ``execute`` steps of each chunk; returns rates and mean seconds."""
    began = time.monotonic()
    jobs = [(str(checkpoint), seed, control, execute, flow_steps) for seed in seeds]
    rows = pool.starmap(_episode, jobs, chunksize=1)
    won = [steps for success, _, steps in rows if success]
    return {
        "control": control,
        "execute": execute,
        "flow_steps": flow_steps,
        "success_rate": len(won) / len(rows),
        "wrong_object_rate": sum(reason == "wrong_object" for _, reason, _ in rows) / len(rows),
        "seconds_to_success": round(float(np.mean(won)) / RATE_HZ, 2) if won else None,
        "failed": [seed for seed, (success, _, _) in zip(seeds, rows, strict=True) if not success][:20],
        "took": round(time.monotonic() - began, 1),
    }


_kept: dict[tuple[str, int], tuple[PiPolicy, TableTop]] = {}


def _episode(checkpoint: str, seed: int, control: str, execute: int, flow_steps: int) -> tuple[bool, str, int]:
    import torch

    torch.set_num_threads(1)
    key = (checkpoint, flow_steps)
    if key not in _kept:
        options = (f"policy.checkpoint:={checkpoint}", f"policy.flow_steps:={flow_steps}", "policy.device:=cpu")
        policy = PiPolicy(load([], ["policy.name:=pi", *options]))
        policy.load()
        _kept[key] = policy, TableTop(WorldOptions(rate_hz=RATE_HZ))
    policy, world = _kept[key]
    scene = world.reset(seed)
    session = policy.start_session()
    instruction = shuffled_instruction(scene) if control == "shuffle" else scene.instruction
    step, decided = 0, False
    while step < MAX_STEPS and not decided:
        image = world.render()
        if control == "turned":
            image = np.ascontiguousarray(image[::-1, ::-1])
        elif control == "blank":
            image = np.zeros_like(image)
        measured = world.joint_positions()
        state: Mapping[str, np.ndarray] = {
            "state": np.append(measured[:7], measured[7:].mean() / arm.FINGER_TRAVEL)
        }
        chunk = policy.infer(session, Observation({"image": image}, instruction, step, state))
        for action in chunk.actions[:execute]:
            joints = world.joint_positions()[:7]
            goal = joints + np.clip(action[:7] - joints, -_MOST, _MOST)
            fingers = np.full(2, arm.FINGER_TRAVEL if action[7] > 0.5 else 0.0)
            world.command(np.concatenate([goal, fingers]))
            decided = world.step()
            step += 1
            if decided or step >= MAX_STEPS:
                break
    judge = world.judge
    return judge.success, judge.reason or "timeout", step


def main() -> None:
    """``python -m tools.train.flow_evaluate CHECKPOINT [EPISODES [FIRST_SEED]]`` prints a JSON line per row."""
    import sys

    checkpoint = Path(sys.argv[1])
    episodes = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 1_000_000
    seeds = range(first, first + episodes)
    rows = [
        ("plain", 16, 10),
        ("plain", 8, 10),
        ("shuffle", 16, 10),
        ("turned", 16, 10),
        ("plain", 16, 4),
        ("plain", 8, 2),
    ]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for control, execute, flow_steps in rows:
            print(json.dumps(evaluate(pool, checkpoint, seeds, control, execute, flow_steps)), flush=True)


if __name__ == "__main__":
    main()
