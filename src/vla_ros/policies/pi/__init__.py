"""pi0 and pi0.5: openpi's and LeRobot's published checkpoints, without remote code.

``architecture`` has the sizes, ``network`` and ``vision_tower`` the parameters, which :mod:`vla_ros.engine.flow`
runs; ``tokenizer``, ``prompt``, ``normalization``, ``robots`` and ``processing`` are the two ends; ``checkpoint``,
``lerobot``, ``names``, ``loading`` and ``memory`` read a folder; ``inference`` and ``policy`` put all together.
"""

from __future__ import annotations

from vla_ros.policies.base import LazyPolicy
from vla_ros.policies.pi.options import PiOptions

PI = LazyPolicy(PiOptions, "vla_ros.policies.pi.policy:PiPolicy")
"""What the entry point names."""
