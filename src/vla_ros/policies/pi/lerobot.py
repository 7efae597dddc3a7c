"""Reads LeRobot's ``config.json`` and processor files, and refuses steps and options that are not supported."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vla_ros.errors import CheckpointError
from vla_ros.policies.checkpoint_files import Fields, from_files, read_fields, read_header
from vla_ros.policies.normalization import LEROBOT_EPS, Normalization, make_normalization
from vla_ros.policies.pi.architecture import PI0, PiArchitecture
from vla_ros.policies.pi.processing import Processing, PromptForm

ADVICE = "policy.name:=lerobot runs the checkpoint with LeRobot itself"

RENAME, RELATIVE, NORMALIZER = "rename_observations_processor", "relative_actions_processor", "normalizer_processor"
NEW_LINE, STATE_PROMPT = "pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step"
TOKENIZER, UNNORMALIZER, ABSOLUTE = "tokenizer_processor", "unnormalizer_processor", "absolute_actions_processor"

FILES = {
    "policy_preprocessor.json": (
        *(RENAME, RELATIVE, NORMALIZER, STATE_PROMPT, NEW_LINE, TOKENIZER),
        *("to_batch_processor", "device_processor"),
    ),
    "policy_postprocessor.json": (UNNORMALIZER, ABSOLUTE, "to_batch_processor", "device_processor"),
}
"""The steps that each file may have."""

CHAINS = (
    (RENAME, RELATIVE, NORMALIZER, STATE_PROMPT),
    (STATE_PROMPT, TOKENIZER),
    (NEW_LINE, TOKENIZER),
    (UNNORMALIZER, ABSOLUTE),
)
"""Steps of which each changes what a later one reads, in their order. Other steps may stand anywhere."""

HARMLESS_FIELDS = {
    "where a step runs": "device",
}

TYPES = ("VISUAL", "STATE", "ENV", "ACTION", "REWARD", "LANGUAGE")
"""LeRobot's types of features."""

FORMS = {
    "IDENTITY": "none",
    "MEAN_STD": "z_score",
    "QUANTILES": "quantile",
    "QUANTILE10": "decile",
    "MIN_MAX": "min_max",
}


class Pipeline:
    """The steps of one processor file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        file = read_fields(self.path, ADVICE)
        steps = file.get("steps")
        if not isinstance(steps, list):
            advice = "save the checkpoint with lerobot 0.4 or newer"
            raise CheckpointError(f"{self.path}: steps is {steps!r}, expected a list; {advice}")
        self._file = file
        entries = [Fields(step, f"{self.path}: step {index}", ADVICE) for index, step in enumerate(steps)]
        names = [entry.get("registry_name", entry.get("class")) for entry in entries]
        supported = FILES[name]
        unknown = [one for one in names if one not in supported]
        if unknown:
            raise CheckpointError(
                f"{self.path}: unknown steps {unknown}; this file may have {sorted(supported)}; {ADVICE}"
            )
        self._check_order(names)
        self._steps: dict[str, Fields] = dict(zip(names, entries, strict=True))
        self._options: dict[str, Fields] = {
            name: Fields(step.get("config") or {}, f"{self.path}: {name}", ADVICE)
            for name, step in self._steps.items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._steps

    def options(self, name: str) -> Fields:
        """Return the options of a step; empty if the file does not have it."""
        return self._options[name] if name in self._options else Fields({}, f"{self.path}: {name}", ADVICE)

    def require(self, name: str, purpose: str) -> Fields:
        """Return a step; raises CheckpointError, which states its ``purpose``, if the file does not have it."""
        if name not in self._steps:
            raise CheckpointError(f"{self.path}: no step {name}, which {purpose}; {ADVICE}")
        return self._steps[name]

    def finish(self) -> None:
        """Refuse what was not read. No step's option is ignored because it is false: its default may be true."""
        for name, step in self._steps.items():
            options = self._options[name]
            if name == "device_processor":
                options.expect("float_dtype", None, "float32")
            if name == TOKENIZER:
                # Padding is masked and takes no position, so each way gives the same actions.
                options.expect("padding", "max_length", "longest", "do_not_pad", True, False)
                options.expect("padding_side", "right", "left")
            options.finish(HARMLESS_FIELDS, off=(None,))
            step.finish(off=(None,))
        self._file.finish({"a title": "name"})

    def _check_order(self, names: Sequence[Any]) -> None:
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise CheckpointError(f"{self.path}: the steps {repeated} are repeated, expected each once; {ADVICE}")
        for chain in CHAINS:
            places = [chain.index(name) for name in names if name in chain]
            if any(first > second for first, second in pairwise(places)):
                found, expected = [chain[place] for place in places], [chain[place] for place in sorted(places)]
                raise CheckpointError(
                    f"{self.path}: the steps are in the order {found}, expected {expected}, because each changes "
                    f"what a later one reads; {ADVICE}"
                )

    def mode(self, step: str, feature: str) -> str:
        """Return how a step normalises a feature of the observation or the action: a key of :data:`FORMS`."""
        if step not in self:
            return "IDENTITY"
        options = self.options(step)
        modes, features = options.object("norm_map"), options.object("features")
        chosen = options.get("normalize_observation_keys")
        for key in ("norm_map", "features"):
            if not isinstance(options.get(key), dict):
                raise CheckpointError(f"{options.where}: {key}: found {options.get(key)!r}, expected a JSON object")
        kinds: dict[str, Any] = {name: features.object(name).get("type") for name in features}
        if bad := {name: one for name, one in kinds.items() if one not in TYPES}:
            raise CheckpointError(f"{features.where}: found the types {bad}, expected one of {TYPES}")
        if feature == "action":  # LeRobot normalises it whatever the features are
            kind: Any = "ACTION"
        elif feature not in features or (chosen is not None and feature not in chosen):
            return "IDENTITY"
        else:
            kind = kinds[feature]
        if bad := {key: value for key, value in modes.items() if value not in FORMS}:
            raise CheckpointError(f"{modes.where}: found {bad}, expected one of {sorted(FORMS)}; {ADVICE}")
        return str(modes.get(kind, "IDENTITY"))

    def normalization(self, name: str, feature: str, size: int) -> Normalization:
        """Read how a step normalises a feature of ``size`` numbers."""
        step, options = self.require(name, f"normalises {feature}"), self.options(name)
        mode, eps = self.mode(name, feature), options.number("eps", LEROBOT_EPS)
        options.expect("stats", None, {})
        options.expect("dtype", None, "float32")
        file = step.get("state_file")
        if mode == "IDENTITY":
            return make_normalization("none", {}, feature, eps)
        folder = self.path.parent
        if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
            raise CheckpointError(
                f"{self.path}: state_file: the statistics are in {file!r}, which is missing; copy the file again"
            )
        stored, stem = read_header(folder / file), f"{feature}."
        tensors = from_files(stored)([key for key in stored if key.startswith(stem)])
        statistics = {key.removeprefix(stem): value.numpy() for key, value in tensors}
        where = f"{folder / file}: {feature}"
        found = make_normalization(FORMS[mode], statistics, where, eps)
        if len(found.offset) != size:
            raise CheckpointError(f"{where}: statistics of {len(found.offset)} numbers, expected {size}")
        return found


STATE, ACTION = "observation.state", "action"

HARMLESS = {
    "training": "optimizer_* scheduler_* time_sampling_* gradient_checkpointing freeze_vision_encoder "
    "train_expert_only",
    "how it runs, which policy.device and policy.dtype choose": "device use_amp compile_model compile_mode",
    "publishing": "push_to_hub repo_id private tags license pretrained_path pretrained_revision",
    "repeated in the processor files, whose values LeRobot uses": "normalization_mapping tokenizer_max_length "
    "relative_exclude_joints action_feature_names",
    "empty cameras are masked": "empty_cameras",
    "pi0 and pi0.5 take one observation": "n_obs_steps",
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
    inputs, outputs = config.object("input_features"), config.object("output_features")
    state_size = _size(inputs, STATE, architecture.action_dim)
    action_size = _size(outputs, ACTION, architecture.action_dim)
    before, after = (Pipeline(folder, name) for name in FILES)
    images = _images(inputs)
    _kinds(outputs)
    keys = _camera_keys(before.options(RENAME), images, inputs)
    for name in images:
        if (mode := before.mode(NORMALIZER, name)) != "IDENTITY":
            raise CheckpointError(
                f"{before.path}: norm_map: {name} is normalised by {mode}, expected VISUAL: IDENTITY; "
                f"{config.advice}"
            )
    prompt, tokenizer = _prompt(before, padded)
    delta = _delta(config, before, after, state_size, action_size)
    processing = Processing(
        images=keys,
        optional_images=keys,
        antialias=False,
        prompt=prompt,
        state_size=state_size,
        action_size=action_size,
        state=before.normalization(NORMALIZER, STATE, state_size),
        actions=after.normalization(UNNORMALIZER, ACTION, action_size),
        previous=before.normalization(NORMALIZER, ACTION, action_size),
        delta=delta,
        raw_state=True,
        summed_times=False,
    )
    before.finish()
    after.finish()
    return processing, tokenizer


def _size(features: Fields, name: str, limit: int) -> int:
    shape = features.object(name).get("shape")
    if not isinstance(shape, list) or len(shape) != 1 or not 1 <= shape[0] <= limit:
        raise CheckpointError(
            f"{features.where}: {name} has the shape {shape}, expected at most {limit} numbers; found "
            f"{sorted(features)}"
        )
    return int(shape[0])


def _kinds(features: Fields) -> dict[str, str]:
    """Return the type of each feature; check that nothing else than type and shape is stated."""
    kinds = {}
    for name in features:
        feature = features.object(name)
        kinds[name] = str(feature.expect("type", None, *TYPES))
        feature.finish({"a list of sizes": "shape"})
        if kinds[name] not in TYPES:
            raise CheckpointError(f"{features.where}: {name} has no type, expected one of {TYPES}")
    return kinds


def _images(features: Fields) -> list[str]:
    """Return the names of the images. Like LeRobot, ignore inputs that are neither images nor the state."""
    empty = "observation.images.empty_camera_"
    images = [name for name, kind in _kinds(features).items() if kind == "VISUAL" and not name.startswith(empty)]
    if not images:
        raise CheckpointError(f"{features.where}: input_features has no image; found {sorted(features)}")
    for name in images:
        shape = features.object(name).get("shape")
        if not isinstance(shape, list) or len(shape) != 3 or shape[0] != 3:
            raise CheckpointError(f"{features.where}: {name} has the shape {shape}, expected [3, H, W]")
    return images


def _camera_keys(options: Fields, names: list[str], features: Fields) -> tuple[str, ...]:
    """Return the names of the cameras before the checkpoint's processor renames them."""
    renamed = dict(options.object("rename_map"))
    before = {new: old for old, new in renamed.items()}
    if len(before) != len(renamed):
        raise CheckpointError(f"{options.where}: rename_map {renamed} maps two observations to the same name")
    if lost := [name for name in features if name in renamed and name not in before]:
        raise CheckpointError(f"{options.where}: rename_map {renamed} leaves no observation with the names {lost}")
    return tuple(before.get(name, name) for name in names)


def _prompt(before: Pipeline, padded_state: int) -> tuple[PromptForm, str]:
    """Read the form of the prompt and the tokenizer's name from the steps that write it."""
    if STATE_PROMPT in before and NEW_LINE in before:
        raise CheckpointError(f"{before.path}: found both {STATE_PROMPT} and {NEW_LINE}, expected one of them")
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
        line_break=NEW_LINE in before,
    )
    return form, str(stated or "")


def _delta(config: Fields, before: Pipeline, after: Pipeline, state_size: int, size: int) -> tuple[bool, ...]:
    """Return which action dimensions are relative to the measured state; empty if none are."""
    options = before.options(RELATIVE)
    said: Mapping[str, bool] = {
        "use_relative_actions of config.json": bool(config.get("use_relative_actions")),
        RELATIVE: bool(options.get("enabled")),
        ABSOLUTE: bool(after.options(ABSOLUTE).get("enabled")),
    }
    excluded, names = (_names(options, key) for key in ("exclude_joints", "action_names"))
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


def _names(options: Fields, key: str) -> list[str]:
    names = options.get(key) or []
    if not isinstance(names, list):
        raise CheckpointError(f"{options.where}: {key}: found {names!r}, expected a list of names")
    return [str(name).lower() for name in names]
