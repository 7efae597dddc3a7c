"""Merges LoRA adapters in peft's format into the base weights during loading."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from vla_ros.errors import CheckpointError
from vla_ros.policies.checkpoint_files import Produce, StoredTensor, from_files, read_header, read_json

FOLDER = "lora_adapter"

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


def read_adapter(folder: Path, manifest: Mapping[str, StoredTensor], own_towers: bool = False) -> Adapter:
    """Read a LoRA adapter.

    ``manifest`` lists the tensors of the base model. ``own_towers`` skips the vision towers, which FiLM checkpoints
    store elsewhere. Raises CheckpointError if the adapter has another base model or is of an unsupported kind.
    """
    path = folder / "adapter_config.json"
    config = read_json(path)
    kinds = ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication")
    odd = {name: config[name] for name in kinds if config.get(name)}
    if odd or config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise CheckpointError(
            f"{path}: {odd or config.get('peft_type')}: only plain LoRA without biases is supported"
        )
    file = folder / "adapter_model.safetensors"
    stored = read_header(file)
    tensors = dict(from_files(stored)(list(stored)))
    pairs: Adapter = {}
    for name, a in tensors.items():
        key = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        if ".lora_A." not in name or (own_towers and key.startswith("vision_backbone.")):
            continue
        b, stored_as = tensors.get(name.replace(".lora_A.", ".lora_B.")), manifest.get(key)
        shape = None if stored_as is None else stored_as.shape
        if b is None or shape is None or (b.shape[0], *a.shape[1:]) != shape or b.shape[1] != a.shape[0]:
            raise CheckpointError(
                f"{file}: {key}: A {list(a.shape)} and B {None if b is None else list(b.shape)} do not fit the "
                f"base model's {None if shape is None else list(shape)}; the adapter was trained on "
                f"{config.get('base_model_name_or_path') or 'another base'}"
            )
        pairs[key] = (a, b, adapter_scale(config, a.shape[0]))
    return pairs


def adapter_scale(config: Mapping[str, object], rank: int) -> float:
    """Return the factor of ``B @ A``; ``config`` is the content of ``adapter_config.json``."""
    alpha = config.get("lora_alpha", min(rank, 16))  # as in the published training code
    if not isinstance(alpha, (int, float)) or rank < 1:
        raise CheckpointError(
            f"adapter_config.json: found lora_alpha {alpha!r} and rank {rank}, expected positive numbers"
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
