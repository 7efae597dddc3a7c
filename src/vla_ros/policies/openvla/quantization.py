"""Weight quantisation of the language model with bitsandbytes: 8-bit and nf4.

Only the linear layers inside the decoder's blocks are quantised; vision towers, projector, embedding and head
keep their type, and products are computed in bfloat16. On a GPU this saves memory, not time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vla_ros.errors import MissingDependencyError

_LAYERS = "language_model.model.layers."


def is_quantizable(key: str) -> bool:
    """Return True for the checkpoint keys whose weights quantisation changes."""
    return key.startswith(_LAYERS) and key.endswith("_proj.weight")


def bytes_per_weight(mode: str) -> float:
    """Return the bytes that one quantised weight takes, with its share of the scales.

    int8 and fp8 have one float32 scale per output row (counted as nothing: rows have thousands of weights), int4
    4 bytes per 128 weights, nf4 an 8-bit scale per 64 weights and a float32 per 256 of those.
    """
    return {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128, "nf4": 0.5 + 1 / 64 + 4 / (64 * 256)}[mode]


def install(layers: nn.Module, mode: str) -> None:
    """Replace every linear layer inside ``layers`` by its quantised kind; weights follow by :func:`place`.

    The layers are the decoder's blocks on ``meta``; ``mode`` is ``none``, ``int8`` or ``nf4``.
    """
    if mode == "none":
        return
    bnb = _bitsandbytes()
    for parent in list(layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, _empty(bnb, child.in_features, child.out_features, mode))


def is_quantized(module: nn.Module) -> bool:
    """Return True for layers created by :func:`install`."""
    return type(module).__module__.startswith("bitsandbytes.")


def place(layer: Any, weight: Tensor, device: torch.device) -> None:
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


def _empty(bnb: Any, width_in: int, width_out: int, mode: str) -> nn.Module:
    if mode == "nf4":
        layer: nn.Module = bnb.nn.Linear4bit(
            width_in, width_out, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
    else:
        layer = bnb.nn.Linear8bitLt(width_in, width_out, bias=False, has_fp16_weights=False, threshold=6.0)
    return layer


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingDependencyError(
            "policy.quantization needs bitsandbytes, which is not installed: pip install 'vla_ros[quant]'"
        ) from error
    return bitsandbytes
