"""Merges LoRA adapters in peft's format into the base weights during loading."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from torch import Tensor

from vla_ros.errors import CheckpointError
from vla_ros.policies.checkpoint_files import Produce, StoredTensor, from_files, list_some, read_header
from vla_ros.policies.fields import read_fields

FOLDER = "lora_adapter"

_HARMLESS = {
    "training": "lora_dropout task_type inference_mode eva_config",
    "about the base model, which policy.base or --base names": "revision auto_mapping",
    "about peft": "peft_version megatron_core",
    "used only with use_qalora": "qalora_group_size",
}
"""Keys of ``adapter_config.json`` that do not change the merged weights."""

Adapter = dict[str, tuple[Tensor, Tensor, float]]
"""Maps a parameter name to A [r, in], B [out, r] and the scale."""


def merging(produce: Produce, adapter: Adapter) -> Produce:
    """Return a function that merges the adapter into tensors of ``produce``, in float32."""

    def merged(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in produce(names):
            yield name, merge(tensor, *adapter[name]) if name in adapter else tensor

    return merged


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``weight + scale * b @ a`` in float32; convolutions are flattened to [out, in * height * width]."""
    delta = (b.float().flatten(1) @ a.float().flatten(1)) * scale
    return weight.float() + delta.view(weight.shape)


def adapter_folder(folder: Path) -> Path:
    """Return the adapter's folder: ``lora_adapter`` in ``folder``, or ``folder`` itself."""
    for place in (folder / FOLDER, folder):
        if (place / "adapter_model.safetensors").exists():
            return place
    raise CheckpointError(
        f"policy.base is set, but neither {folder} nor its {FOLDER} has adapter_model.safetensors"
    )


@dataclass(frozen=True)
class LoraSettings:
    """What ``adapter_config.json`` says about merging an adapter."""

    alpha: float | None = None  # divided by the rank; None without a file: as in OpenVLA-OFT's training code
    by_root: bool = False  # True divides alpha by the root of the rank (rslora)
    rank: int | None = None  # size of A and B; None for any
    targets: Any = None  # names or a pattern of the layers with adapters; None for any
    base: str = ""  # name of the base model
    where: str = "adapter_config.json"  # the file, for messages

    def scale(self, rank: int) -> float:
        if rank < 1 or self.rank not in (None, rank):
            raise CheckpointError(
                f"{self.where}: r: found {self.rank}, but the adapter's matrices have rank {rank}"
            )
        alpha = min(rank, 16) if self.alpha is None else self.alpha
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def targeted(self, layer: str) -> bool:
        """Return whether peft puts an adapter on a layer, given by its name in the base model."""
        if self.targets in (None, "all-linear"):
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, layer) is not None
        return any(layer == name or layer.endswith(f".{name}") for name in self.targets)


def read_settings(path: Path) -> LoraSettings:
    """Read ``adapter_config.json``; raises CheckpointError, which names what is not supported."""
    config = read_fields(path, "merge the adapter with peft itself: merge_and_unload(), then save_pretrained()")
    config.expect("peft_type", "LORA")
    config.expect("bias", "none")
    # Other ways (pissa, olora, loftq, corda, lora_ga) change the base weights when peft loads the adapter.
    config.expect("init_lora_weights", True, False, "gaussian", "orthogonal", "eva")
    targets = config.get("target_modules")
    if not isinstance(targets, (list, str, NoneType)):
        raise CheckpointError(f"{path}: target_modules: found {targets!r}, expected a pattern or a list of names")
    alpha, by_root = config.number("lora_alpha", 8), config.expect("use_rslora", False, True)
    rank, base = config.whole("r", 8), config.get("base_model_name_or_path")
    config.finish(_HARMLESS)
    return LoraSettings(alpha, by_root, rank, targets, str(base or ""), str(path))


def read_adapter(folder: Path, manifest: Mapping[str, StoredTensor], own_towers: bool = False) -> Adapter:
    """Read a LoRA adapter.

    ``manifest`` lists the tensors of the base model. ``own_towers`` skips the vision towers, which FiLM checkpoints
    store elsewhere. Raises CheckpointError if the adapter has another base model or is of an unsupported kind.
    """
    settings = read_settings(folder / "adapter_config.json")
    file = folder / "adapter_model.safetensors"
    stored = read_header(file)
    tensors = dict(from_files(stored)(list(stored)))
    pairs: Adapter = {}
    used: set[str] = set()
    for name, a in tensors.items():
        layer, found, _ = name.partition(".lora_A.weight")
        other = f"{layer}.lora_B.weight"
        layer = layer.removeprefix("base_model.model.")
        if not found:
            continue
        used |= {name, other}
        if own_towers and layer.startswith("vision_backbone."):
            continue
        key = f"{layer}.weight"
        b, stored_as = tensors.get(other), manifest.get(key)
        shape = None if stored_as is None else stored_as.shape
        if b is None or shape is None or (b.shape[0], *a.shape[1:]) != shape or b.shape[1] != a.shape[0]:
            raise CheckpointError(
                f"{file}: {key}: A {list(a.shape)} and B {None if b is None else list(b.shape)} do not fit the "
                f"base model's {None if shape is None else list(shape)}; the adapter was trained on "
                f"{settings.base or 'another base'}"
            )
        if not settings.targeted(layer):
            raise CheckpointError(
                f"{settings.where}: target_modules: found {settings.targets!r}, which does not include {layer}, "
                "but the adapter has weights for it, which peft would ignore"
            )
        pairs[key] = (a, b, settings.scale(a.shape[0]))
    refuse_rest(file, tensors.keys() - used)
    return pairs


def refuse_rest(file: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError if a file has adapter tensors that were not merged, with the ``names`` given."""
    if rest := list_some("tensors that are not a linear layer's lora_A or lora_B", sorted(names)):
        raise CheckpointError(f"{file}: found {rest}; merge the adapter with peft itself")
