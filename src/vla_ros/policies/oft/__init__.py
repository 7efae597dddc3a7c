"""OpenVLA-OFT: OpenVLA's network, returning a whole chunk from one bidirectional pass.

``loading`` reads the published files, ``network`` extends OpenVLA's network, ``inference`` runs the network, and
``policy`` implements :class:`~vla_ros.policies.base.Policy`. Importing this package does not import torch.
"""

from vla_ros.policies.base import LazyPolicy
from vla_ros.policies.oft.options import OFTOptions

__all__ = ["OFT", "OFTOptions"]

OFT = LazyPolicy(OFTOptions, "vla_ros.policies.oft.policy:OFTPolicy")
"""The entry point's target."""
