"""Selects a device's operations: Triton's on a GPU with Triton installed, otherwise torch's."""

import os

import torch

from vla_ros.engine.ops import Ops, TowerOps
from vla_ros.engine.tile_configs import SIMULATE, MeasuredTile, unmeasured
from vla_ros.engine.tile_store import tiles_of


def make_ops(device: torch.device) -> Ops:
    if device.type == "cuda":
        try:
            from vla_ros.engine.triton_ops import TritonOps
        except ImportError:
            return Ops()
        return TritonOps(measured_on(device))
    return Ops()


def measured_on(device: torch.device) -> MeasuredTile:
    """Return the tiles that ``vla-ros tune`` measured on a GPU; none while another GPU is simulated."""
    if os.environ.get(SIMULATE):
        return unmeasured
    tiles = tiles_of(torch.cuda.get_device_name(device))
    return lambda work: tiles.get(work.key)


def make_tower_ops(device: torch.device) -> TowerOps:
    if device.type == "cuda":
        try:
            from vla_ros.engine.triton_ops import TritonTowerOps
        except ImportError:
            return TowerOps()
        return TritonTowerOps()
    return TowerOps()


def make_fused_ops(device: torch.device) -> Ops:
    """Return the operations for decoders with layer norms, biases, or norms of queries and keys."""
    if device.type == "cuda":
        try:
            from vla_ros.engine.fused_ops import FusedOps
        except ImportError:
            return Ops()
        return FusedOps(measured_on(device))
    return Ops()
