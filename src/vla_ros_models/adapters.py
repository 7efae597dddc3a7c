"""Merges PEFT adapters into a base model, in float32, one tensor at a time while it is read.

The rules are those of peft 0.21.2: :func:`merge` gives the weights of ``merge_and_unload()``. LoRA, its variants
rslora and DoRA, and whole tensors that an adapter replaces (``modules_to_save``, biases, embeddings) are obeyed;
what would change the base model otherwise is refused.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from vla_ros.config.checkpoints import ADAPTER_FILE, LORA_FOLDER, adapter_folder, base_folder
from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import Fields, StoredTensor, from_files, list_some, read_fields, read_header
from vla_ros_models.dequantize import read_dequantized

logger = logging.getLogger(__name__)

Manifest = Mapping[str, StoredTensor]
"""Stored tensors by their names in the base model."""

_HARMLESS = {
    "training": "lora_dropout task_type inference_mode eva_config velora_config runtime_config",
    "about the base model, which policy.base or --base names": "revision auto_mapping",
    "about peft": "peft_version megatron_core",
    "used only with use_qalora": "qalora_group_size",
    "of Conv1D, which no model here has: peft sets it to false for other layers": "fan_in_fan_out",
    "what is saved is in the file": "bias",
}
"""Keys of ``adapter_config.json`` that do not change the merged weights."""


@dataclass(frozen=True)
class LoraSettings:
    """What ``adapter_config.json`` says about merging an adapter."""

    alpha: float | None = None  # divided by the rank; None without a file: as in OpenVLA-OFT's training code
    by_root: bool = False  # True divides alpha by the root of the rank (rslora)
    rank: int | None = None  # size of A and B; None for any
    ranks: Mapping[str, int] = field(default_factory=dict)  # other ranks, by a pattern of layers
    alphas: Mapping[str, float] = field(default_factory=dict)  # other alphas, likewise
    targets: Any = None  # names or a pattern of the layers with adapters; None for any
    excluded: Any = None  # names or a pattern of layers without adapters
    indices: tuple[int, ...] | None = None  # numbers of the blocks with adapters; None for all
    stems: tuple[str, ...] = ()  # names in front of such a number; empty for any
    saved: tuple[str, ...] = ()  # names of the modules that are replaced as a whole
    tokens: Any = None  # rows of the embedding that are replaced, or such rows by layer
    dora: bool = False  # True if the adapter also has a magnitude per output
    base: str = ""  # name of the base model
    where: str = "adapter_config.json"  # the file, for messages

    def scale(self, rank: int, layer: str = "") -> float:
        expected = _of_pattern(self.ranks, layer, self.rank)
        if rank < 1 or expected not in (None, rank):
            raise CheckpointError(
                f"{self.where}: r: found {expected}, but the adapter's matrices {layer} have rank {rank}"
            )
        alpha = _of_pattern(self.alphas, layer, min(rank, 16) if self.alpha is None else self.alpha)
        return float(alpha / (sqrt(rank) if self.by_root else rank))

    def targeted(self, layer: str) -> bool:
        """Return whether peft puts an adapter on a layer, given by its name in the base model.

        The rules are those of peft 0.21 (``tuners_utils.check_target_module_exists``).
        """
        if self.excluded and _names(self.excluded, layer):
            return False
        if self.targets in (None, "all-linear"):
            return self._numbered(layer)
        return _names(self.targets, layer) and self._numbered(layer)

    def _numbered(self, layer: str) -> bool:
        """Return whether the layer is in one of the blocks :attr:`indices`."""
        if self.indices is None:
            return True
        patterns = [rf".*\.{stem}\.(\d+)\." for stem in self.stems] or [r".*\.[^.]*\.(\d+)\."]
        found = next(filter(None, (re.match(pattern, layer) for pattern in patterns)), None)
        return found is not None and int(found[1]) in self.indices

    def rows(self, layer: str) -> list[int]:
        """Return the rows of an embedding that ``trainable_token_indices`` names."""
        named = self.tokens if isinstance(self.tokens, dict) else {"": self.tokens}
        return next((list(rows) for name, rows in named.items() if rows and layer.endswith(name)), [])


def _of_pattern(values: Mapping[str, Any], layer: str, default: Any) -> Any:
    """Return the value of the first pattern that a layer's name ends with, as peft's ``get_pattern_key``."""
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


def _names(names: Any, layer: str) -> bool:
    """Return whether a pattern or a list of names, or of their ends, has a layer."""
    if isinstance(names, str):
        return re.fullmatch(names, layer) is not None
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def read_lora_settings(path: Path) -> LoraSettings:
    """Read ``adapter_config.json``; raises CheckpointError, which names what is not supported."""
    config = read_fields(path, "merge the adapter with peft itself: merge_and_unload(), then save_pretrained()")
    config.expect("peft_type", "LORA")
    # Other ways (pissa, olora, loftq, corda, lora_ga) change the base weights when peft loads the adapter.
    config.expect("init_lora_weights", True, False, "gaussian", "orthogonal", "eva")
    targets, excluded, stems, saved = (
        _layer_names(config, key)
        for key in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save")
    )
    indices = config.get("layers_to_transform")
    numbers: list[Any] = [] if indices is None else indices if isinstance(indices, list) else [indices]
    if not all(type(number) is int for number in numbers):
        raise CheckpointError(f"{path}: layers_to_transform: found {indices!r}, expected numbers of layers")
    found = LoraSettings(
        alpha=config.number("lora_alpha", 8),
        by_root=config.expect("use_rslora", False, True),
        rank=config.whole("r", 8),
        ranks=_patterns(config, "rank_pattern", Fields.whole),
        alphas=_patterns(config, "alpha_pattern", Fields.number),
        targets=targets,
        excluded=excluded,
        indices=tuple(numbers) or None,
        stems=(stems,) if isinstance(stems, str) else tuple(stems or ()),
        saved=(saved,) if isinstance(saved, str) else tuple(saved or ()),
        tokens=config.get("trainable_token_indices"),
        dora=config.expect("use_dora", False, True),
        base=str(config.get("base_model_name_or_path") or ""),
        where=str(path),
    )
    config.expect("lora_bias", False, True)
    config.finish(_HARMLESS)
    return found


def _patterns(config: Fields, key: str, read: Callable[..., Any]) -> dict[str, Any]:
    found = config.object(key)
    for name in found:
        _compile(name, found)
    return {name: read(found, name, 0) for name in found}


def _layer_names(config: Fields, key: str) -> Any:
    found = config.get(key)
    if not isinstance(found, (list, str, NoneType)) or (isinstance(found, list) and {*map(type, found)} - {str}):
        raise CheckpointError(f"{config.where}: {key}: found {found!r}, expected a pattern or a list of names")
    if isinstance(found, str):
        _compile(found, config, f"{key}: ")
    return found


def _compile(pattern: str, config: Fields, key: str = "") -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{config.where}: {key}found {pattern!r}, no pattern ({error})") from error


def read_merged(folder: Path, base: str | Path = "") -> dict[str, StoredTensor]:
    """List every tensor of a checkpoint as it is after dequantising and merging, which is done when it is read.

    ``base`` is ``policy.base``. Raises CheckpointError if a file is missing or damaged, or an adapter does not fit.
    """
    model = base_folder(folder, base)
    return read_dequantized(folder) if model is None else merge(read_dequantized(model), require_adapter(folder))


def require_adapter(folder: Path) -> Path:
    """Return the folder of a checkpoint's adapter; raises CheckpointError without."""
    if (found := adapter_folder(folder)) is None:
        pickles = sorted(path.name for path in folder.glob("adapter_model.*"))
        why = f"; {pickles} are pickles, which are never opened: save the adapter as safetensors" if pickles else ""
        raise CheckpointError(
            f"policy.base is set, but neither {folder} nor its {LORA_FOLDER} has {ADAPTER_FILE}{why}"
        )
    return found


def merge(stored: Manifest, folder: Path, skipped: str = "") -> dict[str, StoredTensor]:
    """Return the tensors of a base model with an adapter merged into them.

    ``stored`` are the base's tensors, and ``folder`` has ``adapter_config.json`` and ``adapter_model.safetensors``.
    Only headers are read here: a tensor is merged in float32 when
    :func:`~vla_ros_models.checkpoint_files.from_files` reads it, which takes the memory of two copies of it in
    float32. Layers whose names begin with ``skipped`` are left out. Raises CheckpointError if the adapter has
    another base model or is of an unsupported kind.
    """
    settings, file = read_lora_settings(folder / "adapter_config.json"), folder / ADAPTER_FILE
    adapter = Adapter(settings, file, read_header(file), stored, skipped)
    merged = {**stored, **adapter.replaced}
    for layer, parts in adapter.layers.items():
        merged |= adapter.merged(layer, parts, merged)
    adapter.warn(stored)
    logger.info("%s: an adapter for %d layers is merged into its base model", folder, len(adapter.layers))
    return merged


_PARTS = re.compile(
    r"(.+)\.(lora_A\.weight|lora_B\.(?:weight|bias)|lora_embedding_[AB]|lora_magnitude_vector|"
    r"token_adapter\.trainable_tokens_delta)(?:\.weight)?"
)
_A, _B, _BIAS, _MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"
_EMBEDDING = "lora_embedding_A", "lora_embedding_B"
_TOKENS = "token_adapter.trainable_tokens_delta"
_PREFIXES = ("", "model.", "_groot_model.")
"""What LeRobot's names of tensors have in front of openpi's and NVIDIA's."""


class Adapter:
    """The tensors of an adapter by the layers of its base model.

    Attributes:
        layers: The parts of each layer's adapter, by their names behind the layer's.
        replaced: Tensors that replace the base model's, by its names.
    """

    def __init__(
        self, settings: LoraSettings, file: Path, tensors: Manifest, stored: Manifest, skipped: str
    ) -> None:
        self._settings, self._file = settings, file
        self.layers: dict[str, dict[str, StoredTensor]] = {}
        self.replaced: dict[str, StoredTensor] = {}
        known = {name.rpartition(".")[0] for name in stored}
        plain = {name.removeprefix("base_model.model."): one for name, one in tensors.items()}
        self._own, self._base = _prefixes([*plain], known)
        for name, one in plain.items():
            found = _PARTS.fullmatch(name)
            layer = self._renamed(found[1] if found else name.replace(".base_layer.", "."))
            if (skipped and layer.startswith(skipped)) or _is_tied(layer, stored):
                continue
            if found:
                self.layers.setdefault(layer, {})[found[2]] = one
            else:
                self.replaced[layer] = one
        lost = [layer for layer in self.layers if f"{layer}.weight" not in stored]
        lost += [
            name for name, one in self.replaced.items() if name not in stored or one.shape != stored[name].shape
        ]
        if lost:
            what = list_some("tensors do not fit the base model", sorted(lost))
            raise CheckpointError(f"{file}: {what}; {self._trained}")

    def _renamed(self, name: str) -> str:
        return self._base + name.removeprefix(self._own)

    def _original(self, layer: str) -> str:
        return self._own + layer.removeprefix(self._base)

    @property
    def _trained(self) -> str:
        return f"the adapter was trained on {self._settings.base or 'another base'}"

    def merged(self, layer: str, parts: Manifest, stored: Manifest) -> dict[str, StoredTensor]:
        """Return a layer's tensors, merged when they are read; raises CheckpointError if ``parts`` do not fit."""
        settings, weight, own = self._settings, stored[f"{layer}.weight"], self._original(layer)
        rows = settings.rows(layer) if _TOKENS in parts else []
        if not _fit(parts, weight.shape, rows):
            found = ", ".join(f"{name} {list(one.shape)}" for name, one in parts.items())
            raise CheckpointError(
                f"{self._file}: {layer}: {found} do not fit the base model's weight {list(weight.shape)}; "
                f"{self._trained}"
            )
        if rows:
            return {f"{layer}.weight": weight.changed(partial(_replaced, by=parts[_TOKENS], rows=rows), "F32")}
        scale = settings.scale(parts[_pair(parts)[0]].shape[0], own)
        if settings.dora != (_MAGNITUDE in parts):
            raise CheckpointError(f"{settings.where}: use_dora is {settings.dora}, but {layer} has {sorted(parts)}")
        if _BIAS in parts and f"{layer}.bias" not in stored:
            raise CheckpointError(f"{settings.where}: lora_bias: the base model has no bias for that of {layer}")
        if not settings.targeted(own):
            raise CheckpointError(
                f"{settings.where}: target_modules {settings.targets!r}, exclude_modules {settings.excluded!r} and "
                f"layers_to_transform {settings.indices!r} leave out {layer}, but the adapter has weights for it, "
                "which peft would ignore"
            )
        merged = {f"{layer}.weight": weight.changed(partial(_merged, parts=parts, scale=scale), "F32")}
        if _BIAS in parts:
            moved = partial(_moved, by=parts[_BIAS], scale=scale)
            merged[f"{layer}.bias"] = stored[f"{layer}.bias"].changed(moved, "F32")
        return merged

    def warn(self, stored: Manifest) -> None:
        """Warn of layers that the settings name and the file lacks, which peft leaves as in the base."""
        settings = self._settings
        absent = [one for one in settings.saved if not any(f".{one}." in f".{name}" for name in self.replaced)]
        if settings.targets not in (None, "all-linear"):
            matrices = (name.removesuffix(".weight") for name, one in stored.items() if len(one.shape) in (2, 4))
            left = (name for name in matrices if name not in self.layers and not _is_tied(name, stored))
            absent += filter(settings.targeted, map(self._original, left))
        if text := list_some("modules of adapter_config.json have no weights in the adapter", absent):
            logger.warning("%s: %s; they stay as in the base model", self._file, text)


def _prefixes(names: list[str], known: set[str]) -> tuple[str, str]:
    """Return the prefix of the adapter's names, and the base model's in its place, that fit most tensors."""
    layers = [found[1] for name in names if (found := _PARTS.fullmatch(name))] or [
        name.rpartition(".")[0] for name in names
    ]
    pairs = [(own, base) for own in _PREFIXES for base in _PREFIXES if "" in (own, base)]

    def fits(pair: tuple[str, str]) -> int:
        return sum(pair[1] + name.removeprefix(pair[0]) in known for name in layers if name.startswith(pair[0]))

    return max(pairs, key=fits)


def _is_tied(name: str, stored: Manifest) -> bool:
    """Return whether a tensor is of an output layer that has the embedding's weights.

    No action depends on such a layer, and its change must not change the embedding.
    """
    stem, found, _ = name.partition("lm_head")
    return bool(found) and not any(one.startswith(stem) and one.endswith("embed_tokens.weight") for one in stored)


def lora_delta(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``scale * b @ a`` [out, in] in float32; convolutions are flattened to [out, in * height * width]."""
    return (b.float().flatten(1) @ a.float().flatten(1)).mul_(scale)


def _pair(parts: Mapping[str, object]) -> tuple[str, str]:
    """Return the names of A and B: an embedding's, or another layer's."""
    return _EMBEDDING if _EMBEDDING[0] in parts or _EMBEDDING[1] in parts else (_A, _B)


def _fit(parts: Manifest, weight: tuple[int, ...], rows: list[int]) -> bool:
    """Return whether the parts of an adapter are for a weight of this shape."""
    sizes = {name: one.shape for name, one in parts.items()}
    if _TOKENS in sizes:
        return sizes == {_TOKENS: (len(rows), *weight[1:])} and max(rows, default=0) < weight[0]
    a, b = (sizes.get(name, ()) for name in _pair(sizes))
    if len(a) < 2 or len(b) < 2 or a[0] != b[1]:
        return False
    return weight == ((a[1], b[0]) if _EMBEDDING[0] in sizes else (b[0], *a[1:]))


def _merged(weight: Tensor, parts: Manifest, scale: float) -> Tensor:
    found = dict(from_files(parts)(list(parts)))
    first, second = _pair(found)
    is_embedding = first == _EMBEDDING[0]
    delta = lora_delta(found[first], found[second], scale)
    merged = (delta.T if is_embedding else delta).view(weight.shape).add_(weight)
    if (magnitude := found.get(_MAGNITUDE)) is not None:
        norm = merged.norm(dim=0) if is_embedding else merged.flatten(1).norm(dim=1)
        factor = magnitude.float().flatten() / norm
        merged.mul_(factor if is_embedding else factor.view(-1, *[1] * (merged.dim() - 1)))
    return merged


def _replaced(weight: Tensor, by: StoredTensor, rows: list[int]) -> Tensor:
    return weight.float().index_copy(0, torch.tensor(rows), _read(by).float())


def _moved(bias: Tensor, by: StoredTensor, scale: float) -> Tensor:
    return bias.float() + _read(by).float() * scale


def _read(stored: StoredTensor) -> Tensor:
    return next(from_files({"": stored})([""]))[1]


def refuse_rest(file: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError if a file has adapter tensors ``names`` that were not merged."""
    if rest := list_some("tensors that are not a linear layer's lora_A or lora_B", sorted(names)):
        raise CheckpointError(f"{file}: found {rest}; merge the adapter with peft itself")
