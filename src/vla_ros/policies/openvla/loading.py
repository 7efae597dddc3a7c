"""Loads safetensors files into the network; checks every key and shape before it reads data.

Only safetensors: other weight files are pickles, which can run code when they are opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vla_ros.errors import CheckpointError
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.checkpoint_files import FLOATS, StoredTensor, list_some, read_tensors
from vla_ros.policies.openvla import quantization
from vla_ros.policies.openvla.architecture import Architecture
from vla_ros.policies.openvla.model import OpenVLAModel

M = TypeVar("M", bound=OpenVLAModel)

# Stored in the published files though OpenVLA never runs them: norms and pooling after the last block, and the
# frequencies that older versions of transformers saved.
_NEVER_RUN = re.compile(
    r"vision_backbone\.(fused_)?featurizer\.(norm|fc_norm|attn_pool|head)\."
    r"|language_model\.model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq$"
)
_BLOCK = re.compile(r"vision_backbone\.(fused_)?featurizer\.blocks\.(\d+)\.")


def build_empty(architecture: Architecture, attention: str = "sdpa", quantize: str = "none") -> OpenVLAModel:
    """Return the network without memory for its weights (on ``meta``), ready for :func:`fill`.

    ``quantize`` is ``none``, ``int8`` or ``nf4``, for the linear layers of the decoder.
    """
    return empty(lambda: OpenVLAModel(architecture, attention), quantize)


def empty(make: Callable[[], M], quantize: str = "none") -> M:
    """Call ``make`` without allocating memory for weights; see :func:`build_empty`."""
    with torch.device("meta"):
        model = make()
        quantization.install(model.language_model.layers, quantize)
    return model.eval().requires_grad_(False)


def check_weights(model: OpenVLAModel, manifest: Mapping[str, StoredTensor], folder: Path) -> None:
    """Compare the network's parameters with the stored tensors; CheckpointError names all that differ."""
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    missing = sorted(expected.keys() - manifest.keys())
    unexpected = sorted(key for key in manifest.keys() - expected.keys() if not never_run(key, model.architecture))
    shapes = [
        f"{key} in {manifest[key].file.name}: {list(manifest[key].shape)}, expected {list(shape)}"
        for key, shape in sorted(expected.items())
        if key in manifest and manifest[key].shape != shape
    ]
    types = [
        f"{key} in {manifest[key].file.name}: {manifest[key].dtype}"
        for key in sorted(expected.keys() & manifest.keys())
        if manifest[key].dtype not in FLOATS
    ]
    problems = [
        list_some("missing", missing),
        list_some("unexpected", unexpected),
        list_some("of the wrong shape", shapes),
        list_some(f"not of a type in {list(FLOATS)}", types),
    ]
    text = "; ".join(problem for problem in problems if problem)
    if text:
        raise CheckpointError(f"{folder}: weights do not fit config.json: {text}")


Produce = Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]
"""Parameter names to names and tensors, in any order."""


def from_files(manifest: Mapping[str, StoredTensor]) -> Produce:
    """Yield the tensors of a checkpoint's files, one at a time."""

    def produce(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for file in sorted({manifest[name].file for name in names}):
            yield from read_tensors(file, [name for name in names if manifest[name].file == file])

    return produce


def fill(
    model: OpenVLAModel,
    source: Mapping[str, StoredTensor] | Produce,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress = no_progress,
) -> None:
    """Load the weights to ``device`` one tensor at a time, so that the host never holds a second copy.

    ``model`` is from :func:`build_empty`, checked by :func:`check_weights`. Quantised layers have a type of their
    own.
    """
    produce = from_files(source) if isinstance(source, Mapping) else source
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total, done = sum(sizes.values()), 0
    for name, tensor in produce(list(sizes)):
        place(model, name, tensor, device, dtype)
        done += sizes[name]
        progress(done / total, f"loading {name}")
    model.to(device)  # the constants that are no weights


def place(model: nn.Module, name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Set one parameter of a network that was built on ``meta``, quantising it where its layer asks for that."""
    owner_name, _, leaf = name.rpartition(".")
    owner: Any = model.get_submodule(owner_name)
    if quantization.is_quantized(owner):
        quantization.place(owner, tensor, device)
        return
    moved = tensor.to(device=device, dtype=dtype)
    # What was neither moved nor converted still lies in the mapped file: a changed file would change the model.
    value = moved.clone() if moved.data_ptr() == tensor.data_ptr() else moved
    setattr(owner, leaf, nn.Parameter(value, requires_grad=False))


def never_run(key: str, architecture: Architecture) -> bool:
    """Return whether a stored tensor is one that OpenVLA does not use, such as the last block of a tower."""
    if _NEVER_RUN.match(key):
        return True
    block = _BLOCK.match(key)
    if block is None:
        return False
    tower = int(block.group(1) is not None)
    if tower >= len(architecture.towers):
        return False
    shape = architecture.towers[tower]
    return shape.used_blocks <= int(block.group(2)) < shape.blocks
