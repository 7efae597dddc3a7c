"""Errors of the device and of the network, with advice on what to do."""

from collections.abc import Sequence
from math import isfinite
from typing import NoReturn

import torch

from vla_ros.errors import DeviceLostError, OutOfMemoryError, VlaRosError


class NotFiniteError(VlaRosError):
    """The network's output holds NaN or Inf; ``what`` begins the message."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} NaN or Inf; the frame is dropped. If this persists, the weights are damaged: download the "
            "checkpoint again and reload the policy"
        )


class EngineMismatchError(VlaRosError):
    """The engine's tokens differ from the reference path's."""


def raise_explained(error: RuntimeError, device: torch.device) -> NoReturn:
    """Raise an error of the device's libraries as one of this package's, any other as it is.

    Raises OutOfMemoryError if an allocation failed; cached memory is released, so a smaller request may succeed.
    Raises DeviceLostError if the error is unrecoverable.
    """
    if isinstance(error, torch.cuda.OutOfMemoryError):
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemoryError(
            f"out of memory on {device}: {_first_line(error)}. Choose policy.quantization int8 or int4, or stop "
            "other programs on this device; then reload the policy"
        ) from error
    if not is_device_error(error):
        raise error
    raise DeviceLostError(
        f"{device} stopped answering: {_first_line(error)}. The arm holds. Reload the policy; if that "
        "fails, this process can no longer use the device: restart it, and check nvidia-smi and dmesg"
    ) from error


def is_device_error(error: BaseException) -> bool:
    """Return True for errors of the CUDA libraries other than out-of-memory errors.

    Errors about a graph capture are not device errors: they end only the capture.
    """
    text = str(error)
    return "captur" not in text.lower() and any(
        mark in text for mark in ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "cudaError")
    )


def require_finite(margins: Sequence[float]) -> None:
    """Raise NotFiniteError if a margin is NaN or Inf; it is NaN if any logit of its row is NaN."""
    if not all(isfinite(margin) for margin in margins):
        raise NotFiniteError("the network's logits contain")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
