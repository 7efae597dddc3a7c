"""Reads how one embodiment's images, states and actions are prepared, from NVIDIA's or LeRobot's files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import Fields, read_fields, read_numbers
from vla_ros_models.groot.architecture import GrootArchitecture
from vla_ros_models.groot.processing import ActionPart, Bounds, GrootResize, Processing, fit_units
from vla_ros_models.processor_files import (
    ACTION,
    ADVICE,
    BATCH,
    DEVICE,
    POSTPROCESSOR,
    PREPROCESSOR,
    RENAME,
    STATE,
    Processors,
)

PACK, ENCODE = "groot_n1_7_pack_inputs_v1", "groot_n1_7_vlm_encode_v1"
DECODE, UNPACK = "groot_n1_7_action_decode_v1", "groot_action_unpack_unnormalize_v2"
FILES = {
    PREPROCESSOR: ((RENAME, BATCH, PACK, ENCODE, DEVICE), ((RENAME, PACK, ENCODE),)),
    POSTPROCESSOR: ((DECODE, UNPACK, BATCH, DEVICE), ()),
}
"""The steps that LeRobot's files may have, and their order."""

_Sizes = tuple[tuple[str, int], ...]

_TARGET, _CROPPED = (256, 256), (230, 230)
"""Geometry of the published checkpoints, for files that state none."""


def read_resize(fields: Fields, backbone: Path, unit: int) -> GrootResize:
    """Read how images are cropped and resized, from a processor's options and the backbone's preprocessor."""
    target, cropped = _pair(fields, "image_target_size"), _pair(fields, "image_crop_size")
    edge, crop = fields.get("shortest_image_edge"), fields.get("crop_fraction")
    area = bool(fields.expect("use_albumentations", False, True))
    letterbox = bool(fields.expect("letter_box_transform", False, True))
    if target is None:
        target, cropped, edge, crop = _TARGET, _CROPPED, None, None
    if crop is None and cropped is not None:
        crop = cropped[0] / target[0]
    file = read_fields(backbone / "preprocessor_config.json", "copy the backbone's preprocessor_config.json again")
    for key in ("do_resize", "do_rescale", "do_normalize"):
        file.expect(key, True)
    file.expect("resample", 3)
    for key in ("image_mean", "image_std"):
        file.expect(key, [0.5, 0.5, 0.5])
    if file.whole("patch_size", 14) * file.whole("merge_size", 2) != unit:
        raise CheckpointError(
            f"{file.where}: patch_size and merge_size differ from config.json's, a token of {unit}"
        )
    size = file.object("size")
    limits = (
        size.whole("shortest_edge", file.whole("min_pixels", 65536)),
        size.whole("longest_edge", file.whole("max_pixels", 16777216)),
    )
    return GrootResize(
        fit_units(target, unit, limits), target, int(edge or target[0]), crop, letterbox, area, unit, limits
    )


def _pair(fields: Fields, key: str) -> tuple[int, int] | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(one, int) and one > 0 for one in value):
        raise CheckpointError(f"{fields.where}: {key}: found {value!r}, expected [height, width]")
    return value[0], value[1]


def _names(fields: Fields, key: str = "modality_keys") -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise CheckpointError(f"{fields.where}: {key}: found {value!r}, expected a list of names")
    return value


def read_horizon(folder: Path, tag: str) -> int:
    """Return the number of actions of a chunk that NVIDIA's files state for an embodiment; 0 if they do not."""
    path = folder / "processor_config.json"
    if not path.is_file():
        return 0
    known = read_fields(path).object("processor_kwargs").object("modality_configs")
    return _horizon(known.object(tag).object("action"))


def _horizon(action: Fields) -> int:
    steps = action.get("delta_indices")
    return len(steps) if isinstance(steps, list) else 0


def _bounds(statistics: Fields, name: str, keys: tuple[str, str]) -> Bounds:
    """Read the bounds of one part, float32 [N] or [T, N]."""
    one = statistics.object(name)
    missing = [key for key in keys if key not in one]
    if missing:
        raise CheckpointError(f"{one.where}: no {missing}; found {sorted(one)}")
    low, high = (read_numbers(one[key], f"{one.where}: {key}", np.float32) for key in keys)
    if low.shape != high.shape or low.ndim not in (1, 2) or not low.size or not np.isfinite([low, high]).all():
        raise CheckpointError(
            f"{one.where}: {keys} have the shapes {low.shape} and {high.shape}, expected equal ones of finite "
            "numbers"
        )
    return Bounds(low, high, keys)


def _state(modality: Fields, statistics: Fields, keys: tuple[str, str]) -> tuple[_Sizes, Bounds]:
    state = modality.object("state")
    if state.get("mean_std_embedding_keys"):
        raise CheckpointError(f"{state.where}: mean_std_embedding_keys are not supported, expected none")
    names = _names(state)
    found = [_bounds(statistics.object("state"), name, keys) for name in names]
    low, high = (np.concatenate([getattr(one, side) for one in found]) for side in ("low", "high"))
    bounds = Bounds(low, high, keys)
    return tuple((name, one.size) for name, one in zip(names, found, strict=True)), bounds


def _parts(
    modality: Fields, statistics: Fields, state: Sequence[tuple[str, int]], percentiles: bool, relative: bool
) -> tuple[ActionPart, ...]:
    action = modality.object("action")
    names, configs, parts = _names(action), action.get("action_configs") or [], []
    ends = dict(zip((name for name, _ in state), np.cumsum([size for _, size in state]).tolist(), strict=True))
    sizes = dict(state)
    for index, name in enumerate(names):
        config = Fields(configs[index] if index < len(configs) else {}, f"{action.where}: action_configs: {index}")
        rep, kind, form = (str(config.get(key)).lower() for key in ("rep", "type", "format"))
        if not (relative and rep == "relative"):
            if rep == "delta":
                raise CheckpointError(f"{config.where}: rep: found DELTA, expected ABSOLUTE or RELATIVE")
            keys = ("q01", "q99") if percentiles else ("min", "max")
            parts.append(ActionPart(name, _bounds(statistics.object("action"), name, keys)))
            continue
        bounds = _bounds(statistics.object("relative_action"), name, ("min", "max"))
        source = str(config.get("state_key") or name)
        pose = kind == "eef" and form in ("xyz_rot6d", "xyz+rot6d")
        if kind != "non_eef" and not pose:
            raise CheckpointError(
                f"{config.where}: type {kind!r} and format {form!r}; a relative action is NON_EEF, or EEF with "
                "XYZ_ROT6D"
            )
        if sizes.get(source) != bounds.size or (pose and bounds.size != 9):
            raise CheckpointError(
                f"{config.where}: {name} has {bounds.size} numbers and is relative to the state {source}, which "
                f"has {sizes.get(source, 'none')}"
            )
        place = ends[source] - bounds.size, ends[source]
        parts.append(ActionPart(name, bounds, "composed" if pose else "added", place))
    return tuple(parts)


def _column(parts: Sequence[ActionPart], where: object) -> int:
    """Return the column of the part ``gripper``, which LIBERO's transform converts."""
    start = 0
    for part in parts:
        if part.name == "gripper" and part.bounds.size == 1:
            return start
        start += part.bounds.size
    raise CheckpointError(
        f"{where}: the transform for LIBERO needs a part gripper of one number; found "
        f"{[(part.name, part.bounds.size) for part in parts]}; set policy.action_transform:=none"
    )


def _embodiment(
    options: Fields, modality: Fields, statistics: Fields, rows: int
) -> tuple[_Sizes, Bounds, tuple[ActionPart, ...], int, int]:
    """Read an embodiment's states and actions; a chunk has at most ``rows`` actions.

    Returns names and sizes of the state's parts, the state's bounds, the action's parts, the numbers of an action,
    and the actions of a chunk.
    """
    percentiles = bool(options.expect("use_percentiles", False, True))
    relative = bool(options.expect("use_relative_action", False, True))
    state, bounds = _state(modality, statistics, ("q01", "q99") if percentiles else ("min", "max"))
    parts = _parts(modality, statistics, state, percentiles, relative)
    rows = min(rows, _horizon(modality.object("action")) or rows)
    for part in parts:
        if part.bounds.low.ndim == 2 and 1 < len(part.bounds.low) < rows:
            raise CheckpointError(
                f"{options.where}: {part.name} has statistics of {len(part.bounds.low)} steps, but a chunk "
                f"has {rows}"
            )
    return state, bounds, parts, sum(part.bounds.size for part in parts), rows


def nvidia_processing(
    processor: Fields, modality: Fields, statistics: Fields, resize: GrootResize, horizon: int, libero: bool
) -> Processing:
    """Read an embodiment's images, state and action, and their normalisation, from NVIDIA's files.

    ``horizon`` is the model's.
    """
    state, bounds, parts, size, rows = _embodiment(processor, modality, statistics, horizon)
    video = modality.object("video")
    if len(video.get("delta_indices") or [0]) != 1:
        raise CheckpointError(
            f"{video.where}: delta_indices: found {video['delta_indices']}, expected one moment; models with "
            "earlier images are not supported"
        )
    clip = bool(processor.expect("clip_outliers", True, False))
    gripper = _column(parts, processor.where) if libero else None
    images = tuple(_names(video))
    return Processing(images, resize, state, bounds, clip, parts, size, size, rows, gripper=gripper)


def lerobot_processing(
    folder: Path, config: Fields, backbone: Path, sizes: GrootArchitecture, rows: int, libero: bool
) -> tuple[Processing, int, bool]:
    """Read one embodiment's preparation from LeRobot's processor files; a chunk has at most ``rows`` actions.

    Returns the embodiment's row in the weights, too, and whether instructions lose capitals and punctuation.
    """
    config.advice = ADVICE
    files = Processors(folder, config, FILES, sizes.state_dim, sizes.action_dim)
    before, after, state_size, action_size = files.before, files.after, files.state_size, files.action_size
    packing = before.require(PACK, "normalises the state")
    before.require(ENCODE, "encodes images and instruction")
    pack, encode = before.options(PACK), before.options(ENCODE)
    for key in ("state_horizon", "action_horizon", "valid_action_horizon", "max_action_dim", "state_dropout_prob"):
        pack.get(key)
    pack.expect("language_key", "task")
    if (moments := pack.get("video_horizon")) not in (None, 1):
        raise CheckpointError(f"{before.path}: video_horizon: found {moments}, expected 1; {ADVICE}")
    if pack.whole("max_state_dim", 132) != sizes.state_dim:
        raise CheckpointError(
            f"{before.path}: max_state_dim is {pack['max_state_dim']}, expected {sizes.state_dim}"
        )
    ids, tag = pack.object("embodiment_mapping"), str(pack.get("embodiment_tag", "new_embodiment"))
    keys = _ordered(files.images, pack.get("video_modality_keys"))
    named: _Sizes = ()
    bounds = None
    if pack.expect("normalize_min_max", True, False) and "state_file" in packing:
        bounds = _aligned(before.statistics(PACK, STATE)[1], state_size, 1.0)
    clip, formal = (bool(pack.expect(key, True, False)) for key in ("clip_outliers", "formalize_language"))
    for key in ("raw_stats", "modality_config", "use_percentiles"):
        pack.get(key)
    encode.get("model_name")
    encode.get("device")
    resize = read_resize(encode, backbone, sizes.vision.unit)
    if DECODE in after:
        options = after.options(DECODE)
        modality, statistics = options.object("modality_config"), options.object("raw_stats")
        named, _, parts, size, rows = _embodiment(options, modality, statistics, rows)
        limit = options.whole("env_action_dim", 0, least=0)
        gripper = _column(parts, after.path) if libero else None
        size, clipped = min(size, limit or size), True
        options.get("action_decode_transform")
    else:
        step, options = after.require(UNPACK, "un-normalises actions"), after.options(UNPACK)
        limit = options.whole("env_action_dim", 0, least=0)
        size = min(action_size, limit or action_size)
        options.get("libero_gripper_action")
        binary = options.expect("libero_gripper_binarize", True, False)
        if libero and size >= 7 and not binary:
            raise CheckpointError(f"{after.path}: libero_gripper_binarize: found False, expected True; {ADVICE}")
        clipped = bool(options.expect("clip_normalized_action", False, True))
        if options.expect("normalize_min_max", True, False) and "state_file" in step:
            whole = _aligned(after.statistics(UNPACK, ACTION)[1], size, 0.0)
        else:  # actions stay as the model returns them
            step.get("state_file")
            whole, clipped = Bounds(np.full(size, -1, np.float32), np.full(size, 1, np.float32)), False
        parts, gripper = (ActionPart("action", whole),), size - 1 if libero and size >= 7 else None
    own = ("state", state_size)
    processing = Processing(
        keys, resize, (own,), bounds, clip, parts, size, action_size, rows, clipped, gripper, named
    )
    files.finish()
    return processing, ids.whole(tag, 0, least=0), formal


def _ordered(keys: Sequence[str], wanted: Any) -> tuple[str, ...]:
    """Return the cameras in the order of the checkpoint's names, or alphabetically if none of them matches."""
    stem, found = "observation.images.", []
    for name in wanted or ():
        aliases = [f"{stem}{name}", *([f"{stem}image2"] if name == "wrist_image" else [])]
        found += [alias for alias in aliases if alias in keys][:1]
    return tuple(name.removeprefix("observation.").removeprefix("images.") for name in found or sorted(keys))


def _aligned(statistics: Mapping[str, Any], size: int, last: float) -> Bounds:
    """Return the bounds of ``size`` numbers; those without statistics are 0 and ``last``."""
    low, high = (
        np.concatenate(
            [np.ravel(statistics.get(key, ())).astype(np.float32)[:size], np.full(size, rest, np.float32)]
        )
        for key, rest in (("min", 0.0), ("max", last))
    )
    return Bounds(low[:size], high[:size])
