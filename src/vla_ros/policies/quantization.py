"""Quantises linear layers to int8 or nf4 with bitsandbytes, for the reference path.

Products are computed in bfloat16. On a GPU, quantisation saves memory but no time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vla_ros.errors import MissingDependencyError

_OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"has_fp16_weights": False, "threshold": 6.0},
    "nf4": {"compute_dtype": torch.bfloat16, "quant_type": "nf4"},
}


def install(layers: nn.Module, mode: str) -> None:
    """Replace each linear layer in ``layers`` (on ``meta``) with its int8 or nf4 version.

    :func:`place_quantized` sets the weights.
    """
    bnb = _bitsandbytes()
    for parent in list(layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                sizes = child.in_features, child.out_features
                kind = bnb.nn.Linear8bitLt if mode == "int8" else bnb.nn.Linear4bit
                setattr(parent, name, kind(*sizes, bias=False, **_OPTIONS[mode]))


def is_quantized(module: nn.Module) -> bool:
    """Return True for a layer that :func:`install` created."""
    return type(module).__module__.startswith("bitsandbytes.")


def place_quantized(layer: Any, weight: Tensor, device: torch.device) -> None:
    """Quantise ``weight`` [out, in] into ``layer`` on ``device``."""
    bnb = _bitsandbytes()
    source = weight.to(torch.bfloat16)
    if isinstance(layer, bnb.nn.Linear4bit):
        parameter = bnb.nn.Params4bit(
            source, requires_grad=False, quant_type="nf4", compress_statistics=True, module=layer
        )
    else:
        parameter = bnb.nn.Int8Params(source, requires_grad=False, has_fp16_weights=False)
    layer.weight = parameter
    layer.to(device)  # bitsandbytes quantises when a weight arrives on its device


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingDependencyError(
            "policy.quantization needs bitsandbytes, which is not installed: pip install 'vla_ros[quant]'"
        ) from error
    return bitsandbytes
