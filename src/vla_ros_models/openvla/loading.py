"""Builds the network without weights, checks a checkpoint's tensors, estimates the memory, loads the weights.

LoRA adapters in peft's format are merged into the base weights during loading.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod, sqrt
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vla_ros.errors import CheckpointError
from vla_ros.policies.base import Progress, no_progress
from vla_ros_models import weights
from vla_ros_models.checkpoint_files import (
    Cut,
    Fields,
    Produce,
    StoredTensor,
    from_files,
    list_some,
    read_fields,
    read_header,
)
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.weights import DecoderWeights, assemble, fuse_layer
from vla_ros_models.memory import MemoryNeeds, cache_numbers, memory_needs, prefill_numbers, tower_numbers
from vla_ros_models.openvla.architecture import Architecture
from vla_ros_models.openvla.network import OpenVLAModel
from vla_ros_models.splitting import Shard
from vla_ros_models.weights import Shapes, parameter_shapes, place

# Stored in the published files although OpenVLA never uses them: norms and pooling after the last block, and rotary
# frequencies that older versions of transformers saved.
_NEVER_RUN = re.compile(
    r"vision_backbone\.(fused_)?featurizer\.(norm|fc_norm|attn_pool|head)\."
    r"|language_model\.model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq$"
)
DECODER = "language_model."
"""The decoder's names begin with this."""
_LAYERS = f"{DECODER}model.layers."
_BLOCK = re.compile(r"vision_backbone\.(fused_)?featurizer\.blocks\.(\d+)\.")

M = TypeVar("M", bound=OpenVLAModel)

_PROMPT_TOKENS = 128
"""Prompt length that the estimate assumes; typical prompts have 20 to 40 tokens."""

OPENVLA_CHOICES = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"))
"""Options to suggest if memory does not suffice."""

BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128}
"""Bytes per quantised weight. int4 has 4 bytes of scales per 128 weights, the others a negligible share."""


def build_empty(architecture: Architecture) -> OpenVLAModel:
    """Return the network on ``meta``, ready for :func:`~vla_ros_models.weights.fill`."""
    return weights.empty(lambda: OpenVLAModel(architecture))


def build_shard(make: Callable[[Architecture], M], architecture: Architecture, shard: Shard) -> M:
    """Return the shard of a network that ``make`` builds, on ``meta``."""

    def build() -> M:
        model, llm = make(replace(architecture, llm=shard.shape(architecture.llm))), architecture.llm
        if shard.count > 1:
            model.vision_backbone.keep(shard.has_tower)
            rows = llm.vocab_size // shard.count
            model.language_model.lm_head = nn.Linear(llm.hidden_size, rows, bias=False)
        return model

    return weights.empty(build)


def check_weights(model: OpenVLAModel, manifest: Mapping[str, StoredTensor], folder: Path) -> None:
    """Compare parameters with stored tensors; raises CheckpointError if any differ."""
    source = f"{folder}: weights do not fit config.json"
    weights.check_weights(
        parameter_shapes(model), manifest, partial(never_run, architecture=model.architecture), source
    )


def never_run(key: str, architecture: Architecture) -> bool:
    """Return True for stored tensors that OpenVLA does not use, such as the last block of a tower."""
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


def is_quantizable(key: str) -> bool:
    """Return True for the weights that quantisation changes: linear layers inside the decoder's blocks."""
    return key.startswith(_LAYERS) and key.endswith("_proj.weight")


def plan_memory(shapes: Shapes, architecture: Architecture, dtype: str, quantize: str, device: str) -> MemoryNeeds:
    """Estimate the memory before loading; ``shapes`` are the shapes of the parameters."""
    item = 4 if dtype == "float32" else 2
    weights = sum(
        prod(shape) * (BYTES.get(quantize, item) if is_quantizable(key) else item) for key, shape in shapes.items()
    )
    llm, tokens = architecture.llm, architecture.patches + _PROMPT_TOKENS
    projector = architecture.patches * 8 * architecture.vision_width
    activations = max(prefill_numbers(llm, tokens), projector, *map(tower_numbers, architecture.towers))
    largest_tensor = max((prod(shape) for shape in shapes.values()), default=0)
    loading = largest_tensor * (4 + item)  # the stored and the converted tensor at the same time
    peak = max(activations * item + 8 * llm.vocab_size, loading)
    return memory_needs(weights, cache_numbers(llm, tokens) * item, peak, device)


def fill_quantized(
    model: OpenVLAModel,
    produce: Produce,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    progress: Progress = no_progress,
    ranks: Ranks | None = None,
) -> DecoderWeights:
    """Load the weights of a network on ``meta``; quantise one decoder layer at a time to save memory.

    Returns the decoder; in ``model`` everything else is usable, in the data type ``dtype``.
    """
    names = [name for name, _ in model.named_parameters()]
    for name, tensor in produce([name for name in names if not name.startswith(_LAYERS)]):
        place(model, name, tensor, device, dtype)
    fused = []
    for index, layer in enumerate(model.language_model.layers):
        for name, tensor in produce([name for name in names if name.startswith(f"{_LAYERS}{index}.")]):
            place(model, name, tensor, device, dtype)
        fused.append(fuse_layer(layer, quantization, keep=False, ranks=ranks))
        progress((index + 1) / model.architecture.llm.layers, f"loading layer {index + 1}")
    model.to(device)
    return assemble(model.language_model, tuple(fused))


LORA_FOLDER = "lora_adapter"

_HARMLESS_LORA = {
    "training": "lora_dropout task_type inference_mode eva_config",
    "about the base model, which policy.base or --base names": "revision auto_mapping",
    "about peft": "peft_version megatron_core",
    "used only with use_qalora": "qalora_group_size",
}
"""Keys of ``adapter_config.json`` that do not change the merged weights."""

Adapter = dict[str, tuple[Tensor, Tensor, float]]
"""Maps a parameter name to A [r, in], B [out, r] and the scale."""


def merging(manifest: Mapping[str, StoredTensor], adapter: Adapter, cut: Cut = lambda name: None) -> Produce:
    """Return a function that reads tensors, or their parts, and merges the adapter into them in float32."""
    produce = from_files(manifest, lambda name: None if name in adapter else cut(name))

    def merged(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in produce(names):
            yield name, merge_lora(tensor, *adapter[name])[cut(name) or ...] if name in adapter else tensor

    return merged


def merge_lora(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``weight + scale * b @ a`` in float32; convolutions are flattened to [out, in * height * width]."""
    delta = (b.float().flatten(1) @ a.float().flatten(1)) * scale
    return weight.float() + delta.view(weight.shape)


def adapter_folder(folder: Path) -> Path:
    """Return the adapter's folder: ``lora_adapter`` in ``folder``, or ``folder`` itself."""
    for found in (folder / LORA_FOLDER, folder):
        if (found / "adapter_model.safetensors").exists():
            return found
    raise CheckpointError(
        f"policy.base is set, but neither {folder} nor its {LORA_FOLDER} has adapter_model.safetensors"
    )


@dataclass(frozen=True)
class LoraSettings:
    """What ``adapter_config.json`` says about merging an adapter."""

    alpha: float | None = None  # divided by the rank; None without a file: as in OpenVLA-OFT's training code
    by_root: bool = False  # True divides alpha by the root of the rank (rslora)
    rank: int | None = None  # size of A and B; None for any
    targets: Any = None  # names or a pattern of the layers with adapters; None for any
    excluded: Any = None  # names or a pattern of layers without adapters
    indices: tuple[int, ...] | None = None  # numbers of the blocks with adapters; None for all
    stems: tuple[str, ...] = ()  # names in front of such a number; empty for any
    base: str = ""  # name of the base model
    where: str = "adapter_config.json"  # the file, for messages

    def scale(self, rank: int) -> float:
        if rank < 1 or self.rank not in (None, rank):
            raise CheckpointError(
                f"{self.where}: r: found {self.rank}, but the adapter's matrices have rank {rank}"
            )
        alpha = min(rank, 16) if self.alpha is None else self.alpha
        return alpha / (sqrt(rank) if self.by_root else rank)

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


def _names(names: Any, layer: str) -> bool:
    """Return whether a pattern or a list of names, or of their ends, has a layer."""
    if isinstance(names, str):
        return re.fullmatch(names, layer) is not None
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def read_lora_settings(path: Path) -> LoraSettings:
    """Read ``adapter_config.json``; raises CheckpointError, which names what is not supported."""
    config = read_fields(path, "merge the adapter with peft itself: merge_and_unload(), then save_pretrained()")
    config.expect("peft_type", "LORA")
    config.expect("bias", "none")
    # Other ways (pissa, olora, loftq, corda, lora_ga) change the base weights when peft loads the adapter.
    config.expect("init_lora_weights", True, False, "gaussian", "orthogonal", "eva")
    targets, excluded, stems = (
        _layer_names(config, key) for key in ("target_modules", "exclude_modules", "layers_pattern")
    )
    indices = config.get("layers_to_transform")
    numbers: list[Any] = [] if indices is None else indices if isinstance(indices, list) else [indices]
    if not all(type(number) is int for number in numbers):
        raise CheckpointError(f"{path}: layers_to_transform: found {indices!r}, expected numbers of layers")
    alpha, by_root = config.number("lora_alpha", 8), config.expect("use_rslora", False, True)
    rank, base = config.whole("r", 8), config.get("base_model_name_or_path")
    config.finish(_HARMLESS_LORA)
    return LoraSettings(
        alpha, by_root, rank, targets, excluded, tuple(numbers) or None,
        (stems,) if isinstance(stems, str) else tuple(stems or ()), str(base or ""), str(path),
    )  # fmt: skip


def _layer_names(config: Fields, key: str) -> Any:
    found = config.get(key)
    if not isinstance(found, (list, str, NoneType)) or (isinstance(found, list) and {*map(type, found)} - {str}):
        raise CheckpointError(f"{config.where}: {key}: found {found!r}, expected a pattern or a list of names")
    if isinstance(found, str):
        try:
            re.compile(found)
        except re.error as error:
            raise CheckpointError(f"{config.where}: {key}: found {found!r}, no pattern ({error})") from error
    return found


def read_adapter(folder: Path, manifest: Mapping[str, StoredTensor], own_towers: bool = False) -> Adapter:
    """Read a LoRA adapter of the base model whose tensors ``manifest`` lists.

    ``own_towers`` skips the vision towers, which FiLM checkpoints store elsewhere. Raises CheckpointError if
    the adapter has another base model or is of an unsupported kind.
    """
    settings = read_lora_settings(folder / "adapter_config.json")
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
                f"{settings.where}: target_modules {settings.targets!r}, exclude_modules {settings.excluded!r} and "
                f"layers_to_transform {settings.indices!r} leave out {layer}, but the adapter has weights for it, "
                "which peft would ignore"
            )
        pairs[key] = (a, b, settings.scale(a.shape[0]))
    refuse_rest(file, tensors.keys() - used)
    return pairs


def refuse_rest(file: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError if a file has adapter tensors ``names`` that were not merged."""
    if rest := list_some("tensors that are not a linear layer's lora_A or lora_B", sorted(names)):
        raise CheckpointError(f"{file}: found {rest}; merge the adapter with peft itself")
