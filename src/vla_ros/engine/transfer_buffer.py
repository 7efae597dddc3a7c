"""Packs small arrays into one device buffer, so that one transfer copies them all."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 256  # bytes; kernels are compiled for the alignment of the device's allocations

Field = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of an array."""

_NUMPY: dict[torch.dtype, Any] = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


class TransferBuffer:
    """Arrays on a device that one copy transfers together.

    ``tensors`` (int64, int32 or float32) are views of ``buffer``, uint8 [N]. Every copy costs the host about ten
    microseconds, whatever its size.
    """

    def __init__(self, device: torch.device, *fields: Field) -> None:
        self._spans: list[tuple[slice, Field]] = []
        end = 0
        for shape, dtype in fields:
            size = prod(shape) * dtype.itemsize
            self._spans.append((slice(end, end + size), (shape, dtype)))
            end += -(-size // _ALIGNED) * _ALIGNED
        self.buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self.tensors: list[Tensor] = [
            self.buffer[span].view(dtype).view(shape) for span, (shape, dtype) in self._spans
        ]

    def on_host(self) -> tuple[NDArray[np.uint8], Sequence[NDArray[Any]]]:
        """Return a zeroed host buffer of the same layout, and its arrays."""
        raw = np.zeros(self.buffer.shape[0], np.uint8)
        return raw, self.split(raw)

    def split(self, raw: NDArray[np.uint8]) -> Sequence[NDArray[Any]]:
        """Return the arrays of a downloaded ``buffer`` as views."""
        return [raw[span].view(_NUMPY[dtype]).reshape(shape) for span, (shape, dtype) in self._spans]
