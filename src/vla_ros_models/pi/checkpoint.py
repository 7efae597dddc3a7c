"""Reads a checkpoint folder in either published layout, and refuses what is not supported.

Openpi's PyTorch export has ``model.safetensors``, ``config.json`` and ``assets/<asset>/norm_stats.json``, but does
not describe robot, prompt or delta actions; a :class:`~vla_ros_models.pi.processing.Robot` supplies these.
LeRobot's layout has ``config.json``, two processor files and their statistics, which describe everything.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vla_ros.config.checkpoints import ADAPTER_FILE, base_folder, config_folder
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.policies.published import loop_of
from vla_ros_models.checkpoint_files import Fields, read_fields
from vla_ros_models.distilled import undistilled
from vla_ros_models.flow_options import RTC_SCHEDULES, RtcSettings
from vla_ros_models.geometry import read_geometry, require_images
from vla_ros_models.memory import MemoryNeeds
from vla_ros_models.normalization import make_normalization
from vla_ros_models.pi.architecture import PI0, PROMPT_TOKENS, PiArchitecture, infer_architecture
from vla_ros_models.pi.loading import Manifest, Parts, parameter_parts, plan_memory, read_stored
from vla_ros_models.pi.processing import ROBOTS, Processing, PromptForm, Robot
from vla_ros_models.processor_files import (
    ABSOLUTE,
    ADVICE,
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
    base: Path | None = None  # the folder of an adapter's base model
    distilled: int = 0  # flow steps into which the flow was distilled; 0 if it was not
    points: tuple[tuple[str, str], ...] = ()  # the policy's names of images and of their points

    @property
    def parts(self) -> Parts:
        """The parts of every parameter."""
        return parameter_parts(self.architecture, self.stored)

    def plan(self, flow_steps: int = 0) -> Callable[[str, str, str], MemoryNeeds]:
        """Return the estimate of the memory; ``flow_steps`` 0 takes the checkpoint's."""
        return partial(
            plan_memory,
            self.parts,
            self.architecture,
            cameras=len(self.image_keys),
            prompt=self.processing.prompt.length,
            flow_steps=flow_steps or self.flow_steps,
        )

    @property
    def spec(self) -> PolicySpec:
        architecture, processing = self.architecture, self.processing
        size = (architecture.vision.image_size, architecture.vision.image_size)
        return PolicySpec(
            images=tuple(
                ImageFeature(key, processing.processor(size), required=name not in processing.optional_images)
                for key, name in zip(self.image_keys, processing.images, strict=True)
            ),
            state=tuple(self._states()),
            action=(),
            dimension=processing.action_size,
            horizon=architecture.horizon,
            rate_hz=self.rate_hz,
            execute_steps=self.execute_steps,
            noise=(architecture.horizon, architecture.action_dim),
            continues_chunks=True,
            points=self.points,
        )

    def _states(self) -> Iterator[StateFeature]:
        processing, start = self.processing, 0
        # ALOHA's state is converted before it is normalised; it has no rotations.
        middle = () if processing.adapt else tuple(map(float, processing.state.middle))
        largest = () if processing.adapt else tuple(map(float, processing.state.largest))
        for key, count in self.state_keys:
            place, start = slice(start, start + count), start + count
            yield StateFeature(key, size=count, middle=middle[place], largest=largest[place])


def read_checkpoint(
    folder: Path, robot: Robot | None = None, asset: str = "", preset: Robot | None = None, base: str | Path = ""
) -> PiCheckpoint:
    """Read everything in a checkpoint except its weights.

    Openpi's layout requires ``robot`` or ``preset``; LeRobot's refuses ``robot`` and ignores ``preset``. ``preset``
    is the preset's robot. ``asset`` replaces the robot's folder below ``assets``, for a fine-tuned checkpoint whose
    statistics have another name. ``base`` is ``policy.base``.
    """
    model, adapter = base_folder(folder, base), folder
    folder = config_folder(folder, base)
    config, steps = read_config(folder, adapter=model is not None)
    is_lerobots = str(config.get("type")) in PROMPT_TOKENS and "input_features" in config
    if not is_lerobots and ("action_horizon" not in config or "type" in config):
        raise CheckpointError(
            f"{config.where}: not a layout of pi0 or pi0.5. LeRobot's has type pi0 or pi05 and input_features; "
            f"openpi's PyTorch export has action_horizon. Found type {config.get('type')!r} and entries "
            f"{sorted(config)[:8]}. If you only have openpi's JAX format (params/), convert it first"
        )
    stored = read_stored(adapter, base)
    horizon = config.whole("chunk_size" if is_lerobots else "action_horizon", None)
    architecture = infer_architecture({name: one.shape for name, one in stored.items()}, horizon, model or folder)
    config.advice = ADVICE if is_lerobots else "convert the checkpoint again with LoRA adapters merged"
    config.expect("paligemma_variant", "gemma_2b")
    config.expect("action_expert_variant", "gemma_300m")
    if is_lerobots:
        if robot is not None or asset:
            raise ConfigError(
                f"{folder}: LeRobot's layout states how its data was prepared; set no policy.robot or policy.asset"
            )
        periods = config.number("min_period", 0.004), config.number("max_period", 4.0)
        processing, tokenizer = read_processing(folder, config, architecture)
        geometry, pairs = read_geometry(config)
        require_images(pairs, processing.images, config.where)
        found = PiCheckpoint(
            **lerobot_fields(config, "num_inference_steps", horizon, processing),
            folder=folder,
            architecture=replace(architecture, periods=periods, geometry=geometry),
            points=tuple((image_key(name), points) for name, points in pairs.items()),
            stored=stored,
            trained_delay=config.whole("rtc_training_max_delay", 0, least=0),
            tokenizer=tokenizer,
            base=model,
        )
        config.finish(HARMLESS)
        return as_distilled(found, steps)
    robot = robot or preset
    if robot is None:
        raise ConfigError(
            f"{folder}: openpi's layout does not state the checkpoint's robot; set policy.robot to one of "
            f"{', '.join(sorted(ROBOTS))}"
        )
    config.expect("action_dim", architecture.action_dim)
    config.finish({"how it runs, which policy.dtype chooses": "precision"})
    processing, loop = _openpi(folder, architecture, robot, asset), loop_of("openpi", robot.name)._asdict()
    keys = robot.image_keys, robot.state_keys
    return as_distilled(PiCheckpoint(folder, architecture, stored, processing, *keys, **loop, base=model), steps)


C = TypeVar("C", bound=PiCheckpoint)


def as_distilled(found: C, steps: int) -> C:
    """Return a checkpoint with what being distilled into ``steps`` flow steps means; 0 returns it as it is."""
    if not steps:
        return found
    rtc = replace(found.rtc, max_guidance=min(found.rtc.max_guidance, float(steps)))
    sizes = replace(found.architecture, targets=True)
    return replace(found, architecture=sizes, flow_steps=steps, distilled=steps, rtc=rtc)


def read_config(folder: Path, advice: str = "", adapter: bool = False) -> tuple[Fields, int]:
    """Read ``config.json``, and the flow steps of a distilled checkpoint, else 0.

    Raises CheckpointError if it is an adapter's and there is no ``adapter``.
    """
    config, steps = undistilled(read_fields(folder / "config.json", advice))
    if config.get("use_peft") and not adapter:
        raise CheckpointError(
            f"{config.where}: use_peft: an adapter's, but the folder has no {ADAPTER_FILE}; copy the whole folder"
        )
    return config, steps


def image_key(name: str) -> str:
    """Return the policy's key of an image that LeRobot calls ``name``."""
    return name.removeprefix("observation.").removeprefix("images.")


def lerobot_fields(config: Fields, steps: str, horizon: int, processing: Processing) -> dict[str, Any]:
    """Read the fields that LeRobot states alike for every flow policy; ``steps`` is the key of the Euler steps."""
    execute = config.whole("n_action_steps", horizon)
    if execute > horizon:
        raise CheckpointError(f"{config.where}: n_action_steps is {execute}, but chunk_size is {horizon}")
    return {
        "processing": processing,
        "image_keys": tuple(map(image_key, processing.images)),
        "state_keys": (("state", processing.state_size),),
        "flow_steps": config.whole(steps, 10),
        "execute_steps": execute,
        "rtc": read_rtc(config.object("rtc_config")),
    }


def read_rtc(config: Fields) -> RtcSettings:
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
        raise CheckpointError(
            f"{path}: norm_stats lacks state or actions; copy the file from the training run again"
        )
    content.finish()
    file.finish()
    if max(robot.state, robot.actions) > architecture.action_dim:
        raise ConfigError(
            f"{folder}: {robot.name} has {robot.state} numbers in its state and {robot.actions} in an action, but "
            f"the model pads to {architecture.action_dim}"
        )
    kind = architecture.model
    form = "z_score" if kind == PI0 else "quantile"
    state, actions = (make_normalization(form, content[key], f"{path}: {key}") for key in ("state", "actions"))
    for key, normalization, size in (("state", state, robot.state), ("actions", actions, robot.actions)):
        count, used = len(normalization.offset), normalization.used
        # A number that never changed, such as an unused gripper's, looks like padding. Where nothing is padding
        # although the model pads, the file does not say for how many joints it is.
        unknown = used == count == architecture.action_dim
        if count < size or (used > size and not unknown) or (count > size and used < size - 1):
            raise CheckpointError(
                f"{path}: {key}: found statistics of {count} numbers, {count - used} of them padding, expected the "
                f"{size} of {robot.name}: the checkpoint was trained for another robot. Set policy.robot to it, of "
                f"{', '.join(sorted(ROBOTS))}; any other runs in openpi's own server (policy.name:=remote)"
            )
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
        state=state,
        actions=actions,
        delta=robot.delta.get(kind, ()),
        adapt=robot.adapt,
        summed_times=True,
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
    config.expect("dtype", "float32", "bfloat16")
    padded = config.whole("max_state_dim", architecture.action_dim)
    for name, size in {"max_action_dim": config.get("max_action_dim"), "max_state_dim": padded}.items():
        if size not in (None, architecture.action_dim) and (kind == PI0 or name == "max_action_dim"):
            raise CheckpointError(f"{path}: {name} is {size!r}, but the weights take {architecture.action_dim}")
    found = Processors(folder, config, FILES, architecture.action_dim, architecture.action_dim)
    prompt, tokenizer = read_prompt(found.before, padded)
    delta = _delta(config, found)
    processing = Processing(
        **found.fields(), antialias=False, prompt=prompt, delta=delta, raw_state=True, summed_times=False
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
    stated: Mapping[str, bool] = {
        "use_relative_actions of config.json": bool(config.get("use_relative_actions")),
        RELATIVE: bool(options.get("enabled")),
        ABSOLUTE: bool(after.options(ABSOLUTE).get("enabled")),
    }
    excluded, names = (name_list(options, key) for key in ("exclude_joints", "action_names"))
    if len(set(stated.values())) > 1:
        raise CheckpointError(
            f"{config.where}: the files disagree on whether actions are relative to the state: {stated}"
        )
    if not options.get("enabled"):
        return ()
    if state_size < size:
        raise CheckpointError(
            f"{config.where}: {size} action dimensions are relative, but the state has {state_size} dimensions"
        )
    mask = [not any(token in name for token in excluded if token) for name in names[:size]]
    return (*mask, *(True,) * (size - len(mask)))
