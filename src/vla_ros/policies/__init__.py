"""One module per model family behind :class:`~vla_ros.policies.base.Policy`."""

from vla_ros.policies.base import Policy, available, create, no_progress

__all__ = ["Policy", "available", "create", "no_progress"]
