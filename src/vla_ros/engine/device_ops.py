"""Selects a device's operations: Triton's on a GPU with Triton installed, otherwise torch's."""

import torch

from vla_ros.engine.ops import Ops, TowerOps


def make_ops(device: torch.device) -> Ops:
    if device.type == "cuda":
        try:
            from vla_ros.engine.triton_ops import TritonOps
        except ImportError:
            return Ops()
        return TritonOps()
    return Ops()


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
        return FusedOps()
    return Ops()
