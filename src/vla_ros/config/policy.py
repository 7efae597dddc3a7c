"""The options that every policy has."""

from __future__ import annotations

from dataclasses import dataclass

from vla_ros.config.options import option


@dataclass(frozen=True)
class PolicyConfig:
    """Which policy runs, and what every policy is told. A policy's own options extend this class."""

    name: str = option("openvla", "Policy by its entry-point name (group vla_ros.policies)")
    instruction: str = option("", "Instruction to follow until one arrives on topics.instruction", live=True)
    max_instruction_length: int = option(
        500, "Longer instructions are refused", unit="characters", low=1, high=2000
    )
