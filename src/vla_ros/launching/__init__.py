"""What the launch files share. Imports ``launch`` and ``launch_ros``; only launch files import this.

Options are checked here with the same code as in the node, so that a mistake is told before anything starts.
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
