"""Reads what LeRobot's ``config.json`` and processor files have in common, and refuses what is not supported."""

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import Fields, StoredTensor, from_files, read_fields, read_header
from vla_ros_models.normalization import LEROBOT_EPS, Normalization, make_normalization

logger = logging.getLogger(__name__)

ADVICE = "policy.name:=lerobot runs the checkpoint with LeRobot itself"

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
RENAME, RELATIVE, NORMALIZER = "rename_observations_processor", "relative_actions_processor", "normalizer_processor"
TOKENIZER, UNNORMALIZER, ABSOLUTE = "tokenizer_processor", "unnormalizer_processor", "absolute_actions_processor"
BATCH, DEVICE = "to_batch_processor", "device_processor"
STATE, ACTION = "observation.state", "action"

TYPES = ("VISUAL", "STATE", "ENV", "ACTION", "REWARD", "LANGUAGE")
"""LeRobot's types of features."""

EMPTY_CAMERA = "observation.images.empty_camera_"
"""How the names of cameras begin that LeRobot masks in training and inference (``empty_cameras``)."""

FORMS = {
    "IDENTITY": "none",
    "MEAN_STD": "z_score",
    "QUANTILES": "quantile",
    "QUANTILE10": "decile",
    "MIN_MAX": "min_max",
}


def before_lerobot_04(folder: Path, missing: str) -> str:
    """Describe a folder without processor files, and say how to add them."""
    return (
        f"{folder}: has no {missing}, like checkpoints from before LeRobot 0.4, whose statistics are among the "
        "weights; migrate it with: python -m lerobot.processor.migrate_policy_normalization --pretrained-path "
        f"{folder}"
    )


def has_processors(folder: Path) -> bool:
    """Return True for LeRobot's layout."""
    return (folder / PREPROCESSOR).is_file()


class Pipeline:
    """The steps of one processor file.

    The file may have the steps ``supported``; those of each of ``chains`` stand in its order, because each changes
    what a later one reads.
    """

    def __init__(
        self, folder: Path, name: str, supported: Sequence[str], chains: Sequence[Sequence[str]] = ()
    ) -> None:
        self.path = folder / name
        if not self.path.is_file():
            raise CheckpointError(before_lerobot_04(folder, name))
        file = read_fields(self.path, ADVICE)
        steps = file.get("steps")
        if not isinstance(steps, list):
            advice = "save the checkpoint with lerobot 0.4 or newer"
            raise CheckpointError(f"{self.path}: steps is {steps!r}, expected a list; {advice}")
        self._file = file
        entries = [Fields(step, f"{self.path}: step {index}", ADVICE) for index, step in enumerate(steps)]
        names = [entry.get("registry_name", entry.get("class")) for entry in entries]
        unknown = [one for one in names if one not in supported]
        if unknown:
            raise CheckpointError(
                f"{self.path}: unknown steps {unknown}; this file may have {sorted(supported)}; {ADVICE}"
            )
        self._check_order(names, chains)
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
            options.finish({"where a step runs": "device"}, off=(None,))
            step.finish(off=(None,))
        self._file.finish({"a title": "name"})

    def _check_order(self, names: Sequence[Any], chains: Sequence[Sequence[str]]) -> None:
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise CheckpointError(f"{self.path}: the steps {repeated} are repeated, expected each once; {ADVICE}")
        for chain in chains:
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
        if bad := {key: value for key, value in modes.items() if str(value) not in FORMS}:
            raise CheckpointError(f"{modes.where}: found {bad}, expected one of {sorted(FORMS)}; {ADVICE}")
        return str(modes.get(kind, "IDENTITY"))

    def statistics(self, name: str, feature: str) -> tuple[str, dict[str, Any]]:
        """Read the statistics of a feature from a step's file; returns its name for messages, too."""
        file, folder = self._steps[name].get("state_file"), self.path.parent
        if file is None:
            raise CheckpointError(
                f"{self.path}: the step {name} has no state_file, so there are no statistics of {feature}: a base "
                "model has none until it is fine-tuned. LeRobot would run it with numbers that are not normalised; "
                "fine-tune it on data of your robot (lerobot-train --policy.path), or copy a fine-tuned "
                "checkpoint's files again"
            )
        if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
            raise CheckpointError(
                f"{self.path}: state_file: the statistics are in {file!r}, which is missing; copy the file again"
            )
        stored, stem = read_header(folder / file), f"{feature}."
        tensors = from_files(stored)([key for key in stored if key.startswith(stem)])
        return f"{folder / file}: {feature}", {key.removeprefix(stem): value.numpy() for key, value in tensors}

    def stored(self) -> dict[str, StoredTensor]:
        """List the statistics of all steps by name, such as ``observation.state.mean``."""
        found: dict[str, StoredTensor] = {}
        for step in self._steps.values():
            file = self.path.parent / str(step.get("state_file"))
            found |= read_header(file) if file.is_file() and file.parent == self.path.parent else {}
        return found

    def normalization(self, name: str, feature: str, size: int) -> Normalization:
        """Read how a step normalises a feature of ``size`` numbers."""
        step, options = self.require(name, f"normalises {feature}"), self.options(name)
        mode, eps = self.mode(name, feature), options.number("eps", LEROBOT_EPS)
        options.expect("stats", None, {})
        options.expect("dtype", None, "float32")
        if mode == "IDENTITY":
            step.get("state_file")
            return make_normalization("none", {}, feature, eps)
        where, statistics = self.statistics(name, feature)
        found = make_normalization(FORMS[mode], statistics, where, eps)
        if len(found.offset) != size:
            raise CheckpointError(f"{where}: statistics of {len(found.offset)} numbers, expected {size}")
        return found


class Processors:
    """Both processor files of a checkpoint, and the inputs and outputs that its ``config.json`` states.

    ``files`` has the steps that each file may have, and their chains. A state has at most ``state`` numbers, an
    action at most ``action``.
    """

    def __init__(
        self,
        folder: Path,
        config: Fields,
        files: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]],
        state: int,
        action: int,
    ) -> None:
        inputs, outputs = config.object("input_features"), config.object("output_features")
        self.before, self.after = (Pipeline(folder, name, *files[name]) for name in (PREPROCESSOR, POSTPROCESSOR))
        stored, names = self.before.stored(), image_names(inputs)
        self.state_size = state_size(inputs, stored, state)
        self.action_size = feature_size(outputs, ACTION, action)
        feature_kinds(outputs)
        before = dict(zip(names, camera_keys(self.before.options(RENAME), names, inputs), strict=True))
        self.names = unmasked(names, before, {name.rpartition(".")[0] for name in stored})
        if not self.names:
            raise CheckpointError(f"{inputs.where}: all cameras are empty ones: {names}")
        self.images = tuple(before[name] for name in self.names)

    def fields(self) -> dict[str, Any]:
        """Return the cameras, sizes and normalisations as fields of a flow policy's processing."""
        before, after, size = self.before, self.after, self.action_size
        for name in self.names:
            if (mode := before.mode(NORMALIZER, name)) != "IDENTITY":
                raise CheckpointError(
                    f"{before.path}: norm_map: {name} is normalised by {mode}, expected VISUAL: IDENTITY; {ADVICE}"
                )
        return {
            "images": self.images,
            "optional_images": self.images,
            "state_size": self.state_size,
            "action_size": size,
            "state": before.normalization(NORMALIZER, STATE, self.state_size),
            "actions": after.normalization(UNNORMALIZER, ACTION, size),
            "previous": before.normalization(NORMALIZER, ACTION, size),
        }

    def finish(self) -> None:
        """Refuse what was not read, as :meth:`Pipeline.finish`."""
        self.before.finish()
        self.after.finish()


def state_size(features: Fields, stored: Mapping[str, StoredTensor], limit: int) -> int:
    """Return the numbers of the state: those of its statistics, or without any, those that ``config.json`` states.

    LeRobot does not read the latter (0.6.1, ``prepare_state`` of pi0, pi0.5 and SmolVLA, the pack step of GR00T),
    and keeps the base model's in fine-tuned checkpoints.
    """
    sizes = {
        one.shape[0] for name, one in stored.items() if name.rpartition(".")[0] == STATE and len(one.shape) == 1
    }
    sizes -= {1} if len(sizes) > 1 else set()  # the number of frames, ``count``
    if not sizes:
        return feature_size(features, STATE, limit)
    stated = features.object(STATE).get("shape")
    if len(sizes) > 1 or max(sizes) > limit:
        raise CheckpointError(
            f"{features.where}: the statistics of {STATE} have {sorted(sizes)} numbers, expected at most {limit} "
            "(max_state_dim)"
        )
    size = sizes.pop()
    if stated != [size]:
        logger.info(
            "%s: %s has the shape %s, which LeRobot does not read; its statistics have %d numbers, which count",
            features.where, STATE, stated, size,
        )  # fmt: skip
    return size


def unmasked(names: Sequence[str], before: Mapping[str, str], stored: Collection[str]) -> list[str]:
    """Return the cameras that the training data had; the others are slots that were masked.

    These are ``empty_camera_0`` and its like, unless another camera was renamed to it. LeRobot stores statistics of
    all cameras of a data set, under their names ``before`` or after renaming; if there are any, slots of the base
    model without them were masked, too.
    """
    cameras = [name for name in names if not name.startswith(EMPTY_CAMERA) or before[name] != name]
    return [name for name in cameras if {name, before[name]} & set(stored)] or cameras


def feature_size(features: Fields, name: str, limit: int) -> int:
    shape = features.object(name).get("shape")
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or not 1 <= shape[0] <= limit:
        raise CheckpointError(
            f"{features.where}: {name} has the shape {shape}, expected at most {limit} numbers "
            f"(max_{'action' if name == ACTION else 'state'}_dim); found {sorted(features)}"
        )
    return int(shape[0])


def feature_kinds(features: Fields) -> dict[str, str]:
    """Return the type of each feature; check that nothing else than type and shape is stated."""
    kinds = {}
    for name in features:
        feature = features.object(name)
        kinds[name] = str(feature.expect("type", None, *TYPES))
        feature.finish({"a list of sizes": "shape"})
        if kinds[name] not in TYPES:
            raise CheckpointError(f"{features.where}: {name} has no type, expected one of {TYPES}")
    return kinds


def image_names(features: Fields) -> list[str]:
    """Return the names of the images; like LeRobot, ignore what is neither an image nor the state."""
    images = [name for name, kind in feature_kinds(features).items() if kind == "VISUAL"]
    if not images:
        raise CheckpointError(f"{features.where}: input_features has no image; found {sorted(features)}")
    for name in images:  # LeRobot does not read the size, and some files have [H, W, 3]
        shape = features.object(name).get("shape")
        if not isinstance(shape, list) or len(shape) != 3 or 3 not in (shape[0], shape[2]):
            raise CheckpointError(f"{features.where}: {name} has the shape {shape}, expected [3, H, W]")
    return images


def camera_keys(options: Fields, names: list[str], features: Fields) -> tuple[str, ...]:
    """Return the names of the cameras before the checkpoint's processor renames them."""
    renamed = dict(options.object("rename_map"))
    before = {new: old for old, new in renamed.items()}
    if len(before) != len(renamed):
        raise CheckpointError(f"{options.where}: rename_map {renamed} maps two observations to the same name")
    if lost := [name for name in features if name in renamed and name not in before]:
        raise CheckpointError(f"{options.where}: rename_map {renamed} leaves no observation with the names {lost}")
    return tuple(before.get(name, name) for name in names)


def name_list(options: Fields, key: str) -> list[str]:
    names = options.get(key) or []
    if not isinstance(names, list):
        raise CheckpointError(f"{options.where}: {key}: found {names!r}, expected a list of names")
    return [str(name).lower() for name in names]
