"""Checks a checkpoint's tensors against a network, loads them, and writes them.

On the reference path, linear layers may be int8 or nf4 of bitsandbytes: products are computed in bfloat16, and on a
GPU, quantisation saves memory but no time.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vla_ros.errors import CheckpointError, MissingDependencyError
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.checkpoint_files import FLOATS, INDEX, Produce, StoredTensor, list_some

Shapes = Mapping[str, tuple[int, ...]]
"""Maps parameter names to shapes."""


def parameter_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by name."""
    return {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}


def check_weights(
    needed: Shapes, manifest: Mapping[str, StoredTensor], unused: Callable[[str], object], source: str
) -> None:
    """Compare the tensors that a network needs with the stored tensors.

    ``unused`` returns True for stored tensors that the network does not use. Raises CheckpointError, which begins
    with ``source`` and names all tensors that differ.
    """
    both = sorted(needed.keys() & manifest.keys())
    problems = {
        "missing": sorted(needed.keys() - manifest.keys()),
        "unexpected": sorted(name for name in manifest.keys() - needed.keys() if not unused(name)),
        "of the wrong shape": [
            f"{name} in {manifest[name].file.name}: {list(manifest[name].shape)}, expected {list(needed[name])}"
            for name in both
            if manifest[name].shape != needed[name]
        ],
        f"not of a type in {list(FLOATS)}": [
            f"{name} in {manifest[name].file.name}: {manifest[name].dtype}"
            for name in both
            if manifest[name].dtype not in FLOATS
        ],
    }
    if text := "; ".join(list_some(what, names) for what, names in problems.items() if names):
        raise CheckpointError(f"{source}: {text}")


def fill(
    network: nn.Module,
    produce: Produce,
    device: torch.device,
    dtype: torch.dtype | Callable[[str], torch.dtype],
    progress: Progress = no_progress,
) -> None:
    """Load the weights to ``device`` one tensor at a time, without a second copy on the host.

    ``network`` is on ``meta``. ``dtype`` is the data type of all parameters, or a function from name to data type;
    quantised layers ignore it.
    """
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    total, done = sum(sizes.values()), 0
    for name, tensor in produce(list(sizes)):
        place(network, name, tensor, device, dtype if isinstance(dtype, torch.dtype) else dtype(name))
        done += sizes[name]
        progress(done / total, f"loading {name}")
    network.to(device)  # also moves constants, which are not parameters


def place(network: nn.Module, name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Set one parameter of a network on ``meta``; quantise it if its layer is quantised."""
    owner_name, _, leaf = name.rpartition(".")
    owner: Any = network.get_submodule(owner_name)
    if _is_quantized(owner):
        _place_quantized(owner, tensor, device)
        return
    moved = tensor.view(getattr(owner, leaf).shape).to(device=device, dtype=dtype)
    # A tensor that was neither moved nor converted still maps its file, which may change.
    value = moved.clone() if moved.data_ptr() == tensor.data_ptr() else moved
    setattr(owner, leaf, nn.Parameter(value, requires_grad=False))


def write_shards(folder: Path, parts: Sequence[Sequence[str]], produce: Produce) -> tuple[int, int]:
    """Write one safetensors file per part, and the index; return the tensor and byte counts."""
    index: dict[str, str] = {}
    size = 0
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in produce(part)}
        save_file(tensors, str(folder / file), metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file)  # safetensors makes it readable only by its owner
        index.update(dict.fromkeys(part, file))
        size += sum(tensor.nbytes for tensor in tensors.values())
    content = {"metadata": {"total_size": size}, "weight_map": index}
    (folder / INDEX).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return len(index), size


_OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"has_fp16_weights": False, "threshold": 6.0},
    "nf4": {"compute_dtype": torch.bfloat16, "quant_type": "nf4"},
}


def quantize_layers(layers: nn.Module, mode: str) -> None:
    """Replace each linear layer in ``layers`` (on ``meta``) with its int8 or nf4 version.

    :func:`place` sets the weights.
    """
    bnb = _bitsandbytes()
    for parent in list(layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                sizes = child.in_features, child.out_features
                kind = bnb.nn.Linear8bitLt if mode == "int8" else bnb.nn.Linear4bit
                setattr(parent, name, kind(*sizes, bias=False, **_OPTIONS[mode]))


def _is_quantized(module: nn.Module) -> bool:
    """Return True for a layer that :func:`quantize_layers` created."""
    return type(module).__module__.startswith("bitsandbytes.")


def _place_quantized(layer: Any, weight: Tensor, device: torch.device) -> None:
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
