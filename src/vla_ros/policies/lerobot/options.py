"""Options of LeRobot's policies: ``policy.*`` where ``policy.name`` is ``lerobot``."""

from __future__ import annotations

from dataclasses import dataclass

from vla_ros.config.options import option
from vla_ros.config.policy import PolicyConfig


@dataclass(frozen=True)
class LeRobotOptions(PolicyConfig):
    """Which checkpoint answers."""

    checkpoint: str = option("", "Folder that LeRobot wrote: config.json, model.safetensors and the processors")
    python: str = option(
        "",
        "Python of an environment with LeRobot, started as a process of its own; empty: LeRobot is in this one",
    )
    device: str = option("auto", "Where the model runs: auto, cpu, cuda or cuda:N")
    tokenizer: str = option("", "Folder of the tokenizer that a checkpoint names on the hub; of SmolVLA's backbone")
    seed: int = option(-1, "Seed of the noise of diffusion and flow policies; -1 draws one", low=-1, high=2**31 - 1)
