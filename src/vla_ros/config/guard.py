"""The section ``guard``: a process of its own between the node and the drivers."""

from dataclasses import dataclass

from vla_ros.config.options import AUTO, option


@dataclass(frozen=True)
class GuardConfig:
    """The guard's process; see docs/guard.md."""

    process: str = option(
        AUTO,
        "true: a process of its own checks each command again, sends it, and ends motion if this node cannot; "
        "auto: with velocities and twists, which a node that is killed would leave in force",
        choices=(AUTO, "true", "false"),
    )
