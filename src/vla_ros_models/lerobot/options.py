"""Options of LeRobot's policies: ``policy.*`` if ``policy.name`` is ``lerobot``."""

from dataclasses import dataclass

from vla_ros.config.options import PolicyConfig, option


@dataclass(frozen=True)
class LeRobotOptions(PolicyConfig):
    """The checkpoint and how to run it."""

    checkpoint: str = option("", "Folder that LeRobot wrote: config.json, model.safetensors and the processors")
    python: str = option(
        "",
        "Python of an environment with LeRobot, in which the policy runs as a separate process; empty: "
        "LeRobot is in this environment",
    )
    device: str = option("auto", "Where the model runs: auto, cpu, cuda or cuda:N")
    tokenizer: str = option(
        "", "Local folder of the tokenizer that the checkpoint names on the hub (SmolVLA: of its backbone)"
    )
    seed: int = option(
        -1, "Seed of the noise of diffusion and flow policies; -1: random", low=0, high=2**31 - 1, unset=-1
    )
