"""The section ``guard``: a process of its own between the node and the drivers."""

from dataclasses import dataclass

from vla_ros.config.options import option


@dataclass(frozen=True)
class GuardConfig:
    """The guard's process; see docs/guard.md."""

    process: bool = option(
        False,
        "true: a process of its own checks each command again, sends it, and ends motion if this node cannot",
    )
