"""The wire protocols of policy servers (openpi, RoboArena, vLLM-Omni, SGLang, GR00T, OFT) and their client.

``messages`` encodes and decodes arrays, ``images`` decodes images. Each family of servers has a module with its
dialect; ``dialects`` chooses among them. ``vla_eval`` has the messages of a benchmark harness. ``transport`` sends
and receives messages, ``link`` keeps a connection open, ``policy`` is the client.
"""

from vla_ros.policies.base import LazyPolicy
from vla_ros.policies.remote.options import RemoteOptions

REMOTE = LazyPolicy(RemoteOptions, "vla_ros.policies.remote.policy:RemotePolicy")
"""Target of the entry point ``remote``."""
