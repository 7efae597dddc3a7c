"""Reads a checkpoint folder in either published layout, loads its weights, and estimates their memory.

Openpi's PyTorch export has ``model.safetensors``, ``config.json`` and ``assets/<asset>/norm_stats.json``, but does
not describe robot, prompt or delta actions; a :class:`~vla_ros.policies.pi.processing.Robot` supplies these.
LeRobot's layout has ``config.json``, two processor files and their statistics, which describe everything. LeRobot's
names of tensors are openpi's with a leading ``model.``.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_ros.engine.shapes import DecoderShape
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.policies import weights
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.checkpoint_files import Fields, Produce, StoredTensor, from_files, read_fields, read_manifest
from vla_ros.policies.memory import MemoryPlan, cache_numbers, estimate, prefill_numbers, tower_numbers
from vla_ros.policies.normalization import make_normalization
from vla_ros.policies.pi.architecture import (
    EMBEDDINGS,
    EXPERT,
    PI0,
    PREFIX,
    PROJECTOR,
    PROMPT_TOKENS,
    SIGLIP,
    PiArchitecture,
    infer_architecture,
)
from vla_ros.policies.pi.lerobot import HARMLESS, read_processing
from vla_ros.policies.pi.network import build_empty
from vla_ros.policies.pi.options import RTC_SCHEDULES, RtcSettings
from vla_ros.policies.pi.processing import ROBOTS, Processing, PromptForm, Robot
from vla_ros.policies.processor_files import ADVICE
from vla_ros.policies.published import loop_of
from vla_ros.policies.weights import parameter_shapes

Renames = Sequence[tuple[str, str]]
"""Substitutions, applied in this order. Tensors whose names are in braces are stacked along the first axis."""


def renames(tower: str, projector: str, prefix: str, expert: str) -> Renames:
    """Return the substitutions from parameters to stored names, whose first parts these are."""
    return (
        (r"^vision\.patch_embed\.proj", f"{tower}embeddings.patch_embedding"),
        (r"^vision\.pos_embed$", f"{tower}embeddings.position_embedding.weight"),
        (r"^vision\.norm", f"{tower}post_layernorm"),
        (r"^vision\.blocks", f"{tower}encoder.layers"),
        (r"^projector", projector),
        (r"^prefix\.", prefix),
        (r"^expert\.", expert),
        (r"(\.\d+)(\.attn)?\.qkv", r"\1.self_attn.{q,k,v}_proj"),
        (r"\.attn\.proj", ".self_attn.out_proj"),
        (r"(\.\d+)\.([oqkv])\.", r"\1.self_attn.\2_proj."),
        (r"(\.\d+)\.norm([12])", r"\1.layer_norm\2"),
        (r"\.input_norm", ".input_layernorm"),
        (r"\.post_norm", ".post_attention_layernorm"),
        (r"\.gate_up", ".mlp.{gate,up}_proj"),
        (r"(\.\d+)\.down", r"\1.mlp.down_proj"),
    )


_RENAMES = renames(SIGLIP, PROJECTOR, PREFIX, EXPERT)


@dataclass(frozen=True)
class Part:
    """A stored tensor; the parts of a parameter are stacked along the first axis."""

    name: str  # openpi's name
    shape: tuple[int, ...]  # as stored


Parts = dict[str, tuple[Part, ...]]
"""Maps each parameter of :class:`~vla_ros.policies.pi.network.PiNetwork` to its parts."""


def parameter_parts(architecture: PiArchitecture, stored: Collection[str]) -> Parts:
    """List the parts of every parameter; ``stored`` determines the name of the embedding."""
    return parts_of(build_empty(architecture), architecture.prefix, _RENAMES, EMBEDDINGS, stored)


def parts_of(
    network: nn.Module, prefix: DecoderShape, names: Renames, embeddings: Sequence[str], stored: Collection[str]
) -> Parts:
    """List the parts of every parameter; the embedding has the first of ``embeddings`` that is stored."""
    shapes = parameter_shapes(network)
    embedding = next((name for name in embeddings if name in stored), embeddings[0])
    parts = {name: _parts(name, shape, prefix, names) for name, shape in shapes.items()}
    return parts | {"embed_tokens.weight": (Part(embedding, shapes["embed_tokens.weight"]),)}


def _parts(name: str, shape: tuple[int, ...], prefix: DecoderShape, names: Renames) -> tuple[Part, ...]:
    stored = name
    for pattern, replacement in names:
        stored = re.sub(pattern, replacement, stored)
    stem, _, rest = stored.partition("{")
    if not rest:
        return (Part(stored, shape[1:] if name == "vision.pos_embed" else shape),)
    fused, _, end = rest.partition("}")
    first, *others = fused.split(",")
    is_decoder_attention = first == "q" and not name.startswith("vision.")
    rows = prefix.kv_heads * prefix.head_dim if is_decoder_attention else shape[0] // (1 + len(others))
    sizes = {first: shape[0] - rows * len(others), **dict.fromkeys(others, rows)}  # the prefix may lack queries
    return tuple(Part(f"{stem}{one}{end}", (count, *shape[1:])) for one, count in sizes.items() if count)


def never_run_pattern(architecture: PiArchitecture) -> re.Pattern[str]:
    """Return a pattern for stored tensors that no action depends on.

    These are the expert's head, the embedding under its other name, the prefix's final norm, and the prefix's last
    layer except its keys and values.
    """
    last = architecture.prefix.layers - 1
    tail = r"self_attn\.[qo]_proj\.weight|mlp\.\w+\.weight|post_attention_layernorm\.weight"
    escaped = re.escape(PREFIX)
    return re.compile(
        rf"paligemma_with_expert\.gemma_expert\.lm_head\.weight$|{'|'.join(map(re.escape, EMBEDDINGS))}$"
        rf"|{escaped}norm\.weight$|{escaped}layers\.{last}\.({tail})$"
    )


LEROBOT_PREFIX = "model."

FLOAT32 = re.compile(r"vision\.(patch|pos)_embed|\w+_(proj|mlp_in|mlp_out)\.|(prefix|expert)\..*norm\.")
"""Parameters that stay float32 in a bfloat16 model, as in openpi."""

PI_CHOICES = (("float32", "none"), ("bfloat16", "none"))
"""Options to suggest if memory does not suffice."""

Manifest = Mapping[str, StoredTensor]
"""Stored tensors by openpi's names."""


def read_stored(folder: Path) -> dict[str, StoredTensor]:
    """List every tensor of a checkpoint by openpi's name; reads only the files' headers."""
    manifest = read_manifest(folder)
    lerobot = any(name.startswith(f"{LEROBOT_PREFIX}paligemma_with_expert.") for name in manifest)
    return {name.removeprefix(LEROBOT_PREFIX) if lerobot else name: stored for name, stored in manifest.items()}


def check_weights(architecture: PiArchitecture, stored: Manifest, folder: Path) -> Parts:
    """Compare the parameters with the stored tensors, and return the parts of each parameter.

    Raises CheckpointError if tensors are missing or unexpected, or have the wrong shape or type.
    """
    parts = parameter_parts(architecture, stored)
    weights.check_weights(
        {part.name: part.shape for group in parts.values() for part in group},
        stored,
        never_run_pattern(architecture).match,
        f"{folder}: the weights are not those of {architecture.model} (LoRA adapters must be merged first; files "
        "that LeRobot wrote before October 2025 must be converted by a newer version)",
    )
    return parts


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the data type of a parameter in a model of ``dtype``."""
    return torch.float32 if FLOAT32.match(name) else dtype


def fill_network(
    network: nn.Module,
    parts: Parts,
    stored: Manifest,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress = no_progress,
) -> None:
    """Load the weights to ``device``, one parameter at a time."""
    weights.fill(network, stacked(parts, stored), device, partial(parameter_dtype, dtype=dtype), progress)


def stacked(parts: Parts, stored: Manifest) -> Produce:
    """Return a function that yields parameters, with their parts stacked along axis 0."""

    def produce(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        owner = {part.name: name for name in names for part in parts[name]}
        arrived: dict[str, Tensor] = {}  # still mapped from their files, so waiting costs no memory
        for part_name, tensor in from_files(stored)(list(owner)):
            name, arrived[part_name] = owner[part_name], tensor
            group = [part.name for part in parts[name]]
            if all(one in arrived for one in group):
                rows = [arrived.pop(one) for one in group]
                yield name, rows[0] if len(rows) == 1 else torch.cat(rows)

    return produce


def plan_memory(
    parts: Parts,
    architecture: PiArchitecture,
    dtype: str,
    quantization: str,
    device: str,
    cameras: int = 3,
    flow_steps: int = 10,
) -> MemoryPlan:
    """Estimate the memory of a model for one robot, before loading.

    ``quantization`` has no effect: the dense weights are loaded first and determine the peak.
    """
    torch_dtype = getattr(torch, dtype)
    item = torch_dtype.itemsize
    sizes = {name: sum(prod(part.shape) for part in group) for name, group in parts.items()}
    weights = sum(size * parameter_dtype(name, torch_dtype).itemsize for name, size in sizes.items())
    vision, prefix, expert = architecture.vision, architecture.prefix, architecture.expert
    weights += (flow_steps + 1) * (2 * expert.layers + 1) * 3 * expert.hidden_size * 4
    tokens = cameras * vision.patches + PROMPT_TOKENS[architecture.model]
    peak = max(tower_numbers(vision, cameras), prefill_numbers(prefix, tokens)) * item
    if not device.startswith("cuda"):  # for a GPU, the host converts stored tensors
        peak = max(peak, 4 * max(prod(part.shape) for group in parts.values() for part in group))
    return estimate(weights, cache_numbers(prefix, tokens + 1 + architecture.horizon) * item, peak, device)


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
            rtc=read_rtc(config.object("rtc_config")),
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
