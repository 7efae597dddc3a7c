"""Reads LeRobot's ``config.json`` and processor files, and refuses steps and options that are not supported."""

from collections.abc import Mapping
from pathlib import Path

from vla_ros.errors import CheckpointError
from vla_ros.policies.checkpoint_files import Fields
from vla_ros.policies.pi.architecture import PI0, PiArchitecture
from vla_ros.policies.pi.processing import Processing, PromptForm
from vla_ros.policies.processor_files import (
    ABSOLUTE,
    BATCH,
    DEVICE,
    NORMALIZER,
    POSTPROCESSOR,
    PREPROCESSOR,
    RELATIVE,
    RENAME,
    TOKENIZER,
    UNNORMALIZER,
    Pipeline,
    Processors,
    name_list,
)

NEW_LINE, STATE_PROMPT = "pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step"

_CHAINS = (
    (RENAME, RELATIVE, NORMALIZER, STATE_PROMPT),
    (STATE_PROMPT, TOKENIZER),
    (NEW_LINE, TOKENIZER),
    (UNNORMALIZER, ABSOLUTE),
)
FILES = {
    PREPROCESSOR: ((RENAME, RELATIVE, NORMALIZER, STATE_PROMPT, NEW_LINE, TOKENIZER, BATCH, DEVICE), _CHAINS),
    POSTPROCESSOR: ((UNNORMALIZER, ABSOLUTE, BATCH, DEVICE), _CHAINS),
}
"""The steps that each file may have; and steps of which each changes what a later one reads, in their order."""

SHARED_HARMLESS = {
    "training": "optimizer_* scheduler_* freeze_vision_encoder train_expert_only",
    "how it runs, which policy.device and policy.dtype choose": "device use_amp compile_model compile_mode",
    "publishing": "push_to_hub repo_id private tags license pretrained_path pretrained_revision",
    "the policy takes one observation": "n_obs_steps",
}
"""Keys of every flow policy's ``config.json`` that do not change the actions, by the reason."""

HARMLESS = SHARED_HARMLESS | {
    "also training": "time_sampling_* gradient_checkpointing",
    "repeated in the processor files, whose values LeRobot uses": "normalization_mapping tokenizer_max_length "
    "relative_exclude_joints action_feature_names",
    "empty cameras are masked": "empty_cameras",
    "sizes of a memory that is off": "memory_frames memory_stride memory_temporal_attention_every",
}
"""Keys of ``config.json`` that do not change the actions, by the reason."""


def read_processing(folder: Path, config: Fields, architecture: PiArchitecture) -> tuple[Processing, str]:
    """Read how a LeRobot checkpoint prepares its inputs and converts its actions, and the name of its tokenizer.

    Raises CheckpointError if files or statistics are missing or contradictory, or require unsupported features.
    """
    path = config.where
    kind = architecture.model
    if config["type"] != kind:
        raise CheckpointError(f"{path}: type is {config['type']}, but the weights are those of {kind}")
    side = architecture.vision.image_size
    if config.get("image_resolution", [224, 224]) != [side, side]:
        raise CheckpointError(
            f"{path}: image_resolution is {config['image_resolution']}, but the vision tower takes {side}"
        )
    config.expect("paligemma_variant", "gemma_2b")
    config.expect("action_expert_variant", "gemma_300m")
    config.expect("dtype", "float32", "bfloat16")
    padded = config.whole("max_state_dim", architecture.action_dim)
    for name, size in {"max_action_dim": config.get("max_action_dim"), "max_state_dim": padded}.items():
        if size not in (None, architecture.action_dim) and (kind == PI0 or name == "max_action_dim"):
            raise CheckpointError(f"{path}: {name} is {size!r}, but the weights take {architecture.action_dim}")
    found = Processors(folder, config, FILES, architecture.action_dim, architecture.action_dim)
    prompt, tokenizer = read_prompt(found.before, padded)
    delta = _delta(config, found)
    processing = Processing(
        **found.fields(),
        antialias=False,
        prompt=prompt,
        delta=delta,
        raw_state=True,
        summed_times=False,
    )
    found.finish()
    return processing, tokenizer


def read_prompt(before: Pipeline, padded_state: int, new_line: str = NEW_LINE) -> tuple[PromptForm, str]:
    """Read the form of the prompt and the tokenizer's name from the steps that write it."""
    if STATE_PROMPT in before and new_line in before:
        raise CheckpointError(f"{before.path}: found both {STATE_PROMPT} and {new_line}, expected one of them")
    state = before.options(STATE_PROMPT)
    state.expect("include_state_in_prompt", True)
    state.expect("task_key", "task")
    state.get("max_state_dim")  # LeRobot pads the state no longer; before 0.5: policy.prompt_state
    step, options = before.require(TOKENIZER, "encodes the prompt"), before.options(TOKENIZER)
    options.expect("task_key", "task")
    options.expect("truncation", True)
    stated = step.object("artifacts").get("tokenizer_name") or options.get("tokenizer_name")
    options.get("tokenizer_name")
    form = PromptForm(
        length=options.whole("max_length", 512),
        state="as_is" if STATE_PROMPT in before else "none",
        clean=False,
        padded_state=padded_state,
        line_break=new_line in before,
    )
    return form, str(stated or "")


def _delta(config: Fields, found: Processors) -> tuple[bool, ...]:
    """Return which action dimensions are relative to the measured state; empty if none are."""
    before, after, state_size, size = found.before, found.after, found.state_size, found.action_size
    options = before.options(RELATIVE)
    said: Mapping[str, bool] = {
        "use_relative_actions of config.json": bool(config.get("use_relative_actions")),
        RELATIVE: bool(options.get("enabled")),
        ABSOLUTE: bool(after.options(ABSOLUTE).get("enabled")),
    }
    excluded, names = (name_list(options, key) for key in ("exclude_joints", "action_names"))
    if len(set(said.values())) > 1:
        raise CheckpointError(
            f"{config.where}: the files disagree on whether actions are relative to the state: {said}"
        )
    if not options.get("enabled"):
        return ()
    if state_size < size:
        raise CheckpointError(
            f"{config.where}: {size} action dimensions are relative, but the state has {state_size} dimensions"
        )
    mask = [not any(token in name for token in excluded if token) for name in names[:size]]
    return (*mask, *(True,) * (size - len(mask)))
