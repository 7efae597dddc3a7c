"""Reads a LeRobot folder of SmolVLA, and loads its weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vla_ros.config.checkpoints import base_folder, config_folder
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.policies.base import Progress, no_progress
from vla_ros_models.checkpoint_files import Fields, read_fields
from vla_ros_models.pi.checkpoint import (
    SHARED_HARMLESS,
    PiCheckpoint,
    as_distilled,
    lerobot_fields,
    read_config,
    read_prompt,
)
from vla_ros_models.pi.loading import Parts, StoredNames, fill_network, read_stored
from vla_ros_models.processor_files import (
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
from vla_ros_models.smolvla import SmolVlaOptions
from vla_ros_models.smolvla.architecture import SMOLVLM2, SMOLVLM2_CONFIG, SmolVlaArchitecture, read_architecture
from vla_ros_models.smolvla.network import SmolVlaNetwork, build_empty
from vla_ros_models.smolvla.processing import SmolVlaProcessing
from vla_ros_models.tokenizers import Tokenizer, read_tokenizer

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

ABSENT = (
    "Nothing is downloaded: copy the base model's config.json, tokenizer.json and tokenizer_config.json to vlm/ in "
    "the checkpoint, or set policy.vlm to their folder"
)

_VLM = "vlm_with_expert.vlm."
_SAVED = "tokenizer"  # folder in the checkpoint in which LeRobot newer than 0.6.1 saves the tokenizer
_TEXT = f"{_VLM}model.text_model."
SMOLVLA_TENSORS = StoredNames(
    tower=f"{_VLM}model.vision_model.",
    projector=f"{_VLM}model.connector.modality_projection.proj",
    prefix=_TEXT,
    expert="vlm_with_expert.lm_expert.",
    embeddings=(f"{_TEXT}embed_tokens.weight", f"{_VLM}lm_head.weight"),
)
_CONTROL = {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
"""Keys of ``tokenizer_config.json``, and the control tokens that they name in published checkpoints."""


@dataclass(frozen=True)
class SmolVlaCheckpoint(PiCheckpoint):
    """Everything about a checkpoint except its weights."""

    architecture: SmolVlaArchitecture
    processing: SmolVlaProcessing
    vlm: Path = Path()  # the base model's folder
    words: Path = Path()  # the tokenizer's: newer than LeRobot 0.6.1, the checkpoint has it, else the base model
    cameras: int = 0  # images of the configuration, the empty ones included
    empty: int = 0  # the most missing images that LeRobot replaces with masked ones

    @property
    def parts(self) -> Parts:
        return SMOLVLA_TENSORS.parts(build_empty(self.architecture), self.stored)


def read_checkpoint(folder: Path, options: SmolVlaOptions) -> SmolVlaCheckpoint:
    """Read everything in a checkpoint except its weights."""
    model, adapter = base_folder(folder, options.base), folder
    folder = config_folder(folder, options.base)
    config, steps = read_config(folder, ADVICE, adapter=model is not None)
    config.expect("type", "smolvla")
    config.expect("use_cache", True)
    config.expect("use_delta_joint_actions_aloha", False)
    name = str(config.get("vlm_model_name", SMOLVLM2))
    vlm = _vlm_folder((folder,) if model is None else (folder, model), name, options)
    sizes = read_architecture(config, _base_config(vlm, name))
    inputs = config.object("input_features")
    empty = config.whole("empty_cameras", 0, least=0)
    processing, tokenizer = _read_processing(folder, config, sizes)
    has_own = tokenizer == _SAVED and not options.vlm and (folder / _SAVED / "tokenizer.json").is_file()
    if tokenizer not in ("", name) and not options.vlm and not has_own:
        raise CheckpointError(
            f"{folder}: tokenizer_name is {tokenizer!r}, but vlm_model_name {name!r}; set policy.vlm to a folder "
            "with the tokenizer used in training"
        )
    pictures = {one for one, kind in feature_kinds(inputs).items() if kind == "VISUAL"}
    pictures |= {f"observation.images.empty_camera_{number}" for number in range(empty)}
    found = SmolVlaCheckpoint(
        **lerobot_fields(config, "num_steps", sizes.horizon, processing),
        folder=folder,
        architecture=sizes,
        stored=read_stored(adapter, options.base),
        vlm=vlm,
        words=folder / _SAVED if has_own else vlm,
        cameras=len(pictures),
        empty=empty,
    )
    config.finish(IGNORED_KEYS)
    return as_distilled(found, steps)


def _vlm_folder(folders: Sequence[Path], name: str, options: SmolVlaOptions) -> Path:
    """Return the base model's folder: ``policy.vlm``, or the one that has its tokenizer."""
    if options.vlm:
        chosen = Path(options.vlm).expanduser()
        if not chosen.is_dir():
            raise ConfigError(f"policy.vlm: {chosen} is no folder")
        return chosen
    places = [place for folder in folders for place in (folder / name, folder / "vlm", folder)]
    return next((place for place in places if (place / "tokenizer.json").is_file()), places[1])


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
    fields = found.fields()
    processing = SmolVlaProcessing(**fields, antialias=False, prompt=prompt, adapt=adapt, summed_times=False)
    found.finish()
    return processing, tokenizer


@dataclass(frozen=True, eq=False)
class Words:
    """The base model's tokenizer."""

    tokenizer: Tokenizer
    image_ids: tuple[int, ...]  # control tokens around an image: two before it, one after it
    truncate_left: bool  # as for :class:`~vla_ros_models.smolvla.processing.SmolVlaProcessing`


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


def load_network(
    checkpoint: SmolVlaCheckpoint, device: str = "cpu", dtype: str = "float32", progress: Progress = no_progress
) -> SmolVlaNetwork:
    shifts = f"{SMOLVLA_TENSORS.projector}.bias" in checkpoint.stored  # of a viewpoint adapter
    sizes, vlm = replace(checkpoint.architecture, projector_bias=shifts), checkpoint.vlm
    source = f"{checkpoint.folder}: the weights are not those of the sizes in config.json and {vlm}"
    network = fill_network(build_empty(sizes), SMOLVLA_TENSORS, checkpoint.stored, source, device, dtype, progress)
    network.vision.resize(sizes.vision)
    return network
