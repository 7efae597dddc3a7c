"""Runs policies on another machine: one client for openpi, RoboArena, vLLM-Omni, SGLang, GR00T and OFT.

``messages`` encodes and decodes arrays; ``dialect`` defines what differs between servers, with one module per
family; ``dialects`` chooses. ``transport`` carries messages, ``link`` keeps a connection, ``policy`` is the client.
"""

from vla_ros.policies.base import LazyPolicy
from vla_ros.policies.remote.options import RemoteOptions

REMOTE = LazyPolicy(RemoteOptions, "vla_ros.policies.remote.policy:RemotePolicy")
"""The entry point's target."""
