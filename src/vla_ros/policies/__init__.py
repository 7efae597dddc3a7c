"""Model families, each a module with a :class:`~vla_ros.policies.base.Policy`."""

from vla_ros.config.registry import available
from vla_ros.policies.base import Policy, Session, create, no_progress

__all__ = ["Policy", "Session", "available", "create", "no_progress"]
