"""Writes what a run has trained: a checkpoint with everything merged, and the adapter as a PEFT folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vla_ros.config.checkpoints import DISTILLED, DISTILLED_FILES, WEIGHT_FILES
from vla_ros.errors import VlaRosError
from vla_ros_lab.training.adapting import Adapted, merged_tensors
from vla_ros_models import evidence
from vla_ros_models.checkpoint_files import StoredTensor, from_files, read_json
from vla_ros_models.distilled import TEACHER

ADAPTER_FOLDER = "adapter"
"""Folder of the adapter in the checkpoint's."""

_TYPES = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Written last, or no part of a checkpoint.
_OF_A_RUN = ("config.json", "run", ADAPTER_FOLDER, evidence.FOLDER, ".git")
_SHARD = 5_000_000_000  # bytes


def export(adapted: Adapted, checkpoint: Path, output: Path, dtype: str = "", flow_steps: int = 0) -> None:
    """Write the merged checkpoint to ``output``, with all other files of ``checkpoint``, and the adapter in it.

    Tensors get the type ``dtype``, ``float32`` or ``bfloat16``, or keep theirs. A flow that was distilled into
    ``flow_steps`` gets a type and file names of its own, and keeps its teacher's tensors beside it. ``config.json``
    comes last: without it, nothing loads. Raises VlaRosError if the disk is full.
    """
    trainable = adapted.trainable
    produce = trainable.produce or from_files(trainable.stored)

    def weight(name: str) -> Tensor:
        [(_, tensor)] = produce([name])
        return tensor

    new = {name: tensor.cpu() for name, tensor in _whole(adapted, weight)}
    present = [name for name in trainable.tied if name in trainable.stored]
    if own := [name for name in present if name in new]:
        new |= dict.fromkeys(present, new[own[0]])

    names = {"float32": "F32", "bfloat16": "BF16"}

    def tensor_of(name: str) -> Tensor:
        stored = trainable.stored[name]
        tensor = new.get(name)
        kind = _TYPES[names.get(dtype, stored.dtype)]
        if tensor is None:
            tensor = weight(name)
            kind = kind if tensor.is_floating_point() else tensor.dtype
        return tensor.to(kind).reshape(stored.shape).contiguous()

    output.mkdir(parents=True, exist_ok=True)
    try:
        (output / "config.json").unlink(missing_ok=True)
        _write(output, trainable.stored, tensor_of, *(DISTILLED_FILES if flow_steps else WEIGHT_FILES))
        if flow_steps:
            before = {stored.name: weight(name) for name in new if (stored := trainable.stored[name]).file.name}
            _save(before, output / TEACHER)
        if adapted.lora is not None:
            write_adapter(adapted, output / ADAPTER_FOLDER, checkpoint)
        _copy_others(checkpoint, output, {stored.file for stored in trainable.stored.values()})
        config = read_json(checkpoint / "config.json")
        if flow_steps:
            config = {"type": DISTILLED, "flow_steps": flow_steps, "teacher": config}
        (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        for partial in output.glob(".*.safetensors"):
            partial.unlink()
        raise VlaRosError(
            f"{output}: not written ({error}); free some space, then run the command again: it resumes"
        ) from error


def _whole(adapted: Adapted, weight: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the changed tensors; one with an entry for each embodiment keeps the others'."""
    row, stored = adapted.trainable.row, adapted.trainable.stored
    for name, tensor in merged_tensors(adapted, weight):
        size = tuple(stored[name].shape)
        if row is not None and tensor.ndim == len(size) and tensor.shape[0] == 1 < size[0]:
            every = weight(name).float().clone()
            every[row] = tensor[0].cpu()
            tensor = every
        yield name, tensor


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it readable only by its owner


def _write(
    output: Path, stored: Mapping[str, StoredTensor], tensor_of: Callable[[str], Tensor], single: str, index: str
) -> None:
    """Write the shards under other names first, so that a reader never sees half of them."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, one in stored.items():
        count = 4 * int(torch.Size(one.shape).numel())
        if size + count > _SHARD and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    stem = single.removesuffix(".safetensors")
    for old in (*output.glob(f"{stem}*.safetensors"), output / index):
        old.unlink(missing_ok=True)
    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = single if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        partial = output / f".{file}"
        _save({stored[name].name: tensor_of(name) for name in names}, partial)
        partial.rename(output / file)
        where |= {stored[name].name: file for name in names}
    if len(shards) > 1:
        content = {"metadata": {}, "weight_map": where}
        (output / index).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _copy_others(checkpoint: Path, output: Path, weights: set[Path]) -> None:
    """Copy what describes the checkpoint: configuration, processors, statistics, tokenizer."""
    skipped = {path.resolve() for path in weights}

    def ignored(folder: str, names: list[str]) -> list[str]:
        paths = {name: Path(folder, name).resolve() for name in names}
        return [
            name
            for name, path in paths.items()
            if path in skipped or name in (*_OF_A_RUN, WEIGHT_FILES[1], output.name) or path.suffix == ".bin"
        ]

    shutil.copytree(checkpoint, output, ignore=ignored, dirs_exist_ok=True)
    for place in (checkpoint, *checkpoint.resolve().parents[:2]):
        if (place / "architecture.json").is_file():  # of small checkpoints, which may share one
            shutil.copyfile(place / "architecture.json", output / "architecture.json")
            break


def write_adapter(adapted: Adapted, folder: Path, checkpoint: Path) -> None:
    """Write the adapter as peft does, with the names of the checkpoint's tensors."""
    from peft import LoraConfig

    assert adapted.lora is not None
    stored, lora = adapted.trainable.stored, adapted.lora
    files = {layer: stored[f"{name}.weight"].name.removesuffix(".weight") for layer, name in adapted.layers.items()}
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for layer, name in files.items():
        a, b = adapted.factors(layer)
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        if a.shape[0] != lora.rank:
            ranks[name] = a.shape[0]
    parameters: dict[str, Any] = dict(adapted.trainable.trainee.named_parameters())
    saved = {
        stored[name].name: parameters[own].data.reshape(stored[name].shape)
        for own, name in adapted.whole.items()
        if adapted.trainable.row is None
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted(files.values()),
        init_lora_weights="gaussian" if lora.gaussian else True,
        rank_pattern=ranks,
        alpha_pattern=ranks,
        modules_to_save=sorted({name.rpartition(".")[0] for name in saved}) or None,
        base_model_name_or_path=str(checkpoint),
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    _sort_targets(folder / "adapter_config.json")
    named = {f"base_model.model.{name}": one.cpu().contiguous() for name, one in (tensors | saved).items()}
    _save(named, folder / "adapter_model.safetensors")


def _sort_targets(path: Path) -> None:
    """Sort what peft keeps as a set, so that equal runs write equal files."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["target_modules"] = sorted(content["target_modules"])
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
