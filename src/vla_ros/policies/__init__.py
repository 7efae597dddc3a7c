"""One module per model family behind :class:`~vla_ros.policies.base.Policy`."""

from vla_ros.config.registry import available
from vla_ros.policies.base import Policy, create, no_progress

__all__ = ["Policy", "available", "create", "no_progress"]
