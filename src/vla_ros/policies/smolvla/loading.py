"""Reads a LeRobot folder of SmolVLA, loads its weights, and estimates their memory."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.policies import weights
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.checkpoint_files import Fields, read_fields, read_manifest
from vla_ros.policies.memory import MemoryPlan, cache_numbers, estimate, prefill_numbers, tower_numbers
from vla_ros.policies.pi.lerobot import SHARED_HARMLESS, read_prompt
from vla_ros.policies.pi.loading import (
    LEROBOT_PREFIX,
    Parts,
    PiCheckpoint,
    fill_network,
    parameter_dtype,
    parts_of,
    read_rtc,
    renames,
)
from vla_ros.policies.processor_files import (
    ADVICE,
    BATCH,
    DEVICE,
    NORMALIZER,
    POSTPROCESSOR,
    PREPROCESSOR,
    RENAME,
    TOKENIZER,
    UNNORMALIZER,
    Processors,
    feature_kinds,
)
from vla_ros.policies.smolvla import SmolVlaOptions
from vla_ros.policies.smolvla.architecture import SMOLVLM2, SMOLVLM2_CONFIG, SmolVlaArchitecture, read_architecture
from vla_ros.policies.smolvla.network import SmolVlaNetwork, build_empty
from vla_ros.policies.smolvla.processing import SmolVlaProcessing
from vla_ros.policies.tokenizers import Tokenizer, read_tokenizer

_NEW_LINE = "smolvla_new_line_processor"
_CHAINS = ((RENAME, NORMALIZER), (_NEW_LINE, TOKENIZER))
FILES = {
    PREPROCESSOR: ((RENAME, BATCH, _NEW_LINE, TOKENIZER, DEVICE, NORMALIZER), _CHAINS),
    POSTPROCESSOR: ((UNNORMALIZER, BATCH, DEVICE), ()),
}
"""The steps that each file may have, and those whose order counts."""

IGNORED_KEYS = SHARED_HARMLESS | {
    "also training": "train_state_proj load_vlm_weights",
    "padding is masked": "prefix_length pad_language_to",
    "repeated in the processor files, whose values LeRobot uses": "normalization_mapping tokenizer_max_length",
}
"""Keys of ``config.json`` that do not change the actions, by the reason."""

CHOICES = (("float32", "none"), ("bfloat16", "none"))
"""Options to suggest if memory does not suffice."""

ABSENT = (
    "Nothing is downloaded: copy the base model's config.json, tokenizer.json and tokenizer_config.json to vlm/ in "
    "the checkpoint, or set policy.vlm to their folder"
)

_VLM, _EXPERT = "vlm_with_expert.vlm.", "vlm_with_expert.lm_expert."
_TEXT = f"{_VLM}model.text_model."
_EMBEDDINGS = (f"{_TEXT}embed_tokens.weight", f"{_VLM}lm_head.weight")
_RENAMES = renames(f"{_VLM}model.vision_model.", f"{_VLM}model.connector.modality_projection.proj", _TEXT, _EXPERT)
_CONTROL = {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
"""Keys of ``tokenizer_config.json``, and the control tokens that they name in published checkpoints."""


@dataclass(frozen=True)
class SmolVlaCheckpoint(PiCheckpoint):
    """Everything about a checkpoint except its weights."""

    architecture: SmolVlaArchitecture
    processing: SmolVlaProcessing
    vlm: Path = Path()  # the base model's folder
    cameras: int = 0  # images of the configuration, the empty ones included
    empty: int = 0  # the most missing images that LeRobot replaces with masked ones


def read_checkpoint(folder: Path, options: SmolVlaOptions) -> SmolVlaCheckpoint:
    """Read everything in a checkpoint except its weights."""
    config = read_fields(folder / "config.json", ADVICE)
    config.expect("type", "smolvla")
    if config.get("use_peft"):
        raise CheckpointError(f"{config.where}: use_peft: the folder has an adapter; merge it into its base model")
    config.expect("use_cache", True)
    config.expect("use_delta_joint_actions_aloha", False)
    name = str(config.get("vlm_model_name", SMOLVLM2))
    vlm = _vlm_folder(folder, name, options)
    sizes = read_architecture(config, _base_config(vlm, name))
    inputs = config.object("input_features")
    empty = config.whole("empty_cameras", 0, least=0)
    processing, tokenizer = _read_processing(folder, config, sizes)
    if tokenizer not in ("", name) and not options.vlm:
        raise CheckpointError(
            f"{folder}: tokenizer_name is {tokenizer!r}, but vlm_model_name {name!r}; set policy.vlm to a folder "
            "with the tokenizer used in training"
        )
    pictures = {one for one, kind in feature_kinds(inputs).items() if kind == "VISUAL"}
    pictures |= {f"observation.images.empty_camera_{number}" for number in range(empty)}
    found = SmolVlaCheckpoint(
        folder=folder,
        architecture=sizes,
        stored={name.removeprefix(LEROBOT_PREFIX): one for name, one in read_manifest(folder).items()},
        processing=processing,
        image_keys=tuple(key.removeprefix("observation.").removeprefix("images.") for key in processing.images),
        state_keys=(("state", processing.state_size),),
        flow_steps=config.whole("num_steps", 10),
        execute_steps=config.whole("n_action_steps", sizes.horizon),
        rtc=read_rtc(config.object("rtc_config")),
        vlm=vlm,
        cameras=len(pictures),
        empty=empty,
    )
    config.finish(IGNORED_KEYS)
    if found.execute_steps > sizes.horizon:
        raise CheckpointError(
            f"{config.where}: n_action_steps is {found.execute_steps}, but a chunk has {sizes.horizon}"
        )
    return found


def _vlm_folder(folder: Path, name: str, options: SmolVlaOptions) -> Path:
    """Return the base model's folder: ``policy.vlm``, or the one that has its tokenizer."""
    if options.vlm:
        chosen = Path(options.vlm).expanduser()
        if not chosen.is_dir():
            raise ConfigError(f"policy.vlm: {chosen} is no folder")
        return chosen
    places = (folder / name, folder / "vlm", folder)
    return next((place for place in places if (place / "tokenizer.json").is_file()), folder / "vlm")


def _base_config(vlm: Path, name: str) -> Fields:
    path = vlm / "config.json"
    if path.is_file() and "text_config" in (found := read_fields(path)):
        return found
    if name.rstrip("/") == SMOLVLM2:
        return Fields(SMOLVLM2_CONFIG, f"{SMOLVLM2}'s config.json")
    raise CheckpointError(f"{path}: no file with the sizes of {name}. {ABSENT}")


def _read_processing(folder: Path, config: Fields, sizes: SmolVlaArchitecture) -> tuple[SmolVlaProcessing, str]:
    """Read how the checkpoint prepares its inputs and converts its actions, and the name of its tokenizer."""
    found = Processors(folder, config, FILES, sizes.state_dim, sizes.action_dim)
    prompt, tokenizer = read_prompt(found.before, found.state_size, _NEW_LINE)
    adapt = bool(config.expect("adapt_to_pi_aloha", False, True))
    if adapt and min(found.state_size, found.action_size) < 14:
        raise CheckpointError(
            f"{config.where}: adapt_to_pi_aloha needs a state and actions of 14 numbers, found {found.state_size} "
            f"and {found.action_size}"
        )
    processing = SmolVlaProcessing(
        **found.fields(),
        antialias=False,
        prompt=prompt,
        adapt=adapt,
        summed_times=False,
    )
    found.finish()
    return processing, tokenizer


@dataclass(frozen=True, eq=False)
class Words:
    """The base model's tokenizer."""

    tokenizer: Tokenizer
    image_ids: tuple[int, ...]  # control tokens around an image: two before it, one after it
    truncate_left: bool  # as for :class:`~vla_ros.policies.smolvla.processing.SmolVlaProcessing`


def read_words(vlm: Path, vocabulary: int) -> Words:
    """Read the tokenizer; raises CheckpointError if it is missing or does not fit the model."""
    path = vlm / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file. {ABSENT}")
    tokenizer, stated = read_tokenizer(path, control=True), Fields({}, path)
    if (path := vlm / "tokenizer_config.json").is_file():
        stated = read_fields(path)
    for key in ("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case"):
        stated.expect(key, False, None)
    side = stated.expect("truncation_side", "right", "left")
    names = [str(stated.get(key, usual)) for key, usual in _CONTROL.items()]
    ids = [tokenizer.encode(name) for name in (*names, names[0])]
    if tokenizer.framed or any(len(one) != 1 for one in ids) or tokenizer.size > vocabulary:
        raise CheckpointError(
            f"{vlm}: a tokenizer of {tokenizer.size} pieces that adds {list(tokenizer.framed)} to a prompt and "
            f"encodes {names} as {ids}, expected at most {vocabulary} pieces, no additions and one token each"
        )
    return Words(tokenizer, tuple(one[0] for one in ids), side == "left")


def _parameter_parts(sizes: SmolVlaArchitecture, stored: Collection[str]) -> Parts:
    """List the stored tensors of every parameter."""
    return parts_of(build_empty(sizes), sizes.prefix, _RENAMES, _EMBEDDINGS, stored)


def load_network(
    checkpoint: SmolVlaCheckpoint, device: str = "cpu", dtype: str = "float32", progress: Progress = no_progress
) -> SmolVlaNetwork:
    """Check and load a checkpoint's parameters."""
    sizes, stored = checkpoint.architecture, checkpoint.stored
    parts = _parameter_parts(sizes, stored)
    last = sizes.prefix.layers - 1
    unused = re.compile(
        rf"{'|'.join(map(re.escape, _EMBEDDINGS))}$|{re.escape(_TEXT)}norm\.weight$|{re.escape(_TEXT)}layers\."
        rf"(?:{last}\.(?:self_attn\.[qo]_proj|mlp\.|post_attention)|(\d+)\.)"
    )

    def never_runs(name: str) -> bool:
        found = unused.match(name)
        return found is not None and (found[1] is None or int(found[1]) > last)

    weights.check_weights(
        {part.name: part.shape for group in parts.values() for part in group},
        stored,
        never_runs,
        f"{checkpoint.folder}: the weights are not those of the sizes in config.json and {checkpoint.vlm}",
    )
    network = build_empty(sizes)
    fill_network(network, parts, stored, torch.device(device), getattr(torch, dtype), progress)
    network.vision.resize(sizes.vision)
    return network


def plan_memory(
    parts: Parts, sizes: SmolVlaArchitecture, dtype: str, quantization: str, device: str, cameras: int, tokens: int
) -> MemoryPlan:
    """Estimate the memory for one robot, before loading."""
    torch_dtype = getattr(torch, dtype)
    counts = {name: sum(prod(part.shape) for part in group) for name, group in parts.items()}
    total = sum(count * parameter_dtype(name, torch_dtype).itemsize for name, count in counts.items())
    length = cameras * sizes.image_tokens + tokens
    peak = torch_dtype.itemsize * max(
        tower_numbers(sizes.vision, cameras), prefill_numbers(sizes.prefix, length), 2 * max(counts.values())
    )
    cache = cache_numbers(sizes.prefix, length + sizes.horizon) + cache_numbers(sizes.expert, length)
    return estimate(total, cache * torch_dtype.itemsize, peak, device)


def memory_plan(checkpoint: SmolVlaCheckpoint) -> "partial[MemoryPlan]":
    """Return :func:`plan_memory` for a checkpoint with all cameras and the longest prompt."""
    sizes = checkpoint.architecture
    tokens = checkpoint.processing.prompt.length + 1
    parts = _parameter_parts(sizes, checkpoint.stored)
    return partial(plan_memory, parts, sizes, cameras=len(checkpoint.image_keys), tokens=tokens)
