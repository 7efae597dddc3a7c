"""Resolves ``policy.engine`` for this machine."""

from __future__ import annotations

import importlib.util

import torch

from vla_ros.errors import ConfigError
from vla_ros.policies.openvla.options import CheckpointOptions


def choose_engine(options: CheckpointOptions, device: torch.device) -> str:
    """Resolve ``policy.engine``; ``auto`` means ``graph`` if its kernels run, else ``reference``.

    nf4 runs on the reference path only, so it selects that path.
    """
    asked, weights = options.engine, options.quantization
    missing = _why_no_engine(device) if asked == "auto" else ""
    engine = asked if asked != "auto" else "reference" if missing or weights == "nf4" else "graph"
    if engine == "graph" and weights == "nf4":
        raise ConfigError(
            "policy.quantization: nf4 is bitsandbytes' format, which only the reference path runs, and "
            "policy.engine is graph; choose int4, the engine's 4-bit format, or policy.engine:=reference"
        )
    if engine == "reference" and weights in ("int4", "fp8"):
        instead = {"int4": "nf4, bitsandbytes' 4-bit format", "fp8": "int8, or none"}[weights]
        raise ConfigError(
            f"policy.quantization: {weights} is the engine's format, and "
            f"{missing or 'policy.engine is reference'}; choose {instead}"
        )
    return engine


def _why_no_engine(device: torch.device) -> str:
    """Return why the engine's kernels cannot run, or an empty string.

    They need Triton and bfloat16 tensor cores (Ampere).
    """
    if device.type != "cuda":
        return f"the engine needs an NVIDIA GPU, policy.device is {device}"
    if importlib.util.find_spec("triton") is None:
        return "the engine needs Triton, which is not installed"
    found = torch.cuda.get_device_capability(device)
    return "" if found >= (8, 0) else f"the engine needs compute capability 8.0, {device} has {found[0]}.{found[1]}"
