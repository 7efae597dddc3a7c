"""Policies that another machine serves: one client for openpi, RoboArena, vLLM-Omni, SGLang, GR00T and OFT.

``messages`` encodes and decodes arrays; ``dialect`` says what differs between servers, with one module for each
family; ``dialects`` chooses. ``transport`` carries messages, ``link`` keeps a connection, ``policy`` is the client.
"""

from vla_ros.policies.base import LazyPolicy
from vla_ros.policies.remote.options import RemoteOptions

REMOTE = LazyPolicy(RemoteOptions, "vla_ros.policies.remote.policy:RemotePolicy")
"""What the entry point names."""
