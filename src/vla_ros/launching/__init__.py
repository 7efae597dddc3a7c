"""Shared code of the launch files; only they import it, because it needs ``launch`` and ``launch_ros``.

Options are checked with the node's own code before anything starts.
"""

from vla_ros.launching.arguments import MIDDLEWARE, POLICY, Argument, declare, value
from vla_ros.launching.middleware import middleware
from vla_ros.launching.node import interpreter, policy, policy_node
from vla_ros.launching.runs import demo, replay

__all__ = [
    "MIDDLEWARE",
    "POLICY",
    "Argument",
    "declare",
    "demo",
    "interpreter",
    "middleware",
    "policy",
    "policy_node",
    "replay",
    "value",
]
