"""Reads a GR00T N1.7 folder in either layout, loads its weights, and estimates their memory.

NVIDIA's layout has ``config.json`` with the sizes, ``processor_config.json`` (images, named parts and horizon of
each embodiment), ``statistics.json`` and ``embodiment_id.json``. LeRobot's layout has one embodiment, described by
its processor files; the sizes are in the folder in NVIDIA's layout that it was trained from. Both need the
backbone's configuration, tokenizer and chat template. Nothing is downloaded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from vla_ros.config.checkpoints import base_folder, config_folder
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.policies.base import Progress, no_progress
from vla_ros_models import weights
from vla_ros_models.adapters import read_merged
from vla_ros_models.checkpoint_files import Fields, StoredTensor, from_files, read_fields
from vla_ros_models.distilled import undistilled
from vla_ros_models.groot import SAYS_VERSION, GrootOptions, older_model
from vla_ros_models.groot.architecture import (
    COSMOS,
    COSMOS_CONFIG,
    EMBEDDINGS,
    HEAD,
    LANGUAGE,
    GrootArchitecture,
    number_or,
    read_architecture,
)
from vla_ros_models.groot.building import build_model, tensor_shapes
from vla_ros_models.groot.embodiment import lerobot_processing, nvidia_processing, read_horizon, read_resize
from vla_ros_models.groot.network import GrootModel
from vla_ros_models.groot.processing import GrootResize, Processing
from vla_ros_models.memory import MemoryNeeds, cache_numbers, memory_needs, prefill_numbers

LIBERO = "libero_sim"
GROOT_CHOICES = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "fp8"))
"""Options to suggest if memory does not suffice."""

_PREFIX = "_groot_model."
_CONFIG, _PROCESSOR = "config.json", "processor_config.json"

Manifest = Mapping[str, StoredTensor]
"""Stored tensors by NVIDIA's names."""


@dataclass(frozen=True, eq=False)
class GrootCheckpoint:
    """Everything in a checkpoint except the weights' data."""

    folder: Path
    backbone: Path  # folder of tokenizer and chat template
    architecture: GrootArchitecture
    processing: Processing
    tag: str  # the embodiment
    embodiment: int  # its row in the weights
    formal: bool  # whether instructions lose capitals and punctuation
    stored: Manifest = field(default_factory=dict)
    distilled: int = 0  # flow steps into which the flow was distilled; 0 if it was not

    @property
    def execute_steps(self) -> int:
        """Actions of a chunk before the next inference; in LIBERO as in NVIDIA's evaluation."""
        return min(self.processing.rows, 8) if self.tag == LIBERO else self.processing.rows


def read_checkpoint(folder: Path, options: GrootOptions) -> GrootCheckpoint:
    """Read everything in a checkpoint except its weights."""
    model, adapter = base_folder(folder, options.base), folder
    folder = config_folder(folder, options.base)
    config, steps = undistilled(read_fields(folder / _CONFIG))
    if version := older_model(config):
        raise CheckpointError(
            f"{config.where}: a checkpoint of GR00T {version}, another network; this package runs N1.7. "
            f"{_runs(version)}. Found { {key: config[key] for key in SAYS_VERSION if key in config} }"
        )
    read = _read_lerobot if config.get("type") == "groot" else _read_nvidia
    found = read((folder,) if model is None else (folder, model), config, options)
    found = replace(found, stored=_read_stored(adapter, options.base), distilled=steps)
    if steps:
        sizes = replace(found.architecture, flow_steps=steps, targets=True)
        found = replace(found, architecture=sizes)
    processing, sizes = found.processing, found.architecture
    numbers = sum(part.bounds.size for part in processing.parts)
    if processing.state_size > sizes.state_dim or max(numbers, processing.action_size) > sizes.action_dim:
        raise CheckpointError(
            f"{folder}: a state of {processing.state_size} and actions of {numbers} numbers, but the model pads to "
            f"{sizes.state_dim} and {sizes.action_dim}"
        )
    return found


def _runs(version: str) -> str:
    """Say what runs an older model."""
    isaac = f"NVIDIA/Isaac-GR00T's branch {version.lower()}-release serves it (policy.name:=remote)"
    lerobot = "; LeRobot's layout runs with lerobot 0.5.1 (policy.name:=lerobot with policy.python)"
    return isaac + (lerobot if version == "N1.5" else "")


def _processor_folder(folder: Path) -> Path:
    """Return the folder of the processor's files: ``processor/``, where training saves them, or the folder itself.

    The rule is that of NVIDIA/Isaac-GR00T be889e7 (``gr00t/policy/gr00t_policy.py``).
    """
    nested = folder / "processor"
    return nested if nested.is_dir() and not (folder / _PROCESSOR).exists() else folder


def _read_nvidia(folders: Sequence[Path], config: Fields, options: GrootOptions) -> GrootCheckpoint:
    folder = folders[0]
    if config.get("model_type") != "Gr00tN1d7":
        raise CheckpointError(
            f"{config.where}: found type {config.get('type')!r} and model_type {config.get('model_type')!r}, "
            "expected groot (LeRobot) or Gr00tN1d7 (NVIDIA)"
        )
    if options.base_model:
        raise ConfigError(f"policy.base_model: {folder} has NVIDIA's layout, which states its sizes itself")
    backbone, architecture = _read_sizes(folders, config, options)
    files = _processor_folder(folder)
    processor = read_fields(files / _PROCESSOR).object("processor_kwargs")
    processor.advice = "only GR00T N1.7 is supported"
    known = processor.object("modality_configs")
    tag = options.embodiment or (LIBERO if LIBERO in known else next(iter(known), "") if len(known) == 1 else "")
    if tag not in known:
        raise ConfigError(
            f"policy.embodiment: found {tag!r}, expected one of {sorted(known)}, the robots of {processor.where}"
        )
    ids = read_fields(files / "embodiment_id.json")
    statistics = read_fields(files / "statistics.json")
    if tag not in statistics:
        raise CheckpointError(f"{statistics.where}: no statistics of {tag}; found {sorted(statistics)}")
    resize = read_resize(processor, backbone, architecture.vision.unit)
    libero = options.action_transform == "libero" or (options.action_transform == "auto" and tag == LIBERO)
    processing = nvidia_processing(
        processor, known.object(tag), statistics.object(tag), resize, architecture.horizon, libero
    )
    formal = bool(processor.expect("formalize_language", True, False))
    embodiment = ids.whole(tag, None, least=0)
    return GrootCheckpoint(folder, backbone, architecture, processing, tag, embodiment, formal)


def _read_lerobot(folders: Sequence[Path], config: Fields, options: GrootOptions) -> GrootCheckpoint:
    folder = folders[0]
    if options.embodiment:
        raise ConfigError(f"policy.embodiment: {folder} has LeRobot's layout, which states its own")
    base = _base_folder(folders, config, options)
    backbone, architecture = _read_sizes((*folders, base), read_fields(base / _CONFIG), options)
    tag = str(config.get("embodiment_tag", "new_embodiment"))
    stated = config.get("action_decode_transform", "auto")
    chosen = options.action_transform if options.action_transform != "auto" else stated
    if chosen not in ("auto", "none", "", None, "libero"):
        raise CheckpointError(f"{config.where}: action_decode_transform: found {chosen!r}, expected libero or none")
    libero = chosen == "libero" or (chosen == "auto" and tag == LIBERO)
    chunk, executed = config.whole("chunk_size", 40), config.whole("n_action_steps", 40)
    rows = min(architecture.horizon, chunk, executed, read_horizon(base, tag) or chunk)
    processing, embodiment, formal = lerobot_processing(folder, config, backbone, architecture, rows, libero)
    architecture = replace(
        architecture,
        flow_steps=config.whole("num_inference_timesteps", architecture.flow_steps),
        ramp_rate=number_or(config, "rtc_ramp_rate", architecture.ramp_rate),
    )
    if len(folders) > 1:
        config.expect("use_peft", False, True)
    config.finish(LEROBOT_HARMLESS)
    return GrootCheckpoint(folder, backbone, architecture, processing, tag, embodiment, formal)


LEROBOT_HARMLESS = {
    "training": "optimizer_* tune_* warmup_ratio batch_size max_steps save_steps dataloader_num_workers "
    "dataset_paths output_dir report_to resume video_backend balance_* lora_*",
    "how it runs, which policy.device and policy.dtype choose": "device use_amp use_bf16 model_params_fp32 "
    "use_flash_attention",
    "publishing": "push_to_hub repo_id private tags license pretrained_path pretrained_revision",
    "repeated in the processor files, whose values LeRobot uses": "normalization_mapping use_relative_actions "
    "relative_exclude_joints max_state_dim max_action_dim",
    "of an older model, or not used": "image_size model_version n_obs_steps",
}
"""Keys of LeRobot's ``config.json`` that do not change the actions, by the reason."""


def _base_folder(folders: Sequence[Path], config: Fields, options: GrootOptions) -> Path:
    """Return the folder in NVIDIA's layout that states the sizes of the model."""
    stated = str(config.get("base_model_path") or "nvidia/GR00T-N1.7-3B")
    places = [Path(options.base_model).expanduser()] if options.base_model else [one / stated for one in folders]
    found = next((place for place in places if (place / _CONFIG).is_file()), None)
    if found is None:
        raise CheckpointError(
            f"{folders[0]}: the sizes of the model are in {_CONFIG} of {options.base_model or stated}, which is no "
            "folder here; download it (hf download nvidia/GR00T-N1.7-3B config.json processor_config.json "
            "--local-dir DIR) and set policy.base_model to DIR"
        )
    return found


def _backbone_folder(folders: Sequence[Path], options: GrootOptions) -> Path:
    """Return the folder with the backbone's tokenizer: ``policy.backbone``, or the one that the folder has."""
    if options.backbone:
        chosen = Path(options.backbone).expanduser()
        if not chosen.is_dir():
            raise ConfigError(f"policy.backbone: {chosen} is no folder")
        return chosen
    places = [place for root in folders for place in (root / "backbone", root)]
    return next((place for place in places if (place / "tokenizer.json").is_file()), places[0])


def _read_sizes(folders: Sequence[Path], config: Fields, options: GrootOptions) -> tuple[Path, GrootArchitecture]:
    backbone = _backbone_folder(folders, options)
    path, name = backbone / _CONFIG, str(config.get("model_name", COSMOS))
    if path.is_file() and backbone.resolve() not in [folder.resolve() for folder in folders]:
        fields = read_fields(path)
    elif name.rstrip("/") == COSMOS:
        fields = Fields(COSMOS_CONFIG, f"{COSMOS}'s config.json")
    else:
        raise CheckpointError(
            f"{path}: no such file; it has the sizes of the backbone {name}. Copy its config.json, tokenizer and "
            "chat template there, or set policy.backbone to their folder"
        )
    return backbone, read_architecture(config, fields)


def _read_stored(folder: Path, base: str) -> dict[str, StoredTensor]:
    stored = {name.removeprefix(_PREFIX): one for name, one in read_merged(folder, base).items()}
    if EMBEDDINGS[0] not in stored and EMBEDDINGS[1] in stored:
        stored[EMBEDDINGS[0]] = stored[EMBEDDINGS[1]]
    return stored


def check_weights(sizes: GrootArchitecture, stored: Manifest, folder: Path) -> None:
    """Raise CheckpointError if the stored tensors are not those of the sizes."""
    unused = re.compile(
        rf"{re.escape(EMBEDDINGS[1])}$|{re.escape(LANGUAGE)}norm\.weight$|{re.escape(LANGUAGE)}layers\.(\d+)\.|"
        rf"{re.escape(HEAD)}(position_embedding|mask_token)"
    )

    def never_runs(name: str) -> bool:
        found = unused.match(name)
        return found is not None and (found[1] is None or int(found[1]) >= sizes.text.layers)

    source = f"{folder}: the weights are not those of the sizes in {_CONFIG}"
    weights.check_weights(tensor_shapes(sizes), stored, never_runs, source)


def load_tensors(
    checkpoint: GrootCheckpoint, device: torch.device, dtype: torch.dtype, progress: Progress = no_progress
) -> dict[str, Tensor]:
    """Load the tensors that the passes use; of each embodiment's, only those of the chosen one."""
    sizes, stored = checkpoint.architecture, checkpoint.stored
    check_weights(sizes, stored, checkpoint.folder)
    if checkpoint.embodiment >= sizes.embodiments:
        raise CheckpointError(
            f"{checkpoint.folder}: {checkpoint.tag} has the number {checkpoint.embodiment}, but the weights are "
            f"those of {sizes.embodiments} embodiments"
        )
    shapes, found = tensor_shapes(sizes), dict[str, Tensor]()
    for name, tensor in from_files(stored)(list(shapes)):
        chosen = tensor[checkpoint.embodiment : checkpoint.embodiment + 1] if EACH.match(name) else tensor
        found[name] = chosen.to(device=device, dtype=tensor_dtype(name, dtype), copy=True)
        progress(len(found) / len(shapes), f"loading {name}")
    return found


EACH = re.compile(rf"{re.escape(HEAD)}(state_encoder|action_encoder|action_decoder)\.")
"""Tensors with one entry for each embodiment."""

_FLOAT32 = re.compile(
    rf"{re.escape(HEAD)}(state_encoder|action_encoder|action_decoder|position_embedding|model\.timestep_encoder|"
    rf"target_time_mlp|"
    rf"model\.proj_out|model\.transformer_blocks\.\d+\.norm1)"
)

_FP8 = re.compile(rf"{re.escape(LANGUAGE)}layers\.\d+\.(self_attn\.[qkv]|mlp\.(gate|up|down))_proj\.weight")


def tensor_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the data type of a tensor in a model of ``dtype``; states, actions and times are float32."""
    return torch.float32 if _FLOAT32.match(name) else dtype


def load_network(
    checkpoint: GrootCheckpoint,
    device: str = "cpu",
    dtype: str = "float32",
    flow_steps: int = 0,
    quantization: str = "none",
    progress: Progress = no_progress,
) -> GrootModel:
    """Load a checkpoint's network onto a device; ``flow_steps`` 0 takes the checkpoint's."""
    tensors = load_tensors(checkpoint, torch.device(device), getattr(torch, dtype), progress)
    return build_model(
        checkpoint.architecture, tensors, flow_steps or checkpoint.architecture.flow_steps, quantization
    )


def plan_memory(
    sizes: GrootArchitecture,
    dtype: str,
    quantization: str,
    device: str,
    *,
    cameras: int,
    resize: GrootResize,
    tokens: int = 64,
) -> MemoryNeeds:
    """Estimate the memory for one observation with ``tokens`` of text."""
    number = torch.float32.itemsize if dtype == "float32" else 2
    total, numbers = 0.0, 0
    for name, shape in tensor_shapes(sizes).items():
        count = int(torch.Size(shape).numel()) // (sizes.embodiments if EACH.match(name) else 1)
        numbers = max(numbers, count)
        quantized = quantization == "fp8" and _FP8.match(name)
        total += count * (1 if quantized else 4 if _FLOAT32.match(name) else number)
    patches = resize.size[0] * resize.size[1] // sizes.vision.patch_size**2
    length = cameras * patches // sizes.vision.merge**2 + tokens
    running = max(
        cameras * prefill_numbers(sizes.vision.blocks, patches),
        prefill_numbers(sizes.text, length),
        prefill_numbers(sizes.head, sizes.horizon + 1),
    )
    cache = number * (cache_numbers(sizes.head, length) + cache_numbers(replace(sizes.text, layers=1), length))
    # The matrices of one layer are stacked, so a copy of the largest parts exists for a moment.
    return memory_needs(total, cache, max(number * running, 3 * number * numbers), device)
