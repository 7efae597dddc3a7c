"""Builds the engine (:mod:`vla_ros.engine`) from the reference model's weights."""

from __future__ import annotations

import torch

from vla_ros.engine.executor import Engine, EngineOptions
from vla_ros.engine.ops import Ops
from vla_ros.engine.step_graphs import Encode
from vla_ros.engine.weights import DecoderWeights, assemble, fuse, fuse_layer
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.checkpoint_files import Produce
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.vision_encoder import VisionEncoder
from vla_ros.policies.weights import place

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
    """Return an engine that runs the weights of ``model``.

    ``model`` must be loaded, unquantised and on its device. ``answer`` is the number of tokens to decode;
    ``drafts`` is ``policy.drafts``. With ``keep``, ``model`` stays usable: dense weights are shared, and quantised
    weights are copies. Without ``keep``, the decoder's dense weights are freed layer by layer. ``weights`` are from
    :func:`fill_quantized`. ``ops`` and ``encode`` default to those of the device.
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
    """Load the weights to ``device``; quantise one decoder layer at a time to save memory.

    ``model`` is from :func:`~vla_ros.policies.openvla.loading.build_empty`; afterwards everything except its
    decoder layers is usable. ``produce`` yields the tensors; unquantised parameters have the data type ``dtype``.
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
