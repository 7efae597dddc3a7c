"""Reads LeRobot's ``config.json`` and processor files, and refuses unsupported features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_ros.errors import CheckpointError
from vla_ros.policies.checkpoint_files import from_files, read_header, read_json, whole
from vla_ros.policies.pi.architecture import PI0, PROMPT_TOKENS, PiArchitecture
from vla_ros.policies.pi.normalization import Normalization, make_normalization
from vla_ros.policies.pi.processing import Processing
from vla_ros.policies.pi.prompt import PromptForm

STATE, ACTION = "observation.state", "action"
NORMALIZER, UNNORMALIZER = "normalizer_processor", "unnormalizer_processor"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
FORMS = {"IDENTITY": "none", "MEAN_STD": "z_score", "QUANTILES": "quantile"}
UNSUPPORTED = ("use_visual_memory", "use_proprioceptive_memory", "use_peft")
STEPS = {
    *("rename_observations_processor", "to_batch_processor", "relative_actions_processor", NORMALIZER),
    *("pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step", "tokenizer_processor"),
    *("device_processor", UNNORMALIZER, "absolute_actions_processor"),
}


def read_processing(folder: Path, config: Mapping[str, Any], architecture: PiArchitecture) -> Processing:
    """Read how a LeRobot checkpoint prepares its inputs and converts its actions.

    Raises CheckpointError if files or statistics are missing or contradictory, or require unsupported features.
    """
    path = folder / "config.json"
    kind = architecture.model
    if config["type"] != kind:
        raise CheckpointError(f"{path}: type is {config['type']}, but the weights are those of {kind}")
    wrong = [name for name in UNSUPPORTED if config.get(name)]
    if wrong:
        raise CheckpointError(f"{path}: {wrong} are set, but not supported")
    resolution = list(config.get("image_resolution", ()))
    if resolution != [architecture.vision.image_size] * 2:
        raise CheckpointError(
            f"{path}: image_resolution is {resolution}, but the vision tower takes {architecture.vision.image_size}"
        )
    inputs, outputs = config["input_features"], config.get("output_features") or {}
    state_size = _size(inputs, STATE, path, architecture.action_dim)
    action_size = _size(outputs, ACTION, path, architecture.action_dim)
    before, after = _steps(folder / PREPROCESSOR), _steps(folder / POSTPROCESSOR)
    delta = _delta(config, before, after, state_size, action_size, path)
    images = [
        name
        for name, feature in inputs.items()
        if feature.get("type") == "VISUAL" and not name.startswith("observation.images.empty_camera_")
    ]
    if not images:
        raise CheckpointError(f"{path}: input_features has no image; found {sorted(inputs)}")
    keys = _camera_keys(before, images, folder / PREPROCESSOR)
    return Processing(
        images=keys,
        optional_images=keys,
        antialias=False,
        prompt=PromptForm(
            length=whole(config, "tokenizer_max_length", PROMPT_TOKENS[kind], path),
            state="none" if kind == PI0 else "as_is",
            clean=kind != PI0,
            padded_state=architecture.action_dim,
        ),
        state_size=state_size,
        action_size=action_size,
        state=_normalization(folder, before, PREPROCESSOR, NORMALIZER, STATE, "STATE"),
        actions=_normalization(folder, after, POSTPROCESSOR, UNNORMALIZER, ACTION, "ACTION"),
        delta=delta,
        raw_state=True,
        summed_times=False,
    )


def _size(features: Mapping[str, Any], name: str, path: Path, limit: int) -> int:
    shape = features.get(name, {}).get("shape")
    if not isinstance(shape, list) or len(shape) != 1 or not 1 <= shape[0] <= limit:
        raise CheckpointError(
            f"{path}: {name} has the shape {shape}, expected at most {limit} numbers; found {sorted(features)}"
        )
    return int(shape[0])


def _steps(path: Path) -> dict[str, dict[str, Any]]:
    """Read the steps of a processor file, by name."""
    steps = read_json(path).get("steps")
    if not isinstance(steps, list):
        advice = "save the checkpoint with lerobot 0.4 or newer"
        raise CheckpointError(f"{path}: steps is {steps!r}, expected a list; {advice}")
    named = {step.get("registry_name", step.get("class")): step for step in steps}
    unknown = sorted(str(name) for name in named.keys() - STEPS)
    if unknown:
        raise CheckpointError(f"{path}: unknown steps {unknown}; known steps are {sorted(STEPS)}")
    return named


def _camera_keys(steps: Mapping[str, dict[str, Any]], names: list[str], path: Path) -> tuple[str, ...]:
    """Return the names of the cameras before the checkpoint's processor renames them."""
    renamed = _options(steps, "rename_observations_processor").get("rename_map") or {}
    before = {new: old for old, new in renamed.items()}
    if len(before) != len(renamed):
        raise CheckpointError(f"{path}: rename_map {renamed} maps two observations to the same name")
    return tuple(before.get(name, name) for name in names)


def _normalization(
    folder: Path, steps: Mapping[str, dict[str, Any]], file: str, step_name: str, feature: str, kind: str
) -> Normalization:
    step = steps.get(step_name)
    if step is None:
        raise CheckpointError(f"{folder / file}: no step {step_name}, which defines the normalisation of {feature}")
    mode = _options(steps, step_name).get("norm_map", {}).get(kind, "IDENTITY")
    if mode not in FORMS:
        raise CheckpointError(f"{folder / file}: {kind} is normalised by {mode}, expected one of {sorted(FORMS)}")
    if mode == "IDENTITY":
        return make_normalization("none", {}, feature, lerobot=True)
    name = step.get("state_file")
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        raise CheckpointError(
            f"{folder / file}: the statistics are in {name!r}, which is missing; copy the file again"
        )
    stored = read_header(folder / name)
    stem = f"{feature}."
    tensors = from_files(stored)([key for key in stored if key.startswith(stem)])
    statistics = {key.removeprefix(stem): value.numpy() for key, value in tensors}
    return make_normalization(FORMS[mode], statistics, f"{folder / name}: {feature}", lerobot=True)


def _delta(
    config: Mapping[str, Any],
    before: Mapping[str, dict[str, Any]],
    after: Mapping[str, dict[str, Any]],
    state_size: int,
    size: int,
    path: Path,
) -> tuple[bool, ...]:
    """Return which action dimensions are relative to the measured state; empty if none are."""
    step = _options(before, "relative_actions_processor")
    said = {
        "use_relative_actions of config.json": bool(config.get("use_relative_actions")),
        "relative_actions_processor": bool(step.get("enabled")),
        "absolute_actions_processor": bool(_options(after, "absolute_actions_processor").get("enabled")),
    }
    if len(set(said.values())) > 1:
        raise CheckpointError(f"{path}: the files disagree on whether actions are relative to the state: {said}")
    if not step.get("enabled"):
        return ()
    if state_size < size:
        raise CheckpointError(
            f"{path}: {size} action dimensions are relative, but the state has {state_size} dimensions"
        )
    tokens = [str(token).lower() for token in step.get("exclude_joints") or () if token]
    names = [str(name).lower() for name in step.get("action_names") or ()][:size]
    mask = [not any(token in name for token in tokens) for name in names]
    return (*mask, *(True,) * (size - len(mask)))


def _options(steps: Mapping[str, dict[str, Any]], name: str) -> Mapping[str, Any]:
    options = steps.get(name, {}).get("config") or {}
    return options if isinstance(options, dict) else {}
