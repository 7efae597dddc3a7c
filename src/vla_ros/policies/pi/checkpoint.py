"""Reads a checkpoint folder in either published layout.

Openpi's PyTorch export has ``model.safetensors``, ``config.json`` and ``assets/<asset>/norm_stats.json``, but does
not describe robot, prompt or delta actions; a :class:`~vla_ros.policies.pi.robots.Robot` supplies these. LeRobot's
layout has ``config.json``, two processor files and their statistics, which describe everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.policies.fields import Fields, read_fields
from vla_ros.policies.pi.architecture import PI0, PROMPT_TOKENS, PiArchitecture, infer_architecture
from vla_ros.policies.pi.lerobot import HARMLESS, read_processing
from vla_ros.policies.pi.loading import Manifest, read_stored
from vla_ros.policies.pi.normalization import make_normalization
from vla_ros.policies.pi.options import RTC_SCHEDULES
from vla_ros.policies.pi.pipeline import ADVICE
from vla_ros.policies.pi.processing import Processing
from vla_ros.policies.pi.prompt import PromptForm
from vla_ros.policies.pi.robots import ROBOTS, Robot
from vla_ros.policies.pi.rtc import RtcSettings
from vla_ros.policies.published import loop_of

_OPENPI = "openpi"
_LEROBOT = "lerobot"


@dataclass(frozen=True)
class PiCheckpoint:
    """Everything about a checkpoint except its weights."""

    folder: Path  # the checkpoint's folder
    architecture: PiArchitecture  # sizes
    stored: Manifest  # its tensors
    processing: Processing  # converts observations to the model's inputs, and its outputs to actions
    image_keys: tuple[str, ...]  # the policy's names of the images, in the model's order
    state_keys: tuple[tuple[str, int], ...]  # the policy's names of the state vectors, with their sizes
    flow_steps: int = 10  # Euler steps in the checkpoint's configuration
    rate_hz: float | None = None  # control rate of the training data; None if no file states it
    trained_delay: int = 0  # longest delay of trained real-time chunking; 0 without such training
    tokenizer: str = ""  # the tokenizer's name in the checkpoint; empty if it states none
    execute_steps: int = 0  # actions to execute before the next inference; 0 if unknown
    rtc: RtcSettings = field(default_factory=RtcSettings)  # how a chunk continues the previous one


def detect_layout(config: Mapping[str, Any], folder: Path) -> str:
    """Determine the layout from ``config.json``: ``openpi`` or ``lerobot``."""
    if config.get("type") in PROMPT_TOKENS and "input_features" in config:
        return _LEROBOT
    if "action_horizon" in config and "type" not in config:
        return _OPENPI
    raise CheckpointError(
        f"{folder / 'config.json'}: not a layout of pi0 or pi0.5. LeRobot's has type pi0 or pi05 and "
        f"input_features; openpi's PyTorch export has action_horizon. Found type {config.get('type')!r} and "
        f"entries {sorted(config)[:8]}. If you only have openpi's JAX format (params/), convert it first"
    )


def read_checkpoint(
    folder: Path, robot: Robot | None = None, asset: str = "", preset: Robot | None = None
) -> PiCheckpoint:
    """Read everything in a checkpoint except its weights.

    Openpi's layout requires ``robot`` or ``preset``; LeRobot's refuses ``robot`` and ignores ``preset``. ``preset``
    is the preset's robot. ``asset`` replaces the robot's folder below ``assets``, for a fine-tuned checkpoint whose
    statistics have another name.
    """
    config = read_fields(folder / "config.json")
    layout = detect_layout(config, folder)
    if config.get("use_peft"):
        raise CheckpointError(f"{config.where}: use_peft: the folder has an adapter; merge it into its base model")
    stored = read_stored(folder)
    horizon = config.whole("action_horizon" if layout == _OPENPI else "chunk_size", None)
    architecture = infer_architecture({name: one.shape for name, one in stored.items()}, horizon, folder)
    if layout == _LEROBOT:
        if robot is not None or asset:
            raise ConfigError(
                f"{folder}: LeRobot's layout states how its data was prepared; set no policy.robot or policy.asset"
            )
        config.advice = ADVICE
        periods = config.number("min_period", 0.004), config.number("max_period", 4.0)
        processing, tokenizer = read_processing(folder, config, architecture)
        keys = tuple(name.removeprefix("observation.").removeprefix("images.") for name in processing.images)
        found = PiCheckpoint(
            folder=folder,
            architecture=replace(architecture, periods=periods),
            stored=stored,
            processing=processing,
            image_keys=keys,
            state_keys=(("state", processing.state_size),),
            flow_steps=config.whole("num_inference_steps", 10),
            trained_delay=config.whole("rtc_training_max_delay", 0, least=0),
            tokenizer=tokenizer,
            execute_steps=config.whole("n_action_steps", architecture.horizon),
            rtc=_rtc(config.object("rtc_config")),
        )
        config.finish(HARMLESS)
        if found.execute_steps > architecture.horizon:
            raise CheckpointError(
                f"{config.where}: n_action_steps is {found.execute_steps}, but a chunk has {architecture.horizon}"
            )
        return found
    robot = robot or preset
    if robot is None:
        raise ConfigError(
            f"{folder}: openpi's layout does not state the checkpoint's robot; set policy.robot to one of "
            f"{', '.join(sorted(ROBOTS))}"
        )
    config.advice = "convert the checkpoint again with LoRA adapters merged"
    config.expect("paligemma_variant", "gemma_2b")
    config.expect("action_expert_variant", "gemma_300m")
    config.expect("action_dim", architecture.action_dim)
    config.finish({"how it runs, which policy.dtype chooses": "precision"})
    processing = _openpi(folder, architecture, robot, asset)
    loop = loop_of("openpi", robot.name)
    return PiCheckpoint(
        folder,
        architecture,
        stored,
        processing,
        robot.image_keys,
        robot.state_keys,
        rate_hz=loop.rate_hz,
        execute_steps=loop.execute_steps,
    )


def _rtc(config: Fields) -> RtcSettings:
    """Read LeRobot's ``rtc_config``; null and a configuration that is not enabled mean this package's defaults."""
    found = RtcSettings(
        str(config.expect("mode", "guided", "trained")),
        config.whole("execution_horizon", 10),
        str(config.expect("prefix_attention_schedule", *sorted(RTC_SCHEDULES, key="LINEAR".__ne__))),
        config.number("max_guidance_weight", 10.0),
    )
    enabled = config.expect("enabled", True, False) and len(config)
    config.finish({"recording for debugging": "debug debug_maxlen"})
    return found if enabled else RtcSettings()


def _openpi(folder: Path, architecture: PiArchitecture, robot: Robot, asset: str) -> Processing:
    path = folder / "assets" / (asset or robot.asset) / "norm_stats.json"
    if not path.is_file():
        base = folder / "assets"
        found = sorted(item.parent.relative_to(base).as_posix() for item in base.glob("**/norm_stats.json"))
        raise CheckpointError(
            f"{path}: no such file; there are statistics for {found or 'no robot'}. Actions cannot be "
            "un-normalised without them"
        )
    file = read_fields(path, "openpi would normalise it, too")
    content = file.object("norm_stats")
    if not all(isinstance(content.get(key), dict) for key in ("state", "actions")):
        advice = "copy the file from the training run again"
        raise CheckpointError(f"{path}: norm_stats lacks state or actions; {advice}")
    content.finish()
    file.finish()
    if max(robot.state, robot.actions) > architecture.action_dim:
        raise ConfigError(
            f"{folder}: {robot.name} has {robot.state} numbers in its state and {robot.actions} in an action, but "
            f"the model pads to {architecture.action_dim}"
        )
    kind = architecture.model
    form = "z_score" if kind == PI0 else "quantile"
    return Processing(
        images=robot.images,
        optional_images=robot.optional_images,
        antialias=True,
        prompt=PromptForm(
            length=PROMPT_TOKENS[kind],
            state="as_is" if kind != PI0 and robot.prompt_state else "none",
            padded_state=architecture.action_dim,
        ),
        state_size=robot.state,
        action_size=robot.actions,
        state=make_normalization(form, content["state"], f"{path}: state"),
        actions=make_normalization(form, content["actions"], f"{path}: actions"),
        delta=robot.delta.get(kind, ()),
        adapt=robot.adapt,
        summed_times=True,
    )
