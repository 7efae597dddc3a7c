"""A client for policy servers: openpi, RoboArena, vLLM-Omni, SGLang, GR00T, OFT.

``messages`` encodes and decodes arrays. ``dialect`` defines the protocol of a server; each family of servers has
its own module, and ``dialects`` chooses among them. ``transport`` sends and receives messages, ``link`` keeps a
connection open, and ``policy`` is the client.
"""

from vla_ros.policies.base import LazyPolicy
from vla_ros.policies.remote.options import RemoteOptions

REMOTE = LazyPolicy(RemoteOptions, "vla_ros.policies.remote.policy:RemotePolicy")
"""Target of the entry point ``remote``."""
