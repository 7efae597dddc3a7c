"""Chooses a device and a data type from the options and the machine."""

from __future__ import annotations

import torch

from vla_ros.engine.fp8 import CAPABILITY
from vla_ros.errors import ConfigError


def choose_device(text: str) -> torch.device:
    """Return ``policy.device`` as a torch device of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        return torch.device("cuda:0" if count else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"policy.device: found '{text}', expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or (device.index or 0) >= count:
        raise ConfigError(
            f"policy.device: '{text}' is not available; torch {torch.__version__} sees {count} CUDA devices"
        )
    return torch.device("cuda", device.index or 0)


def choose_dtype(dtype: str, quantization: str, device: torch.device) -> str:
    """Resolve ``policy.dtype`` and check that the device supports the quantisation.

    ``auto`` means bfloat16 on CUDA and for quantised weights, else float32.
    """
    quantized = quantization != "none"
    if dtype == "auto":
        dtype = "bfloat16" if quantized or device.type == "cuda" else "float32"
    if quantized and dtype != "bfloat16":
        raise ConfigError(
            f"policy.dtype: '{dtype}' does not work with policy.quantization '{quantization}', which computes in "
            "bfloat16; set auto or bfloat16"
        )
    if quantization == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        found = torch.cuda.get_device_capability(device)
        raise ConfigError(
            f"policy.quantization: fp8 needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]} (Ada, Hopper or "
            f"later), but {device} has {found[0]}.{found[1]}; choose another format"
        )
    return dtype
