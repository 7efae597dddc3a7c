"""Reads published OpenVLA-OFT checkpoints: shards, component files and LoRA adapters.

Adapters are merged in float32. Component files (``action_head--150000_checkpoint.pt``) are pickles; only torch's
weights-only reader opens them, which refuses anything other than tensors. A folder written by ``vla-ros convert``
contains only safetensors.
"""

import logging
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from vla_ros.config.checkpoints import LORA_FOLDER, adapter_folder, base_folder
from vla_ros.errors import CheckpointError
from vla_ros_models.adapters import (
    LoraSettings,
    lora_delta,
    merge,
    read_lora_settings,
    refuse_rest,
    require_adapter,
)
from vla_ros_models.checkpoint_files import Cut, Produce, StoredTensor, from_files
from vla_ros_models.dequantize import read_dequantized
from vla_ros_models.oft.network import COMPONENTS, Layout
from vla_ros_models.openvla.architecture import Architecture
from vla_ros_models.weights import manifest_of, with_loaded

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """Every tensor of a checkpoint under its parameter name."""

    manifest: dict[str, StoredTensor]  # shape and type of each tensor
    loaded: dict[str, Tensor]  # tensors already in memory: components and merged vision towers
    predicts_noise: bool = False  # True if a component file declares a diffusion head

    def changed(self, manifest: dict[str, StoredTensor]) -> "Weights":
        """Return the weights as ``manifest`` changes them; those in memory are changed at once."""
        loaded = {
            name: reduce(lambda one, change: change(one), manifest[name].changes, tensor)
            for name, tensor in self.loaded.items()
        }
        return replace(self, manifest=manifest, loaded=loaded)

    def produce(self, cut: Cut = lambda name: None) -> Produce:
        """Return a function that yields tensors, or their parts, by name."""
        return with_loaded(from_files(self.manifest, cut), self.loaded)


def read_weights(folder: Path, base: str | Path = "", *, towers: bool = True) -> Weights:
    """Find all tensors of a checkpoint; reads the shards' headers and the component files.

    ``base`` is ``policy.base``, the folder of the base model into which the checkpoint's adapter is merged.
    Component files are the checkpoint's, else the base model's. Without ``towers``, the vision towers of a FiLM
    checkpoint are skipped, because merging them takes seconds. Raises CheckpointError if a file is missing, damaged
    or duplicated, or contains anything other than tensors, or if an adapter does not fit.
    """
    model = base_folder(folder, base)
    manifest = read_dequantized(model or folder)
    known = (*COMPONENTS, "vision_backbone")
    files = [one.name for one in sorted(folder.glob("*checkpoint*.pt"))]
    if unknown := [name for name in files if name.partition("--")[0] not in known]:
        raise CheckpointError(f"{folder}: found the components {unknown}, expected only {list(known)}")
    places = [folder] if model is None else [folder, model]
    film = next(filter(None, (component_file(place, "vision_backbone") for place in places)), None)
    if model is not None:
        # FiLM checkpoints store the towers with their adapters in a file of their own.
        manifest = merge(manifest, require_adapter(folder), "vision_backbone." if film else "")
    elif adapter_folder(folder) is not None:
        logger.info(
            "%s: the shards are taken as merged and %s is not read; set policy.base to merge the adapter",
            folder.name,
            LORA_FOLDER,
        )
    loaded: dict[str, Tensor] = {}
    predicts_noise = False
    for name in COMPONENTS:
        file = next(filter(None, (component_file(place, name) for place in places)), None)
        if file is not None:
            tensors = read_component(file)
            predicts_noise |= any(key.startswith("noise_predictor.") for key in tensors)
            # Both kinds of head are the same network under different names.
            short = {
                re.sub(r"^(noise_predictor\.mlp_resnet|model)\.", "", key): one for key, one in tensors.items()
            }
            named = {f"{name}.{key}": tensor for key, tensor in short.items()}
            loaded |= named
            manifest |= manifest_of(named, file)
    if film is not None and towers:
        config = film.parent / LORA_FOLDER / "adapter_config.json"
        settings = read_lora_settings(config) if config.exists() else LoraSettings()
        merged = merged_towers(read_component(film), film, settings)
        manifest = {key: one for key, one in manifest.items() if not key.startswith("vision_backbone.")}
        manifest |= manifest_of(merged, film)
        loaded |= merged
    return Weights(manifest, loaded, predicts_noise)


def layout_of(
    weights: Weights, architecture: Architecture, folder: Path, images: int, chunk: int, action: int
) -> Layout:
    """Derive a checkpoint's layout from its tensors, and check that the tensors fit together.

    ``images`` is the number of images, ``chunk`` is K, and ``action`` is D according to the statistics. Raises
    CheckpointError, which names ``folder``, if a component is missing or does not fit the network or the
    statistics.
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
    """Return the file ``NAME--STEP_checkpoint.pt``, or None; raises CheckpointError if there are several."""
    found = sorted(folder.glob(f"{name}--*checkpoint*.pt"))
    if len(found) > 1:
        raise CheckpointError(f"{folder}: {[one.name for one in found]}: expected one {name}; delete the others")
    return found[0] if found else None


def read_component(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a ``.pt`` file with torch's weights-only reader; names lose the prefix ``module.``."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except UnpicklingError as error:
        raise CheckpointError(
            f"{file}: contains objects other than tensors; not opened, because opening it could run code "
            f"({str(error).strip().splitlines()[0]})"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable ({error}); download it again") from error
    if not isinstance(content, dict) or not all(isinstance(one, Tensor) for one in content.values()):
        raise CheckpointError(f"{file}: found {type(content).__name__}, expected tensors by name")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def merged_towers(tensors: Mapping[str, Tensor], file: Path, settings: LoraSettings) -> dict[str, Tensor]:
    """Merge the adapters of FiLM vision towers; return the tensors by parameter name."""
    if settings.dora:
        raise CheckpointError(f"{settings.where}: use_dora: not supported for FiLM's vision towers")
    merged: dict[str, Tensor] = {}
    left = {name for name in tensors if ".lora_" in name}
    for name, tensor in tensors.items():
        if ".lora_" in name:
            continue
        layer, based, leaf = name.partition(".base_layer.")
        if based and leaf == "weight":
            names = [f"{layer}.lora_{one}.default.weight" for one in "AB"]
            if missing := [one for one in names if one not in tensors]:
                raise CheckpointError(f"{file}: lacks {missing[0]}; download it again")
            a, b = (tensors[one] for one in names)
            left -= {*names}
            delta = lora_delta(a, b, settings.scale(a.shape[0], layer))
            tensor = delta.view(tensor.shape).add_(tensor)
        merged[re.sub(r"(\.blocks\.\d+)\.block\.", r"\1.", name.replace(".base_layer.", "."))] = tensor
    refuse_rest(file, left)
    return merged
