"""Loads LeRobot's checkpoints with LeRobot's code, without network access.

Uses these functions of LeRobot 0.6.1: ``PreTrainedConfig.from_pretrained``, ``get_policy_class``,
``make_pre_post_processors``, ``predict_action_chunk``.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from vla_ros.contract.spec import DeltaTimestamp, ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import CheckpointError, ConfigError, MissingDependencyError, lfs_pointer
from vla_ros.files import read_json_value
from vla_ros.types import PreviousChunk
from vla_ros_models.checkpoint_files import Fields, read_header, read_json
from vla_ros_models.processor_files import RENAME, before_lerobot_04, camera_keys, unmasked

_ADAPTS = ("smolvla", "pi0", "pi05", "pi0_fast", "xvla")
"""Families whose code in LeRobot 0.6.1 resizes images, pads the state and masks missing cameras.

It does not read the shapes of ``input_features``, which a fine-tuned checkpoint keeps from its base model.
"""

_NOT_OBSERVED = ("LANGUAGE", "ACTION", "REWARD")
"""Types of features that no sensor measures; the instruction is read from the task."""

_STEEPEST = 100
_WITHOUT_INSTRUCTION = ("act", "diffusion", "tdmpc", "vqbet")
_PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
_TOKENIZER = "tokenizer_processor"
# SmolVLA reads the configuration and processor of its backbone, but not the weights; pi0-FAST reads its tokenizer,
# which LeRobot 0.6.1 leaves out of the action tokenizer's file.
_BACKBONES = ("vlm_model_name", "text_tokenizer_name")
_ACTION_TOKENIZER = "action_tokenizer_processor"
_OTHERS = ("action_tokenizer_name", "checkpoint_path")  # of pi0-FAST and of MolmoAct2, with files of their own


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    policy: Any  # LeRobot's ``PreTrainedPolicy``
    before: Any  # preprocessor: observation to batch
    after: Any  # postprocessor: normalised actions to actions
    continues: bool = False  # True if the policy can continue the chunk that is being executed (real-time chunking)

    def guidance(self, previous: PreviousChunk | None, left: Any) -> dict[str, Any]:
        """Return the arguments with which ``predict_action_chunk`` continues a chunk.

        ``left`` [1, T, D] contains the normalised actions of ``previous``. The new chunk repeats the steps that
        will have been executed by then. The following steps, up to the execution horizon, guide the new chunk; the
        horizon is that of ``previous``, or of the checkpoint's ``rtc_config``, or LeRobot's default.
        """
        if previous is None or not self.continues:
            return {}
        stated = int(self.policy.config.rtc_config.execution_horizon)
        horizon = previous.delay + previous.guided if previous.guided else max(stated, previous.delay)
        return {"prev_chunk_left_over": left, "inference_delay": previous.delay, "execution_horizon": horizon}

    def remember(self, batch: dict[str, Any], first: Any) -> Any:
        """Mark the frames of a memory that stand in for those before the episode; return ``first``.

        LeRobot attends to none of them. They are the oldest ones that equal ``first``, the oldest frame of the
        episode's first observation, or None in that observation; the newest frame is never one.
        """
        names = [name for name in self.policy.config.image_features if name in batch]
        if not getattr(self.policy.config, "use_visual_memory", False) or self.policy.config.memory_frames == 1:
            return first
        frames = batch[names[0]].flatten(2)  # [1, T, N]
        first = frames[:, :1] if first is None else first
        padded = (frames == first).all(-1).int().cumprod(1).bool()
        padded[:, -1] = False
        batch.update({f"{name}_is_pad": padded for name in (*names, "observation.state")})
        return first


def load_policy(folder: Path, device: str, tokenizer: str) -> Checkpoint:
    """Load a checkpoint that LeRobot's ``save_pretrained`` wrote.

    ``tokenizer`` is the tokenizer's folder; "" uses the folder that the processors name.

    Raises:
        CheckpointError: The checkpoint does not exist, has an older format, or is incomplete.
        MissingDependencyError: LeRobot, or a library that the policy's family requires, is not installed.
    """
    written = _config(folder)
    kind, overrides = str(written["type"]), _tokenizer(folder, written, tokenizer)
    overrides["device_processor"] = {"device": device}
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    try:
        from draccus.utils import DraccusException
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    except ImportError as error:
        raise MissingDependencyError(
            f"policy.name: 'lerobot' needs LeRobot in this environment ({error}); install it with: pip install "
            "'lerobot<0.7', or set policy.python to the Python of an environment that has it"
        ) from error
    try:
        policy_class = get_policy_class(kind)
        config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
        config.device = device
        for name in _BACKBONES:
            if tokenizer and hasattr(config, name):
                setattr(config, name, tokenizer)
        policy = policy_class.from_pretrained(folder, config=config, local_files_only=True)
        before, after = make_pre_post_processors(config, str(folder), preprocessor_overrides=overrides)
    except ImportError as error:
        raise MissingDependencyError(
            f"{folder}: the policy '{kind}' needs a library that is not installed ({error}); install it with: pip "
            f"install 'lerobot[{kind}]<0.7'"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, DraccusException) as error:
        newer = "; a newer LeRobot wrote it: install that one, if need be its main branch"
        advice = newer if "are not valid for" in str(error) else ""
        raise CheckpointError(
            f"{folder}: the installed LeRobot cannot load this '{kind}' checkpoint: {type(error).__name__}: {error}"
            f"{advice}"
        ) from error
    policy.reset()
    return Checkpoint(policy.eval().to(device), before, after, _continues_chunks(policy))


def _continues_chunks(policy: Any) -> bool:
    """Return whether the policy can continue chunks (real-time chunking).

    If the checkpoint does not configure real-time chunking, it is enabled with LeRobot's defaults. GR00T is
    excluded, because its own implementation has other arguments.
    """
    if not (policy.supports_rtc() and hasattr(policy, "init_rtc_processor")):
        return False
    if policy.config.rtc_config is None:
        from lerobot.policies.rtc.configuration_rtc import RTCConfig

        policy.config.rtc_config = RTCConfig()
        policy.init_rtc_processor()
    return bool(policy.config.rtc_config.enabled)


@dataclass(frozen=True)
class Input:
    """An observation that a checkpoint takes."""

    name: str  # LeRobot's name, before the checkpoint's processor renames it
    shape: tuple[int, ...]  # [H, W, 3] of an image, [N] of a state
    required: bool = True  # False if LeRobot masks a missing image
    fixed: bool = True  # False if LeRobot resizes the image, so that every size is right
    middle: tuple[float, ...] = ()  # as for :class:`~vla_ros.contract.spec.StateFeature`
    largest: tuple[float, ...] = ()

    @property
    def is_image(self) -> bool:
        return is_image_feature(self.name)

    @property
    def key(self) -> str:
        return key_of(self.name)


def read_inputs(folder: Path) -> tuple[Input, ...]:
    """Read what the checkpoint takes, in the order of ``config.json``; slots masked in training are left out."""
    config, steps = _config(folder), _steps(folder)
    features, adapts = config["input_features"], config["type"] in _ADAPTS
    rename = next((step.get("config") for step in steps if step.get("registry_name") == RENAME), None)
    options = Fields(rename or {}, folder / _PROCESSORS[0])
    before = dict(zip(features, camera_keys(options, list(features), features), strict=True))
    stored = {name.rpartition(".")[0] for file in _state_files(folder, steps) for name in read_header(file)}
    trained = [name for name in features if is_image_feature(name)]
    if adapts:
        trained = unmasked(trained, before, stored)
    inputs = []
    for name, feature in features.items():
        shape = feature["shape"]
        if feature.get("type") in _NOT_OBSERVED:
            continue
        if not is_image_feature(name):
            middle, largest, size = _statistics(folder, steps, name)
            if size not in (0, *shape) and not adapts:
                raise CheckpointError(
                    f"{folder}/config.json: {name} has the shape {shape}, but the statistics have {size} numbers; "
                    "the files belong to different checkpoints, copy all of them again"
                )
            inputs.append(Input(before[name], (size or int(shape[0]),), middle=middle, largest=largest))
        elif name in trained:
            inputs.append(Input(before[name], image_shape(name, shape), not adapts, not adapts))
    return tuple(inputs)


def read_spec(folder: Path) -> PolicySpec:
    """Read inputs and outputs from ``config.json``, which does not name the parts of state and action."""
    config, inputs = _config(folder), read_inputs(folder)
    image_times, state_times = _times(config, folder)
    images = tuple(
        ImageFeature(
            one.key, None, image_times, one.required, takes=(one.shape[0], one.shape[1]) if one.fixed else None
        )
        for one in inputs
        if one.is_image
    )
    state = tuple(
        StateFeature(one.key, (), one.shape[0], state_times, one.middle, one.largest)
        for one in inputs
        if not one.is_image
    )
    executed = int(config.get("n_action_steps") or 0)
    horizon = int(config.get("chunk_size") or executed or 1)
    dimension = int(config["output_features"]["action"]["shape"][0])
    return PolicySpec(
        images,
        state,
        (),
        dimension,
        horizon,
        executed,
        uses_instruction=config["type"] not in _WITHOUT_INSTRUCTION,
        ensemble_decay=_ensemble_decay(config, folder),
    )


def _times(config: Mapping[str, Any], folder: Path) -> tuple[tuple[DeltaTimestamp, ...], ...]:
    """Return when images and when states are measured, in steps.

    Families of LeRobot 0.6.1 state the number of past observations as ``n_obs_steps``; the memory of pi0.5 in
    LeRobot's main branch has ``memory_frames``, each ``memory_stride`` steps after the one before.
    """
    now = tuple(map(DeltaTimestamp, range(1 - int(config.get("n_obs_steps") or 1), 1)))
    visual, own = (config.get(f"use_{kind}_memory") is True for kind in ("visual", "proprioceptive"))
    if own and not visual:
        raise CheckpointError(
            f"{folder}/config.json: found use_proprioceptive_memory without use_visual_memory, expected both: the "
            "images show how far an episode's past goes back"
        )
    if not visual:
        return now, now
    frames: Any = config.get("memory_frames")
    stride: Any = config.get("memory_stride")
    if not all(type(one) is int and one >= 1 for one in (frames, stride)):
        raise CheckpointError(f"{folder}/config.json: memory_frames {frames!r} and memory_stride {stride!r}")
    past = tuple(map(DeltaTimestamp, range((1 - frames) * stride, 1, stride)))
    return past, past if own else now


def _ensemble_decay(config: Mapping[str, Any], folder: Path) -> float | None:
    """Return m of ACT's temporal ensembling, or None without it."""
    decay = config.get("temporal_ensemble_coeff")
    if decay is None:
        return None
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not abs(decay) <= _STEEPEST:
        raise CheckpointError(
            f"{folder}/config.json: temporal_ensemble_coeff, by which chunks are averaged: found {decay!r}, "
            f"expected null or a number from -{_STEEPEST} to {_STEEPEST}"
        )
    return float(decay)


def _steps(folder: Path) -> list[dict[str, Any]]:
    content = read_json(folder / _PROCESSORS[0]).get("steps")
    if not isinstance(content, list) or not all(isinstance(step, dict) for step in content):
        raise CheckpointError(f"{folder / _PROCESSORS[0]}: steps is no list of objects; copy the file again")
    return content


def _state_files(folder: Path, steps: Sequence[Mapping[str, Any]]) -> list[Path]:
    return [folder / str(step["state_file"]) for step in steps if step.get("state_file")]


def _statistics(
    folder: Path, steps: Sequence[Mapping[str, Any]], feature: str
) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Return ``middle`` and ``largest`` of a feature's training data, each () if the preprocessor lacks it.

    The last item is the number of statistics, 0 without any.
    """
    stats: dict[str, Any] = {}
    for file in _state_files(folder, steps):
        stats = _tensors(file, feature) | stats
    bounds = [
        [stats[low], stats[high]] for low, high in (("min", "max"), ("q01", "q99")) if {low, high} <= stats.keys()
    ]
    middles = [stats["mean"]] if "mean" in stats else [np.mean(each, axis=0) for each in reversed(bounds)]
    largest = [np.abs(each).max(axis=0) for each in bounds]
    found = [tuple(map(float, np.ravel(each[0]))) if each else () for each in (middles, largest)]
    return found[0], found[1], len(found[0])


def _tensors(file: Path, feature: str) -> dict[str, Any]:
    try:
        with safe_open(file, "numpy") as stored:
            keys = [key for key in stored.keys() if key.startswith(f"{feature}.")]  # noqa: SIM118
            return {key.removeprefix(f"{feature}."): stored.get_tensor(key) for key in keys}
    except (OSError, SafetensorError) as error:
        advice = lfs_pointer(file) or "copy the file again"
        raise CheckpointError(f"{file}: cannot be read ({error}); {advice}") from None


def is_image_feature(name: str) -> bool:
    return name.startswith("observation.image")


def key_of(name: str) -> str:
    """Return the key of a feature in an observation: ``front`` for ``observation.images.front``."""
    return name.removeprefix("observation.images.").removeprefix("observation.")


def image_shape(name: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the shape [3, H, W] of an image as [H, W, 3]; raises CheckpointError for other shapes.

    Some configurations have [H, W, 3], which LeRobot's families either do not read or fail to build.
    """
    if len(shape) != 3 or 3 not in (shape[0], shape[2]):
        raise CheckpointError(f"{name}: the checkpoint takes an image of shape {tuple(shape)}, expected (3, H, W)")
    return (shape[1], shape[2], 3) if shape[0] == 3 else (shape[0], shape[1], 3)


def _config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``, and check that the processors' files exist."""
    if not folder.is_dir():
        raise ConfigError(f"policy.checkpoint: found '{folder}', expected a folder that LeRobot wrote")
    try:
        config: dict[str, Any] = read_json_value(folder / "config.json")
        config["type"], config["input_features"], config["output_features"]["action"]
    except FileNotFoundError:
        nested = folder / "pretrained_model"
        hint = f"; use {nested}" if nested.is_dir() else ""
        raise CheckpointError(f"{folder}: has no config.json, expected a folder that LeRobot wrote{hint}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/config.json: not a policy configuration of LeRobot: {error!r}") from None
    missing = [name for name in _PROCESSORS if not (folder / name).exists()]
    if missing:
        raise CheckpointError(before_lerobot_04(folder, missing[0]))
    return config


def _tokenizer(folder: Path, config: Mapping[str, Any], tokenizer: str) -> dict[str, dict[str, Any]]:
    """Return the overrides that set the tokenizer's folder; raises CheckpointError if it had to be downloaded."""
    if tokenizer and not Path(tokenizer).is_dir():
        raise ConfigError(f"policy.tokenizer: found '{tokenizer}', expected the folder of a tokenizer")
    steps = _steps(folder)
    names = [step["config"].get("tokenizer_name") for step in steps if step.get("registry_name") == _TOKENIZER]
    given = tokenizer
    own = [folder / name for name in names if name and (folder / name).is_dir()]  # newer than LeRobot 0.6.1
    tokenizer = tokenizer or (str(own[0]) if own else "")
    for key in _OTHERS:
        if (found := str(config.get(key) or "")) and not Path(found).is_dir():
            raise CheckpointError(
                f"{folder}: {key} is '{found}' on the hub, but nothing is downloaded automatically; download it "
                "once, and write its folder into config.json and, if it is there, into policy_preprocessor.json"
            )
    backbones = [config.get(key) for key in _BACKBONES]
    for name in (*names, *backbones):
        known = given if name in backbones else tokenizer
        if name and not known and not Path(name).is_dir():
            raise CheckpointError(
                f"{folder}: refers to '{name}' on the hub, but nothing is downloaded automatically; download it "
                "once, without weights, and set policy.tokenizer to its folder"
            )
    overrides = {
        _TOKENIZER: {"tokenizer_name": tokenizer},
        _ACTION_TOKENIZER: {"paligemma_tokenizer_name": tokenizer},
    }
    used = {step.get("registry_name") for step in steps} if tokenizer else set()
    return {name: override for name, override in overrides.items() if name in used}
