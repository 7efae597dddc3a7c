"""Which reason an exception of a policy is."""

from __future__ import annotations

from vla_ros.control.reasons import Reason
from vla_ros.errors import DeviceLostError


def reason_of(error: BaseException) -> Reason:
    """``device_error`` for an error of the GPU itself, else ``inference_error``.

    A CUDA error is sticky: every later call of the process fails as well, so the arm stops and the node must be
    started again. Running out of memory is not (the next frame may fit). PyTorch raises ``RuntimeError`` or
    ``torch.AcceleratorError`` with "CUDA error" in its text, the engine :class:`DeviceLostError`; torch is not
    imported for this.
    """
    lost = isinstance(error, DeviceLostError) or "CUDA error" in str(error)
    return Reason.DEVICE_ERROR if lost else Reason.INFERENCE_ERROR
