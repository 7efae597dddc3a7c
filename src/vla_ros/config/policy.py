"""Options of all policies."""

from __future__ import annotations

from dataclasses import dataclass

from vla_ros.config.options import option


@dataclass(frozen=True)
class PolicyConfig:
    """The policy to run, and the options of all policies; a policy with further options extends this class."""

    name: str = option("openvla", "Name of the policy's entry point (group vla_ros.policies)")
    instruction: str = option("", "Instruction to follow until one arrives on topics.instruction", live=True)
    max_instruction_length: int = option(
        500, "Maximum length of an instruction; longer ones are refused", unit="characters", low=1, high=2000
    )
