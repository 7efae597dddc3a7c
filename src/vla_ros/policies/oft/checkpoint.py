"""Reads OpenVLA-OFT checkpoints as published: shards, component files, LoRA adapters; merges in float32.

Component files (``action_head--150000_checkpoint.pt``) are pickles. Only torch's weights-only reader opens them; it
refuses everything but tensors. A folder that ``vla-ros convert`` wrote has safetensors alone.
"""

from __future__ import annotations

import logging
import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vla_ros.errors import CheckpointError
from vla_ros.policies.oft.network import COMPONENTS, Layout
from vla_ros.policies.openvla.architecture import Architecture, read_json
from vla_ros.policies.openvla.loading import Produce, StoredTensor, from_files, read_manifest

logger = logging.getLogger(__name__)

ADAPTER = "lora_adapter"
DEFAULT_ALPHA = 16
"""The published training code scales an adapter of rank r by min(r, 16) / r."""


@dataclass(frozen=True)
class Weights:
    """Every tensor of a checkpoint under its parameter name.

    Attributes:
        manifest: Shape and type of each tensor.
        loaded: Tensors that are already in memory: of components, merged adapters.
        adapter: Pairs to merge when a tensor is read: parameter name to A [r, in], B [out, r] and scale.
        predicts_noise: Whether a component file says that its action head is a diffusion head.
    """

    manifest: dict[str, StoredTensor]
    loaded: dict[str, Tensor]
    adapter: dict[str, tuple[Tensor, Tensor, float]] = field(default_factory=dict)
    predicts_noise: bool = False

    @property
    def produce(self) -> Produce:
        """Tensors by name, with adapters merged."""

        def produce(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
            yield from ((name, self.loaded[name]) for name in names if name in self.loaded)
            for name, tensor in from_files(self.manifest)([name for name in names if name not in self.loaded]):
                yield name, merge(tensor, *self.adapter[name]) if name in self.adapter else tensor

        return produce


def read_weights(folder: Path, base: Path | None = None) -> Weights:
    """Find all tensors of a checkpoint; reads headers, and the component files.

    Args:
        folder: The checkpoint.
        base: Folder of the base model, into which the checkpoint's LoRA adapter is merged; None where the
            checkpoint's own shards are final, as published ones are (their ``lora_adapter`` is a left-over).

    Raises:
        CheckpointError: A file is missing, damaged, twofold, holds more than tensors, or an adapter does not fit.
    """
    manifest = read_manifest(base or folder)
    loaded: dict[str, Tensor] = {}
    predicts_noise = False
    for name in COMPONENTS:
        file = component_file(folder, name)
        if file is not None:
            tensors = read_component(file)
            predicts_noise |= any(key.startswith("noise_predictor.") for key in tensors)
            # Both kinds of head are the same network under different names.
            short = {
                re.sub(r"^(noise_predictor\.mlp_resnet|model)\.", "", key): one for key, one in tensors.items()
            }
            named = {f"{name}.{key}": tensor for key, tensor in short.items()}
            loaded |= named
            manifest |= _described(named, file)
    film = component_file(folder, "vision_backbone")
    if film is not None:
        towers = merged_towers(read_component(film), film, _adapter_scale(folder))
        manifest = {key: one for key, one in manifest.items() if not key.startswith("vision_backbone.")}
        manifest |= _described(towers, film)
        loaded |= towers
    adapter = {}
    if base is not None:
        adapter = read_adapter(adapter_folder(folder), manifest, film is not None)
        logger.info("policy.base: %d LoRA weights of %s are merged into %s", len(adapter), folder.name, base.name)
    elif (folder / ADAPTER / "adapter_model.safetensors").exists():
        logger.info(
            "%s: its weights are taken as merged, %s is not read; set policy.base to merge it", folder.name, ADAPTER
        )
    return Weights(manifest, loaded, adapter, predicts_noise)


def layout_of(
    weights: Weights, architecture: Architecture, folder: Path, images: int, chunk: int, action: int
) -> Layout:
    """Derive a checkpoint's variant from its tensors, and check that they fit together.

    Args:
        weights: From :func:`read_weights`.
        architecture: Sizes of the network.
        folder: For messages.
        images: Number of images.
        chunk: K.
        action: D, by the statistics.

    Raises:
        CheckpointError: A component is missing or has another width than the network or the statistics.
    """
    shapes = {name: stored.shape for name, stored in weights.manifest.items()}
    width = architecture.llm.hidden_size
    noisy, head = "noisy_action_projector.fc1.weight" in shapes, "action_head.fc2.weight" in shapes
    if noisy and not head:
        raise CheckpointError(f"{folder}: a noisy_action_projector without an action_head; copy both files")
    if weights.predicts_noise and not noisy:
        raise CheckpointError(
            f"{folder}: a diffusion head without its projector, noisy_action_projector--*_checkpoint.pt; copy it"
        )
    expected = {
        "action_head.fc1.weight": (width, width * action),
        "action_head.fc2.weight": (action, width),
        "proprio_projector.fc2.weight": (width, width),
        "noisy_action_projector.fc2.weight": (width, width),
    }
    for name, shape in expected.items():
        if shapes.get(name, shape) != shape:
            raise CheckpointError(
                f"{folder}: {name} is {list(shapes[name])}, expected {list(shape)} for a decoder of width {width} "
                f"and statistics of {action} numbers per action; the file belongs to another checkpoint"
            )
    state = shapes.get("proprio_projector.fc1.weight", (0, 0))[1]
    film = any(".blocks.0.scale.weight" in name for name in shapes)
    return Layout(images, chunk, action, state, "diffusion" if noisy else "l1" if head else "none", film)


def component_file(folder: Path, name: str) -> Path | None:
    """``NAME--STEP_checkpoint.pt`` of a component, or None.

    Raises:
        CheckpointError: There are several.
    """
    found = sorted(folder.glob(f"{name}--*checkpoint*.pt"))
    if len(found) > 1:
        raise CheckpointError(f"{folder}: {[one.name for one in found]}: expected one {name}; delete the others")
    return found[0] if found else None


def read_component(file: Path) -> dict[str, Tensor]:
    """Tensors of a ``.pt`` file by torch's weights-only reader, names without ``module.``.

    Raises:
        CheckpointError: The file is damaged, or holds anything but tensors.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file}: holds more than tensors and is not opened, because that could run code "
            f"({str(error).strip().splitlines()[0]})"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable ({error}); download it again") from error
    if not isinstance(content, dict) or not all(isinstance(one, Tensor) for one in content.values()):
        raise CheckpointError(f"{file}: found {type(content).__name__}, expected names and tensors")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``weight + scale * b @ a`` in float32; convolutions are flattened to [out, in * height * width]."""
    delta = (b.float().flatten(1) @ a.float().flatten(1)) * scale
    return weight.float() + delta.view(weight.shape)


def merged_towers(tensors: Mapping[str, Tensor], file: Path, scale: float | None) -> dict[str, Tensor]:
    """Vision towers of a FiLM checkpoint with their adapters merged, named as the network's parameters."""
    merged = {}
    for name, tensor in tensors.items():
        if ".lora_" in name:
            continue
        layer, based, leaf = name.partition(".base_layer.")
        if based and leaf == "weight":
            try:
                a, b = (tensors[f"{layer}.lora_{one}.default.weight"] for one in "AB")
            except KeyError as error:
                raise CheckpointError(f"{file}: lacks {error.args[0]}; download it again") from None
            tensor = merge(tensor, a, b, min(a.shape[0], DEFAULT_ALPHA) / a.shape[0] if scale is None else scale)
        merged[re.sub(r"(\.blocks\.\d+)\.block\.", r"\1.", name.replace(".base_layer.", "."))] = tensor
    return merged


def adapter_folder(folder: Path) -> Path:
    """Where a checkpoint keeps its adapter: in ``lora_adapter``, or, if it is nothing else, in itself.

    Raises:
        CheckpointError: It has none.
    """
    for place in (folder / ADAPTER, folder):
        if (place / "adapter_model.safetensors").exists():
            return place
    raise CheckpointError(
        f"policy.base is set, but {folder} has no adapter_model.safetensors, neither in {ADAPTER} nor itself"
    )


def read_adapter(
    folder: Path, manifest: Mapping[str, StoredTensor], own_towers: bool = False
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """A LoRA adapter as peft saves it: parameter name to A, B and scale.

    Args:
        folder: Has ``adapter_config.json`` and ``adapter_model.safetensors``.
        manifest: Tensors of the base model.
        own_towers: True leaves the vision towers out: a FiLM checkpoint stores them elsewhere.

    Raises:
        CheckpointError: It belongs to another base, or is of a kind that is not supported.
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
    try:
        with safe_open(str(file), framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not readable ({error}); download it again") from error
    pairs: dict[str, tuple[Tensor, Tensor, float]] = {}
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
        pairs[key] = (a, b, _scale(config, a.shape[0]))
    return pairs


def _adapter_scale(folder: Path) -> float | None:
    path = folder / ADAPTER / "adapter_config.json"
    if not path.exists():
        return None
    config = read_json(path)
    return _scale(config, int(config.get("r") or 0))


def _scale(config: Mapping[str, object], rank: int) -> float:
    alpha = config.get("lora_alpha", DEFAULT_ALPHA)
    if not isinstance(alpha, (int, float)) or rank < 1:
        raise CheckpointError(
            f"adapter_config.json: lora_alpha {alpha!r} and rank {rank}, expected positive numbers"
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _described(tensors: Mapping[str, Tensor], file: Path) -> dict[str, StoredTensor]:
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    return {
        key: StoredTensor(file, tuple(one.shape), names.get(one.dtype, str(one.dtype)))
        for key, one in tensors.items()
    }
