"""Selects a device's operations: Triton's on a GPU with Triton installed, otherwise torch's."""

import os
from importlib import import_module
from typing import Any

import torch

from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.tile_configs import SIMULATE, MeasuredTile, unmeasured
from vla_ros_models.engine.tile_store import tiles_of
from vla_ros_models.engine.tower_ops import TowerOps


def make_ops(device: torch.device, ranks: Ranks | None = None) -> Ops:
    """Return the operations of a Llama, or of the shards that ``ranks`` have of it."""
    module = _module(device, "triton_ops")
    return Ops(ranks) if module is None else module.TritonOps(measured_on(device), ranks=ranks)


def make_tower_ops(device: torch.device) -> TowerOps:
    module = _module(device, "triton_ops")
    return TowerOps() if module is None else module.TritonTowerOps()


def make_fused_ops(device: torch.device) -> Ops:
    """Return the operations for decoders with layer norms, biases, or norms of queries and keys."""
    module = _module(device, "fused_ops")
    return Ops() if module is None else module.FusedOps(measured_on(device))


def _module(device: torch.device, name: str) -> Any:
    """Return a module of this package that needs Triton, or None if it cannot run on ``device``."""
    if device.type != "cuda":
        return None
    try:
        return import_module(f"vla_ros_models.engine.{name}")
    except ImportError:
        return None


def measured_on(device: torch.device) -> MeasuredTile:
    """Return the tiles that ``vla-ros tune`` measured on a GPU; none while another GPU is simulated."""
    if os.environ.get(SIMULATE):
        return unmeasured
    tiles = tiles_of(torch.cuda.get_device_name(device))
    return lambda work: tiles.get(work.key)
