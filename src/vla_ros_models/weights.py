"""Checks a checkpoint's tensors against a network, loads them, and writes them."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vla_ros.errors import CheckpointError
from vla_ros.policies.base import Progress, no_progress
from vla_ros_models.checkpoint_files import FLOATS, INDEX, SINGLE, Produce, StoredTensor, list_some

M = TypeVar("M", bound=nn.Module)
Shapes = Mapping[str, tuple[int, ...]]
"""Maps parameter names to shapes."""


class Joined(nn.Module):
    """Linear layers of the same inputs, whose outputs are concatenated: one fused matrix as its stored parts."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    @property
    def weight(self) -> Tensor:
        """The weight of the first layer."""
        first: Any = next(iter(self.children()))
        return first.weight  # type: ignore[no-any-return]

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([part(rows) for part in self.children()], dim=-1)


def linears_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the linear layers whose outputs make up those of ``module``."""
    return tuple(module.children()) if isinstance(module, Joined) else (module,)


class _NoInit(TorchFunctionMode):
    """Skips ``torch.nn.init``: to draw random numbers on ``meta``, torch imports its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_init = getattr(func, "__module__", "") == "torch.nn.init"
        return None if is_init else func(*args, **(kwargs or {}))


def empty(make: Callable[[], M]) -> M:
    """Return the network that ``make`` builds on ``meta``, without memory for its weights; for inference only."""
    with torch.device("meta"), _NoInit():
        return make().eval().requires_grad_(False)


def parameter_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by name."""
    return {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}


def check_weights(
    needed: Shapes, manifest: Mapping[str, StoredTensor], unused: Callable[[str], object], source: str
) -> None:
    """Raise CheckpointError, which begins with ``source`` and names all tensors that differ.

    ``unused`` returns True for stored tensors that the network does not use.
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
    """Load the weights of a network on ``meta`` one tensor at a time, without a second copy on the host.

    ``dtype`` is the data type of all parameters, or a function from name to data type.
    """
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    total, done = sum(sizes.values()), 0
    for name, tensor in produce(list(sizes)):
        place(network, name, tensor, device, dtype if isinstance(dtype, torch.dtype) else dtype(name))
        done += sizes[name]
        progress(done / total, f"loading {name}")
    network.to(device)  # also moves constants, which are not parameters


def place(network: nn.Module, name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Set one parameter of a network on ``meta``; its class may name parameters that stay float32."""
    dtype = torch.float32 if name.startswith(getattr(network, "float32", ())) else dtype
    owner_name, _, leaf = name.rpartition(".")
    owner: Any = network.get_submodule(owner_name)
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


_TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}
"""Data types by their names in safetensors files."""


def manifest_of(tensors: Mapping[str, Tensor], file: Path) -> dict[str, StoredTensor]:
    """Describe tensors in memory, of ``file``, as stored ones are."""
    names = {dtype: name for name, dtype in _TYPES.items()}
    return {
        name: StoredTensor(file, tuple(one.shape), names.get(one.dtype, str(one.dtype)), name)
        for name, one in tensors.items()
    }


def with_loaded(produce: Produce, loaded: Mapping[str, Tensor]) -> Produce:
    """Return a function that yields tensors of ``loaded``, which are in memory, before those of ``produce``."""

    def both(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, loaded[name]) for name in names if name in loaded)
        yield from produce([name for name in names if name not in loaded])

    return both


def write_weights(
    folder: Path, manifest: Mapping[str, StoredTensor], produce: Produce, dtype: str = ""
) -> tuple[int, int]:
    """Write ``model.safetensors`` one tensor at a time; return the tensor and byte counts.

    Tensors of floats get the type ``dtype``, if it is not empty. The file has its name only when it is complete.
    """
    types = {name: dtype if dtype and one.dtype in FLOATS else one.dtype for name, one in manifest.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    size = 0
    for name in sorted(manifest):
        shape = manifest[name].shape
        end = size + prod(shape) * _TYPES[types[name]].itemsize
        header[name] = {"dtype": types[name], "shape": shape, "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = folder / f"{SINGLE}.partial"
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in produce(list(manifest)):
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            data = tensor.to(_TYPES[types[name]]).contiguous().flatten().view(torch.uint8)
            file.write(data.numpy().data)
    partial.rename(folder / SINGLE)
    return len(manifest), size
