"""OpenVLA through :mod:`vla_ros.engine`: what connects the reference model's weights with the engine."""

from __future__ import annotations

import torch

from vla_ros.engine.executor import Engine, EngineOptions
from vla_ros.engine.ops import Ops
from vla_ros.engine.step_graphs import Encode
from vla_ros.engine.weights import DecoderWeights, assemble, fuse, fuse_layer
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.openvla.loading import Produce, place
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.vision_encoder import VisionEncoder

_LAYERS = "language_model.model.layers."


def make_engine(
    model: OpenVLAModel,
    answer: int,
    quantization: str = "none",
    drafts: str = "prefill",
    *,
    keep: bool = True,
    weights: DecoderWeights | None = None,
    ops: Ops | None = None,
    encode: Encode | None = None,
) -> Engine:
    """Return an engine over the weights of ``model``.

    Args:
        model: Loaded, not quantised, on its device.
        answer: Tokens to decode.
        quantization: ``none``, ``int8`` or ``int4``.
        drafts: ``policy.drafts``.
        keep: True leaves ``model`` usable: dense weights are shared, quantised ones exist beside them. False frees
            the decoder's dense weights layer by layer.
        weights: From :func:`fill_quantized`; None takes those of ``model``.
        ops: How its decoder computes; None takes what suits the device.
        encode: The vision encoder; None takes :class:`~vla_ros.policies.openvla.vision_encoder.VisionEncoder`.
    """
    size = model.architecture.image_size
    if weights is None:
        weights = fuse(model.language_model, quantization, keep=keep)
    return Engine(
        VisionEncoder(model) if encode is None else encode,
        weights,
        model.architecture.patches,
        EngineOptions(answer=answer, image_size=(size, size), drafts=drafts),
        ops,
    )


def fill_quantized(
    model: OpenVLAModel,
    produce: Produce,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    progress: Progress = no_progress,
) -> DecoderWeights:
    """Load the weights to ``device``, quantising layer by layer: at most one layer is dense.

    Args:
        model: Empty, from :func:`~vla_ros.policies.openvla.loading.build_empty`. All but its decoder's layers can
            be used afterwards.
        produce: Source of the tensors.
        device: Where they go.
        dtype: Type of all that is not quantised.
        quantization: ``int8`` or ``int4``.
        progress: Told the share of layers.

    Raises:
        CheckpointError: A file cannot be read.
    """
    names = [name for name, _ in model.named_parameters()]
    for name, tensor in produce([name for name in names if not name.startswith(_LAYERS)]):
        place(model, name, tensor, device, dtype)
    fused = []
    for index, layer in enumerate(model.language_model.layers):
        for name, tensor in produce([name for name in names if name.startswith(f"{_LAYERS}{index}.")]):
            place(model, name, tensor, device, dtype)
        fused.append(fuse_layer(layer, quantization, keep=False))
        progress((index + 1) / model.architecture.llm.layers, f"quantising layer {index + 1}")
    model.to(device)
    return assemble(model.language_model, tuple(fused))
