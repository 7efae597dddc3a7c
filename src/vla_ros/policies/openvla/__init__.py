"""OpenVLA: the published checkpoints on current libraries, without remote code.

``architecture`` reads what ``config.json`` says; ``vision_tower`` and ``model`` are the network; ``prompt`` and
``actions`` are its two ends; ``loading``, ``quantization`` and ``memory`` bring weights in; ``policy`` puts them
together behind :class:`~vla_ros.policies.base.Policy`; ``checkpoints``, ``vocabulary`` and ``tiny`` write
directories in the same layout.

Importing from here needs torch for ``OpenVLAPolicy`` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vla_ros.policies.base import LazyPolicy
from vla_ros.policies.openvla.options import OpenVLAOptions

if TYPE_CHECKING:
    from vla_ros.policies.openvla.policy import OpenVLAPolicy

__all__ = ["OpenVLAOptions", "OpenVLAPolicy"]

OPENVLA = LazyPolicy(OpenVLAOptions, "vla_ros.policies.openvla.policy:OpenVLAPolicy")
"""What the entry point names."""


def __getattr__(name: str) -> Any:
    if name == "OpenVLAPolicy":
        from vla_ros.policies.openvla.policy import OpenVLAPolicy

        return OpenVLAPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
